"""`EmulatedLinks`: messages between slices of one GPU that take the time of a chosen link.

Within one memory a message can be passed by reference. With an imposed link it is copied, and the
GPU then waits until the link would have finished, as in rule 4 of docs/time.md:

    SEND  copies, and lasts until nbytes/bandwidth after its start, or as long as the copy if longer
    RECV  lasts until latency after the end of its SEND

Each pair of slices has its own link in each direction; links shared by pairs are refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
from torch import Tensor

from pipeexec.devices.emulated_links.timers import StreamTimer
from pipesim.errors import ArgumentError
from pipesim.network.network import Network


class TimedMessage(tuple[Tensor | None, ...]):
    """The tensors of a message, the time at which its SEND ended, and its latency.

    Attributes
    ----------
    sent
        Time at which its SEND ended, as `StreamTimer.timestamp` returns it.
    latency
        Seconds from the end of the SEND to the arrival.
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


class FifoLock:
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

    Parameters
    ----------
    network
        Network with a separate link for each pair.
    n_devices
        Number of devices.
    timer
        Makes streams wait.
    has_threads
        Whether streams are threads: a link then takes messages of several streams one by one.
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
        self._locks = {pair: FifoLock() for pair in self._link} if has_threads else {}

    def carry(self, values: tuple[Tensor | None, ...], source: int, target: int) -> TimedMessage:
        """Return a copy of a message at the end of its SEND; runs on the stream that sends."""
        latency, bandwidth = self._link[source, target]
        nbytes = sum(value.nbytes for value in values if value is not None)
        seconds = nbytes / bandwidth
        with self._locks.get((source, target), nullcontext()) if seconds > 0 else nullcontext():
            start = self.timer.timestamp()
            copied = tuple(None if value is None else value.clone() for value in values)
            if seconds > 0:
                self.timer.wait_until(start, seconds)
            return TimedMessage(copied, self.timer.timestamp(), latency)

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
