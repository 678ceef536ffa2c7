"""Timers that let a stream wait until a moment, for messages that take the time of a link.

Two kernels of one thread do it, which read the GPU's nanosecond timer (`%globaltimer`): one notes
the time in a tensor that travels with the message, the other spins until so long after it. They are
loaded when the slices are made; see `gpu_kernels`. Where that does not work, the wait is a number
of cycles (`torch.cuda._sleep`, calibrated once), which cannot know how long the copy took: it is
added to it.
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

__all__ = ["CycleWaits", "SleepWaits", "TimerWaits", "Waits", "make_waits"]


class Waits(Protocol):
    """Lets the current stream wait, not the host."""

    says: str

    def note(self) -> Tensor | None:
        """Return the time at which the current stream gets here."""
        ...

    def until(self, noted: Tensor | None, seconds: float) -> None:
        """Let the current stream wait until so long after a time that was noted."""
        ...


class TimerWaits:
    """Waits by the GPU's timer.

    Parameters
    ----------
    device
        The GPU.

    Raises
    ------
    AttributeError, ImportError, OSError, RuntimeError
        If the kernels cannot be loaded.
    """

    says = "a SEND lasts as long as the longer of its copy and its link"

    def __init__(self, device: torch.device) -> None:
        self.device, self._kernels = device, load_kernels(device)

    def note(self) -> Tensor:
        """Return the time at which the current stream gets here (ns)."""
        at = torch.empty(1, dtype=torch.int64, device=self.device)
        self._kernels.note(at)
        return at

    def until(self, noted: Tensor | None, seconds: float) -> None:
        """Let the current stream wait until so long after a time that was noted."""
        assert noted is not None
        self._kernels.wait(noted, round(seconds * 1e9))


class CycleWaits:
    """Waits by counting cycles from where it is called, whatever was noted.

    Parameters
    ----------
    device
        The GPU.
    """

    says = "link times are added to those of the copies"
    #: Cycles of one calibration run: some 50 ms.
    CYCLES = 100_000_000

    def __init__(self, device: torch.device) -> None:
        self.device = device
        seconds = math.inf
        with torch.cuda.device(device):
            for _ in range(3):  # the first one wakes the GPU's clock; the fastest counts
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                torch.cuda._sleep(self.CYCLES)
                ended.record()
                ended.synchronize()
                seconds = min(seconds, began.elapsed_time(ended) * 1e-3)
        self.per_second = self.CYCLES / seconds

    def note(self) -> None:
        """Note nothing."""

    def until(self, noted: Tensor | None, seconds: float) -> None:
        """Let the current stream wait so long from here."""
        torch.cuda._sleep(int(seconds * self.per_second))


class SleepWaits:
    """Waits by sleeping, on streams of a CPU: threads of their own."""

    says = "a SEND lasts as long as its link, and the time that a thread takes to wake up"

    def note(self) -> Tensor:
        """Return the time now (s)."""
        return torch.tensor(perf_counter(), dtype=torch.float64)

    def until(self, noted: Tensor | None, seconds: float) -> None:
        """Sleep until so long after a time that was noted."""
        assert noted is not None
        sleep(max(0.0, float(noted) + seconds - perf_counter()))


def make_waits(device: torch.device) -> Waits:
    """Return waits by the GPU's timer, or where its kernels cannot be loaded, by cycles."""
    try:
        return TimerWaits(device)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"the kernels of imposed links cannot be loaded ({error}): {CycleWaits.says}; for "
            "exact ones use a CUDA driver of release 10 or later, and a release of torch that has "
            "torch.cuda._utils._cuda_load_module",
            AccuracyWarning,
            stacklevel=3,
        )
        return CycleWaits(device)
