"""How long messages take by size: measured between idle and between busy devices.

Idle: nothing else runs. Busy: every device computes, but for the one that the message is for,
which waits for it as it does in a step; the sender's next task begins as the message leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeexec import transfer
from pipeexec.devices import Device
from pipeexec.link_fit import STATES, Pair
from pipeexec.streams import Event
from pipesim.graph import TaskGraph
from pipesim.ops import SENDS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SIZES", "measure_transfers", "pairs_of"]

#: Bytes of the messages that are timed.
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: Least seconds of a piece of the work that keeps devices busy, and most rows of its matrices.
_PIECE, _LARGEST = 0.3e-3, 4096


def pairs_of(graph: TaskGraph) -> list[Pair]:
    """Return the pairs of devices, sender first, that messages of a graph travel between."""
    sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
    ends = zip(graph.device[sends].tolist(), graph.device[graph.pair[sends]].tolist(), strict=True)
    return sorted(set(ends))


def measure_transfers(
    devices: Sequence[Device],
    pairs: Iterable[Pair],
    *,
    sizes: Sequence[int] = SIZES,
    repeat: int = 9,
) -> pd.DataFrame:
    """Time messages between pairs of devices.

    Returns
    -------
    pandas.DataFrame
        One row a pair and size: ``source``, ``target`` (numbers of devices), ``nbytes``, and the
        median seconds from the moment that the message could leave to that at which its receiver
        could compute with it: ``idle`` and ``loaded``.
    """
    import pandas as pd

    work: dict[int, _Work] = {}
    rows = []
    for source, target in pairs:
        work |= {d: _Work(devices[d]) for d in range(len(devices)) if d not in work}
        for nbytes in sizes:
            message = torch.zeros(nbytes, dtype=torch.uint8, device=devices[source].torch_device)
            row: dict[str, float] = {"source": source, "target": target, "nbytes": nbytes}
            for state in STATES:
                busy = work if state == "loaded" else {}
                # Twice as long as the message took before: the work outlasts it.
                seconds = 2 * row.get("idle", 0.0)
                times = [
                    _time(devices, (source, target), message, busy, seconds) for _ in range(repeat)
                ]
                row[state] = float(np.median(times))
            rows.append(row)
    return pd.DataFrame(rows, columns=["source", "target", "nbytes", *STATES])


def _time(
    devices: Sequence[Device],
    pair: Pair,
    message: torch.Tensor,
    work: dict[int, _Work],
    seconds: float,
) -> float:
    """Return what a message takes, while devices ``work`` for longer than ``seconds``."""
    source, target = (devices[d] for d in pair)
    out, into = source.stream(f"send:{pair[1]}"), target.stream(f"recv:{pair[0]}")
    consumer = target.stream("compute")
    for number, piece in work.items():
        if number != pair[1]:
            piece.submit(1 if number == pair[0] else piece.count(seconds))
    if pair[0] in work:
        out.wait_event(source.stream("compute").record())
    began = out.record()
    out.submit(lambda: transfer.send((message,), source, out, target))
    sent = out.record()
    if pair[0] in work:
        work[pair[0]].submit(work[pair[0]].count(seconds))
    into.wait_event(began)
    zero = into.record()
    into.wait_event(sent)
    consumer.wait_event(into.record())
    arrived = consumer.record()
    for device in devices:
        device.synchronize()
    return _between(source, target, began, zero, arrived)


def _between(source: Device, target: Device, began: Event, zero: Event, arrived: Event) -> float:
    """Return seconds from ``began`` on the source to ``arrived`` on the target.

    Two clocks are not compared: there ``zero``, the target's own event after ``began``, counts as
    the beginning. The time of one event's way to the target is missing then.
    """
    one_clock = source.torch_device == target.torch_device
    return max(arrived.seconds_since(began if one_clock else zero), 1e-9)


class _Work:
    """Products of matrices that keep a device busy, in pieces of about 0.3 ms and more."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows = 128
        self.seconds = 0.0
        while self.seconds < _PIECE and self.rows < _LARGEST:
            self.rows *= 2
            self.matrices = torch.zeros((2, self.rows, self.rows), device=device.torch_device)
            self.seconds = min(self._once() for _ in range(3))

    def _once(self) -> float:
        compute = self.device.stream("compute")
        began = compute.record()
        self.submit(1)
        ended = compute.record()
        self.device.synchronize()
        return ended.seconds_since(began)

    def _run(self) -> None:
        torch.mm(self.matrices[0], self.matrices[0], out=self.matrices[1])

    def count(self, seconds: float) -> int:
        """Return how many pieces last longer than ``seconds``."""
        return 1 + math.ceil(seconds / max(self.seconds, 1e-6))

    def submit(self, count: int) -> None:
        """Give the device work."""
        compute = self.device.stream("compute")
        for _ in range(count):
            compute.submit(self._run)
