"""Speeds of fused attention kernels by version, size of a head, sequence and direction.

FLOP/s are those under a causal mask, which halves the work. Speeds of H100 are of
Shah et al., "FlashAttention-3", arXiv 2407.08608, figures 5 and 6. The figures have no causal
backward: its speeds are those without a mask times causal over not causal of FlashAttention-2's
forward. Speeds of A100 are those of its data sheet, which hold for FlashAttention-2. Older kernels
are a factor slower than FlashAttention-2, within the ranges of Dao, "FlashAttention-2", arXiv
2307.08691, section 4.1: 1.7 to 3.0 for FlashAttention, 1.3 to 2.5 for that of Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Sequences of the columns below.
_SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
#: How many times as long as FlashAttention-2 a kernel takes.
_SLOWER: dict[str, float] = {"fa1": 2.0, "triton": 1.8}


class _Speeds(NamedTuple):
    """TFLOP/s at each of `_SEQUENCES`; the backward without a mask."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


#: Of H100 SXM by kernel and size of a head.
_H100 = {
    ("fa2", 64): _Speeds((180, 229, 262, 284, 295, 299), (198, 238, 264, 279, 287, 291)),
    ("fa2", 128): _Speeds((191, 260, 298, 319, 333, 335), (214, 260, 291, 310, 318, 322)),
    ("fa3", 64): _Speeds((197, 265, 371, 420, 460, 473), (272, 363, 422, 453, 472, 474)),
    ("fa3", 128): _Speeds((292, 423, 521, 579, 602, 616), (316, 424, 501, 542, 559, 561)),
    ("cudnn", 64): _Speeds((225, 288, 334, 363, 379, 388), (266, 348, 395, 417, 432, 433)),
    ("cudnn", 128): _Speeds((315, 410, 484, 518, 529, 539), (305, 408, 465, 499, 518, 516)),
}
#: FlashAttention-2's forward on H100 without a mask, by size of a head.
_UNMASKED = {64: (282, 306, 318, 321, 322, 324), 128: (309, 350, 362, 368, 370, 370)}


def attention_flops(
    kernel: str, architecture: str, head: float, sequence: float, *, is_backward: bool
) -> float | None:
    """Return the FLOP/s of a fused kernel on a whole GPU; None where it was not measured.

    Speeds between two sequences are interpolated over their logarithms, those between heads of 64
    and 128 elements over the size. Heads below 64 elements are slower by the square root of their
    size, an assumption; those above 128 are as fast as 128.
    """
    measured = "fa2" if kernel in _SLOWER else kernel
    if architecture != "h100" or (measured, 64) not in _H100:
        return None
    small, large = (
        _interpolated(_causal(measured, size, is_backward=is_backward), sequence)
        for size in (64, 128)
    )
    share = min(1.0, max(0.0, (head - 64) / 64))
    speed = small + (large - small) * share
    return 1e12 * speed * min(1.0, math.sqrt(head / 64)) / _SLOWER.get(kernel, 1.0)


def slower(kernel: str) -> float:
    """Return how many times as long as the GPU's own attention a kernel of no table takes."""
    return _SLOWER.get(kernel, 1.0)


def _causal(kernel: str, head: int, *, is_backward: bool) -> Sequence[float]:
    speeds = _H100[kernel, head]
    if not is_backward:
        return speeds.forward
    masked = zip(_H100["fa2", head].forward, _UNMASKED[head], strict=True)
    return [x * a / b for x, (a, b) in zip(speeds.backward, masked, strict=True)]


def _interpolated(speeds: Sequence[float], sequence: float) -> float:
    place = math.log2(min(max(sequence, _SEQUENCES[0]), _SEQUENCES[-1]) / _SEQUENCES[0])
    low = min(int(place), len(speeds) - 2)
    return speeds[low] + (speeds[low + 1] - speeds[low]) * (place - low)
