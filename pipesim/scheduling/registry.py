"""The registry of named schedules, and their closed forms."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.errors import (
    ArgumentError,
    CapacityError,
    PipeError,
    ScheduleError,
    UnknownNameError,
    check_count,
    check_name,
    check_text,
    check_type,
    find_name,
    number,
    public_name,
    suggestion,
)
from pipesim.ops import Action, Overlapped
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Recipe, Schedule
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    import pandas as pd


@checked_names
@dataclass(frozen=True)
class ClosedForm:
    """A formula of the number of devices ``p``, of micro-batches ``m``, and of options.

    Attributes
    ----------
    text
        The formula.
    value
        ``value(n_devices, n_microbatches, **options)``, the options by the names of the
        schedule's parameters; options that the formula does not have are left out.
    assumes
        Assumptions besides stages of equal cost and free transfers.
    exact
        Whether a simulation gives exactly this value; else it is a bound or an approximation.

    Examples
    --------
    >>> import pipesim as ps
    >>> bubble = ps.ClosedForm("(p - 1) / (m + p - 1)", lambda p, m: (p - 1) / (m + p - 1))
    >>> bubble.of(n_devices=4, n_microbatches=9)
    0.25
    """

    text: str
    value: Callable[..., float]
    assumes: str = ""
    exact: bool = True

    def of(self, n_devices: int, n_microbatches: int, **options: Any) -> float:
        """Return the value; NaN if the formula fails, so that others can still be listed.

        Parameters
        ----------
        n_devices, n_microbatches
            The numbers ``p`` and ``m``.
        **options
            Options of the schedule; those that the formula does not have are left out.

        Returns
        -------
        float
            The value; NaN if the formula raises, lacks an option, or returns no number.
        """
        try:
            value = number(call_with_known(self.value, n_devices, n_microbatches, options))
        except Exception:  # a user's formula may raise anything
            return math.nan
        return math.nan if value is None else value


class Counts(NamedTuple):
    """Numbers of devices and micro-batches that a schedule takes: in words, and as a test.

    Attributes
    ----------
    text
        The numbers in words, for error messages and tables.
    allow
        ``allow(n_devices, n_microbatches, **options)`` returns whether a schedule takes these
        numbers; options that it does not have are left out. By default any.

    Examples
    --------
    >>> from pipesim.scheduling import Counts
    >>> counts = Counts("an even number of devices", lambda p, m: p % 2 == 0)
    >>> counts.allow(4, 8), counts.allow(3, 8)
    (True, False)
    """

    text: str = "any"
    allow: Callable[..., bool] = lambda p, m: True


def call_with_known(function: Callable[..., Any], p: int, m: int, options: dict[str, Any]) -> Any:
    """Call a formula, or a test, with the counts and the options that it has parameters for."""
    parameters = inspect.signature(function).parameters if options else {}
    return function(p, m, **{name: value for name, value in options.items() if name in parameters})


def _check_kind(where: str, value: object, kind: type, function: str) -> None:
    """Raise unless a `ClosedForm` or `Counts` has a text, and a function of this name."""
    if not isinstance(value, kind):
        got = f"{value!r} ({type(value).__name__})"
    elif not isinstance(value.text, str):  # type: ignore[attr-defined]
        got = f"one with text={value.text!r}"  # type: ignore[attr-defined]
    elif not callable(getattr(value, function)):
        got = f"one with {function}={getattr(value, function)!r}, which is no function"
    else:
        return
    raise ArgumentError(
        f'{where} must be a {public_name(kind)}("...", lambda p, m: ...), got {got}'
    )


# Checks of `register`: the name of a schedule, its function, and the result

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
    """Return a function that builds the schedule, and the options that it takes."""
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
            named = type(error)(f"schedule {name!r}: {error}")
            raise named from error.__cause__ or error

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
            "function of n_devices, such as placement=pipesim.Placement.v_shaped"
        )
    return placement


@contextmanager
def name_user_errors(where: str) -> Iterator[None]:
    """Add ``where`` to errors of a user's function that makes a schedule.

    Errors of pipesim keep their type; others become a `ScheduleError`.
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
    """Return one device's order, as an iterable that ends."""
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


def check_built(name: str, built: object, n_devices: int, n_microbatches: int) -> Schedule:
    """Return the result of a schedule's function, if it is a schedule of these counts."""
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
            "as it is called with, or tell what it takes: counts=pipesim.scheduling.Counts(...)"
        )
    return built


_UNKNOWN = ClosedForm("", lambda p, m: math.nan, exact=False)
_ONE = ClosedForm("1", lambda p, m: 1)
_ANY = Counts()


