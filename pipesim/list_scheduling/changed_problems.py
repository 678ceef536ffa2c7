"""Problems of the list scheduler with other lengths, counts or orders of micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.problem import Problem, action_columns, lane_actions
from pipesim.utils.csr import Ints, bincount

Floats = NDArray[np.float64]


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
    return problem._replace(
        n_microbatches=n_microbatches,
        first=np.cumsum(count) - count,
        n_of_path=count,
        lane_ptr=lane_ptr,
        lane=lane,
        seconds=first_values(problem, problem.seconds)[lane],
        delay=first_values(problem, problem.delay)[lane],
        f_bytes=first_values(problem, problem.f_bytes)[copy],
        w_bytes=first_values(problem, problem.w_bytes)[copy],
    )


def in_order(problem: Problem, order: Ints) -> Problem:
    """Return the problem whose micro-batch k is micro-batch ``order[k]`` of this one."""
    _, _, microbatch = action_columns(problem)
    # Within a lane, actions are numbered like the micro-batches of its path.
    action = np.arange(len(microbatch)) + order[microbatch] - microbatch
    forward = action[: len(problem.f_bytes)]
    return problem._replace(
        seconds=problem.seconds[action],
        delay=problem.delay[action],
        f_bytes=problem.f_bytes[forward],
        w_bytes=problem.w_bytes[forward],
    )


def microbatch_seconds(problem: Problem) -> Floats:
    """Return the length of each micro-batch: its seconds over all stages and phases."""
    _, _, microbatch = action_columns(problem)
    return bincount(microbatch, problem.seconds, problem.n_microbatches)
