"""The streams on which a route's messages leave and arrive."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from pipeexec.devices.device import Device
from pipeexec.devices.streams import Stream
from pipeexec.gpipe.routes import Route, Ways
from pipesim.ops import Op

__all__ = ["Lane", "Lanes", "lanes"]


class Lane(NamedTuple):
    """A route of the outputs of F, or of the gradients of B, and its streams.

    Attributes
    ----------
    route, op
        From where to where, and what makes it.
    send, recv
        What its two ends are.
    ahead, behind
        The partition at the other end of each, for skips; None for others.
    sends, receives, computes
        Streams: of the sender, and of the receiver, who computes with what came on the last.
    """

    route: Route
    op: Op
    send: Op
    recv: Op
    ahead: int | None
    behind: int | None
    sends: Stream
    receives: Stream
    computes: Stream


class Lanes(NamedTuple):
    """Of each partition, the lanes on which something arrives, and on which something leaves."""

    arriving: list[list[Lane]]
    leaving: list[list[Lane]]


def lanes(
    op: Op, ways: Ways, devices: Sequence[Device], compute: str, *,
    copy_streams: bool, partitions: Container[int],
) -> Lanes:  # fmt: skip
    """Return the lanes of F or B between some partitions.

    Messages have streams of their own, or are on those that ``compute``.
    """
    send, recv = (Op.SEND_F, Op.RECV_F) if op == Op.F else (Op.SEND_B, Op.RECV_B)

    def lane(route: Route) -> Lane:
        source, target, skips = route
        names = (f"send:{target}", f"recv:{source}") if copy_streams else (compute, compute)
        ahead, behind = (None, None) if skips is None else (target, source)
        return Lane(
            route, op, send, recv, ahead, behind,
            sends=devices[source].stream(names[0]),
            receives=devices[target].stream(names[1]),
            computes=devices[target].stream(compute),
        )  # fmt: skip

    def between(routes: Sequence[Route]) -> list[Lane]:
        return [lane(r) for r in routes if r.source in partitions and r.target in partitions]

    return Lanes(*([between(routes) for routes in each] for each in ways))
