"""Whether a timeline fits in the memory of its devices, and by how much it does not."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_list, number
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import COMPUTE, Op
from pipesim.timeline.memory import ROUNDING, costs_of, exceeds, reserved_memory
from pipesim.timeline.task_bytes import static
from pipesim.timeline.timeline import Timeline
from pipesim.utils.texts import format_bytes, format_time, in_bytes

Floats = NDArray[np.float64]


class Excess(NamedTuple):
    """A device that needs more bytes than it may hold."""

    device: int
    #: Most bytes that it holds, the allocator's reserve included, and those that it may hold.
    needed: float
    limit: float
    #: Seconds at which it first holds the most.
    time: float
    #: Task that starts then and allocates them; None if it holds them throughout.
    task: Task | None
    #: Number of replicas whose device for the same stages needs as many bytes, and may hold as
    #: many, itself included; and number of all replicas.
    n_equal: int = 1
    n_replicas: int = 1


def checked_memory_limit(value: object, n_devices: int, name: str = "memory_limit") -> Floats:
    """Return the bytes that each device may hold; shape ``(n_devices,)``.

    ``value`` is one number or one a device; each may be a text such as ``"80GiB"``.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    value = in_bytes(name, value)
    if isinstance(value, (int, float)) or number(value) is not None:
        return np.full(n_devices, _checked_bytes(value, name))
    values = check_list(name, value, "bytes: one number, or one a device")
    if len(values) != n_devices:
        raise ArgumentError(
            f"{name} has {len(values)} values for {n_devices} devices; give one number, or "
            "one a device"
        )
    return np.array([_checked_bytes(x, f"{name} of device {k}") for k, x in enumerate(values)])


def _checked_bytes(value: object, name: str) -> float:
    nbytes = number(value)
    if nbytes is None or nbytes < 0:
        raise ArgumentError(
            f"{name} must be bytes >= 0, got {value!r:.60}; give such as 80e9 or '80GB', or None "
            "for no limit"
        )
    return nbytes


def limits_beyond_static(graph: TaskGraph, costs: Costs, value: object) -> Floats:
    """Return the most bytes beyond the static ones with which each device still fits.

    ``value`` is that of `checked_memory_limit`. The result has the shape ``(n_devices,)``; it is
    negative where the static bytes (parameters, gradients, optimizer) alone are too many.
    """
    limits = checked_memory_limit(value, graph.n_devices)
    held, reserve = static(graph, costs), costs.memory_reserve
    most = limits / (1.0 + reserve) - held
    finite = np.isfinite(most)

    def fits(nbytes: Floats) -> NDArray[np.bool_]:
        peak = held + np.where(finite, nbytes, 0.0)
        return peak + reserve * peak <= limits  # as `reserved_memory` sums it

    for _ in range(64):  # the division rounds: go to the last number that fits
        more, less = np.nextafter(most, math.inf), np.nextafter(most, -math.inf)
        last, most = most, np.where(finite & fits(more), more, np.where(fits(most), most, less))
        if np.array_equal(last, most):
            break
    return most


def too_low_limit(device: int, limit: float, needed: float) -> ArgumentError:
    """Return the error of a limit in which one micro-batch does not fit, with exact bytes."""
    least = math.ceil(needed * (1.0 - ROUNDING))  # whole bytes
    return ArgumentError(
        f"memory_limit of device {device} is {format_bytes(limit)} ({limit:.16g} bytes), but one "
        f"micro-batch needs {format_bytes(needed)} there, with parameters, gradients, optimizer "
        f"and reserve; give at least {least} bytes, smaller micro-batches, or more devices"
    )


def _too_full(timeline: Timeline) -> list[int]:
    """Return the numbers of the devices that need more bytes than they may hold."""
    limit = timeline.memory.limit
    return (
        [] if limit is None else np.flatnonzero(exceeds(reserved_memory(timeline), limit)).tolist()
    )


