"""`Schedule`: each device's order of compute actions, and the registry of named schedules."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.capacity import check_schedule
from pipesim.errors import (
    ArgumentError,
    ScheduleError,
    UnknownNameError,
    check_count,
    check_name,
    suggestion,
)
from pipesim.ops import SCHEDULED, Action, Op
from pipesim.placement import Placement

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ClosedForm",
    "Schedule",
    "ScheduleInfo",
    "options_of_schedules",
    "register",
    "schedule",
    "schedule_info",
    "schedules",
]

#: Largest number of a stage or a micro-batch: columns have 32 bits.
_LARGEST = int(np.iinfo(np.int32).max)

DeviceOrder = tuple[Sequence[int] | NDArray[Any], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A placement and, device after device, the order of the compute actions (F, B, I, W).

    The actions are columns; `orders` shows them as `Action` objects. A schedule is not checked
    when it is made, so that a wrong one can be looked at: `pipesim.verify` checks it, and
    `pipesim.lower` calls that first.

    Attributes
    ----------
    name
        What tables and plots call it.
    placement
        Which device holds which stage.
    n_microbatches
        Number of micro-batches of a step.
    op, stage, microbatch
        One entry an action, the actions of device 0 first.
    ptr
        Actions ``ptr[d]`` to ``ptr[d + 1]`` are device ``d``'s; shape ``(n_devices + 1,)``.
    """

    name: str
    placement: Placement
    n_microbatches: int
    op: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ptr: NDArray[np.int64]

    @classmethod
    def from_columns(
        cls, name: str, placement: Placement, n_microbatches: int, devices: Iterable[DeviceOrder]
    ) -> Schedule:
        """Make a schedule from ``(ops, stages, microbatches)`` of each device."""
        types = (np.int8, np.int32, np.int32)
        columns = [
            [np.asarray(column, dtype) for column, dtype in zip(device, types, strict=True)]
            for device in devices
        ]
        op, stage, microbatch = (
            np.concatenate([device[k] for device in columns]) for k in range(3)
        )
        return cls(
            name=name,
            placement=placement,
            n_microbatches=check_count("n_microbatches", n_microbatches),
            op=op,
            stage=stage,
            microbatch=microbatch,
            ptr=np.cumsum([0, *(len(device[0]) for device in columns)], dtype=np.int64),
        )

    @classmethod
    def from_orders(
        cls,
        orders: Sequence[Sequence[Action | str]],
        *,
        placement: Placement | None = None,
        n_microbatches: int | None = None,
        name: str = "custom",
    ) -> Schedule:
        """Make a schedule from your own orders, one sequence of actions (or their text) a device.

        Where they are not given, the placement is read off the actions (a stage lies where it is
        first named) and the number of micro-batches is the largest one named, plus one.

        Raises
        ------
        ArgumentError
            If a text is no action.
        ScheduleError
            If an action is none that a schedule may list.
        """
        parsed = [[a if isinstance(a, Action) else Action.parse(a) for a in o] for o in orders]
        if not any(parsed):
            raise ScheduleError("a schedule needs at least one action; got none")
        for device, order in enumerate(parsed):
            for position, action in enumerate(order):
                if action.op not in SCHEDULED or action.microbatch is None:
                    raise ScheduleError(
                        f"device {device}, position {position}: {action} is not a compute action; "
                        f"a schedule lists {', '.join(op.name for op in sorted(SCHEDULED))} of "
                        "one micro-batch, and lower() adds the rest"
                    )
                if action.stage < 0 or action.microbatch < 0:
                    raise ScheduleError(
                        f"device {device}, position {position}: {action} is out of range; number "
                        "stages and micro-batches from 0"
                    )
                if max(action.stage, action.microbatch) > _LARGEST:
                    raise ScheduleError(
                        f"device {device}, position {position}: {action} is out of range; stages "
                        f"and micro-batches go from 0 to {_LARGEST}"
                    )
        if placement is None:
            home: dict[int, int] = {}
            for device, order in enumerate(parsed):
                for action in order:
                    home.setdefault(action.stage, device)
            missing = next(stage for stage in itertools.count() if stage not in home)
            if missing < len(home):
                raise ScheduleError(f"no action names stage {missing}; number stages from 0")
            placement = Placement([home[stage] for stage in range(len(home))])
        if len(parsed) != placement.n_devices:
            raise ScheduleError(
                f"got the orders of {len(parsed)} devices for a placement on "
                f"{placement.n_devices}; give one order a device"
            )
        if n_microbatches is None:
            n_microbatches = 1 + max(a.microbatch or 0 for order in parsed for a in order)
        columns = (
            ([a.op for a in o], [a.stage for a in o], [a.microbatch or 0 for a in o])
            for o in parsed
        )
        return cls.from_columns(name, placement, n_microbatches, columns)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.placement.n_devices

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def device(self) -> NDArray[np.int32]:
        """Device of each action."""
        return np.repeat(np.arange(self.n_devices, dtype=np.int32), np.diff(self.ptr))

    @cached_property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """One sequence of compute actions a device."""
        actions = [
            Action(stage, Op(op), microbatch)
            for stage, op, microbatch in zip(
                self.stage.tolist(), self.op.tolist(), self.microbatch.tolist(), strict=True
            )
        ]
        return tuple(tuple(actions[a:b]) for a, b in zip(self.ptr, self.ptr[1:], strict=False))

    def __len__(self) -> int:
        return len(self.op)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.placement == other.placement
            and self.n_microbatches == other.n_microbatches
            and all(
                np.array_equal(getattr(self, column), getattr(other, column))
                for column in ("op", "stage", "microbatch", "ptr")
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.n_devices} devices, {self.n_stages} stages, "
            f"{self.n_microbatches} micro-batches, {len(self)} actions>"
        )

    def grid(self, mark: tuple[int, int] | None = None, width: int = 12) -> str:
        """Return the orders as text, a row a device.

        Parameters
        ----------
        mark
            ``(device, position)`` of a cell to put in ``>...<``; rows are then cut to the cells
            within ``width`` positions of it.
        width
            Positions to each side of the marked cell.
        """
        columns = max((len(order) for order in self.orders), default=0)
        first, last = 0, columns
        if mark is not None:
            first, last = max(0, mark[1] - width), min(columns, mark[1] + width + 1)
        cells = [[str(action) for action in order[first:last]] for order in self.orders]
        if mark is not None:
            row = cells[mark[0]]
            row += [""] * (mark[1] - first + 1 - len(row))
            row[mark[1] - first] = f">{row[mark[1] - first]}<"
        pad = max((len(cell) for row in cells for cell in row), default=0)
        label = len(f"device {self.n_devices - 1}")
        lines = (
            f"{f'device {device}':<{label}} |{' ...' if first else ''} "
            + " ".join(f"{cell:<{pad}}" for cell in row).rstrip()
            + (" ..." if len(self.orders[device]) > last else "")
            for device, row in enumerate(cells)
        )
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        from pipesim.plot import schedule_html

        return schedule_html(self)


