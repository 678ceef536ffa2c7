"""Constants of a GPU from measured steps of training."""

from pipesim.calibration.calibration import Calibration

__all__ = ["Calibration"]
