"""Split F, B and I of stages with experts into segments, with exchanges of tokens between them.

A stage with one layer of experts, on the compute stream (``d``, ``c``: dispatch and combine)::

    alone      compute  | F0.0    F0.1    F0.2          B0.0    B0.1    B0.2
               exchange |      d0      c0                    c0      d0

    as a pair  compute  | F1.0 B0.0 F1.1 B0.1 F1.2 B0.2
               exchange |      d1   c0   c1   d0

Segments of an F and a B that the schedule pairs alternate, so that the exchanges of one run behind
the compute of the other (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1). They are tasks
like any other: none lasts longer or shorter as half of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count
from pipesim.graph.dependencies import overlapped_pairs
from pipesim.graph.tasks import Kinds, StreamKind, Tasks
from pipesim.ops import EXPERT_EXCHANGES, SEGMENTED, Op, expert_exchange
from pipesim.utils.csr import CSR

#: Number of layers with experts of each stage; empty for none.
ExpertLayers = tuple[int, ...]
#: Most layers with experts of a stage.
_MOST_LAYERS = 1000


def checked_experts(
    expert_layers: object,
    n_stages: int,
    sharded: tuple[int, ...],
    expert_replicas: int | None,
    n_replicas: int,
) -> tuple[ExpertLayers, int]:
    """Return the layers with experts of each stage, and how many replicas share them; 0 for all."""
    if isinstance(expert_layers, (str, bytes, Mapping)) or not isinstance(
        expert_layers, (Iterable, int, float)
    ):
        raise ArgumentError(
            "expert_layers must be the number of layers with experts of each stage, one number or "
            f"one a stage, such as Costs.expert_layers; got {expert_layers!r:.60}"
        )
    values: list[Any] = (
        list(expert_layers) if isinstance(expert_layers, Iterable) else [expert_layers] * n_stages
    )
    if len(values) not in (0, n_stages):
        raise ArgumentError(
            f"expert_layers has {len(values)} values for {n_stages} stages; give one number, or "
            "one a stage"
        )
    for stage, value in enumerate(values):
        if isinstance(value, float) and value.is_integer():  # as costs have them
            values[stage] = int(value)
        n = check_count(f"expert_layers of stage {stage}", values[stage], 0)
        if n > _MOST_LAYERS:
            raise ArgumentError(
                f"expert_layers of stage {stage} must be at most {_MOST_LAYERS}, got {n}"
            )
        if n and stage in sharded:
            raise ArgumentError(
                f"expert_layers gives stage {stage} {n} layers with experts, but it is a sharded "
                "embedding; give it 0"
            )
    if expert_replicas is not None and n_replicas % expert_replicas:
        raise ArgumentError(
            f"expert_replicas={expert_replicas} replicas that together have all experts do not "
            f"divide n_replicas={n_replicas}; give lower(n_replicas=...) a multiple of it"
        )
    return (tuple(values), (expert_replicas or 0) % n_replicas) if any(values) else ((), 0)


def with_segments(
    layers: ExpertLayers, kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> tuple[Kinds, NDArray[np.int32], NDArray[np.int32]]:
    """Return compute tasks, given in the order of each device, with segments."""
    if not layers:
        return kinds, kind, microbatch
    n_segments = np.where(kinds.is_op(SEGMENTED), 2 * np.array(layers)[kinds.stage] + 1, 1)[kind]
    place, overlapped = np.arange(len(kind)), kinds.overlapped[kind]
    second = np.zeros_like(place)
    forward, backward = overlapped_pairs(kinds, kind, kinds.streams[1])
    splits = (n_segments[forward] > 1) | (n_segments[backward] > 1)
    forward, backward = forward[splits], backward[splits]
    overlapped[forward] = overlapped[backward] = 0
    place[backward], second[backward] = forward, 1
    task = np.repeat(np.arange(len(kind)), n_segments)
    segment = np.arange(len(task)) - (np.cumsum(n_segments) - n_segments)[task]
    order = np.lexsort((2 * segment + second[task], place[task]))
    task, segment = task[order], segment[order]
    own = kind[task]
    tasks = Tasks(
        kinds.op[own],
        kinds.device[own],
        kinds.stage[own],
        microbatch[task].astype(np.int64),
        kinds.stream[own],
        kinds.replica[own],
        overlapped[task],
        part=np.where(n_segments[task] > 1, segment, -1),
    )
    return *tasks.kinds(), microbatch[task]


def expert_exchange_kinds(
    compute: Kinds, kinds: Kinds, after: CSR, overlap: bool
) -> tuple[CSR, Kinds]:
    """Add the kinds of exchanges of experts' tokens to ``after`` and ``kinds``.

    ``kinds`` begin with those of ``compute``. ``after`` has the exchanges that come after a task of
    each kind of ``compute``.
    """
    own = np.flatnonzero(compute.is_op(SEGMENTED) & (compute.part >= 0) & ~compute.completes)
    if not len(own):
        return after, kinds
    layer, second = np.divmod(compute.part[own], 2)
    direction = np.where(compute.op[own] == Op.F, 0, 2)
    part = expert_exchange(EXPERT_EXCHANGES[0], 0) + layer * len(EXPERT_EXCHANGES)
    part += direction + second
    # B and I of a stage share the kinds of their exchanges.
    place = np.stack([compute.replica[own], compute.stage[own], part])
    _, first, number = np.unique(place, axis=1, return_index=True, return_inverse=True)
    rows = own[first]
    same = np.ones_like(rows)
    stream = StreamKind.EXCHANGE if overlap else StreamKind.COMPUTE
    exchanges = Kinds(
        Op.ALL_TO_ALL * same,
        compute.device[rows],
        compute.stage[rows],
        compute.replica[rows],
        stream * same,
        part=part[first],
    )
    row = np.concatenate([after.rows, own])
    value = np.concatenate([after.values, len(kinds) + number.ravel()])
    return CSR.from_pairs(row, value, len(after)), kinds.joined(exchanges)
