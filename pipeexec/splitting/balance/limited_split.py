"""The split of blocks into stages that are as even as possible, and fit in a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def limited_split(
    weights: Sequence[float], nbytes: Sequence[float], n_stages: int, limit: float
) -> tuple[int, ...] | None:
    """Return the blocks of each stage such that the heaviest stage is as light as possible.

    Among such splits, the sum of squares of the stages' weights is small.

    Parameters
    ----------
    weights, nbytes
        Weight and bytes of each block.
    n_stages
        Number of stages; each gets a block or more.
    limit
        Bytes that a stage may have.

    Returns
    -------
    tuple of int or None
        None if no split fits.
    """
    n = len(weights)
    weight_ends = np.concatenate([[0.0], np.cumsum(weights)])
    byte_ends = np.concatenate([[0.0], np.cumsum(nbytes)])
    # Heaviest stage and sum of squares of the best split of the first blocks into some stages.
    heaviest = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    squares, borders = heaviest.copy(), []
    for _ in range(n_stages):
        new_heaviest, new_squares = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
        border = np.zeros(n + 1, dtype=int)
        for end in range(1, n + 1):
            own = weight_ends[end] - weight_ends[:end]
            fits = byte_ends[end] - byte_ends[:end] <= limit
            most = np.where(fits, np.maximum(heaviest[:end], own), np.inf)
            border[end] = np.lexsort((squares[:end] + own**2, most))[0]
            new_heaviest[end] = most[border[end]]
            new_squares[end] = squares[border[end]] + own[border[end]] ** 2
        heaviest, squares = new_heaviest, new_squares
        borders.append(border)
    if not np.isfinite(heaviest[n]):
        return None
    ends = [n]
    for border in reversed(borders):
        ends.append(int(border[ends[-1]]))
    return tuple(a - b for a, b in zip(ends[-2::-1], ends[:0:-1], strict=True))
