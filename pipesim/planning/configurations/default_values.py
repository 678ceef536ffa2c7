"""Values of parameters that a plan tries where none are given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.planning.configurations.setting_reasons import tensor_reason

#: Schedules that are tried by default: of whole sequences, and of slices.
SCHEDULES = (
    "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
)  # fmt: skip
SLICED = ("seq1f1b", "slimpipe")
#: Numbers of chunks that are always tried, and the most that are.
_CHUNKS, _MOST_CHUNKS = (2, 4), 12
#: Most sequences of a micro-batch that are tried.
_MOST_SEQUENCES = 16


def tensor_sizes(problem: PlanProblem) -> list[int]:
    """Return the sizes of tensor parallelism that fit in a node and divide the model."""
    sizes = _divisors(problem.cluster.gpus_per_node)
    return [tp for tp in sizes if not tensor_reason(problem, tp)]


def depths(problem: PlanProblem, n_devices: int) -> list[int]:
    """Return the numbers of devices of a pipeline that have layers for all."""
    most = problem.n_layers + (problem.n_layers > 1)
    return [pp for pp in _divisors(n_devices) if pp <= most]


def expert_sizes(problem: PlanProblem, cp: int, dp: int) -> list[int]:
    """Return the divisors of the number of experts whose groups fill whole replicas."""
    model = problem.model
    if not isinstance(model, Transformer) or not model.n_experts:
        return [1]
    sizes = _divisors(model.n_experts)
    return [ep for ep in sizes if cp % ep == 0 or (ep % cp == 0 and dp % (ep // cp) == 0)]


def sequence_counts(problem: PlanProblem, n: int) -> list[int]:
    """Return the sizes of micro-batches of n sequences."""
    if isinstance(problem.model, Layers):
        return [problem.measured_size or 1]
    return [size for size in _divisors(n) if size <= _MOST_SEQUENCES]


def recomputes(problem: PlanProblem) -> Sequence[str]:
    """Return the modes of recompute."""
    return ("none",) if isinstance(problem.model, Layers) else ("none", "selective", "full")


def chunk_counts(problem: PlanProblem, pp: int) -> list[int]:
    """Return numbers of chunks: those that divide the layers evenly, and a few more."""
    n = problem.n_layers
    most = min(n // pp, _MOST_CHUNKS)
    return [v for v in range(2, most + 1) if v in _CHUNKS or n % (pp * v) == 0]


def _divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
