"""`graph_bound`: a lower bound on the time of any order of the tasks of a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.device_lanes import device_lanes
from pipesim.analysis.lower_bounds.device_orders import DeviceLanes
from pipesim.analysis.lower_bounds.horizon import latest_excluded_horizon
from pipesim.analysis.lower_bounds.lanes import (
    Floats,
    LaneGraph,
    joined_arcs,
    lane_graph,
    task_lanes,
)
from pipesim.analysis.lower_bounds.longest_paths import (
    Places,
    heads_of,
    ordered_places,
    tails_of,
)
from pipesim.analysis.lower_bounds.memory_arcs import memory_arcs
from pipesim.analysis.lower_bounds.one_machine import busiest_stream, shared_streams
from pipesim.analysis.lower_bounds.spans import longest_span_bound, spans_of_devices
from pipesim.analysis.lower_bounds.stage_lanes import device_stages
from pipesim.analysis.lower_bounds.windows import Windows
from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import least_costs
from pipesim.errors import CostsError, check_name
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, LISTED, Op
from pipesim.order_search.objective import OBJECTIVES, Objective
from pipesim.simulation.simulate import checked_costs
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.timeline.timeline import LONGEST
from pipesim.utils.csr import Ints
from pipesim.utils.units import Bytes

#: Relative error of sums of times that are no whole numbers, at least.
_ROUNDING = 1e-12


def graph_bound(
    graph: TaskGraph,
    costs: Costs,
    *,
    memory_limit: Bytes | Sequence[Bytes] | NDArray[np.float64] | None = None,
    objective: Objective = "makespan",
    target: float = math.inf,
    search: bool = False,
) -> float:
    """Return a time (s) that no order of the graph's compute tasks goes below.

    The orders are those with the same tasks on the same streams, in which each task keeps the
    dependencies of rule 3 and the times of rules 2, 4, 6 and 9 of docs/time.md.
    `pipesim.analysis.lower_bounds.lanes` says what is kept of the graph. The bound is the largest
    of:

    - the longest path;
    - for each stream, Jackson's preemptive bound, in which heads and tails are longest paths;
    - the latest horizon that `pipesim.analysis.lower_bounds.horizon` excludes. It leaves out
      devices with more than six lanes besides W and R, or with too many states, and stops after a
      fixed number of steps, about a quarter of a second.

    A bound on the span is the largest over devices, and lower for placements with several paths:
    horizons are not tried there.

    If micro-batches differ, this is done twice, and the larger bound is returned:

    - with each task as it is: longest paths, and Jackson's bound. Memory and horizons are left out;
    - with all micro-batches as the least one, each field by itself. An order keeps its limits with
      less bytes, and takes no longer with less seconds.

    Times are sums of up to as many terms as there are tasks. The result is lowered by their
    rounding error: by 1e-12 of it or more, unless all times are whole numbers, whose sums are
    exact.

    Parameters
    ----------
    graph
        Graph of any order of the tasks.
    costs
        Seconds and bytes.
    memory_limit
        Bytes that a device may hold, as in `pipesim.simulate`; None for no limit. It raises no
        bound of a graph that offloads activations, frees parameters, or has
        experts.
    objective
        ``"makespan"``, or ``"span"``: the longest time of any device from its first start to its
        last end, without STEP.
    target
        A makespan (s) that an order reaches: a bound that meets it is not raised further.
    search
        Whether to branch on the orders of devices, which takes up to about a second longer.

    Raises
    ------
    CostsError
        If the costs lack an operation, if sums of their seconds are not finite, and for a memory
        limit if they have no bytes.
    """
    check_name("objective", objective, OBJECTIVES)
    limits = None
    if memory_limit is not None:
        limits = checked_memory_limit(memory_limit, graph.n_devices)
    in_segments = not graph.kinds.completes.all()
    if in_segments or graph.is_op(COPIES | {Op.RESHARD}).any():  # bytes depend on the order
        limits = None
    seconds = _bound_of_tasks(graph, costs, objective)
    least = least_costs(costs)
    seconds = max(seconds, _bound_of_places(graph, least, limits, objective, target, search))
    if not seconds <= LONGEST:
        raise CostsError(
            f"the tasks of {graph.name!r} take at least {seconds:g} s, beyond {LONGEST:g}: too "
            "long a time to calculate with; costs are in seconds, so check them"
        )
    return seconds


def _bound_of_tasks(graph: TaskGraph, costs: Costs, objective: Objective) -> float:
    """Return a bound for micro-batches that differ, each with its seconds; 0 if they do not.

    It is 0 with overlapped actions, too: which ones overlap depends on the order.
    """
    if costs.n_microbatches is None or graph.kinds.overlapped.any():
        return 0.0
    lanes, kind = task_lanes(graph, checked_costs(graph, costs))
    places = ordered_places(lanes, lanes.arcs)
    if objective == "span":
        is_action = (kind >= 0) & graph.kinds.is_op(LISTED)[kind]
        device = np.where(is_action, graph.kinds.device[kind], -1)
        seconds = longest_span_bound(places, device[places.lane])
    else:
        seconds = _longest(places, heads_of(places), tails_of(places))
    return float(seconds * (1.0 - _rounding(places)))


def _bound_of_places(
    graph: TaskGraph,
    costs: Costs,
    limits: Floats | None,
    objective: Objective,
    target: float,
    search: bool,
) -> float:
    """Return a bound for equal micro-batches."""
    lanes = lane_graph(graph, checked_costs(graph, costs))
    devices = device_stages(graph, lanes, costs, limits)
    arcs = lanes.arcs
    if limits is not None:
        arcs = joined_arcs(arcs, memory_arcs(devices, lanes, costs.memory_reserve))
    places = ordered_places(lanes, arcs)
    if objective == "span":
        device = _devices_of_actions(graph, lanes)[places.lane]
        seconds = _span(places, device_lanes(lanes, places, devices), device, search)
    else:
        seconds = _makespan(places, device_lanes(lanes, places, devices), target, search)
    return float(seconds * (1.0 - _rounding(places)))


def _makespan(places: Places, lanes: DeviceLanes, target: float, search: bool) -> float:
    """Return a lower bound on the end of the last task (s)."""
    head, tail = heads_of(places), tails_of(places)
    longest = _longest(places, head, tail)
    windows = Windows.of_places(places, lanes, head, tail)
    whole = _rounding(places) == 0.0
    return latest_excluded_horizon(windows, longest, target, whole=whole, search=search)


def _longest(places: Places, head: Floats, tail: Floats) -> float:
    """Return the longest path, or Jackson's preemptive bound of a stream (s)."""
    longest = float((head + places.seconds + tail).max(initial=0.0))
    streams = shared_streams(places.lane, places.stream)
    return max(longest, busiest_stream(streams, head, places.seconds, tail))


