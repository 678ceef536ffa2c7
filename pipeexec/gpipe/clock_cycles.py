"""The order in which the host issues forwards: by clock cycle."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles"]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Return what each clock cycle runs: pairs of micro-batch and partition, in order.

    In cycle ``k`` partition ``j`` runs micro-batch ``k - j`` (torchgpipe, arXiv 2004.09910, section
    3.1): deterministic, and every partition's input was made in the cycle before.

    Examples
    --------
    >>> list(clock_cycles(2, 3))
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]
