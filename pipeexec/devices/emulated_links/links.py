"""Messages between slices of one GPU that take the time of a chosen link.

Within one memory a message could be handed over by reference. With an imposed link it is really
copied, and the GPU then waits until the link would have been done, as in rule 4 of docs/time.md:

    SEND  copies, and lasts until nbytes/bandwidth after its start, or as long as the copy if longer
    RECV  lasts until latency after the end of its SEND

Each pair of slices has its own link in each direction; links that pairs share are refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
from torch import Tensor

from pipeexec.devices.emulated_links.timers import Waits
from pipesim.errors import ArgumentError
from pipesim.network.network import Network

__all__ = ["Links", "Message", "check_links"]


class Message(tuple[Tensor | None, ...]):
    """The tensors of a message, the time at which it was sent, and what is left of its way.

    Attributes
    ----------
    sent
        When its SEND ended, as `Waits.note` gives it.
    latency
        Seconds from then to its arrival.
    """

    sent: Tensor | None
    latency: float

    def __new__(
        cls, values: Iterable[Tensor | None], sent: Tensor | None, latency: float
    ) -> Message:
        """Return a tuple of ``values`` that knows the rest."""
        message = super().__new__(cls, tuple(values))
        message.sent, message.latency = sent, latency
        return message


class Turns:
    """Lets threads use a link one after the other, in the order in which they ask (rule 8)."""

    def __init__(self) -> None:
        self._lock, self._queue = threading.Lock(), deque[threading.Event]()

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._lock:
            self._queue.append(turn)
            if len(self._queue) == 1:
                turn.set()
        turn.wait()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()


class Links:
    """The imposed links between all slices of a GPU, or all workers.

    Parameters
    ----------
    network
        With a link of its own for each pair.
    n_devices
        How many of them.
    waits
        How they wait.
    takes_turns
        Whether streams are threads: messages on several of them then share a link one by one.

    Raises
    ------
    ArgumentError
        If pairs share links.
    """

    def __init__(
        self, network: Network, n_devices: int, waits: Waits, takes_turns: bool = False
    ) -> None:
        check_links(network)
        pairs = np.indices((n_devices, n_devices)).reshape(2, -1)
        pairs = pairs[:, pairs[0] != pairs[1]]
        routes = network.resolve(pairs[0], pairs[1], n_devices)
        self._of = {
            (int(source), int(target)): (float(latency), float(bandwidth))
            for source, target, latency, bandwidth in zip(
                *pairs, routes.latency, routes.bandwidth, strict=True
            )
        }
        self.waits = waits
        self._turns = {pair: Turns() for pair in self._of} if takes_turns else {}

    def carry(self, values: tuple[Tensor | None, ...], source: int, target: int) -> Message:
        """Return a copy of a message, once its link is done with it; for the stream that sends."""
        latency, bandwidth = self._of[source, target]
        nbytes = sum(value.nbytes for value in values if value is not None)
        seconds = nbytes / bandwidth
        with self._turns.get((source, target), nullcontext()) if seconds > 0 else nullcontext():
            began = self.waits.note()
            copied = tuple(None if value is None else value.clone() for value in values)
            if seconds > 0:
                self.waits.until(began, seconds)
            return Message(copied, self.waits.note(), latency)

    def arrive(self, message: Message) -> None:
        """Let the stream that receives wait until a message is there."""
        if message.latency > 0:
            self.waits.until(message.sent, message.latency)


def check_links(network: Network) -> None:
    """Raise `ArgumentError` for a network whose pairs share links."""
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
