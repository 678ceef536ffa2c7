"""Split a model into stages."""

from typing import Literal

#: What stages have equally much of; here, so that files of trainings are read without torch.
Balance = Literal["blocks", "parameters", "time", "memory"]
