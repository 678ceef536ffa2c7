"""Memory that devices and hosts hold over a timeline (rule 10 of docs/time.md).

`pipesim.timeline.task_bytes` has the bytes of stages and tasks, which are added up here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError, TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE, COPIES, Op
from pipesim.timeline.task_bytes import (
    changes,
    dropped_activations,
    finite_bytes,
    gathered_bytes,
    kind_bytes,
    row_bytes,
    static,
    static_parts,
    waiting_gradients,
    workspaces,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import OwnerMethod, Subject
from pipesim.utils.csr import Ints, bincount, count
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.analysis.configurations import changes_that_fit


Floats = NDArray[np.float64]
#: Operations that change bytes and compute nothing, beside reductions and messages.
_CHANGERS = COPIES | {Op.RESHARD}
#: Relative error that sums of bytes may have.
ROUNDING = 1e-12


def _is_by_events(graph: TaskGraph, costs: Costs) -> bool:
    """Return whether tasks other than compute tasks change bytes: messages, copies, collectives."""
    if graph.forward_only or not graph.kinds.ops.isdisjoint(_CHANGERS):
        return True
    return len(waiting_gradients(graph, costs).reduction) > 0


class _Columns(NamedTuple):
    """Inputs of the kernel: columns of the graph, bytes of the rows of its tasks, and times.

    The columns from ``device`` to ``stage`` have one value a row too.
    """

    row: Ints
    microbatch: Ints
    device: Ints
    replica: Ints
    stage: Ints
    allocated: Floats
    kept: Floats
    released: Floats
    workspace: Floats
    dropped: NDArray[np.bool_]
    start: Floats
    end: Floats


class OrderBytes(NamedTuple):
    """Bytes of the kinds of a graph: those that tasks change, and those that are always held."""

    #: Device of each kind.
    device: Ints
    #: Bytes that a task of each kind allocates and releases, and holds only while it runs.
    allocated: Floats
    released: Floats
    workspace: Floats
    #: Bytes that each device always holds.
    static: Floats

    def peak(self, kind: Ints) -> Floats:
        """Return `TimelineMemory.peak` if the tasks of each device run in the order of their kinds.

        ``kind`` has the kinds of tasks, those of each device in order; others may be among them.
        """
        peak = np.zeros(len(self.static))
        _order_peak(kind, self.device, self.allocated, self.released, self.workspace, peak)
        with np.errstate(over="ignore", invalid="ignore"):
            return finite_bytes(self.static + peak)


@kernel()
def _order_peak(
    kind: Ints,
    device: Ints,
    allocated: Floats,
    released: Floats,
    workspace: Floats,
    peak: Floats,
) -> None:
    """Fill the most bytes that tasks of each device hold, in the order of their kinds."""
    held = np.zeros(len(peak))
    for k in kind:
        d = device[k]
        during = held[d] + allocated[k]
        peak[d] = max(peak[d], during + workspace[k])
        held[d] = during - released[k]


def order_bytes(graph: TaskGraph, costs: Costs) -> OrderBytes:
    """Return the bytes of a graph's kinds, from which `OrderBytes.peak` finds those of any order.

    The graph must have neither recomputes nor gradients that wait for their reduction:
    `pipesim.lower` makes it with ``grad_sync="last"``.
    """
    allocated, _, released = kind_bytes(graph, costs)
    workspace, held = workspaces(graph, costs), static(graph, costs)
    device = graph.kinds.device.copy()  # loops are compiled for arrays that can be written
    return OrderBytes(device, allocated, released, workspace, held)


def over_time(timeline: Timeline) -> pd.DataFrame:
    """Return the bytes that each device holds over time (rule 10).

    A device's rows are the starts and ends of its compute tasks, and other times at which bytes
    change: the ends of reductions and OFFLOADs, and the starts of RELOADs.

    Returns
    -------
    pandas.DataFrame
        ``device``, ``time`` (s), ``nbytes``; by device, then in order of time. The first row of
        a device has the bytes that it holds throughout, at time 0.

    Raises
    ------
    TimelineError
        If the timeline has no costs.

    Examples
    --------
    GPipe holds the activations of all micro-batches:

    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
    >>> timeline.memory().groupby("device")["nbytes"].max().tolist()
    [2.0, 2.0]
    """
    from pipesim.utils.packages import pandas as pd

    graph, costs = timeline.graph, costs_of(timeline)
    held = static(graph, costs)
    if _is_by_events(graph, costs):
        _ = timeline.memory.peak  # for its error
        events = held_bytes(timeline)
        nbytes = held[events.device] + events.balance
        return _table_over_time("device", held, events.device, events.time, nbytes)
    computes = graph.kinds.is_op(COMPUTE)
    tasks = (count(graph.kind, len(graph.kinds)) * computes).astype(np.float64)
    counts = 1 + 2 * bincount(graph.kinds.device, tasks, graph.n_devices).astype(np.int64)
    first = np.cumsum(counts) - counts
    time, nbytes = np.zeros(counts.sum()), np.zeros(counts.sum())
    nbytes[first] = held
    cursor = first + 1
    peak = np.zeros(graph.n_devices)
    with np.errstate(over="ignore", invalid="ignore"):
        columns = _columns(timeline)
        is_counted = np.resize(computes, len(columns.device))
        _balances(columns, is_counted, held, peak, cursor, time, nbytes)
        finite_bytes(held + peak)
    written = cursor - first  # fewer than there is room for if tasks did not run
    device = np.repeat(np.arange(graph.n_devices), counts)
    frame = pd.DataFrame({"device": device, "time": time, "nbytes": nbytes})
    if (written == counts).all():
        return frame
    kept = np.arange(len(device)) - np.repeat(first, counts) < np.repeat(written, counts)
    return frame[kept].reset_index(drop=True)


def _table_over_time(
    name: str, first: Floats, owner: Ints, time: Floats, nbytes: Floats
) -> pd.DataFrame:
    """Return a table by owner; the first row of each has the bytes ``first``, at time 0."""
    from pipesim.utils.packages import pandas as pd

    owner = np.concatenate([np.arange(len(first)), owner])
    time = np.concatenate([np.zeros(len(first)), time])
    columns = {name: owner, "time": time, "nbytes": np.concatenate([first, nbytes])}
    order = np.argsort(owner, kind="stable")
    return pd.DataFrame(columns).iloc[order].reset_index(drop=True)


class HeldBytes(NamedTuple):
    """Starts and ends of tasks, by device and in order of time; one entry each.

    ``is_end`` marks the ends. ``balance`` has the bytes that are held from then on, beyond the
    static ones. ``workspace`` is the part of them that tasks hold only while they run.
    """

    task: Ints
    is_end: NDArray[np.bool_]
    device: Ints
    time: Floats
    balance: Floats
    workspace: Floats


def held_bytes(timeline: Timeline) -> HeldBytes:
    """Return the starts and ends of tasks that compute or release bytes."""
    graph, costs = timeline.graph, costs_of(timeline)
    allocated, released = changes(graph, costs)
    computes = graph.is_op(COMPUTE)
    task, is_end = in_order_of_time(timeline, computes | (allocated > 0), computes | (released > 0))
    device = graph.device[task]
    change = np.where(is_end, -released[task], allocated[task])
    if graph.offload_to == "peer":  # a peer holds them from OFFLOAD's start to RELOAD's end
        peers = graph.offload_peers[graph.device]
        is_copy = graph.op == Op.OFFLOAD, graph.op == Op.RELOAD
        copies, ends = in_order_of_time(timeline, *is_copy, peers)
        moved = np.where(ends, -allocated[copies], released[copies])
        task, is_end = np.concatenate([task, copies]), np.concatenate([is_end, ends])
        device, change = np.concatenate([device, peers[copies]]), np.concatenate([change, moved])
        order = order_of_time(timeline, task, is_end, device)
        task, is_end, device, change = task[order], is_end[order], device[order], change[order]
    table = row_bytes(graph, costs)
    temporary = table.workspace[table.row[task]]
    temporary = np.where(is_end, -temporary, temporary)
    balance, workspace = np.empty_like(change), np.empty_like(change)
    for number in range(graph.n_devices):
        rows = slice(*np.searchsorted(device, [number, number + 1]))
        workspace[rows] = np.cumsum(temporary[rows])
        balance[rows] = np.cumsum(change[rows]) + workspace[rows]
    time = np.where(is_end, timeline.end[task], timeline.start[task])
    return HeldBytes(task, is_end, device, time, balance, workspace)


def in_order_of_time(
    timeline: Timeline,
    starts: NDArray[np.bool_],
    ends: NDArray[np.bool_],
    owner: Ints | None = None,
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the tasks of starts and ends in order of time, and which are ends.

    They are sorted by the ``owner`` of each task first, which is its device by default.

    At equal times, ends come first. Tasks that take no time are the exception: they come after the
    other ends, and start and end in order of their ids. ``starts`` and ``ends`` mark the tasks that
    count; tasks that did not run are left out.
    """
    start = np.flatnonzero(starts & ~np.isnan(timeline.start))
    end = np.flatnonzero(ends & ~np.isnan(timeline.end))
    task = np.concatenate([start, end])
    is_end = np.repeat([False, True], [len(start), len(end)])
    owner = timeline.graph.device if owner is None else owner
    order = order_of_time(timeline, task, is_end, owner[task])
    return task[order], is_end[order]


