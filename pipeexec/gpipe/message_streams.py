"""Streams on which the messages of a route are sent and received."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from pipeexec.devices.device import Device
from pipeexec.devices.streams import Stream
from pipeexec.gpipe.routes import Route, RoutesByPartition
from pipesim.ops import Op


class MessageStreams(NamedTuple):
    """A route of the outputs of F, or of the gradients of B, and its streams.

    Attributes
    ----------
    route
        Source, target and skips of the messages.
    op
        Operation that produces the messages: F or B.
    send_op, recv_op
        Operations of the two ends of a message.
    send_peer, recv_peer
        For skips, the partition at the other end of the SEND and of the RECV; else None.
    send_stream
        Stream of the source that sends.
    recv_stream
        Stream of the target that receives.
    compute_stream
        Stream of the target that computes with the message.
    """

    route: Route
    op: Op
    send_op: Op
    recv_op: Op
    send_peer: int | None
    recv_peer: int | None
    send_stream: Stream
    recv_stream: Stream
    compute_stream: Stream


class MessageStreamsByPartition(NamedTuple):
    """Streams of the messages that each partition receives, and of those that it sends."""

    incoming: list[list[MessageStreams]]
    outgoing: list[list[MessageStreams]]


def message_streams(
    op: Op, routes: RoutesByPartition, devices: Sequence[Device], compute: str, *,
    copy_streams: bool, partitions: Container[int],
) -> MessageStreamsByPartition:  # fmt: skip
    """Return the streams of the messages of F or B between the given partitions.

    With ``copy_streams`` each peer and direction has its own stream. Without, messages are on the
    streams named ``compute``.
    """
    send_op, recv_op = (Op.SEND_F, Op.RECV_F) if op == Op.F else (Op.SEND_B, Op.RECV_B)

    def streams_of_route(route: Route) -> MessageStreams:
        source, target, skips = route
        names = (f"send:{target}", f"recv:{source}") if copy_streams else (compute, compute)
        send_peer, recv_peer = (None, None) if skips is None else (target, source)
        return MessageStreams(
            route, op, send_op, recv_op, send_peer, recv_peer,
            send_stream=devices[source].stream(names[0]),
            recv_stream=devices[target].stream(names[1]),
            compute_stream=devices[target].stream(compute),
        )  # fmt: skip

    def streams_by_partition(rows: Sequence[Sequence[Route]]) -> list[list[MessageStreams]]:
        return [
            [
                streams_of_route(route)
                for route in row
                if route.source in partitions and route.target in partitions
            ]
            for row in rows
        ]

    return MessageStreamsByPartition(
        streams_by_partition(routes.incoming), streams_by_partition(routes.outgoing)
    )
