"""`OrderProblem`: the tasks of one placement as arrays, for kernels that search orders.

Seconds, bytes and routes are those of a graph of one micro-batch a path, which `pipesim.lower`
makes and `Costs.of` prices. So they are the numbers that `pipesim.simulate` takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import distinct_costs
from pipesim.costs.task_costs import CostTable
from pipesim.errors import ArgumentError, CostsError, check_count, check_flag, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.list_scheduling.limits import one_microbatch_graph
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.simulation.engines.plan import shared_links
from pipesim.timeline.memory_limit import limits_beyond_static
from pipesim.timeline.task_bytes import kind_bytes, workspaces
from pipesim.utils.csr import Ints, bincount

Floats = NDArray[np.float64]


class OrderProblem(NamedTuple):
    """The lanes of a placement, with their seconds, needs and bytes.

    A *lane* is one operation of one stage on one path, for all micro-batches of the path. All lanes
    of a path take its micro-batches in one order. If these are identical, that loses nothing. If
    they differ, orders in which a stage takes them in another order than the stage before are left
    out.

    A *row* has the values of a lane for a class of equal micro-batches: row ``k * n_lanes + lane``
    those of class k. If all are identical, rows are lanes.

    Lanes are in order of path, stage and operation. A *channel* is an ordered pair of devices.
    """

    n_devices: int
    # Shape ``(n_lanes,)``.
    device: Ints
    op: Ints
    stage: Ints
    path: Ints
    count: Ints  # type: ignore[assignment]  # of micro-batches; shadows the method of tuples
    class_of: Ints  # of each micro-batch, numbered over all paths
    seconds: Floats  # of a task of each row
    # Lanes whose task of the same number must have ended, -1 for none; shape ``(n_lanes, 2)``. The
    # first is the data from another stage, the second the F or I of the same stage.
    needs: Ints
    # Message that delivers the need: seconds of its latency, and those for which it holds its
    # channel; shape ``(n_rows, 2)``.
    latency: Floats
    hold: Floats
    channel: Ints  # of this message, -1 for none, on one device; shape ``(n_lanes, 2)``
    # Bytes that a task takes at its start, gives back at its end, and holds while it runs; of rows.
    allocated: Floats
    released: Floats
    workspace: Floats
    # Most bytes of these that each device may hold. One that holds as many fits exactly in the
    # user's limit, with static bytes and reserve.
    limit: Floats
    tail: Floats  # seconds of the STEPs behind the last task of each device


def compute_ops(costs: Costs, split_backward: bool | None) -> tuple[Op, ...]:
    """Return F, I and W, or F and B; by default the former if the costs have both I and W."""
    has_both = costs.input_grad is not None and costs.weight_grad is not None
    is_split = has_both
    if split_backward is not None:
        is_split = check_flag("split_backward", split_backward)
    if is_split and not has_both:
        raise CostsError(
            "split_backward=True needs the seconds of I and W; give the costs input_grad and "
            "weight_grad, or leave split_backward out"
        )
    return (Op.F, Op.I, Op.W) if is_split else (Op.F, Op.B)


def order_problem(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    *,
    split_backward: bool | None = None,
    memory_limit: object = None,
) -> OrderProblem:
    """Return the lanes of a placement, with the costs and limits that `pipesim.simulate` counts.

    Arguments are as for `pipesim.lower_bound`, without ``launch`` of the costs. If
    ``split_backward`` is None, the backward is I and W if the costs have both.
    """
    check_type("placement", placement, Placement)
    check_type("costs", costs, Costs)
    if placement.edges:
        raise ArgumentError(
            "the search for orders takes stages that are a chain, and the placement has the edges "
            f"{list(placement.edges)}; make orders with ps.order_by(placement, ...), whose "
            "priorities and limits suit stages of any edges, and compare them with ps.compare"
        )
    m = check_count("n_microbatches", n_microbatches, placement.n_paths)
    ops = compute_ops(costs, split_backward)
    graph = one_microbatch_graph(placement, ops)
    n_paths, n_stages, n_ops = placement.n_paths, placement.n_stages, len(ops)
    path, stage, phase = (x.ravel() for x in np.indices((n_paths, n_stages, n_ops)))
    op = np.array(ops, dtype=np.int64)[phase]
    kind = kind_numbers(graph)[op, path, stage]
    needs = _needs(stage, phase, n_stages, n_ops)
    path_of = placement.path_of(m)  # checks that so many micro-batches fit in memory
    different, class_of = distinct_costs(costs, m)
    values = [_row_values(graph, own, needs, kind) for own in different]
    rows = _RowValues(*map(np.concatenate, zip(*values, strict=True)))
    first, kinds = different[0], graph.kinds
    if memory_limit is None:
        memory = None if first.work is None else first.work.memory
        memory_limit = math.inf if memory is None else memory
    seconds = first.of(graph).table.duration
    return OrderProblem(
        n_devices=placement.n_devices,
        device=kinds.device[kind].astype(np.int64),
        op=op,
        stage=stage,
        path=path,
        count=np.bincount(path_of, minlength=n_paths)[path],
        class_of=class_of,
        needs=needs,
        channel=channels(graph, needs, kind),
        **rows._asdict(),
        limit=limits_beyond_static(graph, first, memory_limit),
        tail=bincount(
            kinds.device, np.where(kinds.op == Op.STEP, seconds, 0.0), placement.n_devices
        ),
    )


class _RowValues(NamedTuple):
    """Values of the rows of a class of micro-batches, as in `OrderProblem`."""

    seconds: Floats
    latency: Floats
    hold: Floats
    allocated: Floats
    released: Floats
    workspace: Floats


def _row_values(graph: TaskGraph, costs: Costs, needs: Ints, kind: Ints) -> _RowValues:
    """Return the values of lanes, of which ``kind`` are the kinds in the graph."""
    table = costs.of(graph).table
    allocated, _, released = kind_bytes(graph, costs)
    latency, hold = messages(graph, table, needs, kind)
    seconds = table.duration[kind]
    for lane in np.flatnonzero(~np.isfinite(seconds))[:1].tolist():
        row = kind[lane]
        raise CostsError(
            f"{Op(graph.kinds.op[row])} of stage {graph.kinds.stage[row]} takes "
            f"{seconds[lane]} s; check the costs"
        )
    return _RowValues(
        seconds=seconds,
        latency=latency,
        hold=hold,
        allocated=allocated[kind],
        released=released[kind],
        workspace=workspaces(graph, costs)[kind],
    )


def has_equal_microbatches(problem: OrderProblem) -> bool:
    """Return whether all micro-batches have the same seconds and bytes."""
    return len(problem.seconds) == len(problem.count)


def counts_all_costs(
    placement: Placement, costs: Costs, *, split_backward: bool | None = None
) -> bool:
    """Return whether times of an `OrderProblem` are those of a simulation without STEPs.

    They are not if launches take time, if messages of several channels share a link, or if the
    replicas of stages on several paths reduce gradients.
    """
    graph = one_microbatch_graph(placement, compute_ops(costs, split_backward))
    if costs.n_microbatches is not None:  # channels and REDUCE_GRAD are those of all
        costs = costs.averaged()
    tasks = costs.of(graph)
    reduces = np.any(tasks.table.duration[graph.kinds.op == Op.REDUCE_GRAD] > 0)
    has_launches = tasks.table.launch.any()
    return not (has_launches or reduces or (shared_links(graph, tasks) >= 0).any())


def _needs(stage: Ints, phase: Ints, n_stages: int, n_ops: int) -> Ints:
    """Return the lanes that each lane needs: data of another stage; F or I of its own stage."""
    lane = np.arange(len(stage))
    previous = np.where(stage > 0, lane - n_ops, -1)
    following = np.where(stage < n_stages - 1, lane + n_ops, -1)
    data = np.select([phase == 0, phase == 1], [previous, following], -1)
    return np.stack([data, np.where(phase > 0, lane - 1, -1)], axis=1)


# Messages between lanes: their channels, latency and time on a channel.


def kind_numbers(graph: TaskGraph) -> Ints:
    """Return the kind of each operation, path and stage of a graph; -1 for none."""
    kinds = graph.kinds
    numbers = np.full((len(Op), graph.n_replicas, graph.n_stages), -1, dtype=np.int64)
    numbers[kinds.op, kinds.replica, kinds.stage] = np.arange(len(kinds))
    return numbers


def _received_lanes(graph: TaskGraph, needs: Ints, kind: Ints) -> Ints:
    """Return the lanes whose need a message delivers."""
    device = graph.kinds.device[kind]
    return np.flatnonzero((needs[:, 0] >= 0) & (device[needs[:, 0]] != device))


def channels(graph: TaskGraph, needs: Ints, kind: Ints) -> Ints:
    """Return the channel of the messages that deliver the needs."""
    device, channel = graph.kinds.device[kind], np.full_like(needs, -1)
    lanes = _received_lanes(graph, needs, kind)
    pairs = device[needs[lanes, 0]].astype(np.int64) * graph.n_devices + device[lanes]
    channel[lanes, 0] = np.unique(pairs, return_inverse=True)[1]
    return channel


def messages(graph: TaskGraph, table: CostTable, needs: Ints, kind: Ints) -> tuple[Floats, Floats]:
    """Return latency and hold of the messages that deliver the needs."""
    kinds, numbers = graph.kinds, kind_numbers(graph)
    replica, stage = (x[kind] for x in (kinds.replica, kinds.stage))
    latency, hold = np.zeros(needs.shape), np.zeros(needs.shape)
    lanes = _received_lanes(graph, needs, kind)
    source = needs[lanes, 0]
    send = np.where(kinds.op[kind[lanes]] == Op.F, Op.SEND_F, Op.SEND_B)
    message = numbers[send, replica[source], stage[source]]
    latency[lanes, 0], hold[lanes, 0] = table.latency[message], table.duration[message]
    return latency, hold
