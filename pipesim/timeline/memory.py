"""Memory that each device holds over a timeline (rule 10 of docs/time.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError, TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import input_bytes
from pipesim.ops import COMPUTE, Op
from pipesim.timeline.gradient_memory import waiting_gradients
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints, bincount, count
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

__all__ = ["changes", "in_order_of_time", "over_time", "peak_memory", "static", "weight_versions"]


def static(graph: TaskGraph, costs: Costs) -> NDArray[np.float64]:
    """Return bytes that each device holds throughout: parameters, gradients, optimizer state.

    Parameters count once for each version of them that a stage holds; see `weight_versions`. Of a
    sharded optimizer, a replica has its share; gradients it holds whole, as in ZeRO-1. One gradient
    a parameter is held throughout: others, that wait for a reduction, are among the `changes`.

    Raises
    ------
    CostsError
        If the bytes of a device are too many to be added; so do `peak_memory` and `over_time`.
    """
    parameters, gradients, optimizer = (
        costs.per_stage(f"{name}_bytes", graph.n_stages)
        for name in ("parameter", "gradient", "optimizer")
    )
    with np.errstate(over="ignore"):
        held = weight_versions(graph) * parameters + gradients
        held += optimizer / graph.optimizer_shares
    return _finite(bincount(graph.homes.ravel(), held.ravel(), graph.n_devices))


def _finite(nbytes: Floats) -> Floats:
    """Return the bytes of each device.

    Raises
    ------
    CostsError
        If they are so many that their sum is not finite.
    """
    endless = np.flatnonzero(~np.isfinite(nbytes))
    if len(endless):
        raise CostsError(
            f"device {endless[0]} would hold {nbytes[endless[0]]} bytes: activation_bytes, "
            "parameter_bytes and optimizer_bytes of its stages are too many to be added; check them"
        )
    return nbytes


def weight_versions(graph: TaskGraph) -> NDArray[np.int64]:
    """Return the most versions of its weights that each stage holds at once.

    One; two where they are double-buffered; where they are stashed, the newest and all with which
    a micro-batch in flight has begun. Shape ``(n_replicas, n_stages)``.
    """
    most = np.ones((graph.n_replicas, graph.n_stages), dtype=np.int64)
    if graph.weight_versions == "double_buffered":
        return most + 1
    if graph.weight_versions == "stashed":
        kinds = graph.kinds
        role = np.select([kinds.op == Op.F, kinds.op == Op.STEP], [1, 3], 0)
        role[kinds.is_op(frozenset({Op.B, Op.W}))] = 2
        place = kinds.replica * graph.n_stages + kinds.stage
        of = np.zeros((most.size, graph.n_microbatches), dtype=np.int64)
        in_flight = np.zeros((most.size, graph.n_batches + 1), dtype=np.int64)
        _versions(graph.kind, graph.microbatch, role, place, of, in_flight, most.reshape(-1))
    return most


@kernel()
def _versions(
    kind: Ints, microbatch: Ints, role: Ints, place: Ints, of: Ints, in_flight: Ints, most: Ints
) -> None:
    """Fill ``most``; a kind begins a micro-batch (role 1), ends it (2), or steps (3).

    ``of`` is the version of each micro-batch, ``in_flight`` how many have each version.
    """
    newest, different = np.zeros_like(most), np.zeros_like(most)
    for task in range(len(kind)):
        does, at, m = role[kind[task]], place[kind[task]], microbatch[task]
        if does == 0:
            continue
        if does == 1:
            of[at, m] = newest[at]
            in_flight[at, newest[at]] += 1
            different[at] += in_flight[at, newest[at]] == 1
        elif does == 2:
            in_flight[at, of[at, m]] -= 1
            different[at] -= in_flight[at, of[at, m]] == 0
        else:
            newest[at] += 1
        most[at] = max(most[at], different[at] + (in_flight[at, newest[at]] == 0))


def changes(graph: TaskGraph, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes that each task takes at its start and gives back at its end.

    F takes its activations, or only its input where R takes the rest. B gives all back; I keeps
    ``weight_grad_bytes`` for W to give back, and where that is more than the activations, takes
    the rest. The input of stage 0 is the caller's and counts as 0; what skips bring is input too.
    Gradients that wait for a reduction are taken by the first B or W that adds to them, and given
    back by their REDUCE_GRAD; see `pipesim.timeline.gradient_memory`.
    """
    taken, kept, given = _of_kinds(graph, costs)
    dropped, waiting = _dropped(graph), waiting_gradients(graph, costs)
    takes, gives = taken[graph.kind], given[graph.kind]
    if len(dropped):
        cell = dropped[graph.replica, graph.stage, np.maximum(graph.microbatch, 0)]
        takes = np.where(cell, kept[graph.kind], takes)
    takes[waiting.takes] += waiting.nbytes
    gives[waiting.gives] += waiting.nbytes
    return takes, gives


