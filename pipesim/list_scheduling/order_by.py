"""`order_by`: a schedule that says what matters, not an order, is put in order."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import (
    ArgumentError,
    CostsError,
    CostsWarning,
    PipeError,
    check_count,
    check_flag,
    check_name,
    check_text,
    check_type,
    number,
)
from pipesim.list_scheduling.priorities import PRIORITIES
from pipesim.list_scheduling.scheduler import Key, Work, list_orders
from pipesim.ops import Action, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.host_memory import check_memory

__all__ = [
    "Priority",
    "check_weight_bytes",
    "checked_costs",
    "checked_limits",
    "order_by",
    "ordered",
]

#: ``priority(action, ready)`` ranks an action that is ready at ``ready`` seconds; lowest first.
Priority = Callable[[Action, float], Any]

#: What an action takes while orders are made, by measurement.
_BYTES_PER_ACTION = 250


def order_by(
    placement: Placement,
    n_microbatches: int,
    costs: Costs | None = None,
    *,
    priority: str | Priority = "backward_first",
    memory_limit: float | Sequence[float] | None = None,
    in_flight: int | Sequence[int] | None = None,
    split_backward: bool = True,
    patience: float = 0.0,
    name: str = "custom",
) -> Schedule:
    """Put F, I and W (or F and B) of all stages and micro-batches in order, by list scheduling.

    Each device, whenever it is free, starts the action that comes first by ``priority`` among
    those that are ready and fit. Which are ready follows from the costs; messages are taken to
    find their links free. The outcome is an order, without times: `pipesim.simulate` says when
    its actions run.

    Orders never deadlock, whatever the limits and the priority: a device leaves room and a place
    in flight for the oldest micro-batch that has yet to come.

    Parameters
    ----------
    placement
        Which device holds which stage.
    n_microbatches
        Micro-batches of a step, at least one for each path of the placement.
    costs
        Seconds of F, of I and W (or of B), and of messages; bytes of activations, as rule 10 of
        docs/time.md counts them without recompute. By default a second each, and no bytes.
    priority
        ``"backward_first"``: B or I, then F, then W, each in order of micro-batches, the deepest
        stage first. ``"forward_first"``: F, B or I, W. ``"first_come"``: what was ready first.
        ``"critical_path"``: what has the most seconds of work after it. Or a function
        ``priority(action, ready)``, called when the action's predecessors have been ordered,
        with the moment at which it will be ready (s); it returns a number or a tuple of
        numbers, and the lowest goes first.
    memory_limit
        Bytes of activations that a device may hold: one number, or one a device. None: no limit.
        A W that makes room for an F takes its turn.
    in_flight
        Most micro-batches between F and B (or I) on a stage: one number, or one a stage.
    split_backward
        Whether the backward is I and W, or B.
    patience
        A W that nothing asks for starts only if the next F or I, as far as it is known, comes no
        sooner than in ``patience`` times its seconds. 0: at once; 1: only where it delays nothing.
    name
        Of the schedule.

    Raises
    ------
    ArgumentError
        For arguments that are out of range, and for a limit that no micro-batch fits in, with the
        device and what it needs at least.
    CostsError
        If the costs lack seconds of an operation, or are so large that sums of their seconds or
        bytes are not finite.
    CapacityError
        If there is no memory for so many actions.

    Warns
    -----
    CostsWarning
        If there is a limit, and the costs have no ``activation_bytes``, or W has no
        ``weight_grad_bytes``.

    Examples
    --------
    1F1B is a limit of micro-batches in flight, and a priority:

    >>> import pipesim as ps
    >>> uniform = ps.Costs(forward=1, backward=2)
    >>> schedule = ps.order_by(ps.linear(3), 8, uniform, priority="forward_first",
    ...                        in_flight=[3, 2, 1], split_backward=False)
    >>> schedule == ps.schedule("1f1b", 3, 8)
    True
    """
    if memory_limit is not None and isinstance(placement, Placement):
        given = checked_costs(costs)
        if not np.any(given.activation_bytes) and not np.any(given.weight_grad_bytes):
            warnings.warn(
                "memory_limit limits nothing: the costs have no activation_bytes; give them, such "
                "as ps.Costs(..., activation_bytes=1, weight_grad_bytes=1) to count micro-batches "
                "of a stage",
                CostsWarning,
                stacklevel=2,
            )
        elif split_backward:
            check_weight_bytes(given, placement.n_stages, stacklevel=3)
    return ordered(
        placement,
        n_microbatches,
        costs,
        priority=priority,
        memory_limit=memory_limit,
        in_flight=in_flight,
        split_backward=split_backward,
        patience=patience,
        name=name,
    )


def check_weight_bytes(costs: Costs, n_stages: int, stacklevel: int = 6) -> None:
    """Warn where an order under a memory limit takes W to hold nothing, since no bytes say so."""
    held, seconds = (
        getattr(costs, name) is not None and costs.per_stage(name, n_stages).any()
        for name in ("activation_bytes", "weight_grad")
    )
    if held and seconds and not np.any(costs.weight_grad_bytes):
        warnings.warn(
            "the costs have activation_bytes and no weight_grad_bytes, so that under the memory "
            "limit a W counts as holding nothing; give weight_grad_bytes, the bytes that are held "
            "between I and W (at most, those of activations and gradients of outputs)",
            CostsWarning,
            stacklevel=stacklevel,
        )


def ordered(
    placement: Placement,
    n_microbatches: int,
    costs: Costs | None = None,
    *,
    priority: str | Priority = "backward_first",
    memory_limit: object = None,
    in_flight: object = None,
    split_backward: bool = True,
    patience: float = 0.0,
    name: str = "custom",
) -> Schedule:
    """Do what `order_by` does, without warnings."""
    check_type("placement", placement, Placement)
    check_flag("split_backward", split_backward)
    check_text("name", name)
    # Each path takes one at least.
    n_microbatches = check_count("n_microbatches", n_microbatches, placement.n_paths)
    n_actions = 3 * placement.n_stages * n_microbatches
    check_memory(f"ordering {n_actions} actions", n_actions * _BYTES_PER_ACTION)
    wait = number(patience)
    if wait is None or not 0 <= wait < math.inf:
        raise ArgumentError(f"patience must be finite and >= 0, got {patience!r}")
    work = _work(
        placement,
        n_microbatches,
        checked_costs(costs),
        split_backward,
        memory_limit,
        in_flight,
    )
    ops = (Op.F, Op.I, Op.W) if split_backward else (Op.F, Op.B)
    orders = list_orders(work, _key(priority, work, ops), wait)
    columns = (
        (
            [ops[choice.phase] for choice in order],
            [choice.stage for choice in order],
            [choice.microbatch for choice in order],
        )
        for order in orders
    )
    return Schedule.from_columns(name, placement, n_microbatches, columns)


def _work(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    split: bool,
    memory_limit: object,
    in_flight: object,
) -> Work:
    def of(field: str) -> list[float]:
        return [float(x) for x in costs.per_stage(field, placement.n_stages)]

    taken, kept = of("activation_bytes"), of("weight_grad_bytes")
    if split:
        taken = list(map(max, taken, kept))  # as much as there will be, from the start
    forward_delay, backward_delay = _delays(placement, costs)
    seconds = [
        of("forward"),
        *map(of, ("input_grad", "weight_grad") if split else ("backward",)),
    ]
    once = sum(map(sum, (*seconds, forward_delay, backward_delay)))
    for what, total in (("seconds", once), ("bytes", sum(taken) * placement.n_paths)):
        if not math.isfinite(total * n_microbatches):
            raise CostsError(
                f"the {what} of {n_microbatches} micro-batches, {total:g} of each, add up to more "
                "than a number can hold; check the costs"
            )
    return Work(
        placement=placement,
        n_microbatches=n_microbatches,
        seconds=seconds,
        forward_delay=forward_delay,
        backward_delay=backward_delay,
        taken=taken,
        kept=kept,
        limits=checked_limits(memory_limit, placement, taken),
        in_flight=_places(in_flight, placement.n_stages),
    )


def _delays(placement: Placement, costs: Costs) -> tuple[list[float], list[float]]:
    """Return seconds from each stage of each path to the next one, and to the one before."""
    home = np.array(placement.paths)
    nbytes, fixed = (
        costs.per_stage(name, placement.n_stages)[:-1]
        for name in ("output_bytes", "output_seconds")
    )
    forward, backward = np.zeros(home.shape), np.zeros(home.shape)
    for path in range(placement.n_paths):
        down, up = home[path, :-1], home[path, 1:]
        forward[path, :-1] = _message(costs, down, up, nbytes, fixed, placement.n_devices)
        backward[path, 1:] = _message(costs, up, down, nbytes, fixed, placement.n_devices)
    return forward.ravel().tolist(), backward.ravel().tolist()


def _message(
    costs: Costs,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    nbytes: NDArray[np.float64],
    fixed: NDArray[np.float64],
    n_devices: int,
) -> NDArray[np.float64]:
    """Return seconds of messages that find their links free; none from a device to itself."""
    seconds, away = np.zeros(len(source)), source != target
    routes = costs.network.resolve(source[away], target[away], n_devices)
    with np.errstate(over="ignore"):
        seconds[away] = routes.latency + fixed[away] + nbytes[away] / routes.bandwidth
    for message in np.flatnonzero(~np.isfinite(seconds))[:1].tolist():
        raise CostsError(
            f"a message from device {source[message]} to {target[message]} would take "
            f"{seconds[message]} s; check output_bytes, and latency and bandwidth of the network"
        )
    return seconds


def checked_costs(given: object) -> Costs:
    """Return the costs that the user gave; F, I and W of one second each for None.

    Raises
    ------
    CostsError
        For what are no costs.
    """
    if given is None:
        return Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)
    if not isinstance(given, Costs):
        raise CostsError(f"costs must be a pipesim.Costs, got {given!r}")
    return given


def checked_limits(
    given: object, placement: Placement, taken: Sequence[float] | NDArray[np.float64]
) -> list[float]:
    """Return the bytes that each device may hold, from one number, one a device, or None.

    Parameters
    ----------
    given
        What the user gave.
    placement
        Which device holds which stage.
    taken
        Bytes that a micro-batch's F takes on each stage.

    Raises
    ------
    ArgumentError
        For what is no limit, and for one that is too small for a micro-batch.
    """
    n_devices = placement.n_devices
    values = [math.inf if given is None else given] * n_devices
    if _is_several(given):
        if len(given) != n_devices:
            raise ArgumentError(
                f"memory_limit has {len(given)} values for {n_devices} devices; "
                "give one, or one a device"
            )
        values = list(given)
    limits = []
    for device, value in enumerate(values):
        limit = number(value)
        if limit is None or limit < 0:
            raise ArgumentError(
                f"memory_limit of device {device} must be bytes >= 0, got {value!r}; "
                "give one number, or one a device"
            )
        limits.append(limit)
        _check_fits(limit, device, placement, taken)
    return limits


def _check_fits(
    limit: float, device: int, placement: Placement, taken: Sequence[float] | NDArray[np.float64]
) -> None:
    for path in placement.paths:
        stages = [stage for stage, home in enumerate(path) if home == device]
        needed = sum(taken[stage] for stage in stages)
        if needed > limit * (1 + 1e-9):  # as `Admission` compares sums
            names = ", ".join(map(str, stages))
            raise ArgumentError(
                f"memory_limit of device {device} is {limit:.10g} bytes, but one micro-batch takes "
                f"{needed:.10g} there ({'stages' if len(stages) > 1 else 'stage'} {names}); "
                f"give at least {needed:.10g}"
            )


def _is_several(given: object) -> TypeGuard[Sequence[object] | NDArray[Any]]:
    """Whether there is a value a device or stage; an array without a dimension is one value."""
    if isinstance(given, np.ndarray):
        return given.ndim > 0
    return isinstance(given, Sequence) and not isinstance(given, str)


def _places(given: object, n_stages: int) -> list[float]:
    """Return how many micro-batches may be in flight on each stage."""
    if given is None:
        return [math.inf] * n_stages
    if not _is_several(given):
        return [check_count("in_flight", given)] * n_stages
    if len(given) != n_stages:
        raise ArgumentError(
            f"in_flight has {len(given)} values for {n_stages} stages; give one, or one a stage"
        )
    return [check_count(f"in_flight of stage {s}", value) for s, value in enumerate(given)]


def _key(priority: object, work: Work, ops: Sequence[Op]) -> Key:
    """Return the list scheduler's key of a priority."""
    if callable(priority):
        _check_takes_two(priority)
        return _Checked(priority, ops)
    return PRIORITIES[check_name("priority", priority, PRIORITIES)](work)


def _check_takes_two(priority: Callable[..., Any]) -> None:
    try:
        inspect.signature(priority).bind(Action(0, Op.F, 0), 0.0)
    except TypeError as error:
        raise ArgumentError(
            f"priority must be a function of (action, ready), got {priority!r}: {error}"
        ) from error
    except ValueError:  # some functions in C have no signature: their call shows what they take
        return


@dataclass(frozen=True)
class _Checked:
    """A priority of the user's own, as a key; every rank is a tuple of numbers."""

    priority: Priority
    ops: Sequence[Op]

    def __call__(self, phase: int, stage: int, microbatch: int, ready: float) -> tuple[float, ...]:
        action = Action(stage, self.ops[phase], microbatch)
        try:
            rank = self.priority(action, ready)
        except PipeError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, raised {type(error).__name__}: "
                f"{error}"
            ) from error
        numbers = [number(x) for x in (rank if isinstance(rank, tuple) else (rank,))]
        if not numbers or None in numbers:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, must be a number or a tuple of "
                f"numbers, got {rank!r}"
            )
        return tuple(x for x in numbers if x is not None)
