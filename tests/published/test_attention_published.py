"""Depth at which fused attention reaches half of its rate, from published speeds by size of head.

Speeds are of FlashAttention-3's paper, figures 5 and 6: H100, 16,384 tokens, no causal mask.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipesim as ps
from pipesim.models.gpu import Kernel

SPEEDS = json.loads((Path(__file__).parent / "flash_attention_h100.json").read_text())["expected"]


def mean_speed(speeds: dict[str, float]) -> float:
    """Return the speed of forward and backward, which has 2.5 times the FLOPs."""
    return 3.5 / (1 / speeds["forward"] + 2.5 / speeds["backward"])


def half_depth(name: str) -> float:
    """Return h of speeds that are r / (1 + h / d) for heads of 64 and of 128 elements."""
    small, large = (mean_speed(SPEEDS[name][size]) for size in ("64", "128"))
    return (large - small) / (small / 64 - large / 128)


@pytest.mark.parametrize(
    ("name", "depth"), [("FlashAttention-2", 17), ("FlashAttention-3", 35), ("cuDNN", 44)]
)
def test_depth_of_each_kernel(name: str, depth: float) -> None:
    """The three depths that `pipesim.GPU` states."""
    assert half_depth(name) == pytest.approx(depth, abs=0.5)


def test_presets_are_between_the_measured_depths() -> None:
    """The half of that of ordinary products, and near the mean of the three kernels."""
    measured = [half_depth(name) for name in SPEEDS]
    for name in ps.gpus().index:
        gpu = ps.GPU.preset(name)
        assert gpu.attention_half_depth is not None
        assert min(measured) < gpu.attention_half_depth < max(measured)
        assert gpu.attention_half_depth == gpu.half_depth / 2
        assert gpu.attention_half_depth == pytest.approx(sum(measured) / 3, rel=0.05)


def test_depth_gives_the_ratio_of_speeds() -> None:
    """Kernels of one GPU with the depth of FlashAttention-3 have its ratio of both heads."""
    gpu = ps.GPU(flops=1e15, bandwidth=1e18, half_depth=64, attention_half_depth=35)
    seconds = [gpu.kernel_seconds(attention(depth)) for depth in (64, 128)]
    speeds = [mean_speed(SPEEDS["FlashAttention-3"][size]) for size in ("64", "128")]
    assert seconds[0] / seconds[1] == pytest.approx(speeds[1] / speeds[0], rel=0.001)


def attention(depth: float) -> Kernel:
    """Return a fused core with heads of so many elements."""
    return Kernel("attention", flops=1e12, depth=depth, is_attention=True)
