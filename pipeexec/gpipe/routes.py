"""Which messages a pipeline has: outputs from partition to partition, and skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeexec.gpipe.skip import Key
from pipesim.graph.skips import border_crossings

__all__ = ["Route", "Ways", "routes", "ways"]


class Route(NamedTuple):
    """What goes from one partition to another for each micro-batch.

    Attributes
    ----------
    source, target
        The partitions.
    skips
        Those that it carries; None for the outputs of the partition, or their gradients.
    """

    source: int
    target: int
    skips: tuple[Key, ...] | None = None

    @property
    def back(self) -> Route:
        """The way of the gradients."""
        return Route(self.target, self.source, self.skips)

    def carries(self, slot: int | Key) -> bool:
        """Return whether a tensor goes this way: the number of an output, or a skip."""
        return isinstance(slot, int) if self.skips is None else slot in self.skips


class Ways(NamedTuple):
    """Of each partition, the routes on which something arrives, and on which something leaves."""

    arriving: list[list[Route]]
    leaving: list[list[Route]]


def routes(n: int, skips: Mapping[Key, tuple[int, int]], *, portals: bool) -> list[Route]:
    """Return the routes of a forward through ``n`` partitions, those of outputs first.

    With ``portals`` skips go straight to the partition that pops them; without, beside the outputs
    through each one between.
    """
    keys = list(skips)
    outputs = [Route(j, j + 1) for j in range(n - 1)]
    return outputs + [
        Route(*hop, tuple(keys[k] for k in members))
        for hop, members in border_crossings(skips.values(), portals).items()
    ]


def ways(n: int, along: Sequence[Route]) -> Ways:
    """Sort routes by the partitions that they lead to, and come from.

    Outputs leave before skips; what arrives, does so by source. So a graph has it, too, where all
    messages are on one stream.
    """
    by_source = sorted(along, key=lambda route: (route.source, route.skips is not None))
    by_target = sorted(along, key=lambda route: (route.skips is not None, route.target))
    return Ways(
        [[route for route in by_source if route.target == j] for j in range(n)],
        [[route for route in by_target if route.source == j] for j in range(n)],
    )
