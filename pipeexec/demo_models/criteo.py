"""Criteo's click logs: rows of their tables, and random keys of similar distribution.

A sample has 13 numbers and 26 categories. The number of values of each category is public. Their
frequencies are not: here they follow Zipf's law with an assumed skew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesim.errors import ArgumentError, check_count, number

#: Numbers of a sample, besides its categories.
N_DENSE = 13
#: Rows of the display advertising challenge (Kaggle, 2014) as facebookresearch/dlrm counts them.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
#: Rows of the terabyte click logs, numbers taken modulo 40 million: MLPerf's DLRM.
TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
#: Exponent of Zipf's law: key k occurs about (k + 1) ** -SKEW as often as key 0. Assumed.
SKEW = 1.05
#: Number of blocks of keys; keys of a block count as equally frequent.
_BLOCKS = 4096


def scaled_rows(rows: Sequence[int], factor: float, least: int = 4) -> tuple[int, ...]:
    """Return the rows of smaller tables: times ``factor``, but at least ``least`` or all rows."""
    got = number(factor)
    if got is None or not 0 < got <= 1:
        raise ArgumentError(f"factor must be above 0 and at most 1, got {factor!r}")
    least = check_count("least", least)
    return tuple(max(round(n * got), min(n, least)) for n in rows)


def draw_keys(
    rows: Sequence[int], n: int, generator: torch.Generator, skew: float = SKEW
) -> Tensor:
    """Return keys of ``n`` samples, int64 of shape ``(n, tables)``; small ones are frequent."""
    share = torch.rand(n, len(rows), generator=generator, dtype=torch.float64).numpy()
    columns = [_quantile(share[:, i], size, skew) for i, size in enumerate(rows)]
    return torch.from_numpy(np.stack(columns, axis=1))


def distinct(rows: Sequence[int], n: int, skew: float = SKEW) -> float:
    """Return the mean number of different keys in ``n`` samples, over all tables.

    A process requests each key once (`pipeexec.ShardedEmbedding`): it sends this many keys.
    """
    total = 0.0
    for size in rows:
        first = np.unique(np.geomspace(1, size + 1, _BLOCKS).astype(np.int64))
        count = np.diff(first)
        share = np.diff(_cumulated(first, size, skew)) / count
        total += float((count * -np.expm1(n * np.log1p(-np.minimum(share, 1 - 1e-16)))).sum())
    return total


def _cumulated(x: NDArray[np.int64], size: int, skew: float) -> NDArray[np.float64]:
    """Return the share of keys below ``x - 1``, by the integral of ``x ** -skew`` from 1."""
    power, logs, whole = 1 - _check_skew(skew), np.log(x), np.log(size + 1)
    # expm1 and log1p are exact even as power approaches 0.
    shares: NDArray[np.float64] = (
        np.expm1(power * logs) / np.expm1(power * whole) if power else logs / whole
    )
    return shares


def _quantile(share: NDArray[np.float64], size: int, skew: float) -> NDArray[np.int64]:
    """Return the key at each share of a table: the inverse of `_cumulated`."""
    power, whole = 1 - _check_skew(skew), np.log(size + 1)
    logs = np.log1p(share * np.expm1(power * whole)) / power if power else share * whole
    keys: NDArray[np.int64] = np.clip(np.exp(logs).astype(np.int64) - 1, 0, size - 1)
    return keys


def _check_skew(skew: float) -> float:
    got = number(skew)
    if got is None or not 0 <= got < inf:
        raise ArgumentError(f"skew must be finite and >= 0, got {skew!r}")
    return got
