"""`Problem`: the actions that a list scheduler orders, their seconds and bytes, and the limits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import distinct_costs
from pipesim.costs.pricing import skip_sizes
from pipesim.errors import CostsError
from pipesim.graph.skips import border_bytes
from pipesim.list_scheduling.limits import (
    checked_in_flight,
    checked_limits,
    one_microbatch_graph,
)
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.scheduling.placement import Placement, first_on_device, stage_pairs
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

Floats = NDArray[np.float64]
#: Bytes of memory that ordering takes for each action, measured.
_BYTES_PER_ACTION = 340
#: Phases of a stage and a micro-batch: F; B or I; W.
FORWARD, BACKWARD, WEIGHT = range(3)


class Problem(NamedTuple):
    """Actions to order: F and B, or F, I and W, of each stage and micro-batch.

    - A *copy* is a stage on one path: number ``stage * n_paths + path``.
    - A *lane* is one phase of a copy: number ``phase * n_copies + copy``. It has an action for each
      micro-batch of its path. On a lane, micro-batches are numbered from 0.
    - An *arc* leads from a lane to another, whose actions need those of the first with the same
      number.
    """

    n_stages: int
    n_paths: int
    n_devices: int
    n_microbatches: int
    n_phases: int  # 3 if the backward is split into I and W, else 2
    home: Ints  # device of each copy
    shared: Ints  # first copy with the stage and the device of each copy
    copies_ptr: Ints  # CSR: copies of each device, path after path
    copies: Ints
    first: Ints  # micro-batch of each path
    n_of_path: Ints  # number of micro-batches
    lane_ptr: Ints  # actions ``lane_ptr[lane]`` to ``lane_ptr[lane + 1]`` are those of a lane
    lane: Ints  # of each action
    seconds: Floats  # of each action
    arc_ptr: Ints  # CSR: arcs from each lane
    arc_to: Ints  # lane of each
    n_needed: Ints  # arcs that lead to each lane
    delay_ptr: Ints  # CSR: delays of each arc, one a micro-batch of its path
    delay: Floats  # from the end of an action until its message has reached another
    f_bytes: Floats  # that each F takes; actions of F come first, so that they are numbered alike
    w_bytes: Floats  # the part of these that is held from I to W
    has_equal_bytes: bool  # whether all F of a stage take as many
    limits: Floats  # bytes of activations that each device may hold
    in_flight: Floats  # most micro-batches between F and their B or I, of each stage


def make_problem(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    split: bool,
    activation_limit: object,
    in_flight: object,
    memory_limit: object = None,
) -> Problem:
    """Return the problem of the arguments of `order_by`; ``split``: I and W in place of B."""
    n_stages, n_paths = placement.n_stages, placement.n_paths
    n_actions = 3 * n_stages * n_microbatches
    check_memory(f"ordering {n_actions} actions", n_actions * _BYTES_PER_ACTION, FEWER_TASKS)
    different, number = distinct_costs(costs, n_microbatches)
    phases = ("forward", "input_grad", "weight_grad") if split else ("forward", "backward")
    arcs = source, target, _ = lane_arcs(placement, len(phases))
    values = [_lane_values(placement, x, phases, arcs) for x in different]
    _check_sums(values, n_microbatches, n_paths)
    in_flight_of_stages = checked_in_flight(in_flight, n_stages)  # may be too large for a float
    homes = np.array(placement.paths)
    home, shared = homes.T.ravel(), np.arange(n_stages) * n_paths + first_on_device(homes)
    path = np.arange(len(home)) % n_paths
    count, lane_ptr, lane = lane_actions(n_microbatches, n_paths, len(home) * len(phases))
    first = np.cumsum(count) - count
    seconds, delay, f_bytes, w_bytes = map(np.array, zip(*values, strict=True))
    classes = np.split(number, first[1:])  # of the micro-batches of each path

    def of_actions(rows: Floats, of_path: Ints | None = None) -> Floats:
        """Return the values of lanes, given for each class, as one an action."""
        of_path = np.arange(rows.shape[1]) % n_paths if of_path is None else of_path
        if len(rows) == 1:
            return np.repeat(rows[0], count[of_path])
        own = zip(rows.T, of_path.tolist(), strict=True)
        return np.concatenate([row[classes[path]] for row, path in own])

    return Problem(
        n_stages=n_stages,
        n_paths=n_paths,
        n_devices=placement.n_devices,
        n_microbatches=n_microbatches,
        n_phases=len(phases),
        home=home,
        shared=shared.T.ravel(),
        copies_ptr=np.append(0, np.cumsum(np.bincount(home))),
        copies=np.lexsort((path, home)),
        first=first,
        n_of_path=count,
        lane_ptr=lane_ptr,
        lane=lane,
        seconds=of_actions(seconds),
        arc_ptr=np.append(0, np.cumsum(np.bincount(source, minlength=len(lane_ptr) - 1))),
        arc_to=target,
        n_needed=np.bincount(target, minlength=len(lane_ptr) - 1),
        delay_ptr=np.append(0, np.cumsum(count[source % n_paths])),
        delay=of_actions(delay, source % n_paths),
        f_bytes=of_actions(np.repeat(f_bytes, n_paths, axis=1)),
        w_bytes=of_actions(np.repeat(w_bytes, n_paths, axis=1)),
        has_equal_bytes=bool((f_bytes == f_bytes[0]).all()),
        limits=checked_limits(
            activation_limit, memory_limit, placement, different, f_bytes, number
        ),
        in_flight=np.array([min(x, n_microbatches + 1) for x in in_flight_of_stages], float),
    )


class _LaneValues(NamedTuple):
    """Seconds of each lane, delays of each arc, bytes of each stage, for equal micro-batches."""

    seconds: Floats
    delay: Floats
    f_bytes: Floats
    w_bytes: Floats


def _lane_values(
    placement: Placement, costs: Costs, phases: tuple[str, ...], arcs: tuple[Ints, Ints, Ints]
) -> _LaneValues:
    """Return the values of the actions of one micro-batch."""
    n_stages, n_paths = placement.n_stages, placement.n_paths
    f_bytes, w_bytes = (
        costs.per_stage(f"{name}_bytes", n_stages) for name in ("activation", "weight_grad")
    )
    # W's bytes count from the start. Without W, nothing is held after the backward.
    f_bytes, w_bytes = (
        (np.maximum(f_bytes, w_bytes), w_bytes)
        if len(phases) > WEIGHT
        else (f_bytes, np.zeros(n_stages))
    )
    seconds = [costs.per_stage(name, n_stages) for name in phases]
    return _LaneValues(
        seconds=np.concatenate([np.repeat(row, n_paths) for row in seconds]),
        delay=_delays(placement, costs, arcs),
        f_bytes=f_bytes,
        w_bytes=w_bytes,
    )


def lane_actions(n_microbatches: int, n_paths: int, n_lanes: int) -> tuple[Ints, Ints, Ints]:
    """Return ``n_of_path``, ``lane_ptr`` and ``lane`` of a problem."""
    path = np.arange(n_microbatches) * n_paths // n_microbatches  # as `Placement.path_of`
    count = np.bincount(path, minlength=n_paths)
    lane_count = count[np.arange(n_lanes) % n_paths]
    lane_ptr = np.append(0, np.cumsum(lane_count))
    return count, lane_ptr, np.repeat(np.arange(n_lanes), lane_count)


def operations(problem: Problem) -> tuple[Op, ...]:
    """Return the operation of each phase."""
    return (Op.F, Op.I, Op.W) if problem.n_phases > WEIGHT else (Op.F, Op.B)


def action_columns(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """Return phase, stage and micro-batch of each action; micro-batches numbered over all paths."""
    phase, copy = np.divmod(problem.lane, len(problem.home))
    stage, path = np.divmod(copy, problem.n_paths)
    number = np.arange(len(problem.lane)) - problem.lane_ptr[problem.lane]
    return phase, stage, number + problem.first[path]


def _check_sums(values: list[_LaneValues], n_microbatches: int, n_paths: int) -> None:
    """Raise for sums of so many of the largest micro-batches that are not finite."""
    with np.errstate(over="ignore"):  # infinite sums are refused
        seconds = [float(x.seconds.sum() + x.delay.sum()) for x in values]
        nbytes = [float(x.f_bytes.sum() * n_paths) for x in values]
    for unit, totals in (("seconds", seconds), ("bytes", nbytes)):
        if not math.isfinite(max(totals) * n_microbatches):
            raise CostsError(
                f"the {unit} of {n_microbatches} micro-batches, {max(totals):g} each, add up to "
                "more than a number can hold; check the costs"
            )


def lane_arcs(placement: Placement, n_phases: int) -> tuple[Ints, Ints, Ints]:
    """Return the arcs of a `Problem`: the lanes that each leads from and to, and its message.

    F needs the F of stages before, B or I those of stages after or, without one, its own F, and W
    needs I. The number of a message is ``2 * edge``, or ``2 * edge + 1`` for the gradient; -1 for
    none. Arcs are in the order of the lanes that they lead from.
    """
    n_stages, n_paths = placement.n_stages, placement.n_paths
    n_copies, path = n_stages * n_paths, np.arange(n_paths)
    pairs = stage_pairs(placement.edges, n_stages)
    before, after = (
        (stage[:, None] * n_paths + path).ravel() for stage in (pairs[:, 0], pairs[:, 1])
    )
    last = np.flatnonzero(np.bincount(before, minlength=n_copies) == 0)
    edge = 2 * np.repeat(np.arange(len(pairs)), n_paths)
    backward = np.arange(n_copies, 2 * n_copies if n_phases > WEIGHT else n_copies)
    source = np.concatenate([before, n_copies + after, last, backward])
    target = np.concatenate([after, n_copies + before, last + n_copies, backward + n_copies])
    message = np.concatenate([edge, edge + 1, np.full(len(last) + len(backward), -1)])
    order = np.argsort(source, kind="stable")
    return source[order], target[order], message[order]


def _delays(placement: Placement, costs: Costs, arcs: tuple[Ints, Ints, Ints]) -> Floats:
    """Return the seconds of the message of each arc; 0 for an arc without one."""
    pairs = stage_pairs(placement.edges, placement.n_stages)
    source, target, message = arcs
    sent = np.flatnonzero(message >= 0)
    stages = pairs[message[sent] // 2]
    nbytes, fixed = (
        costs.per_stage(name, placement.n_stages)[stages[:, 0]]
        for name in ("output_bytes", "output_seconds")
    )
    if placement.edges and costs.skip_bytes is not None:
        graph = one_microbatch_graph(placement, (Op.F, Op.B))
        sizes = dict(border_bytes(graph.skips, True, skip_sizes(graph, costs)))
        own = [sizes.get((a, b), -1.0) for a, b in stages.tolist()]
        nbytes = np.where(np.array(own) < 0, nbytes, own)
    home = np.array(placement.paths).T.ravel()
    down, up = home[source[sent] % len(home)], home[target[sent] % len(home)]
    delays = np.zeros(len(source))
    delays[sent] = _message_seconds(costs, down, up, nbytes, fixed, placement.n_devices)
    return delays


def _message_seconds(
    costs: Costs,
    source: Ints,
    target: Ints,
    nbytes: Floats,
    fixed: Floats,
    n_devices: int,
) -> Floats:
    """Return the seconds of messages that find their links free; 0 from a device to itself."""
    seconds, remote = np.zeros(len(source)), source != target
    routes = costs.network.resolve(source[remote], target[remote], n_devices)
    with np.errstate(over="ignore"):
        seconds[remote] = routes.latency + fixed[remote] + nbytes[remote] / routes.bandwidth
    for message in np.flatnonzero(~np.isfinite(seconds))[:1].tolist():
        raise CostsError(
            f"a message from device {source[message]} to {target[message]} would take "
            f"{seconds[message]} s; check output_bytes, and latency and bandwidth of the network"
        )
    return seconds


# Problems with other lengths, counts or orders of micro-batches.


def first_values(problem: Problem, values: Floats) -> Floats:
    """Return the values of the first micro-batch of each lane, or of each copy for bytes."""
    first = problem.lane_ptr[:-1]
    of_lanes: Floats = values[first[first < len(values)]]
    return of_lanes


def with_equal_lengths(problem: Problem) -> Problem:
    """Return the same problem with a second for F, I and W, a byte from F to W, and no messages."""
    return problem._replace(
        seconds=np.ones_like(problem.seconds),
        delay=np.zeros_like(problem.delay),
        f_bytes=np.ones_like(problem.f_bytes),
        w_bytes=np.ones_like(problem.w_bytes),
        has_equal_bytes=True,
    )


def with_microbatches(problem: Problem, n_microbatches: int) -> Problem:
    """Return a problem of equal micro-batches for another number of them."""
    n_lanes, n_copies = len(problem.lane_ptr) - 1, len(problem.home)
    count, lane_ptr, lane = lane_actions(n_microbatches, problem.n_paths, n_lanes)
    copy = lane[: lane_ptr[n_copies]]
    arc_count = count[problem.arc_to % problem.n_paths]
    return problem._replace(
        n_microbatches=n_microbatches,
        first=np.cumsum(count) - count,
        n_of_path=count,
        lane_ptr=lane_ptr,
        lane=lane,
        seconds=first_values(problem, problem.seconds)[lane],
        delay_ptr=np.append(0, np.cumsum(arc_count)),
        delay=np.repeat(problem.delay[problem.delay_ptr[:-1]], arc_count),
        f_bytes=first_values(problem, problem.f_bytes)[copy],
        w_bytes=first_values(problem, problem.w_bytes)[copy],
    )


def _places_of_arcs(problem: Problem, action: Ints) -> Ints:
    """Return the delay of each arc and micro-batch after `in_order`, as an index."""
    first = problem.lane_ptr[problem.arc_to]
    arc = np.repeat(np.arange(len(first)), np.diff(problem.delay_ptr))
    number = np.arange(len(problem.delay)) - problem.delay_ptr[arc]
    return problem.delay_ptr[arc] + action[first[arc] + number] - first[arc]


def in_order(problem: Problem, order: Ints) -> Problem:
    """Return the problem whose micro-batch k is micro-batch ``order[k]`` of this one."""
    _, _, microbatch = action_columns(problem)
    # Within a lane, actions are numbered like the micro-batches of its path.
    action = np.arange(len(microbatch)) + order[microbatch] - microbatch
    forward = action[: len(problem.f_bytes)]
    return problem._replace(
        seconds=problem.seconds[action],
        delay=problem.delay[_places_of_arcs(problem, action)],
        f_bytes=problem.f_bytes[forward],
        w_bytes=problem.w_bytes[forward],
    )