def excesses(timeline: Timeline, *, worst: bool = False) -> list[Excess]:
    """Return the devices that need more bytes than they may hold, or the ``worst`` one alone.

    Equal devices of several replicas are one entry: that of the first of them.
    """
    limit = timeline.memory.limit
    groups = _equal_devices(timeline)
    if worst and limit is not None:
        over = reserved_memory(timeline) - limit
        groups = sorted(groups, key=lambda group: -over[group[0]])[:1]
    if limit is None or not groups:
        return []
    reserved = reserved_memory(timeline)
    held = timeline.memory()
    graph, too_full = timeline.graph, []
    computes = graph.is_op(COMPUTE | {Op.RELOAD})
    for device, *others in groups:
        rows = held[held["device"] == device]
        most = int(rows["nbytes"].to_numpy().argmax())
        time = float(rows["time"].iloc[most])
        own = computes & (graph.device == device)
        own |= (graph.op == Op.OFFLOAD) & (graph.offload_peers[graph.device] == device)
        begins = np.flatnonzero(own & (timeline.start == time))
        task = graph.task(int(begins[0])) if most and len(begins) else None
        nbytes = float(reserved[device]), float(limit[device])
        counts = 1 + len(others), graph.n_replicas
        too_full.append(Excess(device, *nbytes, time, task, *counts))
    return too_full


def _equal_devices(timeline: Timeline) -> list[list[int]]:
    """Return the devices that need too many bytes; equal ones of several replicas together."""
    devices, limit = _too_full(timeline), timeline.memory.limit
    if limit is None or not devices:
        return []
    homes, reserved = timeline.graph.homes, reserved_memory(timeline)
    first_stage = np.zeros(timeline.n_devices, dtype=np.int64)
    for stage in reversed(range(homes.shape[1])):
        first_stage[homes[:, stage]] = stage
    groups: dict[tuple[float, ...], list[int]] = {}
    for device in devices:
        key = first_stage[device], reserved[device], limit[device]
        groups.setdefault(key, []).append(device)
    return list(groups.values())


def excess_text(excess: Excess) -> str:
    """Return such as ``device 0 needs 3 B of 2 B, 1 B too much, from task 0F3 on, at 1 s``."""
    place = "throughout"
    if excess.task is not None:
        place = f"from task {excess.task} on, at {format_time(excess.time)}"
    if excess.n_replicas > 1 and excess.n_equal == excess.n_replicas:
        place += f", in all {excess.n_replicas} replicas"
    elif excess.n_equal > 1:
        place += f", in {excess.n_equal} of {excess.n_replicas} replicas"
    return (
        f"device {excess.device} needs {format_bytes(excess.needed)} of "
        f"{format_bytes(excess.limit)}, {format_bytes(excess.needed - excess.limit)} too much, "
        f"{place}"
    )


def limit_text(timeline: Timeline) -> str:
    """Return a sentence on the device that needs most beyond its limit; empty if there is none."""
    too_full = _too_full(timeline)
    if not too_full:
        return ""
    (worst,) = excesses(timeline, worst=True)
    more = len(too_full) - worst.n_equal
    others = f"; {more} more device{'s' * (more > 1)} too" if more > 0 else ""
    share = costs_of(timeline).memory_reserve
    reserve = f"; {share:.3g} of the tensors' bytes are the allocator's reserve" if share else ""
    return f"timeline {timeline.name!r} does not fit: {excess_text(worst)}{others}{reserve}"


def static_text(timeline: Timeline) -> str:
    """Return what is needed if bytes that do not depend on micro-batches exceed a limit; or ""."""
    limit, graph, costs = timeline.memory.limit, timeline.graph, costs_of(timeline)
    if limit is None:
        return ""
    nbytes = static(graph, costs)
    needed = nbytes + costs.memory_reserve * nbytes
    device = int((needed - limit).argmax())
    if needed[device] <= limit[device]:
        return ""
    is_sharded = bool((graph.optimizer_shares > 1).any())
    would_fit = needed.sum() <= limit.sum()
    split = "another split of layers among devices, " if would_fit and graph.n_stages > 1 else ""
    return (
        f"parameters, gradients and optimizer alone take {format_bytes(needed[device])} of "
        f"{format_bytes(limit[device])} on device {device}: it needs {split}more devices, tensor "
        f"parallelism, or {'more replicas that share' if is_sharded else 'replicas that shard'} "
        "the optimizer"
    )