@dataclass(frozen=True)
class ClosedForm:
    """A formula, as text and as a function of ``(n_devices, n_microbatches)``."""

    text: str
    value: Callable[[int, int], float]


@dataclass(frozen=True)
class ScheduleInfo:
    """What the registry knows of a named schedule.

    Attributes
    ----------
    name, summary, source
        What it is called, what it does in a line, and the paper.
    bubble
        Idle share of the devices, 0..1, for stages of equal cost and free transfers.
    activations
        Most micro-batches whose activations any device holds, without recompute.
    build
        ``build(n_devices, n_microbatches, **options)`` makes the schedule.
    """

    name: str
    summary: str
    source: str
    bubble: ClosedForm
    activations: ClosedForm
    build: Callable[..., Schedule]

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that ``build`` takes beside the two counts."""
        return tuple(inspect.signature(self.build).parameters)[2:]

    def check_options(self, options: Iterable[str]) -> None:
        """Raise `UnknownNameError` for an option that ``build`` does not take."""
        for option in options:
            if option not in self.options:
                raise UnknownNameError(
                    f"schedule {self.name!r} takes no option {option!r}"
                    f"{suggestion(option, self.options)} "
                    f"(it takes: {', '.join(self.options) or 'none'})"
                )

    def make(self, n_devices: int, n_microbatches: int, **options: Any) -> Schedule:
        """Build the schedule; `schedule` says what of."""
        self.check_options(options)
        n_devices = check_count("n_devices", n_devices)
        n_microbatches = check_count("n_microbatches", n_microbatches)
        check_schedule(self.name, 2 * n_devices * n_microbatches)  # F and B, on each device
        return self.build(n_devices, n_microbatches, **options)


_REGISTRY: dict[str, ScheduleInfo] = {}


def register(
    name: str, *, summary: str, source: str, bubble: ClosedForm, activations: ClosedForm
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register the decorated builder under ``name``; see `ScheduleInfo` for the arguments."""

    def decorate(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        if name in _REGISTRY:
            raise ArgumentError(f"a schedule named {name!r} is registered already")
        _REGISTRY[name] = ScheduleInfo(name, summary, source, bubble, activations, build)
        return build

    return decorate


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


def schedules(n_devices: int = 4, n_microbatches: int = 8) -> pd.DataFrame:
    """List the named schedules, with their closed forms as text and as numbers.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``, ``bubble_formula``, ``bubble`` (0..1),
        ``activations_formula``, ``activations`` (micro-batches held by the fullest device),
        ``options``, ``source``. A number is NaN where its formula fails for these counts.
    """
    import pandas as pd

    counts = check_count("n_devices", n_devices), check_count("n_microbatches", n_microbatches)
    rows = {
        info.name: {
            "summary": info.summary,
            "bubble_formula": info.bubble.text,
            "bubble": _value(info.bubble, *counts),
            "activations_formula": info.activations.text,
            "activations": _value(info.activations, *counts),
            "options": ", ".join(info.options),
            "source": info.source,
        }
        for info in _REGISTRY.values()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("schedule")


def _value(form: ClosedForm, n_devices: int, n_microbatches: int) -> float:
    """Return a formula's number, or NaN where it has none; one schedule is not to hide the rest."""
    try:
        return form.value(n_devices, n_microbatches)
    except Exception:  # whatever a schedule of the user's own may raise
        return math.nan