@dataclass(frozen=True)
class ScheduleInfo:
    """Entry of the registry: a named schedule."""

    name: str
    #: One line of description.
    summary: str
    #: The paper.
    source: str
    #: ``build(n_devices, n_microbatches, **options)`` makes the schedule.
    build: Build
    #: Names of the options that ``build`` takes.
    options: tuple[str, ...]
    #: Idle share of the devices, 0..1, for stages of equal cost and free transfers; F, I and W of
    #: equal length, B of two, unless the formula assumes otherwise.
    bubble: ClosedForm = _UNKNOWN
    #: Most activations that a device holds, without recompute. The unit is the activations of one
    #: micro-batch through ``1 / p`` of the model. If backwards are split, all are held until W.
    activations: ClosedForm = _UNKNOWN
    #: Sets of weights that a device holds. The unit is the weights of ``1 / p`` of the model.
    parameters: ClosedForm = _ONE
    #: Numbers of devices and micro-batches that it takes.
    counts: Counts = _ANY
    #: Name in figures: that of the paper.
    label: str = ""
    #: Number of modules that the stages are of: 2 for an encoder and a language model.
    n_modules: int = 1

    @cached_property
    def _required(self) -> tuple[str, ...]:
        """Options without a default."""
        parameters = inspect.signature(self.build).parameters
        empty = inspect.Parameter.empty
        return tuple(x for x in self.options if x in parameters and parameters[x].default is empty)

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
        """Return whether the schedule takes these counts; True too if the test itself fails.

        Building then reports the mistake, such as an option that is no number.
        """
        try:
            return bool(call_with_known(self.counts.allow, n_devices, n_microbatches, options))
        except Exception:  # a user's test may raise anything
            return True

    def make(self, n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
        """Build the schedule; arguments and errors are those of `schedule`."""
        self.check_options(options)
        for option in self._required:
            if option not in options:
                raise ArgumentError(
                    f"schedule {self.name!r} needs its option {option!r}, which has no default; "
                    f"give {option}=..."
                )
        n_devices = check_count("n_devices", n_devices)
        n_microbatches = check_count("n_microbatches", n_microbatches)
        check_schedule(self.name, 2 * n_devices * n_microbatches)  # F and B, on each device
        if not self.allows(n_devices, n_microbatches, **options):
            options_text = "".join(f", {name}={value!r}" for name, value in options.items())
            raise ArgumentError(
                f"schedule {self.name!r} takes {self.counts.text}; "
                f"got n_devices={n_devices}, n_microbatches={n_microbatches}{options_text}"
            )
        try:
            built = self.build(n_devices, n_microbatches, **options)
        except PipeError:
            raise
        except Exception:  # from a user's function
            with name_user_errors(f"schedule {self.name!r}"):
                raise
        schedule = check_built(self.name, built, n_devices, n_microbatches)
        return replace(schedule, recipe=Recipe(self.name, dict(options)))


_REGISTRY: dict[str, ScheduleInfo] = {}


@checked_names
def register(
    name: str,
    *,
    label: str = "",
    summary: str = "",
    source: str = "",
    bubble: ClosedForm = _UNKNOWN,
    activations: ClosedForm = _UNKNOWN,
    parameters: ClosedForm = _ONE,
    counts: Counts = _ANY,
    placement: PlacementLike = None,
    n_modules: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under ``name``; see `ScheduleInfo` for the arguments.

    The function has one of two forms. Its options are its other named parameters.

    - ``function(n_devices, n_microbatches, **options)`` returns a `Schedule`.
    - ``function(device, n_devices, n_microbatches, **options)`` yields the actions of one device,
      or their texts. This form is recognized by the name of the first parameter, ``device``.

    A function that is defined again, for example by running a notebook's cell twice, replaces its
    earlier definition.

    Parameters
    ----------
    name
        Name for `pipesim.schedule`.
    label
        Name in figures, such as ``"ZB-H1"``; by default ``name``.
    summary
        One line of description; by default the first line of the function's docstring.
    source
        The paper.
    bubble, activations, parameters
        Closed forms, in the units of `ScheduleInfo`. By default bubble and activations are unknown,
        and a device holds one set of weights.
    counts
        Numbers of devices and micro-batches that the schedule takes; by default any.
    placement
        Device of each stage, of a function in the second form: a `Placement`, or a function of
        ``n_devices`` that returns one, such as `Placement.v_shaped`. By default it is inferred from
        the actions that each device lists.
    n_modules
        Number of modules that its stages are of, such as 2 for an encoder and a language model. A
        schedule is tried in place of another only if both have as many.

    Returns
    -------
    callable
        The decorator, which returns the function unchanged.

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
    name = checked_name(name)
    forms = {"bubble": bubble, "activations": activations, "parameters": parameters}
    for argument, form in forms.items():
        _check_kind(f"schedule {name!r}: {argument}", form, ClosedForm, "value")
    _check_kind(f"schedule {name!r}: counts", counts, Counts, "allow")
    check_text("label", label)
    check_text("summary", summary)
    check_text("source", source)
    n_modules = check_count("n_modules", n_modules)
    if not (placement is None or isinstance(placement, Placement) or callable(placement)):
        raise ArgumentError(
            f"schedule {name!r}: placement must be a pipesim.Placement, or a function of n_devices "
            f"that returns one, got {placement!r:.60}"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        build, options = builder(name, function, placement)
        if name in _REGISTRY and _origin(_REGISTRY[name].build) != _origin(function):
            raise ArgumentError(
                f"a schedule named {name!r} is registered already; choose another name"
            )
        about = summary or next(iter((inspect.getdoc(function) or "").splitlines()), "")
        _REGISTRY[name] = ScheduleInfo(
            name, about, source, build, options, bubble, activations, parameters, counts,
            label or name, n_modules,
        )  # fmt: skip
        return function

    return decorate


def _origin(function: Callable[..., Any]) -> tuple[object, object]:
    """Return module and qualified name of a function; the same if its definition runs again."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def schedule_info(name: object) -> ScheduleInfo:
    """Return the registry's entry of a schedule, or raise `UnknownNameError`."""
    return _REGISTRY[find_name("schedule", name, _REGISTRY)]


def schedule(name: str, n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
    """Build a named schedule.

    Parameters
    ----------
    name
        One of the names that `schedules` lists, in any spelling: ``"ZB-H1"`` is ``"zb_h1"``.
    n_devices, n_microbatches
        Whole numbers of at least 1.
    **options
        Options of the schedule, such as ``backward_order`` of ``"gpipe"``.

    Returns
    -------
    Schedule
        Order of the actions of each device; its ``recipe`` has the name and the options.

    Raises
    ------
    ScheduleError
        If the registered function raises, with its error as ``__cause__``, or does not return a
        schedule of these counts.
    CapacityError
        If the schedule would not fit in memory, or if a device's actions do not end.

    Examples
    --------
    >>> import pipesim as ps
    >>> print(ps.schedule("1f1b", n_devices=2, n_microbatches=3).grid())
    device 0 | 0F0 0F1 0B0 0F2 0B1 0B2
    device 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    return schedule_info(name).make(n_devices, n_microbatches, **options)


def schedule_labels() -> dict[str, str]:
    """Return the name of each schedule in figures."""
    return {name: info.label for name, info in _REGISTRY.items()}


def options_of_schedules() -> dict[str, tuple[str, ...]]:
    """Return the names of the options that each named schedule takes."""
    return {name: info.options for name, info in _REGISTRY.items()}


def schedules(n_devices: int = 4, n_microbatches: int = 8, **options: Any) -> pd.DataFrame:
    """List the named schedules, with their closed forms as text and as numbers.

    Parameters
    ----------
    n_devices, n_microbatches
        Counts for which the closed forms are evaluated.
    **options
        Options such as ``n_chunks``, for the formulas that have them.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``label`` (name in figures), ``summary``; ``bubble_formula``, ``bubble``
        (0..1);
        ``activations_formula``, ``activations`` (of the fullest device, in micro-batches through
        ``1 / p`` of the model); ``parameters_formula``, ``parameters`` (sets of weights);
        ``assumes``, ``counts``, ``n_modules``, ``options``, ``source``. A number is NaN if its
        formula fails, or if the schedule does not take these counts.

    Examples
    --------
    GPipe leaves (p - 1) / (m + p - 1) of the time idle:

    >>> import pipesim as ps
    >>> table = ps.schedules(n_devices=4, n_microbatches=9)
    >>> float(table.loc["gpipe", "bubble"])
    0.25
    """
    from pipesim.utils.packages import pandas as pd

    counts = check_count("n_devices", n_devices), check_count("n_microbatches", n_microbatches)
    known_options = {name for info in _REGISTRY.values() for name in info.options}
    for option in options:
        check_name("option", option, known_options)
    rows = {}
    for info in _REGISTRY.values():
        row: dict[str, Any] = {"label": info.label, "summary": info.summary}
        allowed = info.allows(*counts, **options)
        for name in ("bubble", "activations", "parameters"):
            form: ClosedForm = getattr(info, name)
            row[f"{name}_formula"] = form.text
            row[name] = form.of(*counts, **options) if allowed else math.nan
        row["assumes"] = info.bubble.assumes
        row["counts"] = info.counts.text
        row["n_modules"] = info.n_modules
        row["options"] = ", ".join(info.options)
        row["source"] = info.source
        rows[info.name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("schedule")
