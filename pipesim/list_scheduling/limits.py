"""Checks of the costs and limits that a user gives to `pipesim.order_by`.

Static bytes and workspaces of devices are those of a graph of one micro-batch a path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, CostsError, CostsWarning, check_count
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.memory_limit import checked_memory_limit, limits_beyond_static
from pipesim.timeline.task_bytes import workspaces
from pipesim.utils.caller_warnings import warn_caller

Floats = NDArray[np.float64]


def checked_costs(costs: object) -> Costs:
    """Return the user's costs; for None, costs of one second for each F, I and W."""
    if costs is None:
        return Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)
    if not isinstance(costs, Costs):
        raise CostsError(f"costs must be a pipesim.Costs, got {costs!r}")
    return costs


def check_weight_bytes(costs: Costs, n_stages: int) -> None:
    """Warn if W holds no bytes under a memory limit only because the costs give none for it."""
    held, seconds = (
        getattr(costs, name) is not None and costs.averaged().per_stage(name, n_stages).any()
        for name in ("activation_bytes", "weight_grad")
    )
    if held and seconds and not np.any(costs.weight_grad_bytes):
        warn_caller(
            "the costs have activation_bytes and no weight_grad_bytes, so that under the memory "
            "limit a W counts as holding nothing; give weight_grad_bytes, the bytes that are held "
            "between I and W (at most, those of activations and gradients of outputs)",
            CostsWarning,
        )


def checked_limits(
    activation_limit: object,
    memory_limit: object,
    placement: Placement,
    costs: Sequence[Costs],
    f_bytes: Floats,
    class_of: NDArray[np.int64],
) -> Floats:
    """Return the bytes of activations that each device may hold, by the user's two limits.

    ``costs`` are those of each class of equal micro-batches, ``f_bytes`` the bytes that its F takes
    in each stage. ``class_of`` has the class of each micro-batch.
    """
    n = placement.n_devices
    limits = np.full(n, math.inf)
    if activation_limit is not None:
        limits = checked_memory_limit(activation_limit, n, "activation_limit")
        _check_fits("activation_limit", limits, placement, f_bytes, class_of)
    if memory_limit is not None:
        total = checked_memory_limit(memory_limit, n)
        graph = one_microbatch_graph(placement, (Op.F, Op.B))
        room = activation_limits(graph, costs, memory_limit)
        is_finite = np.isfinite(total)
        bound = np.where(is_finite, total, 0.0) / (1 + costs[0].memory_reserve)
        others = bound - np.where(is_finite, room, 0.0)
        needed = _check_fits(
            "memory_limit", total, placement, f_bytes, class_of, others, costs[0].memory_reserve
        )
        limits = np.minimum(limits, np.maximum(room, needed))  # rounding must leave one its room
    return limits


def _check_fits(
    name: str,
    limits: Floats,
    placement: Placement,
    f_bytes: Floats,
    class_of: NDArray[np.int64],
    others: Floats | float = 0.0,
    reserve: float = 0.0,
) -> Floats:
    """Return the bytes of the largest micro-batch on each device, which must fit beside others."""
    path_of = placement.path_of(len(class_of))
    other_bytes, largest_bytes = np.broadcast_to(others, len(limits)), np.zeros(len(limits))
    for device, limit in enumerate(limits.tolist()):
        for path, homes in enumerate(placement.paths):
            stages = [stage for stage, home in enumerate(homes) if home == device]
            nbytes = f_bytes[:, stages].sum(axis=1)[class_of]
            nbytes[path_of != path] = -1.0
            largest = int(nbytes.argmax())
            largest_bytes[device] = max(largest_bytes[device], float(nbytes[largest]))
            needed = float(nbytes[largest] + other_bytes[device]) * (1 + reserve)
            if needed > limit * (1 + 1e-9):  # as `Admission` compares sums
                names = ", ".join(map(str, stages))
                which = "one micro-batch" if len(f_bytes) == 1 else f"micro-batch {largest}"
                where = f"{'stages' if len(stages) > 1 else 'stage'} {names}"
                if other_bytes[device] or reserve:
                    where += ", with parameters, gradients, optimizer, workspace and reserve"
                raise ArgumentError(
                    f"{name} of device {device} is {limit:.10g} bytes, but {which} takes "
                    f"{needed:.10g} there ({where}); give at least {needed:.10g}"
                )
    return largest_bytes


def checked_in_flight(in_flight: object, n_stages: int) -> list[float]:
    """Return the most micro-batches in flight on each stage; infinity for None."""
    if in_flight is None:
        return [math.inf] * n_stages
    if not _is_several(in_flight):
        return [check_count("in_flight", in_flight)] * n_stages
    if len(in_flight) != n_stages:
        raise ArgumentError(
            f"in_flight has {len(in_flight)} values for {n_stages} stages; give one, or one a stage"
        )
    return [check_count(f"in_flight of stage {s}", value) for s, value in enumerate(in_flight)]


def _is_several(value: object) -> TypeGuard[Sequence[object] | NDArray[Any]]:
    """Return whether a value is one a device or stage; a 0-dimensional array is one number."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str)


def any_order(placement: Placement, n_microbatches: int, ops: tuple[Op, ...]) -> Schedule:
    """Return a schedule: all F down the stages, then all others up."""
    path_of, stages = placement.path_of(n_microbatches), range(placement.n_stages)
    paths = [(path, np.flatnonzero(path_of == k)) for k, path in enumerate(placement.paths)]
    actions: list[list[tuple[Any, ...]]] = [[] for _ in range(placement.n_devices)]
    for in_turn, own_ops in ((stages, ops[:1]), (reversed(stages), ops[1:])):
        for stage, (path, numbers), op in itertools.product(in_turn, paths, own_ops):
            actions[path[stage]].append((op, stage, numbers))
    devices = []
    for rows in actions:
        *columns, microbatches = zip(*rows, strict=True)
        sizes = [len(own) for own in microbatches]
        devices.append((*(np.repeat(x, sizes) for x in columns), np.concatenate(microbatches)))
    return Schedule.from_columns("any order", placement, n_microbatches, devices)


@lru_cache(maxsize=16)  # a search over configurations asks for the same placements
def one_microbatch_graph(placement: Placement, ops: tuple[Op, ...]) -> TaskGraph:
    """Return a graph of one micro-batch a path."""
    return lower(any_order(placement, placement.n_paths, ops))


def activation_limits(graph: TaskGraph, costs: Sequence[Costs], memory_limit: object) -> Floats:
    """Return the bytes of activations that each device may hold, by a limit of all its bytes.

    It is the limit without parameters, gradients, optimizer, the largest workspace of the device's
    tasks and the allocator's reserve. Negative where these exceed it. ``costs`` are those of each
    class of equal micro-batches.
    """
    workspace = np.zeros(graph.n_devices)
    for own in costs:
        np.maximum.at(workspace, graph.kinds.device, workspaces(graph, own))
    return limits_beyond_static(graph, costs[0], memory_limit) - workspace
