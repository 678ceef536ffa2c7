"""The registry of named schedules, and their closed forms."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.capacity import check_schedule
from pipesim.errors import (
    ArgumentError,
    UnknownNameError,
    check_count,
    check_name,
    suggestion,
)
from pipesim.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ClosedForm",
    "Counts",
    "ScheduleInfo",
    "options_of_schedules",
    "register",
    "schedule",
    "schedule_info",
    "schedules",
]

Build = Callable[..., Schedule]


@dataclass(frozen=True)
class ClosedForm:
    """A formula of the number of devices ``p``, of micro-batches ``m``, and of options.

    Attributes
    ----------
    text
        The formula.
    value
        ``value(n_devices, n_microbatches, **options)``, the options by the names that the schedule
        takes; those that the formula does not know are left out.
    assumes
        What it takes for granted beside stages of equal cost and free transfers.
    exact
        Whether a simulation gives just that, or it is a bound or an approximation.
    """

    text: str
    value: Callable[..., float]
    assumes: str = ""
    exact: bool = True

    def of(self, n_devices: int, n_microbatches: int, **options: Any) -> float:
        """Return the number; NaN where the formula fails, so that one does not hide the rest."""
        known = inspect.signature(self.value).parameters
        taken = {name: value for name, value in options.items() if name in known}
        try:
            return self.value(n_devices, n_microbatches, **taken)
        except Exception:  # whatever a formula of the user's own may raise
            return math.nan


class Counts(NamedTuple):
    """Which numbers of devices and micro-batches a schedule takes: in words, and as a test."""

    text: str = "any"
    allow: Callable[..., bool] = lambda p, m: True


_UNKNOWN = ClosedForm("", lambda p, m: math.nan, exact=False)
_ONE = ClosedForm("1", lambda p, m: 1)
_ANY = Counts()


@dataclass(frozen=True)
class ScheduleInfo:
    """What the registry knows of a named schedule.

    Attributes
    ----------
    name, summary, source
        What it is called, what it does in a line, and the paper.
    build
        ``build(n_devices, n_microbatches, **options)`` makes the schedule.
    options
        Names of the options that ``build`` takes.
    bubble
        Idle share of the devices, 0..1, for stages of equal cost and free transfers; F, I and W of
        equal length, B of two, unless the formula assumes otherwise.
    activations
        Most activations that a device holds, without recompute, in those of one micro-batch
        through ``1 / p`` of the model. Where backwards are split, W is taken to need them all.
    parameters
        Sets of weights that a device holds, in those of ``1 / p`` of the model.
    counts
        Which numbers of devices and micro-batches it takes.
    """

    name: str
    summary: str
    source: str
    build: Build
    options: tuple[str, ...]
    bubble: ClosedForm = _UNKNOWN
    activations: ClosedForm = _UNKNOWN
    parameters: ClosedForm = _ONE
    counts: Counts = _ANY

    def check_options(self, options: Iterable[str]) -> None:
        """Raise `UnknownNameError` for an option that ``build`` does not take."""
        for option in options:
            if option not in self.options:
                raise UnknownNameError(
                    f"schedule {self.name!r} takes no option {option!r}"
                    f"{suggestion(option, self.options)} "
                    f"(it takes: {', '.join(self.options) or 'none'})"
                )

    def allows(self, n_devices: int, n_microbatches: int, **options: Any) -> bool:
        """Whether the schedule exists for these counts."""
        known = inspect.signature(self.counts.allow).parameters
        taken = {name: value for name, value in options.items() if name in known}
        return self.counts.allow(n_devices, n_microbatches, **taken)

    def make(self, n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
        """Build the schedule; `schedule` says what of."""
        self.check_options(options)
        n_devices = check_count("n_devices", n_devices)
        n_microbatches = check_count("n_microbatches", n_microbatches)
        check_schedule(self.name, 2 * n_devices * n_microbatches)  # F and B, on each device
        if not self.allows(n_devices, n_microbatches, **options):
            given = "".join(f", {name}={value!r}" for name, value in options.items())
            raise ArgumentError(
                f"schedule {self.name!r} takes {self.counts.text}; "
                f"got n_devices={n_devices}, n_microbatches={n_microbatches}{given}"
            )
        return self.build(n_devices, n_microbatches, **options)


_REGISTRY: dict[str, ScheduleInfo] = {}


def register(
    name: str,
    *,
    summary: str = "",
    source: str = "",
    bubble: ClosedForm = _UNKNOWN,
    activations: ClosedForm = _UNKNOWN,
    parameters: ClosedForm = _ONE,
    counts: Counts = _ANY,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under ``name``; see `ScheduleInfo` for the arguments.

    The function makes a `Schedule` of ``(n_devices, n_microbatches, **options)``. Or, if its first
    parameter is named ``device``, it yields the actions (or their text) of one device at a time,
    of ``(device, n_devices, n_microbatches, **options)``.

    A function that is defined again, as by running a notebook's cell twice, replaces itself.

    Raises
    ------
    ArgumentError
        If there is another schedule of that name, or the function takes other arguments.

    Examples
    --------
    >>> import pipesim as ps
    >>> @ps.register("one_at_a_time")
    ... def one_at_a_time(device, n_devices, n_microbatches):
    ...     for m in range(n_microbatches):
    ...         yield from (f"{device}F{m}", f"{device}B{m}")
    >>> print(ps.schedule("one_at_a_time", n_devices=2, n_microbatches=2).grid())
    device 0 | 0F0 0B0 0F1 0B1
    device 1 | 1F0 1B0 1F1 1B1
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        build, options = _builder(name, function)
        if name in _REGISTRY and _origin(_REGISTRY[name].build) != _origin(function):
            raise ArgumentError(
                f"a schedule named {name!r} is registered already; choose another name"
            )
        about = summary or next(iter((inspect.getdoc(function) or "").splitlines()), "")
        _REGISTRY[name] = ScheduleInfo(
            name, about, source, build, options, bubble, activations, parameters, counts
        )
        return function

    return decorate


def _origin(function: Callable[..., Any]) -> tuple[object, object]:
    """Return where a function was defined: what is defined there again, as in a notebook's cell."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _builder(name: str, function: Callable[..., Any]) -> tuple[Build, tuple[str, ...]]:
    """Return what builds a schedule with ``function``, and the options it takes."""
    parameters = tuple(inspect.signature(function).parameters) if callable(function) else ()
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
        orders = [
            list(function(device, n_devices, n_microbatches, **options))
            for device in range(n_devices)
        ]
        return Schedule.from_orders(orders, n_microbatches=n_microbatches, name=name)

    return build, parameters[3:]


