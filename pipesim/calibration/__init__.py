"""Constants of a GPU from measured steps of training."""

from pipesim.calibration.fit_gpu import Calibration
from pipesim.models.gpu import GPU
from pipesim.utils.accessors import add_constructors

__all__ = ["Calibration"]

add_constructors(GPU, fit="pipesim.calibration.fit_gpu:fit_gpu")