def _span(places: Places, lanes: DeviceLanes, device: Ints, search: bool) -> float:
    """Return a lower bound on the longest span of a device (s)."""
    longest = longest_span_bound(places, device)
    spans = spans_of_devices(places, device)
    if not len(spans.first):
        return longest
    # Tasks of other devices than the first may end later than a horizon after time zero.
    total = float(places.seconds.sum() + places.lag.clip(0.0).sum())
    tail = np.full(len(device), -total)
    windows = Windows.of_places(places, lanes, heads_of(places), tail, spans)
    whole = _rounding(places) == 0.0
    return latest_excluded_horizon(windows, longest, math.inf, whole=whole, search=search)


def _devices_of_actions(graph: TaskGraph, lanes: LaneGraph) -> Ints:
    """Return the device of each lane of F, B, I, W or R; -1 for other lanes."""
    device = np.full(len(lanes.seconds), -1)
    actions = graph.kinds.is_op(LISTED)
    device[lanes.lane_of_kind[actions]] = graph.kinds.device[actions]
    return device


def _rounding(places: Places) -> float:
    """Return the relative error of sums of the places' times: 0 for whole numbers."""
    times: Floats = np.concatenate([places.seconds, places.lag])
    if (times == np.floor(times)).all() and np.abs(times).sum() < 2.0**53:
        return 0.0
    return max(_ROUNDING, len(places.seconds) * 2.0**-52)
