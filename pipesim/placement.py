"""Placements: which device holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesim.errors import ArgumentError, check_count

__all__ = ["Placement", "linear", "looped", "v_shaped"]


@dataclass(frozen=True)
class Placement:
    """``device_of[s]`` is the device that holds stage ``s``; every device holds at least one.

    Raises
    ------
    ArgumentError
        If a device number is not a whole number from 0, or a device is left without a stage.
    """

    device_of: tuple[int, ...]

    def __init__(self, device_of: Sequence[int]) -> None:
        devices = tuple(
            check_count(f"the device of stage {s}", d, 0) for s, d in enumerate(device_of)
        )
        idle = sorted(set(range(max(devices, default=0) + 1)) - set(devices))
        if idle:
            raise ArgumentError(
                f"placement {list(devices)} leaves device {idle[0]} without a stage; "
                "number the devices from 0 without gaps"
            )
        object.__setattr__(self, "device_of", devices)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.device_of)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return max(self.device_of) + 1

    @property
    def n_chunks(self) -> int:
        """Most stages that any device holds."""
        return max(self.device_of.count(device) for device in range(self.n_devices))

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that ``device`` holds, in ascending order."""
        return tuple(s for s, d in enumerate(self.device_of) if d == device)


def linear(n_devices: int) -> Placement:
    """Place stage ``i`` on device ``i``."""
    return looped(n_devices, 1)


def looped(n_devices: int, n_chunks: int) -> Placement:
    """Deal the stages round the devices, ``n_chunks`` times (Megatron-LM, arXiv 2104.04473)."""
    n_devices = check_count("n_devices", n_devices)
    n_chunks = check_count("n_chunks", n_chunks)
    return Placement([s % n_devices for s in range(n_devices * n_chunks)])


def v_shaped(n_devices: int) -> Placement:
    """Place two stages a device, down and up again, so that device 0 holds the first and last."""
    n_devices = check_count("n_devices", n_devices)
    return Placement([*range(n_devices), *reversed(range(n_devices))])