def order_of_time(timeline: Timeline, task: Ints, is_end: NDArray[np.bool_], owner: Ints) -> Ints:
    """Return the order of `in_order_of_time`; ``owner`` has that of each start or end."""
    time = np.where(is_end, timeline.end[task], timeline.start[task])
    later = ~is_end | (timeline.end[task] <= timeline.start[task])
    order: Ints = np.lexsort((is_end, task, later, time, owner))
    return order


def _columns(timeline: Timeline) -> _Columns:
    graph, kinds = timeline.graph, timeline.graph.kinds
    rows = row_bytes(graph, costs_of(timeline))
    return _Columns(
        rows.row,
        graph.microbatch,
        kinds.device[rows.kind],
        kinds.replica[rows.kind],
        kinds.stage[rows.kind],
        rows.allocated,
        rows.kept,
        rows.released,
        rows.workspace,
        dropped_activations(graph),
        timeline.start,
        timeline.end,
    )


@kernel()
def _balances(
    columns: _Columns,
    is_counted: NDArray[np.bool_],
    static_bytes: Floats,
    peak: Floats,
    cursor: Ints,
    time: Floats,
    nbytes: Floats,
) -> None:
    """Add up the bytes of each device over the tasks of the rows in ``is_counted``.

    A device computes one task after the other, in order of ids. ``peak`` gets the most bytes
    beyond ``static_bytes`` of each device. Unless ``time`` is empty, ``time`` and ``nbytes`` get a
    row for each start and end, from the ``cursor`` of the device on, which is moved behind them.
    """
    (
        row_of, microbatch, device, replica, stage, allocated, kept, released, workspace, dropped,
        start, end,
    ) = columns  # fmt: skip
    held = np.zeros(len(peak))
    record = len(time) > 0
    for task in range(len(row_of)):
        k = row_of[task]
        if not is_counted[k] or np.isnan(start[task]):
            continue
        d = device[k]
        m = microbatch[task] if len(dropped) else -1
        change = kept[k] if m >= 0 and dropped[replica[k], stage[k], m] else allocated[k]
        during = held[d] + change
        peak[d] = max(peak[d], during + workspace[k])
        ends = not np.isnan(end[task])
        held[d] = during - released[k] if ends else during
        if record:
            row = cursor[d]
            time[row], nbytes[row] = start[task], static_bytes[d] + (during + workspace[k])
            if ends:
                time[row + 1], nbytes[row + 1] = end[task], static_bytes[d] + held[d]
            cursor[d] = row + 1 + ends


