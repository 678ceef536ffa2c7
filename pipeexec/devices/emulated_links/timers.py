"""`StreamTimer`: make a stream wait until a moment, for messages that take the time of a link.

Two kernels of one thread read the GPU's nanosecond timer (`%globaltimer`). One writes the time into
a tensor that travels with the message. The other spins until a number of nanoseconds after it. They
are loaded when the slices are made; see `gpu_kernels`. If that fails, the wait is a number of
cycles (`torch.cuda._sleep`, calibrated once). It cannot take account of the time of the copy, so
the link's time is added to the copy's. Not yet measured on hardware.
"""

from __future__ import annotations

import math
import warnings
from time import perf_counter, sleep
from typing import Protocol

import torch
from torch import Tensor

from pipeexec.devices.emulated_links.gpu_kernels import load_kernels
from pipesim.errors import AccuracyWarning


class StreamTimer(Protocol):
    """Makes the current stream wait, not the host.

    Attributes
    ----------
    description
        How long a SEND takes with this timer, for the notes of devices.
    """

    description: str

    def timestamp(self) -> Tensor | None:
        """Return the time at which the current stream reaches this point."""
        ...

    def wait_until(self, timestamp: Tensor | None, seconds: float) -> None:
        """Make the current stream wait until ``seconds`` after a timestamp."""
        ...


class GpuTimer:
    """Reads the GPU's nanosecond timer.

    Parameters
    ----------
    device
        The GPU.

    Raises
    ------
    AttributeError, ImportError, OSError, RuntimeError
        If the kernels cannot be loaded.
    """

    description = "a SEND lasts as long as the longer of its copy and its link"

    def __init__(self, device: torch.device) -> None:
        self.device, self._kernels = device, load_kernels(device)

    def timestamp(self) -> Tensor:
        """Return the time at which the current stream reaches this point (ns)."""
        timestamp = torch.empty(1, dtype=torch.int64, device=self.device)
        self._kernels.write_time(timestamp)
        return timestamp

    def wait_until(self, timestamp: Tensor | None, seconds: float) -> None:
        """Make the current stream wait until ``seconds`` after a timestamp."""
        assert timestamp is not None
        self._kernels.wait(timestamp, round(seconds * 1e9))


class CycleTimer:
    """Counts cycles from the call of `wait_until`, whatever the timestamp.

    Parameters
    ----------
    device
        The GPU.
    """

    description = "link times are added to those of the copies"
    #: Cycles of one calibration run, about 50 ms.
    CYCLES = 100_000_000

    def __init__(self, device: torch.device) -> None:
        self.device = device
        seconds = math.inf
        with torch.cuda.device(device):
            for _ in range(3):  # the first run wakes the GPU's clock; the fastest counts
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.cuda._sleep(self.CYCLES)
                end.record()
                end.synchronize()
                seconds = min(seconds, start.elapsed_time(end) * 1e-3)
        self.cycles_per_second = self.CYCLES / seconds

    def timestamp(self) -> None:
        """Return None: the timer has no clock."""

    def wait_until(self, timestamp: Tensor | None, seconds: float) -> None:
        """Make the current stream wait ``seconds`` from this call."""
        torch.cuda._sleep(int(seconds * self.cycles_per_second))


class SleepTimer:
    """Sleeps, on streams of a CPU, which are separate threads."""

    description = "a SEND lasts as long as its link, and the time that a thread takes to wake up"

    def timestamp(self) -> Tensor:
        """Return the time now (s)."""
        return torch.tensor(perf_counter(), dtype=torch.float64)

    def wait_until(self, timestamp: Tensor | None, seconds: float) -> None:
        """Sleep until ``seconds`` after a timestamp."""
        assert timestamp is not None
        sleep(max(0.0, float(timestamp) + seconds - perf_counter()))


def make_timer(device: torch.device) -> StreamTimer:
    """Return a `GpuTimer`, or a `CycleTimer` if the kernels cannot be loaded."""
    try:
        return GpuTimer(device)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"the kernels of imposed links cannot be loaded ({error}): {CycleTimer.description}; "
            "for exact ones use a CUDA driver of release 10 or later, and a release of torch that "
            "has torch.cuda._utils._cuda_load_module",
            AccuracyWarning,
            stacklevel=3,
        )
        return CycleTimer(device)
