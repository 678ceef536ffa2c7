"""Checks of `pipesim.register`: the name of a schedule, its function, and the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pipesim.errors import ArgumentError, CapacityError, PipeError, ScheduleError, check_type
from pipesim.ops import Action, Overlapped
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

Build = Callable[..., Schedule]
#: A placement, a function of the number of devices that returns it, or None to infer it.
PlacementLike = Placement | Callable[[int], Placement] | None
#: Most actions of a device: this many, or 3 for each of this many stages and each micro-batch.
_ACTIONS, _STAGES = 10**5, 1000
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked_name(name: object) -> str:
    """Return the name for a schedule, checked."""
    if isinstance(name, str) and name.strip():
        return name
    if callable(name):
        example = getattr(name, "__name__", "name")
        raise ArgumentError(
            f"register takes the schedule's name, got {name!r}; "
            f'write @ps.register("{example}") above the function'
        )
    raise ArgumentError(
        f"the name of a schedule must be a text that is not empty, got {name!r}; "
        'write for example @ps.register("my_schedule")'
    )


def builder(
    name: str, function: Callable[..., Any], placement: PlacementLike = None
) -> tuple[Build, tuple[str, ...]]:
    """Return a function that builds the schedule, and the options that it takes.

    Parameters
    ----------
    name, function, placement
        As in `pipesim.register`.
    """
    parameters = _parameters(function)
    by_device = parameters[:1] == ("device",)
    first = (*(["device"] if by_device else []), "n_devices", "n_microbatches")
    if len(parameters) < len(first):
        raise ArgumentError(
            f"schedule {name!r} must be a function of (n_devices, n_microbatches) that returns a "
            "Schedule, or of (device, n_devices, n_microbatches) that yields one device's actions; "
            f"got {function!r} of ({', '.join(parameters)})"
        )
    if not by_device:
        if placement is not None:
            raise ArgumentError(
                f"schedule {name!r}: placement is for functions of (device, n_devices, "
                "n_microbatches); a function that returns a Schedule gives it its placement"
            )
        return function, parameters[2:]

    @functools.wraps(function)
    def build(n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
        def order(device: int) -> Any:
            return function(device, n_devices, n_microbatches, **options)

        try:
            orders = [
                _device_order(name, device, n_microbatches, functools.partial(order, device))
                for device in range(n_devices)
            ]
            return Schedule.from_orders(
                orders,
                n_microbatches=n_microbatches,
                placement=_placement(placement, n_devices),
                name=name,
            )
        except (ArgumentError, ScheduleError) as error:
            raise _with_name(name, error) from error.__cause__ or error

    return build, parameters[3:]


def _placement(placement: PlacementLike, n_devices: int) -> Placement | None:
    """Return the placement of a schedule on so many devices; None to infer it."""
    if callable(placement):
        with name_user_errors("placement"):
            placement = placement(n_devices)
        check_type("the result of placement", placement, Placement)
    if placement is not None and placement.n_devices != n_devices:
        raise ArgumentError(
            f"placement has {placement.n_devices} devices, but the schedule {n_devices}; give a "
            "function of n_devices, such as placement=pipesim.v_shaped"
        )
    return placement


@contextmanager
def name_user_errors(where: str) -> Iterator[None]:
    """Add ``where`` to errors of a user's function that makes a schedule.

    Raises
    ------
    ScheduleError
        With the error as ``__cause__``; errors of pipesim keep their type.
    """
    try:
        yield
    except CapacityError:
        raise
    except PipeError as error:
        raise type(error)(f"{where}: {error}") from error
    except MemoryError as error:
        raise CapacityError(
            f"{where}: its function ran out of memory; list fewer actions"
        ) from error
    except Exception as error:
        raise ScheduleError(
            f"{where}: its function raised {type(error).__name__}: {error}"
        ) from error


def _device_order(name: str, device: int, m: int, make_order: Callable[[], Any]) -> Any:
    """Return one device's order, as an iterable that ends.

    Raises
    ------
    ScheduleError
        If the user's function raises, with its error as ``__cause__``.
    """
    with name_user_errors(f"device {device}"):
        order = make_order()
    if not isinstance(order, Iterable) or isinstance(order, str | Action | Overlapped):
        return order  # `Schedule.from_orders` refuses it with a reason
    return _bounded(name, device, m, order)


def _bounded(name: str, device: int, m: int, order: Iterable[Any]) -> Iterator[Any]:
    """Yield the actions of an order; raise if there are more than any device could run."""
    most = max(_ACTIONS, 3 * _STAGES * m)
    with name_user_errors(f"device {device}"):
        for count, action in enumerate(order):
            if count == most:
                raise CapacityError(
                    f"schedule {name!r}, device {device}: its function has yielded {count:,} "
                    f"actions for {m} micro-batches, and more follow; a device runs at most 3 "
                    "actions of each of its stages and micro-batches, so make sure that the "
                    "function ends"
                )
            yield action


def _parameters(function: object) -> tuple[str, ...]:
    """Return the names of a function's parameters, without ``*args`` and ``**options``."""
    if not callable(function):
        return ()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return ()
    return tuple(k for k, parameter in parameters.items() if parameter.kind not in _VARIADIC)


def _with_name(name: str, error: PipeError) -> PipeError:
    return type(error)(f"schedule {name!r}: {error}")


def required_options(build: Build, options: Iterable[str]) -> tuple[str, ...]:
    """Return the options of a schedule's function that have no default."""
    parameters = inspect.signature(build).parameters
    empty = inspect.Parameter.empty
    return tuple(x for x in options if x in parameters and parameters[x].default is empty)


def check_required(name: str, required: Iterable[str], user_options: Container[str]) -> None:
    """Raise `ArgumentError` if the user left out an option that has no default."""
    for option in required:
        if option not in user_options:
            raise ArgumentError(
                f"schedule {name!r} needs its option {option!r}, which has no default; "
                f"give {option}=..."
            )


def check_built(name: str, built: object, n_devices: int, n_microbatches: int) -> Schedule:
    """Return the result of a schedule's function, if it is a schedule of these counts.

    Raises
    ------
    ScheduleError
        The message has the counts that were requested and the result.
    """
    requested = f"{n_devices} devices and {n_microbatches} micro-batches"
    if not isinstance(built, Schedule):
        raise ScheduleError(
            f"schedule {name!r}: its function returned {built!r:.60} ({type(built).__name__}); "
            f"return a pipesim.Schedule of {requested}, or name its first parameter 'device' and "
            "yield one device's actions"
        )
    if (built.n_devices, built.n_microbatches) != (n_devices, n_microbatches):
        raise ScheduleError(
            f"schedule {name!r}: asked for {requested}, its function returned one of "
            f"{built.n_devices} devices and {built.n_microbatches} micro-batches; return as many "
            "as it is called with, or give counts=pipesim.Counts(...) to tell what it takes"
        )
    return built
