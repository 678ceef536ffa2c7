"""Routes of messages between partitions: outputs go to the next partition, skips across several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeexec.gpipe.skip import Key
from pipesim.graph.skips import border_crossings


class Route(NamedTuple):
    """Route of one message a micro-batch, from one partition to another.

    Attributes
    ----------
    source, target
        The two partitions.
    skips
        Skips that the message carries; None for outputs of the partition, or their gradients.
    """

    source: int
    target: int
    skips: tuple[Key, ...] | None = None

    @property
    def reverse(self) -> Route:
        """The route of the gradients."""
        return Route(self.target, self.source, self.skips)

    def carries(self, slot: int | Key) -> bool:
        """Return whether a tensor takes this route: the number of an output, or a skip."""
        return isinstance(slot, int) if self.skips is None else slot in self.skips


class RoutesByPartition(NamedTuple):
    """Routes that lead to each partition, and routes that lead from it."""

    incoming: list[list[Route]]
    outgoing: list[list[Route]]


def forward_routes(n: int, skips: Mapping[Key, tuple[int, int]], *, portals: bool) -> list[Route]:
    """Return the routes of a forward through ``n`` partitions, outputs before skips.

    With ``portals`` a skip goes straight to the partition that pops it. Without, it goes through
    each partition between, in a message next to the output.
    """
    keys = list(skips)
    outputs = [Route(j, j + 1) for j in range(n - 1)]
    return outputs + [
        Route(*hop, tuple(keys[k] for k in members))
        for hop, members in border_crossings(skips.values(), portals).items()
    ]


def routes_by_partition(n: int, routes: Sequence[Route]) -> RoutesByPartition:
    """Sort the routes of ``n`` partitions by target and by source.

    Outputs leave before skips. Messages arrive in the order of their sources. Task graphs whose
    messages are all on one stream have the same order.
    """
    by_source = sorted(routes, key=lambda route: (route.source, route.skips is not None))
    by_target = sorted(routes, key=lambda route: (route.skips is not None, route.target))
    return RoutesByPartition(
        [[route for route in by_source if route.target == j] for j in range(n)],
        [[route for route in by_target if route.source == j] for j in range(n)],
    )
