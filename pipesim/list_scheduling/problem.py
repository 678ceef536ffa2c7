"""`Problem`: the actions that a list scheduler orders, their seconds and bytes, and the limits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError
from pipesim.list_scheduling.argument_checks import checked_in_flight, checked_limits
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.scheduling.placement import Placement
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

__all__ = [
    "BACKWARD",
    "FORWARD",
    "WEIGHT",
    "Problem",
    "action_columns",
    "make_problem",
    "operations",
    "with_equal_lengths",
    "with_microbatches",
]

Floats = NDArray[np.float64]
#: Bytes of memory that ordering takes for each action, measured.
_BYTES_PER_ACTION = 320
#: Phases of a stage and a micro-batch: F; B or I; W.
FORWARD, BACKWARD, WEIGHT = range(3)


class Problem(NamedTuple):
    """Actions to order: F and B, or F, I and W, of each stage and micro-batch.

    - A *copy* is a stage on one path: number ``stage * n_paths + path``.
    - A *lane* is one phase of a copy: number ``phase * n_copies + copy``. It has an action for each
      micro-batch of its path. On a lane, micro-batches are numbered from 0.
    - Actions ``lane_ptr[lane]`` to ``lane_ptr[lane + 1]`` are those of a lane.

    Attributes
    ----------
    n_stages, n_paths, n_devices, n_microbatches, n_phases
        Counts; ``n_phases`` is 3 if the backward is split into I and W, else 2.
    home
        Device of each copy.
    copies_ptr, copies
        Copies of each device, as CSR, path after path.
    first, n_of_path
        First micro-batch of each path, and number of its micro-batches.
    lane_ptr, lane
        First action of each lane, shape ``(n_lanes + 1,)``; and the lane of each action.
    seconds, delay
        Seconds of an action of each lane, and from its end until its message is at the next stage
        (F) or at the previous one (B or I).
    f_bytes, w_bytes
        Bytes that an F takes, and the part that is held from I to W; one number a stage.
    limits
        Bytes that each device may hold.
    in_flight
        Most micro-batches between F and their B or I; one number a stage.
    """

    n_stages: int
    n_paths: int
    n_devices: int
    n_microbatches: int
    n_phases: int
    home: Ints
    copies_ptr: Ints
    copies: Ints
    first: Ints
    n_of_path: Ints
    lane_ptr: Ints
    lane: Ints
    seconds: Floats
    delay: Floats
    f_bytes: Floats
    w_bytes: Floats
    limits: Floats
    in_flight: Floats


def make_problem(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    split: bool,
    memory_limit: object,
    in_flight: object,
) -> Problem:
    """Return the problem of these costs and limits; ``split``: I and W in place of B.

    Raises
    ------
    ArgumentError
        For a limit that is out of range, or in which no micro-batch fits.
    CostsError
        If the costs lack seconds of an operation, or if sums of seconds or bytes are not finite.
    CapacityError
        If there is no memory for so many actions.
    """
    n_stages, n_paths = placement.n_stages, placement.n_paths
    n_actions = 3 * n_stages * n_microbatches
    check_memory(f"ordering {n_actions} actions", n_actions * _BYTES_PER_ACTION, FEWER_TASKS)
    f_bytes, w_bytes = (
        costs.per_stage(f"{name}_bytes", n_stages) for name in ("activation", "weight_grad")
    )
    # W's bytes count from the start. Without W, nothing is held after the backward.
    f_bytes, w_bytes = (
        (np.maximum(f_bytes, w_bytes), w_bytes) if split else (f_bytes, np.zeros(n_stages))
    )
    phases = ("forward", "input_grad", "weight_grad") if split else ("forward", "backward")
    seconds = [costs.per_stage(name, n_stages) for name in phases]
    delays = _delays(placement, costs)
    with np.errstate(over="ignore"):  # infinite sums are refused
        _check_sums(n_microbatches, [*seconds, *delays], f_bytes.sum() * n_paths)
    in_flight_of_stages = checked_in_flight(in_flight, n_stages)  # may be too large for a float
    home = np.array(placement.paths).T.ravel()
    path = np.arange(len(home)) % n_paths
    count, lane_ptr, lane = _actions(n_microbatches, n_paths, len(home) * len(phases))
    return Problem(
        n_stages=n_stages,
        n_paths=n_paths,
        n_devices=placement.n_devices,
        n_microbatches=n_microbatches,
        n_phases=len(phases),
        home=home,
        copies_ptr=np.append(0, np.cumsum(np.bincount(home))),
        copies=np.lexsort((path, home)),
        first=np.cumsum(count) - count,
        n_of_path=count,
        lane_ptr=lane_ptr,
        lane=lane,
        seconds=np.concatenate([np.repeat(row, n_paths) for row in seconds]),
        delay=np.concatenate([*delays, np.zeros(len(home) * (len(phases) - 2))]),
        f_bytes=f_bytes,
        w_bytes=w_bytes,
        limits=np.array(checked_limits(memory_limit, placement, f_bytes), float),
        in_flight=np.array([min(x, n_microbatches + 1) for x in in_flight_of_stages], float),
    )


def with_equal_lengths(problem: Problem) -> Problem:
    """Return the same problem with a second for F, I and W, a byte from F to W, and no messages."""
    one = np.ones(problem.n_stages)
    return problem._replace(
        seconds=np.ones_like(problem.seconds),
        delay=np.zeros_like(problem.delay),
        f_bytes=one,
        w_bytes=one,
    )


def with_microbatches(problem: Problem, n_microbatches: int) -> Problem:
    """Return the same problem for another number of micro-batches."""
    count, lane_ptr, lane = _actions(n_microbatches, problem.n_paths, len(problem.seconds))
    return problem._replace(
        n_microbatches=n_microbatches,
        first=np.cumsum(count) - count,
        n_of_path=count,
        lane_ptr=lane_ptr,
        lane=lane,
    )


def _actions(n_microbatches: int, n_paths: int, n_lanes: int) -> tuple[Ints, Ints, Ints]:
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


def _check_sums(n_microbatches: int, seconds: list[Floats], nbytes: float) -> None:
    total_seconds = float(sum(row.sum() for row in seconds))
    for unit, total in (("seconds", total_seconds), ("bytes", float(nbytes))):
        if not math.isfinite(total * n_microbatches):
            raise CostsError(
                f"the {unit} of {n_microbatches} micro-batches, {total:g} each, add up to more "
                "than a number can hold; check the costs"
            )


def _delays(placement: Placement, costs: Costs) -> tuple[Floats, Floats]:
    """Return the seconds of messages from each copy to the next stage, and to the previous one."""
    device = np.array(placement.paths)
    nbytes, fixed = (
        costs.per_stage(name, placement.n_stages)[:-1]
        for name in ("output_bytes", "output_seconds")
    )
    forward, backward = np.zeros(device.shape), np.zeros(device.shape)
    for path in range(placement.n_paths):
        down, up = device[path, :-1], device[path, 1:]
        forward[path, :-1] = _message_seconds(costs, down, up, nbytes, fixed, placement.n_devices)
        backward[path, 1:] = _message_seconds(costs, up, down, nbytes, fixed, placement.n_devices)
    return forward.T.ravel(), backward.T.ravel()


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
