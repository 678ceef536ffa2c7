"""Emulated links: messages within one memory that take the time of a chosen link.

Within one memory a message can be passed by reference. With an imposed link it is copied, and its
stream then waits until the link would have finished, as in rule 4 of docs/time.md:

    SEND  copies, and lasts until nbytes/bandwidth after its start, or as long as the copy if longer
    RECV  lasts until latency after the end of its SEND
    OFFLOAD and RELOAD of a peer copy, and last until latency + nbytes/bandwidth after their start

Each pair of devices has its own link in each direction; links shared by pairs are refused.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, sleep
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeexec.devices.gpu_kernels import load_kernels
from pipesim.errors import AccuracyWarning, ArgumentError
from pipesim.network.network import Network
from pipesim.utils.caller_warnings import warn_caller


class TimedMessage(tuple[Tensor | None, ...]):
    """The tensors of a message, with the time at which its SEND ended, and its latency.

    ``sent`` is as `StreamTimer.timestamp` returns it. The latency is the time from the end of the
    SEND to the arrival (s).
    """

    sent: Tensor | None
    latency: float

    def __new__(
        cls, values: Iterable[Tensor | None], sent: Tensor | None, latency: float
    ) -> TimedMessage:
        """Return a tuple of ``values`` with the other attributes."""
        message = super().__new__(cls, tuple(values))
        message.sent, message.latency = sent, latency
        return message


class _FifoLock:
    """A lock that threads acquire in the order of their requests (rule 8 of docs/time.md)."""

    def __init__(self) -> None:
        self._lock, self._queue = threading.Lock(), deque[threading.Event]()

    def __enter__(self) -> None:
        is_first = threading.Event()
        with self._lock:
            self._queue.append(is_first)
            if len(self._queue) == 1:
                is_first.set()
        is_first.wait()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()


class EmulatedLinks:
    """The imposed links between all slices of a GPU, or all workers.

    Each pair of ``network`` has a separate link. If streams are threads (``has_threads``), a link
    takes messages of several streams one by one.
    """

    def __init__(
        self, network: Network, n_devices: int, timer: StreamTimer, has_threads: bool = False
    ) -> None:
        check_links(network)
        pairs = np.indices((n_devices, n_devices)).reshape(2, -1)
        pairs = pairs[:, pairs[0] != pairs[1]]
        routes = network.resolve(pairs[0], pairs[1], n_devices)
        self._link = {
            (int(source), int(target)): (float(latency), float(bandwidth))
            for source, target, latency, bandwidth in zip(
                *pairs, routes.latency, routes.bandwidth, strict=True
            )
        }
        self.timer = timer
        self._locks = {pair: _FifoLock() for pair in self._link} if has_threads else {}

    def carry(self, values: tuple[Tensor | None, ...], source: int, target: int) -> TimedMessage:
        """Return a copy of a message at the end of its SEND; runs on the stream that sends."""
        latency, bandwidth = self._link[source, target]
        nbytes = sum(value.nbytes for value in values if value is not None)
        with self._hold(source, target, nbytes / bandwidth):
            copied = tuple(None if value is None else value.clone() for value in values)
        return TimedMessage(copied, self.timer.timestamp(), latency)

    def hold(self, source: int, target: int, nbytes: int) -> AbstractContextManager[None]:
        """Return a context that holds a link while a copy in it runs, and until it arrives."""
        latency, bandwidth = self._link[source, target]
        return self._hold(source, target, latency + nbytes / bandwidth)

    @contextmanager
    def _hold(self, source: int, target: int, seconds: float) -> Iterator[None]:
        """Hold a link for a block, which lasts at least ``seconds`` on the stream that runs it."""
        with self._locks.get((source, target), nullcontext()) if seconds > 0 else nullcontext():
            start = self.timer.timestamp()
            yield
            if seconds > 0:
                self.timer.wait_until(start, seconds)

    def await_arrival(self, message: TimedMessage) -> None:
        """Make the stream that receives wait until a message arrives."""
        if message.latency > 0:
            self.timer.wait_until(message.sent, message.latency)


def check_links(network: Network) -> None:
    """Raise `ArgumentError` unless each pair of a network has a separate link."""
    if not isinstance(network, Network):
        raise ArgumentError(
            f"link must be a pipesim.Network, got {network!r}; for example "
            "Network(latency=20e-6, bandwidth=25e9)"
        )
    if network.nodes is not None or any(len(link.pairs) > 1 for link in network.links):
        raise ArgumentError(
            "link must give each pair of devices a link of its own: the time that messages spend "
            "waiting for a shared one cannot be imposed; leave out nodes and shared links"
        )


# Timers, which make a stream wait until a moment
#
# Two kernels of one thread read the GPU's nanosecond timer (`%globaltimer`). One writes the time
# into a tensor that travels with the message. The other spins until a number of nanoseconds after
# it. They are loaded when the slices are made; see `gpu_kernels`. If that fails, the wait is a
# number of cycles (`torch.cuda._sleep`, calibrated once). It cannot take account of the time of
# the copy, so the link's time is added to the copy's. Not yet measured on hardware.


class StreamTimer(Protocol):
    """Makes the current stream wait, not the host.

    ``description`` tells how long a SEND takes with this timer, for the notes of devices.
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

    If the kernels cannot be loaded, it raises AttributeError, ImportError, OSError or RuntimeError.
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
    """Counts cycles from the call of `wait_until`, whatever the timestamp."""

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
        warn_caller(
            f"the kernels of imposed links cannot be loaded ({error}): {CycleTimer.description}; "
            "for exact ones use a CUDA driver of release 10 or later, and a release of torch that "
            "has torch.cuda._utils._cuda_load_module",
            AccuracyWarning,
        )
        return CycleTimer(device)
