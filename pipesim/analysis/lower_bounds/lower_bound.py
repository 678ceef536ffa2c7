"""Lower bounds on the time of any order: of a placement's actions, a graph's tasks, a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.device_orders import DeviceLanes, device_lanes
from pipesim.analysis.lower_bounds.horizon import Windows, latest_excluded_horizon
from pipesim.analysis.lower_bounds.lanes import (
    Floats,
    Places,
    busiest_stream,
    heads_of,
    joined_arcs,
    lane_graph,
    longest_span_bound,
    ordered_places,
    shared_streams,
    spans_of_devices,
    tails_of,
    task_lanes,
)
from pipesim.analysis.lower_bounds.memory_arcs import device_stages, memory_arcs
from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import each_microbatch, least_costs
from pipesim.errors import CostsError, check_count, check_name
from pipesim.graph.graph import TaskGraph
from pipesim.list_scheduling.limits import any_order
from pipesim.lowering.lower import lower
from pipesim.ops import COPIES, LISTED, RECVS, Op
from pipesim.order_search.evaluate import OBJECTIVES, Objective
from pipesim.order_search.problem import compute_ops
from pipesim.scheduling.placement import Placement
from pipesim.simulation.simulate import checked_costs, predict_timeline
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.timeline.timeline import LONGEST, Timeline
from pipesim.utils.checks import checked
from pipesim.utils.csr import Ints
from pipesim.utils.texts import Bytes


@checked
def lower_bound(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    memory_limit: Bytes | Sequence[Bytes] | NDArray[np.float64] | None = None,
    *,
    split_backward: bool | None = None,
    objective: Objective = "makespan",
    search: bool = True,
) -> float:
    """Return a time (s) that no order of a placement's actions goes below.

    It holds for each schedule of F and B, or of F, I and W, without overlapped actions, that
    `pipesim.lower` lowers with its default options and `pipesim.simulate` simulates with these
    costs. `pipesim.analysis.lower_bounds.lower_bound` says how it is computed.

    Parameters
    ----------
    placement
        Which device holds which stage.
    n_microbatches
        Micro-batches of a step, at least one for each path of the placement.
    costs
        Seconds and bytes of each stage, or of each stage and micro-batch. The bound then holds for
        all orders of micro-batches.
    memory_limit
        Bytes that a device may hold, one number or one a device, as in `pipesim.simulate`: all
        bytes, parameters included, also as ``"80GiB"``. The bound then holds for orders that keep
        the limit; without bytes in the costs, all do. By default the memory of a GPU in the
        workload of the costs, if any, as in `pipesim.optimize`; infinity for no limit.
    split_backward
        Whether the backward is I and W, or B. None: either, if the costs have ``input_grad`` and
        ``weight_grad``, else B. For either, I takes the lesser of I and B, and W the rest of the
        lesser of both sums.
    objective
        ``"makespan"``, or ``"span"``: the longest time of any device from its first start to its
        last end, without STEP.
    search
        Whether to raise the bound by branching on the orders of devices, for up to about a second
        more. The number of steps is fixed, so that the bound does not depend on the machine.
        No option limits the time of the rest, which grows with the tasks. It is a second for some
        tens of thousands of them, and 12 s for 512 stages with 512 micro-batches. It is about a
        minute for 3 stages with a million.

    Returns
    -------
    float
        Seconds of the objective; no order takes less.

    See Also
    --------
    pipesim.optimize : Search for an order that meets the bound.
    pipesim.Timeline.why.lower_bound : Bound for the tasks of a timeline.
    pipesim.Timeline.why.gap : Makespan of a timeline over its bound, minus 1.

    Examples
    --------
    1F1B is optimal if all stages take equally long:

    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2)
    >>> ps.lower_bound(ps.Placement.linear(4), 8, costs)
    33.0
    >>> ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), costs).makespan
    33.0
    """
    n_microbatches = check_count("n_microbatches", n_microbatches, placement.n_paths)
    ops = compute_ops(costs, split_backward)
    if split_backward is None and Op.W in ops:
        costs = each_microbatch(lambda own: _of_both_kinds(own, placement.n_stages), costs)
    if memory_limit is None and costs.work is not None:
        memory_limit = costs.work.memory
    graph = lower(any_order(placement, n_microbatches, ops))
    return graph_bound(graph, costs, memory_limit=memory_limit, objective=objective, search=search)


def _of_both_kinds(costs: Costs, n_stages: int) -> Costs:
    """Return costs of I and W such that orders with I and W, or with B, take as long or longer.

    An order with B becomes one with I and W: both fit into the time of B, the gradient is sent
    after I, and memory is released as early or earlier, if W holds no more than activations.
    """
    input_grad, weight_grad, backward, activation, held = (
        costs.per_stage(name, n_stages)
        for name in (
            *("input_grad", "weight_grad", "backward"),
            *("activation_bytes", "weight_grad_bytes"),
        )
    )
    first = np.minimum(input_grad, backward)
    rest = np.maximum(0.0, np.minimum(weight_grad, backward - first))
    return replace(
        costs,
        input_grad=tuple(first.tolist()),
        weight_grad=tuple(rest.tolist()),
        weight_grad_bytes=tuple(np.minimum(held, activation).tolist()),
    )


# Bound of a graph.

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
    costs, memory_limit, objective, search
        As for `lower_bound`; None for no limit. A limit raises no bound of a graph that offloads
        activations, frees parameters, or has experts.
    target
        A makespan (s) that an order reaches: a bound that meets it is not raised further.
    """
    check_name("objective", objective, OBJECTIVES)
    limits = None
    if memory_limit is not None:
        limits = checked_memory_limit(memory_limit, graph.n_devices)
    in_segments = not graph.kinds.completes.all()
    if in_segments or graph.is_op(COPIES | {Op.RESHARD}).any():
        limits = None  # bytes depend on the order
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
        seconds = _longest_path(places, heads_of(places), tails_of(places))
    return float(seconds * (1.0 - _rounding_error(places)))


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
    of_devices = device_lanes(lanes, places, devices)
    if objective == "span":
        of_lane = np.full(len(lanes.seconds), -1)  # device of each lane of F, B, I, W or R
        actions = graph.kinds.is_op(LISTED)
        of_lane[lanes.lane_of_kind[actions]] = graph.kinds.device[actions]
        seconds = _span_bound(places, of_devices, of_lane[places.lane], search)
    else:
        head, tail = heads_of(places), tails_of(places)
        longest = _longest_path(places, head, tail)
        windows = Windows.of_places(places, of_devices, head, tail)
        whole = _rounding_error(places) == 0.0
        seconds = latest_excluded_horizon(windows, longest, target, whole=whole, search=search)
    return float(seconds * (1.0 - _rounding_error(places)))


