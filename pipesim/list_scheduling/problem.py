"""`Problem`: the actions that a list scheduler orders, their seconds and bytes, and the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError
from pipesim.list_scheduling.argument_checks import checked_in_flight, checked_limits
from pipesim.scheduling.placement import Placement

__all__ = ["BACKWARD", "FORWARD", "WEIGHT", "Problem", "make_problem"]

#: Phases of a stage and a micro-batch: F; B or I; W.
FORWARD, BACKWARD, WEIGHT = range(3)


@dataclass(frozen=True)
class Problem:
    """Actions to order: F and B, or F, I and W, of each stage and micro-batch.

    A *copy* of a stage is the stage on one path: number ``path * n_stages + stage``.

    Attributes
    ----------
    placement, n_microbatches
        Stages and micro-batches of the actions.
    seconds
        Seconds of F; of B or I; and of W if the backward is split. One sequence a phase, each with
        one number a stage.
    forward_delay, backward_delay
        Seconds from the end of an action of a copy until its message is at the next stage, and at
        the previous one. One number a copy; the entry that leads out of the pipeline is not read.
    f_bytes
        Bytes that an F takes; one number a stage.
    w_bytes
        The part of ``f_bytes`` that is held from I to W; one number a stage.
    limits
        Bytes that each device may hold.
    in_flight
        Most micro-batches between F and their B or I; one number a stage.
    """

    placement: Placement
    n_microbatches: int
    seconds: Sequence[Sequence[float]]
    forward_delay: Sequence[float]
    backward_delay: Sequence[float]
    f_bytes: Sequence[float]
    w_bytes: Sequence[float]
    limits: Sequence[float]
    in_flight: Sequence[float]

    @property
    def is_split(self) -> bool:
        """Whether the backward is split into I and W."""
        return len(self.seconds) > WEIGHT


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
    """

    def per_stage(field: str) -> list[float]:
        return [float(x) for x in costs.per_stage(field, placement.n_stages)]

    f_bytes, w_bytes = per_stage("activation_bytes"), per_stage("weight_grad_bytes")
    if split:
        f_bytes = list(map(max, f_bytes, w_bytes))  # W's bytes count from the start
    forward_delay, backward_delay = _delays(placement, costs)
    backward = ("input_grad", "weight_grad") if split else ("backward",)
    seconds = [per_stage("forward"), *map(per_stage, backward)]
    total_seconds = sum(map(sum, (*seconds, forward_delay, backward_delay)))
    for unit, total in (
        ("seconds", total_seconds),
        ("bytes", sum(f_bytes) * placement.n_paths),
    ):
        if not math.isfinite(total * n_microbatches):
            raise CostsError(
                f"the {unit} of {n_microbatches} micro-batches, {total:g} each, add up to more "
                "than a number can hold; check the costs"
            )
    return Problem(
        placement=placement,
        n_microbatches=n_microbatches,
        seconds=seconds,
        forward_delay=forward_delay,
        backward_delay=backward_delay,
        f_bytes=f_bytes,
        w_bytes=w_bytes,
        limits=checked_limits(memory_limit, placement, f_bytes),
        in_flight=checked_in_flight(in_flight, placement.n_stages),
    )


def _delays(placement: Placement, costs: Costs) -> tuple[list[float], list[float]]:
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
    return forward.ravel().tolist(), backward.ravel().tolist()


def _message_seconds(
    costs: Costs,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    nbytes: NDArray[np.float64],
    fixed: NDArray[np.float64],
    n_devices: int,
) -> NDArray[np.float64]:
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
