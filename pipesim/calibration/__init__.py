"""Constants of a GPU from measured steps of training."""

from pipesim.calibration.fit_gpu import Calibration

__all__ = ["Calibration"]