def _longest_path(places: Places, head: Floats, tail: Floats) -> float:
    """Return the longest path, or Jackson's preemptive bound of a stream (s)."""
    longest = float((head + places.seconds + tail).max(initial=0.0))
    streams = shared_streams(places.lane, places.stream)
    return max(longest, busiest_stream(streams, head, places.seconds, tail))


def _span_bound(places: Places, lanes: DeviceLanes, device: Ints, search: bool) -> float:
    """Return a lower bound on the longest span of a device (s)."""
    longest = longest_span_bound(places, device)
    spans = spans_of_devices(places, device)
    if not len(spans.first):
        return longest
    # Tasks of other devices than the first may end later than a horizon after time zero.
    total = float(places.seconds.sum() + places.lag.clip(0.0).sum())
    tail = np.full(len(device), -total)
    windows = Windows.of_places(places, lanes, heads_of(places), tail, spans)
    whole = _rounding_error(places) == 0.0
    return latest_excluded_horizon(windows, longest, math.inf, whole=whole, search=search)


def _rounding_error(places: Places) -> float:
    """Return the relative error of sums of the places' times: 0 for whole numbers."""
    times: Floats = np.concatenate([places.seconds, places.lag])
    if (times == np.floor(times)).all() and np.abs(times).sum() < 2.0**53:
        return 0.0
    return max(_ROUNDING, len(places.seconds) * 2.0**-52)


# Bound of a timeline's tasks, and the timeline's gap to it.

#: Differences of times below this share of the makespan are rounding.
SHARE_OF_ROUNDING = 1e-9


def timeline_bound(timeline: Timeline) -> float:
    """Return ``timeline.why.lower_bound``, without its cache."""
    costs = timeline.costs
    if costs is None or not timeline.complete or not len(timeline):
        return math.nan
    others = ~timeline.graph.is_op(RECVS)  # a RECV lasts as long as it waits for its SEND
    if costs.overlap_cost:  # tasks last longer than their costs, with collectives beside them
        expected = predict_timeline(timeline.graph, costs).duration
    else:
        expected = costs.of(timeline.graph).duration
    error = np.abs(timeline.duration - expected)[others]
    if error.max(initial=0.0) > SHARE_OF_ROUNDING * timeline.makespan:
        return math.nan
    limit = timeline.memory.limit if timeline.memory.fits else None
    return graph_bound(timeline.graph, costs, memory_limit=limit, target=timeline.makespan)
