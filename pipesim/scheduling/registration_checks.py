"""What `pipesim.register` checks: a schedule's name, its function, and what that returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pipesim.errors import ArgumentError, CapacityError, PipeError, ScheduleError
from pipesim.ops import Action, Overlapped
from pipesim.scheduling.schedule import Schedule

__all__ = [
    "Build",
    "builder",
    "check_built",
    "check_required",
    "checked_name",
    "of_user",
]

Build = Callable[..., Schedule]
#: A device may list so many actions, or if that is more, 3 of each of so many stages.
_ACTIONS, _STAGES = 10**5, 1000
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked_name(name: object) -> str:
    """Return the name that a schedule is to have.

    Raises
    ------
    ArgumentError
        If it is no text or an empty one, such as the function that is to be decorated.
    """
    if isinstance(name, str) and name.strip():
        return name
    if callable(name):
        called = getattr(name, "__name__", "name")
        raise ArgumentError(
            f"register takes the schedule's name, got {name!r}; "
            f'write @ps.register("{called}") above the function'
        )
    raise ArgumentError(
        f"the name of a schedule must be a text that is not empty, got {name!r}; "
        'write such as @ps.register("mine")'
    )


def builder(name: str, function: Callable[..., Any]) -> tuple[Build, tuple[str, ...]]:
    """Return what builds a schedule with ``function``, and the options it takes.

    Raises
    ------
    ArgumentError
        If the function does not take the counts.
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
        return function, parameters[2:]

    @functools.wraps(function)
    def build(n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
        def order(device: int) -> Any:
            return function(device, n_devices, n_microbatches, **options)

        try:
            orders = [
                _watched(name, device, n_microbatches, functools.partial(order, device))
                for device in range(n_devices)
            ]
            return Schedule.from_orders(orders, n_microbatches=n_microbatches, name=name)
        except (ArgumentError, ScheduleError) as error:
            raise _named(name, error) from error.__cause__ or error

    return build, parameters[3:]


@contextmanager
def of_user(where: str) -> Iterator[None]:
    """Name the place of an error in a function of the user's that makes a schedule.

    Raises
    ------
    ScheduleError
        With that error as ``__cause__``; errors of pipesim's own keep their kind.
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


def _watched(name: str, device: int, m: int, made: Callable[[], Any]) -> Any:
    """Return one device's order, as something to iterate over that ends.

    Raises
    ------
    ScheduleError
        If the user's function raises, with its error as ``__cause__``.
    """
    with of_user(f"device {device}"):
        order = made()
    if not isinstance(order, Iterable) or isinstance(order, str | Action | Overlapped):
        return order  # refused by `Schedule.from_orders`, which says why
    return _ending(name, device, m, order)


def _ending(name: str, device: int, m: int, order: Iterable[Any]) -> Iterator[Any]:
    """Yield the actions of an order, unless there are more than any device could run."""
    most = max(_ACTIONS, 3 * _STAGES * m)
    with of_user(f"device {device}"):
        for count, action in enumerate(order):
            if count == most:
                raise CapacityError(
                    f"schedule {name!r}, device {device}: its function has yielded {count:,} "
                    f"actions for {m} micro-batches, and goes on; a device runs at most 3 actions "
                    "of each of its stages and micro-batches, so see that the function ends"
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
    return tuple(key for key, each in parameters.items() if each.kind not in _VARIADIC)


def _named(name: str, error: PipeError) -> PipeError:
    return type(error)(f"schedule {name!r}: {error}")


def check_required(name: str, build: Build, options: Iterable[str], given: Iterable[str]) -> None:
    """Raise `ArgumentError` where an option without a default is not given.

    ``options`` are those that the schedule takes.
    """
    parameters, given = inspect.signature(build).parameters, set(given)
    for option in options:
        left_out = option in parameters and parameters[option].default is inspect.Parameter.empty
        if left_out and option not in given:
            raise ArgumentError(
                f"schedule {name!r} needs its option {option!r}, which has no default; "
                f"give {option}=..."
            )


def check_built(name: str, built: object, n_devices: int, n_microbatches: int) -> Schedule:
    """Return what a schedule's function built, if it is a schedule for these counts.

    Raises
    ------
    ScheduleError
        Saying what was asked for and what came.
    """
    asked = f"{n_devices} devices and {n_microbatches} micro-batches"
    if not isinstance(built, Schedule):
        raise ScheduleError(
            f"schedule {name!r}: its function returned {built!r:.60} ({type(built).__name__}); "
            f"return a pipesim.Schedule of {asked}, or name its first parameter 'device' and "
            "yield one device's actions"
        )
    if (built.n_devices, built.n_microbatches) != (n_devices, n_microbatches):
        raise ScheduleError(
            f"schedule {name!r}: asked for {asked}, its function returned one of "
            f"{built.n_devices} devices and {built.n_microbatches} micro-batches; return as many "
            "as it is called with, or say with counts=pipesim.Counts(...) what it takes"
        )
    return built