def costs_of(timeline: Timeline) -> Costs:
    """Return the costs of a timeline; raise `TimelineError` if it has none."""
    if timeline.costs is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no costs to compute memory with; "
            "load it with Timeline.load(path, costs=...)"
        )
    return timeline.costs


def memory_breakdown(timeline: Timeline) -> pd.DataFrame:
    """Return the bytes that each device holds at its first peak, by what they are for.

    Returns
    -------
    pandas.DataFrame
        One row a device, in bytes:

        - ``parameters``, ``gradients`` and ``optimizer`` are held throughout.
        - ``activations`` of all micro-batches in flight, and gradients that wait for their W.
        - ``workspace`` of the task that runs at the peak.
        - ``buffers``: gradients that wait for a reduction while the next ones are added up.
        - ``reserve`` of the allocator: ``Costs.memory_reserve`` times `peak`.
        - ``total``: the sum of the others, which is `peak` and the reserve.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1, parameter_bytes=5)
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
    >>> print(timeline.memory.breakdown()[["parameters", "gradients", "activations", "total"]])
            parameters  gradients  activations  total
    device
    0              5.0        5.0          2.0   12.0
    1              5.0        5.0          2.0   12.0
    """
    from pipesim.utils.packages import pandas as pd

    graph, costs = timeline.graph, costs_of(timeline)
    peak = timeline.memory.peak  # checks that the sums are finite
    parts = static_parts(graph, costs)
    activations, workspace, buffers, gathered = _at_peaks(timeline)
    columns = {
        "parameters": parts.parameters + gathered,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": activations,
        "workspace": workspace,
        "buffers": buffers,
        "reserve": costs.memory_reserve * peak,
    }
    columns["total"] = peak + columns["reserve"]
    return pd.DataFrame(columns, index=pd.RangeIndex(graph.n_devices, name="device"))