def _of_kinds(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return bytes that each kind takes, takes where R will take the rest, and gives back."""
    kinds = graph.kinds
    activation, weight_grad = (
        costs.per_stage(name, graph.n_stages)[kinds.stage]
        for name in ("activation_bytes", "weight_grad_bytes")
    )
    inputs = np.concatenate([[0.0], costs.per_stage("output_bytes", graph.n_stages)[:-1]])
    inputs += input_bytes(graph.n_stages, graph.skips, costs.skip_sizes)
    kept_input = np.minimum(inputs[kinds.stage], activation)
    zero = np.zeros(len(kinds))

    def choose(*choices: tuple[Op, NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.select([kinds.op == op for op, _ in choices], [x for _, x in choices], zero)

    more = np.maximum(0.0, weight_grad - activation)
    taken = choose((Op.F, activation), (Op.R, activation - kept_input), (Op.I, more))
    left = np.maximum(0.0, activation - weight_grad)
    given = choose((Op.B, activation), (Op.I, left), (Op.W, weight_grad))
    return taken, choose((Op.F, kept_input), (Op.R, taken), (Op.I, more)), given


def _dropped(graph: TaskGraph) -> NDArray[np.bool_]:
    """Mark each replica's stages' micro-batches that are recomputed; empty if there are none."""
    recomputed = graph.kinds.op == Op.R
    if not recomputed.any():
        return np.empty((0, 0, 0), dtype=bool)
    dropped = np.zeros((graph.n_replicas, graph.n_stages, graph.n_microbatches), dtype=bool)
    of_r = np.flatnonzero(recomputed[graph.kind])
    kind = graph.kind[of_r]
    dropped[graph.kinds.replica[kind], graph.kinds.stage[kind], graph.microbatch[of_r]] = True
    return dropped


def peak_memory(timeline: Timeline) -> NDArray[np.float64]:
    """Return the most bytes that each device holds; shape ``(n_devices,)``.

    Raises
    ------
    TimelineError
        If the timeline has no costs.
    """
    graph, costs = timeline.graph, _costs(timeline)
    held, peak = np.zeros(graph.n_devices), np.zeros(graph.n_devices)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(waiting_gradients(graph, costs).gives):
            events = _events(timeline, costs)
            np.maximum.at(peak, events.device, events.balance)
            return _finite(static(graph, costs) + peak)
        _peaks(*_walked(timeline), held, peak)
        return _finite(static(graph, costs) + peak)


def over_time(timeline: Timeline) -> pd.DataFrame:
    """Return bytes held at each start and end of a device's compute tasks.

    And at the end of reductions that give back gradients which have waited for them.

    Returns
    -------
    pandas.DataFrame
        ``device``, ``time`` (s), ``nbytes``; by device, then in order of time. The first row of
        a device is what it holds throughout, at time 0.

    Raises
    ------
    TimelineError
        If the timeline has no costs.
    """
    import pandas as pd

    graph, costs = timeline.graph, _costs(timeline)
    held = static(graph, costs)
    if len(waiting_gradients(graph, costs).gives):
        peak_memory(timeline)
        events = _events(timeline, costs)
        device = np.concatenate([np.arange(graph.n_devices), events.device])
        time = np.concatenate([np.zeros(graph.n_devices), events.time])
        nbytes = np.concatenate([held, held[events.device] + events.balance])
        order = np.argsort(device, kind="stable")
        return (
            pd.DataFrame({"device": device, "time": time, "nbytes": nbytes})
            .iloc[order]
            .reset_index(drop=True)
        )
    computes = graph.kinds.is_op(COMPUTE)
    tasks = (count(graph.kind, len(graph.kinds)) * computes).astype(np.float64)
    counts = 1 + 2 * bincount(graph.kinds.device, tasks, graph.n_devices).astype(np.int64)
    first = np.cumsum(counts) - counts
    peak_memory(timeline)  # raises where sums are not finite
    time, nbytes = np.zeros(counts.sum()), np.zeros(counts.sum())
    nbytes[first] = held
    cursor = first + 1
    _changes(*_walked(timeline), computes, held, cursor, time, nbytes)
    written = cursor - first  # fewer than there is room for where tasks did not run
    device = np.repeat(np.arange(graph.n_devices), counts)
    frame = pd.DataFrame({"device": device, "time": time, "nbytes": nbytes})
    if (written == counts).all():
        return frame
    kept = np.arange(len(device)) - np.repeat(first, counts) < np.repeat(written, counts)
    return frame[kept].reset_index(drop=True)


class _Events(NamedTuple):
    """Starts and ends of tasks, by device and in order of time, and bytes beyond the static ones.

    As many in each as there are starts and ends; ``balance`` is what is held from then on.
    """

    device: Ints
    time: Floats
    balance: Floats


def _events(timeline: Timeline, costs: Costs) -> _Events:
    """Return the starts and ends of tasks that compute, or that give back bytes."""
    graph = timeline.graph
    takes, gives = changes(graph, costs)
    computes = graph.is_op(COMPUTE)
    task, is_end = in_order_of_time(timeline, computes, computes | (gives > 0))
    device = graph.device[task]
    change = np.where(is_end, -gives[task], takes[task])
    balance = np.empty_like(change)
    for number in range(graph.n_devices):
        of_device = slice(*np.searchsorted(device, [number, number + 1]))
        balance[of_device] = np.cumsum(change[of_device])
    time = np.where(is_end, timeline.end[task], timeline.start[task])
    return _Events(device, time, balance)


def in_order_of_time(
    timeline: Timeline, starts: NDArray[np.bool_], ends: NDArray[np.bool_]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the tasks of starts and ends, by device and in order of time, and which are ends.

    Of several at one moment ends come first, but for tasks that take no time, which start and end
    in order of their ids. ``starts`` and ``ends`` mark the tasks that count, where they have run.
    """
    start = np.flatnonzero(starts & ~np.isnan(timeline.start))
    end = np.flatnonzero(ends & ~np.isnan(timeline.end))
    task = np.concatenate([start, end])
    time = np.concatenate([timeline.start[start], timeline.end[end]])
    is_end = np.repeat([False, True], [len(start), len(end)])
    later = ~is_end | (timeline.end[task] <= timeline.start[task])
    order = np.lexsort((is_end, task, later, time, timeline.graph.device[task]))
    return task[order], is_end[order]


class _Walked(NamedTuple):
    """What both loops read: columns of the graph, bytes of its kinds, and times."""

    kind: Ints
    microbatch: Ints
    device: Ints
    replica: Ints
    stage: Ints
    taken: Floats
    kept: Floats
    given: Floats
    dropped: NDArray[np.bool_]
    start: Floats
    end: Floats


def _walked(timeline: Timeline) -> _Walked:
    graph, kinds = timeline.graph, timeline.graph.kinds
    return _Walked(
        graph.kind,
        graph.microbatch,
        kinds.device,
        kinds.replica,
        kinds.stage,
        *_of_kinds(graph, _costs(timeline)),
        _dropped(graph),
        timeline.start,
        timeline.end,
    )


@kernel()
def _peaks(
    kind: Ints,
    microbatch: Ints,
    device: Ints,
    replica: Ints,
    stage: Ints,
    taken: Floats,
    kept: Floats,
    given: Floats,
    dropped: NDArray[np.bool_],
    start: Floats,
    end: Floats,
    held: Floats,
    peak: Floats,
) -> None:
    """Fill ``peak``. A device computes one task after the other, in order of ids."""
    for task in range(len(kind)):
        of = kind[task]
        if (taken[of] == 0.0 and given[of] == 0.0) or np.isnan(start[task]):
            continue
        on = device[of]
        if len(dropped) and dropped[replica[of], stage[of], microbatch[task]]:
            held[on] += kept[of]
        else:
            held[on] += taken[of]
        peak[on] = max(peak[on], held[on])
        if not np.isnan(end[task]):
            held[on] -= given[of]


@kernel()
def _changes(
    kind: Ints,
    microbatch: Ints,
    device: Ints,
    replica: Ints,
    stage: Ints,
    taken: Floats,
    kept: Floats,
    given: Floats,
    dropped: NDArray[np.bool_],
    start: Floats,
    end: Floats,
    computes: NDArray[np.bool_],
    static_bytes: Floats,
    cursor: Ints,
    time: Floats,
    nbytes: Floats,
) -> None:
    """Fill ``time`` and ``nbytes`` from each device's ``cursor`` on."""
    balance = np.zeros(len(static_bytes))
    for task in range(len(kind)):
        of = kind[task]
        if not computes[of] or np.isnan(start[task]):
            continue
        on = device[of]
        if len(dropped) and microbatch[task] >= 0:
            was_dropped = dropped[replica[of], stage[of], microbatch[task]]
        else:
            was_dropped = False
        balance[on] += kept[of] if was_dropped else taken[of]
        time[cursor[on]] = start[task]
        nbytes[cursor[on]] = static_bytes[on] + balance[on]
        cursor[on] += 1
        if not np.isnan(end[task]):
            balance[on] -= given[of]
            time[cursor[on]] = end[task]
            nbytes[cursor[on]] = static_bytes[on] + balance[on]
            cursor[on] += 1


def _costs(timeline: Timeline) -> Costs:
    if timeline.costs is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no costs to compute memory with; "
            "load it with Timeline.load(path, costs=...)"
        )
    return timeline.costs