def schedule_info(name: object) -> ScheduleInfo:
    """Return what the registry knows of a schedule, or raise `UnknownNameError`."""
    return _REGISTRY[check_name("schedule", name, _REGISTRY)]


def schedule(name: str, n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
    """Build a named schedule.

    Parameters
    ----------
    name
        One of the names that `schedules` lists.
    n_devices, n_microbatches
        Whole numbers of at least 1.
    **options
        What the schedule takes besides, such as ``backward_order`` for ``"gpipe"``.

    Raises
    ------
    UnknownNameError
        For an unknown name or option, with the nearest known one.
    ArgumentError
        For counts that are fractional, boolean, zero or negative.
    CapacityError
        If it would not fit in memory.

    Examples
    --------
    >>> import pipesim as ps
    >>> print(ps.schedule("1f1b", n_devices=2, n_microbatches=3).grid())
    device 0 | 0F0 0F1 0B0 0F2 0B1 0B2
    device 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    return schedule_info(name).make(n_devices, n_microbatches, **options)


def options_of_schedules() -> dict[str, tuple[str, ...]]:
    """Return the names of the options that each named schedule takes."""
    return {name: info.options for name, info in _REGISTRY.items()}


def schedules(n_devices: int = 4, n_microbatches: int = 8, **options: Any) -> pd.DataFrame:
    """List the named schedules, with their closed forms as text and as numbers.

    Parameters
    ----------
    n_devices, n_microbatches
        What the numbers are for.
    **options
        Options such as ``n_chunks``, for the formulas that know them.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``; ``bubble_formula``, ``bubble`` (0..1);
        ``activations_formula``, ``activations`` (of the fullest device, in micro-batches through
        ``1 / p`` of the model); ``parameters_formula``, ``parameters`` (sets of weights);
        ``assumes``, ``counts``, ``options``, ``source``. A number is NaN where its formula fails,
        or the schedule does not take these counts.
    """
    import pandas as pd

    counts = check_count("n_devices", n_devices), check_count("n_microbatches", n_microbatches)
    rows = {}
    for info in _REGISTRY.values():
        row: dict[str, Any] = {"summary": info.summary}
        allowed = info.allows(*counts, **options)
        for name in ("bubble", "activations", "parameters"):
            form: ClosedForm = getattr(info, name)
            row[f"{name}_formula"] = form.text
            row[name] = form.of(*counts, **options) if allowed else math.nan
        row["assumes"] = info.bubble.assumes
        row["counts"] = info.counts.text
        row["options"] = ", ".join(info.options)
        row["source"] = info.source
        rows[info.name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("schedule")
