"""The registry of named schedules, and their closed forms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipesim.errors import (
    ArgumentError,
    PipeError,
    UnknownNameError,
    check_count,
    check_name,
    check_text,
    suggestion,
)
from pipesim.scheduling.closed_forms import (
    ClosedForm,
    Counts,
    call_with_known,
    check_counts,
    check_form,
)
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registration_checks import (
    Build,
    PlacementLike,
    builder,
    check_built,
    check_required,
    checked_name,
    name_user_errors,
    required_options,
)
from pipesim.scheduling.schedule import Recipe, Schedule

if TYPE_CHECKING:
    import pandas as pd


_UNKNOWN = ClosedForm("", lambda p, m: math.nan, exact=False)
_ONE = ClosedForm("1", lambda p, m: 1)
_ANY = Counts()


@dataclass(frozen=True)
class ScheduleInfo:
    """Entry of the registry: a named schedule.

    Attributes
    ----------
    name, summary, source
        Its name, one line of description, and the paper.
    build
        ``build(n_devices, n_microbatches, **options)`` makes the schedule.
    options
        Names of the options that ``build`` takes.
    bubble
        Idle share of the devices, 0..1, for stages of equal cost and free transfers; F, I and W of
        equal length, B of two, unless the formula assumes otherwise.
    activations
        Most activations that a device holds, without recompute. The unit is the activations of
        one micro-batch through ``1 / p`` of the model. If backwards are split, all of them are
        held until W.
    parameters
        Sets of weights that a device holds. The unit is the weights of ``1 / p`` of the model.
    counts
        Numbers of devices and micro-batches that it takes.
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

    @cached_property
    def _required(self) -> tuple[str, ...]:
        """Options without a default."""
        return required_options(self.build, self.options)

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
        check_required(self.name, self._required, options)
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


def register(
    name: str,
    *,
    summary: str = "",
    source: str = "",
    bubble: ClosedForm = _UNKNOWN,
    activations: ClosedForm = _UNKNOWN,
    parameters: ClosedForm = _ONE,
    counts: Counts = _ANY,
    placement: PlacementLike = None,
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
        ``n_devices`` that returns one, such as ``pipesim.v_shaped``. By default it is inferred
        from the actions that each device lists.

    Returns
    -------
    callable
        The decorator, which returns the function unchanged.

    See Also
    --------
    pipesim.schedule : Build a registered schedule by its name.
    pipesim.schedules : List the registered schedules.
    pipesim.ClosedForm : A formula of the numbers of devices and micro-batches.
    pipesim.Counts : Numbers of devices and micro-batches that a schedule takes.

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
        check_form(f"schedule {name!r}: {argument}", form)
    check_counts(f"schedule {name!r}: counts", counts)
    check_text("summary", summary)
    check_text("source", source)
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
            name, about, source, build, options, bubble, activations, parameters, counts
        )
        return function

    return decorate


def _origin(function: Callable[..., Any]) -> tuple[object, object]:
    """Return module and qualified name of a function; the same if its definition runs again."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def schedule_info(name: object) -> ScheduleInfo:
    """Return the registry's entry of a schedule, or raise `UnknownNameError`."""
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

    See Also
    --------
    pipesim.schedules : List the named schedules.
    pipesim.register : Add a schedule of your own to them.
    pipesim.Schedule.from_orders : Make a schedule without a name from your own orders.
    pipesim.lower : Turn a schedule into a task graph.

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
        Counts for which the closed forms are evaluated.
    **options
        Options such as ``n_chunks``, for the formulas that have them.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``; ``bubble_formula``, ``bubble`` (0..1);
        ``activations_formula``, ``activations`` (of the fullest device, in micro-batches through
        ``1 / p`` of the model); ``parameters_formula``, ``parameters`` (sets of weights);
        ``assumes``, ``counts``, ``options``, ``source``. A number is NaN if its formula fails, or
        if the schedule does not take these counts.

    See Also
    --------
    pipesim.schedule : Build one of these schedules.
    pipesim.register : Add a schedule of your own.
    pipesim.compare : Compare simulated schedules in a table.

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