def _at_peaks(timeline: Timeline) -> tuple[Floats, Floats, Floats, Floats]:
    """Return activations, workspace, waiting gradients and gathered parameters.

    One value a device, at its first peak.
    """
    graph, costs = timeline.graph, costs_of(timeline)
    held = held_bytes(timeline)
    added, removed = np.zeros(len(graph)), np.zeros(len(graph))
    waiting = waiting_gradients(graph, costs)
    added[waiting.backward] += waiting.nbytes
    removed[waiting.reduction] += waiting.nbytes
    change = np.where(held.is_end, -removed[held.task], added[held.task])
    gathers, frees = (of_kind[graph.kind[held.task]] for of_kind in gathered_bytes(graph, costs))
    gathers = np.where(held.is_end, -frees, gathers)
    activations, workspace, buffers, gathered = np.zeros((4, graph.n_devices))
    for device in range(graph.n_devices):
        rows = slice(*np.searchsorted(held.device, [device, device + 1]))
        balance = held.balance[rows]
        if not len(balance) or balance.max() <= 0:
            continue
        top = balance.argmax()
        workspace[device] = held.workspace[rows][top]
        buffers[device] = np.cumsum(change[rows])[top]
        gathered[device] = np.cumsum(gathers[rows])[top]
        activations[device] = balance[top] - workspace[device] - buffers[device] - gathered[device]
    return activations, workspace, buffers, gathered


# Memory of hosts that offloaded activations take.
#
# An OFFLOAD takes its bytes of host memory at its start, and the RELOAD of the same activations
# gives them back at its end: the copy writes to a buffer from its start, and reads from it to its
# end.


def host_memory(timeline: Timeline) -> pd.DataFrame:
    """Return the bytes of offloaded activations that hosts hold over time.

    An OFFLOAD takes its bytes at its start, and the RELOAD gives them back at its end. The host
    of a device is the process that issues its tasks (``graph.host``).

    Returns
    -------
    pandas.DataFrame
        ``host``, ``time`` (s), ``nbytes``; by host, then in order of time. The first row of a
        host is at time 0.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 4), offload="all", prefetch=0)
    >>> network = ps.Network(host=ps.HostLink(bandwidth=1))
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1, network=network)
    >>> timeline = ps.simulate(graph, costs)
    >>> float(timeline.memory.host()["nbytes"].max())  # 3 micro-batches, 2 stages
    6.0
    """
    n_hosts = int(timeline.graph.host.max(initial=0)) + 1
    return _table_over_time("host", np.zeros(n_hosts), *_held(timeline))


