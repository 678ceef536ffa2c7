"""`StageDevices`: the devices of the stages of a placement, for sums and extremes of values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.scheduling.placement import Placement
from pipesim.utils.csr import Ints, bincount

Floats = NDArray[np.float64]


class StageDevices(NamedTuple):
    """Devices of the stages of a placement of one path, for sums and extremes over their stages.

    Attributes
    ----------
    device
        Device of each stage.
    n_devices
        Number of devices, each of which has a stage.
    stages
        Stages in order of their devices.
    starts
        Position in ``stages`` of the first stage of each device.
    """

    device: Ints
    n_devices: int
    stages: Ints
    starts: Ints

    @classmethod
    def of_placement(cls, placement: Placement) -> StageDevices:
        """Return the devices of the stages of a placement."""
        device = np.array(placement.paths[0])
        stages = np.argsort(device, kind="stable")
        starts = np.searchsorted(device[stages], np.arange(placement.n_devices))
        return cls(device, placement.n_devices, stages, starts)

    @property
    def first(self) -> Ints:
        """First stage of each device."""
        return self.stages[self.starts]

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the values of the stages of each device."""
        return bincount(self.device, values, self.n_devices)

    def least(self, values: Floats) -> Floats:
        """Return the least value of the stages of each device."""
        least: Floats = np.minimum.reduceat(values[self.stages], self.starts)
        return least

    def most(self, values: Floats) -> Floats:
        """Return the largest value of the stages of each device."""
        most: Floats = np.maximum.reduceat(values[self.stages], self.starts)
        return most
