"""Counter-based random numbers: a draw depends on its key and index, not on earlier draws.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). A scenario is thus the same on one core or many, alone or among
thousands. A distribution is a table of its quantiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Purposes of draws. The key of a draw depends on seed, scenario and purpose.
N_PURPOSES = 3
TASK_DRAWS, DEVICE_DRAWS, FAILURE_DRAWS = range(N_PURPOSES)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_11, _27, _30, _31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_BITS = 14
#: Equally likely bins of a distribution; its first and last bin are divided into as many again.
BINS = 1 << _BITS
_TO_BIN, _TO_PART = np.uint64(64 - _BITS), np.uint64(64 - 2 * _BITS)
_MASK = np.uint64(BINS - 1)


def random_bits(seed: Any, index: Any) -> Any:
    """Return 64 random bits (uint64) for each index; callable from Python and from kernels."""
    bits = seed + (index + np.uint64(1)) * _GOLDEN
    bits = (bits ^ (bits >> _30)) * _FIRST
    bits = (bits ^ (bits >> _27)) * _SECOND
    return bits ^ (bits >> _31)


def table_quantile(table: Any, bits: Any) -> Any:
    """Return the quantile that 64 random bits select; for kernels only."""
    part = bits >> _TO_BIN
    if part == np.uint64(0):
        return table[1, (bits >> _TO_PART) & _MASK]
    if part == _MASK:
        return table[2, (bits >> _TO_PART) & _MASK]
    return table[0, part]


def factors(table: Floats, bits: NDArray[np.uint64]) -> Floats:
    """Return the quantiles that random bits select; `table_quantile` for an array."""
    part = (bits >> _TO_BIN).astype(np.int64)
    subpart = ((bits >> _TO_PART) & _MASK).astype(np.int64)
    row = np.where(part == 0, 1, np.where(part == BINS - 1, 2, 0))
    quantiles: Floats = table[row, np.where(row > 0, subpart, part)]
    return quantiles


def uniform(bits: Any) -> Any:
    """Return uniform numbers in [0, 1) for random bits; callable from Python and from kernels."""
    return (bits >> _11) * 2.0**-53


def keys(seed: int, scenarios: Any) -> NDArray[np.uint64]:
    """Return the keys of draws for each purpose in each scenario; shape ``(n, N_PURPOSES)``."""
    seed_bits = np.array([[seed % 2**64]], dtype=np.uint64)
    scenario_bits = random_bits(seed_bits, np.asarray(scenarios, dtype=np.uint64)[:, None])
    purposes = np.arange(N_PURPOSES, dtype=np.uint64)[None, :]
    bits: NDArray[np.uint64] = random_bits(scenario_bits, purposes)
    return bits


def quantile_table(quantile: Any, slowest_of: int = 1) -> Floats:
    """Tabulate a quantile function, or that of the largest of ``slowest_of`` draws.

    Returns
    -------
    numpy.ndarray
        Shape ``(3, BINS)``: row 0 has the quantile at the middle of each bin. Rows 1 and 2 divide
        the first and the last bin into ``BINS`` again.
    """
    middle = (np.arange(BINS) + 0.5) / BINS
    levels = np.stack([middle, middle / BINS, 1.0 - (1.0 - middle) / BINS])
    below_one = np.minimum(levels ** (1.0 / slowest_of), 1.0 - 2.0**-53)
    table: Floats = np.asarray(quantile(below_one), dtype=np.float64)
    return table