def _held(timeline: Timeline) -> tuple[Ints, Floats, Floats]:
    """Return host, time and held bytes after each change, by host and in order of time."""
    graph, costs, moved = timeline.graph, costs_of(timeline), np.zeros(len(timeline))
    if not graph.kinds.ops.isdisjoint(COPIES):
        nbytes = row_bytes(graph, costs)
        is_offload = graph.kinds.op[nbytes.kind] == Op.OFFLOAD
        moved = np.where(is_offload, nbytes.released, nbytes.allocated)[nbytes.row]
    host_of, to_host = graph.host[graph.device], graph.offload_to == "host"
    task, is_end = in_order_of_time(
        timeline, (graph.op == Op.OFFLOAD) & to_host, (graph.op == Op.RELOAD) & to_host, host_of
    )
    host, change = host_of[task], np.where(is_end, -moved[task], moved[task])
    held = np.empty_like(change)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in np.unique(host).tolist():
            rows = slice(*np.searchsorted(host, [number, number + 1]))
            held[rows] = np.cumsum(change[rows])
    if not np.isfinite(held).all():
        raise CostsError(
            "a host would hold more bytes than a number can have: activation_bytes of the "
            "offloaded stages are too many to be added; check them"
        )
    return host, np.where(is_end, timeline.end[task], timeline.start[task]), held


# The accessor of timelines


class TimelineMemory(Subject[Timeline]):
    """Memory of a timeline, ``timeline.memory``; called, the bytes that devices hold over time.

    All but `limit` raise `TimelineError` if the timeline has no costs, such as after loading it
    without; `fits` is None then.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs, memory_limit=3)
    >>> timeline.memory.peak.tolist(), timeline.memory.limit.tolist(), timeline.memory.fits
    ([2.0, 2.0], [3.0, 3.0], True)
    """

    __call__ = OwnerMethod(over_time)
    breakdown = OwnerMethod(memory_breakdown)
    host = OwnerMethod(host_memory)

    if TYPE_CHECKING:  # registered by the rooms that have them
        changes_that_fit = OwnerMethod(changes_that_fit)

    @property
    def peak(self) -> Floats:
        """Most bytes that each device holds (rule 10); shape ``(n_devices,)``."""
        timeline = self._owner
        graph, costs = timeline.graph, costs_of(timeline)
        peak = np.zeros(graph.n_devices)
        with np.errstate(over="ignore", invalid="ignore"):
            if _is_by_events(graph, costs):
                events = held_bytes(timeline)
                np.maximum.at(peak, events.device, events.balance)
            else:
                columns = _columns(timeline)
                is_counted = (columns.allocated != 0) | (columns.released != 0)
                is_counted |= columns.workspace != 0
                none = np.empty(0)
                _balances(columns, is_counted, none, peak, np.empty(0, np.int64), none, none)
            return finite_bytes(static(graph, costs) + peak)

    @property
    def peak_host(self) -> Floats:
        """Most bytes of offloaded activations that each host holds; shape ``(n_hosts,)``."""
        peak = np.zeros(int(self._owner.graph.host.max(initial=0)) + 1)
        host, _, held = _held(self._owner)
        np.maximum.at(peak, host, held)
        return peak

    @property
    def limit(self) -> Floats | None:
        """Bytes that each device may hold; shape ``(n_devices,)``, or None if unknown.

        They are `Timeline.limits`, or else the memory of a GPU in the workload of its costs.
        """
        timeline = self._owner
        if timeline.limits is not None:
            return np.asarray(timeline.limits, dtype=np.float64)
        work = None if timeline.costs is None else timeline.costs.work
        if work is None or work.memory is None:
            return None
        return np.full(timeline.n_devices, work.memory)

    @property
    def fits(self) -> bool | None:
        """Whether no device needs more than its `limit`, which it may reach.

        A device needs its `peak` and the allocator's share of it, ``Costs.memory_reserve``. None if
        that is unknown: without a limit or costs, and for costs that have no bytes.

        Near the limit it is uncertain. CUDA's context, NCCL's buffers and blocks of the allocator
        take some GB besides, which are not counted: ``memory_reserve`` is 0 by default. The memory
        of a GPU is the nominal value of its data sheet, of which a part is not available.
        """
        limit = self.limit
        if limit is None or self._owner.costs is None:
            return None
        needed = reserved_memory(self._owner)
        return not exceeds(needed, limit).any() if needed.any() else None


def reserved_memory(timeline: Timeline) -> Floats:
    """Return the bytes that each device needs: its peak, and the allocator's reserve."""
    peak = timeline.memory.peak
    return peak + costs_of(timeline).memory_reserve * peak


def exceeds(needed: Floats, limit: Floats) -> NDArray[np.bool_]:
    """Return whether each device needs more bytes than it may hold, but for rounding of sums."""
    return needed * (1.0 - ROUNDING) > limit
