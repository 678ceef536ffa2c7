"""`Schedule`: each device's order of compute actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    ScheduleError,
    check_count,
    check_name,
    check_text,
    check_type,
)
from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.parse_orders import listed_actions
from pipesim.scheduling.placement import Placement

__all__ = ["VERSIONS", "DeviceOrder", "Schedule", "Versions"]

#: ``(ops, stages, microbatches)`` of a device, and where there are some, which overlap.
DeviceOrder = tuple[Sequence[int] | NDArray[Any], ...]
#: Which weights the F of a micro-batch sees; see `Schedule`.
Versions = Literal["one", "stashed", "double_buffered"]
VERSIONS: tuple[Versions, ...] = ("one", "stashed", "double_buffered")


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A placement and, device after device, the order of the compute actions (F, B, I, W).

    It may list recomputes (R), each between its F and its backward, to say where they come.

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
    overlapped
        Marks each F that runs overlapped with the B listed right after it; None if none does.
    n_batches
        Number of mini-batches, of as many micro-batches each. After each comes an optimizer step.
    weight_versions
        ``"one"``: a stage has one set of weights, and a step is one mini-batch. ``"stashed"``: F
        sees the newest weights, which are kept for its backward (PipeDream, arXiv 1806.03377,
        section 3.3). ``"double_buffered"``: F of mini-batch ``t`` sees those of the step after
        ``t - 2``, so that there are never more than two (PipeDream-2BW, arXiv 2006.09503, 3.1).
    """

    name: str
    placement: Placement
    n_microbatches: int
    op: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ptr: NDArray[np.int64]
    overlapped: NDArray[np.bool_] | None = None
    n_batches: int = 1
    weight_versions: Versions = "one"

    @classmethod
    def from_columns(
        cls, name: str, placement: Placement, n_microbatches: int, devices: Iterable[DeviceOrder]
    ) -> Schedule:
        """Make a schedule from ``(ops, stages, microbatches)`` of each device.

        A fourth column marks each F that is overlapped with the B after it.

        Raises
        ------
        ArgumentError
            For columns that are no numbers or differ in length, naming the device, and for
            arguments of another type.
        """
        columns = _columns(devices)
        op, stage, microbatch, *overlapped = (
            np.concatenate([device[k] for device in columns]) for k in range(len(columns[0]))
        )
        return cls(
            name=check_text("name", name),
            placement=check_type("placement", placement, Placement),
            n_microbatches=check_count("n_microbatches", n_microbatches),
            op=op,
            stage=stage,
            microbatch=microbatch,
            ptr=np.cumsum([0, *(len(device[0]) for device in columns)], dtype=np.int64),
            overlapped=overlapped[0] if overlapped and overlapped[0].any() else None,
        )

    @classmethod
    def from_orders(
        cls,
        orders: Sequence[Sequence[Action | Overlapped | str]],
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
            If what is listed is no action, naming device and position.
        ScheduleError
            If an action is none that a schedule may list; where the placement is read off, if a
            device lists nothing, or no stage of its own.
        """
        parsed = listed_actions(orders)
        if not any(parsed):
            raise ScheduleError("a schedule needs at least one action; got none")
        singles = [list(_singles(order)) for order in parsed]
        if placement is None:
            placement = _read_off(singles)
        check_type("placement", placement, Placement)
        if len(parsed) != placement.n_devices:
            raise ScheduleError(
                f"got the orders of {len(parsed)} devices for a placement on "
                f"{placement.n_devices}; give one order a device"
            )
        if n_microbatches is None:
            n_microbatches = 1 + max(a.microbatch or 0 for order in singles for a, _ in order)
        columns = (
            (
                [a.op for a, _ in o],
                [a.stage for a, _ in o],
                [a.microbatch or 0 for a, _ in o],
                [overlapped for _, overlapped in o],
            )
            for o in singles
        )
        return cls.from_columns(name, placement, n_microbatches, columns)

    @classmethod
    def load(cls, path: Path | str, name: str | None = None) -> Schedule:
        """Read a schedule from a file: torch's CSV, or a grid.

        Told apart by what is in it. The CSV has a row a rank (device) and a cell an action, as
        torch.distributed.pipelining writes it; empty cells are skipped. A grid is what `grid`
        prints, with or without the labels. Messages, reductions of gradients and FSDP's
        ``UNSHARD`` and ``RESHARD`` may be listed and are left out: `pipesim.lower` adds what is
        simulated. Where the stages lie and how many micro-batches there are is read off the
        actions; if stages lie on two devices each, one half of the micro-batches must take the one
        and the other half the other. Like any schedule, it is checked by `pipesim.verify`. A
        checksum that `save` wrote is checked; delete it from a file that you change by hand.

        Parameters
        ----------
        path
            The file, UTF-8.
        name
            Of the schedule; by default that of the file, without its suffix.

        Raises
        ------
        ArgumentError
            For something that is no path.
        ScheduleError
            If the file cannot be read, is of another form, or has a cell that is no action, naming
            row and column (from 1), or a SEND without its RECV; or if it was changed after it was
            written.
        CapacityError
            For a file that is too large for memory.
        """
        from pipesim.scheduling.files import read_schedule

        if name is not None:
            check_text("name", name)
        return read_schedule(path, name)

    def save(self, path: Path | str) -> None:
        """Write the schedule to a file that `load` reads: a grid as ``.txt``, else torch's CSV.

        torch.distributed.pipelining reads the CSV as ``compute_only``; with messages,
        `TaskGraph.save_torch_csv` writes it. One cell has a checksum behind its action, which torch
        passes over; in a grid it is the last word.

        Raises
        ------
        ArgumentError
            If the file cannot be written.
        ScheduleError
            If there are several mini-batches or weight versions: the forms have no place for them;
            nor has torch's CSV for recomputes, which a grid has.
        """
        from pipesim.scheduling.files import write_schedule

        write_schedule(self, path)

    def with_name(self, name: str) -> Schedule:
        """Return the same schedule under another name."""
        return replace(self, name=check_text("name", name))

    def with_updates(self, n_batches: int, weight_versions: Versions) -> Schedule:
        """Return the same orders, as several mini-batches between which weights are updated.

        Raises
        ------
        ArgumentError
            If it is unknown which weights F is to see.
        ScheduleError
            If the micro-batches cannot be dealt evenly to so many mini-batches.
        """
        check_name("weight_versions", weight_versions, VERSIONS)
        n_batches = check_count("n_batches", n_batches)
        if self.n_microbatches % n_batches:
            raise ScheduleError(
                f"n_batches={n_batches} mini-batches cannot share {self.n_microbatches} "
                "micro-batches evenly; give a divisor"
            )
        return replace(self, n_batches=n_batches, weight_versions=weight_versions)

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
    def path(self) -> NDArray[np.int64]:
        """Path that each action's micro-batch takes through the placement."""
        return self.placement.path_of(self.n_microbatches)[self.microbatch]

    @cached_property
    def orders(self) -> tuple[tuple[Action | Overlapped, ...], ...]:
        """One sequence of compute actions a device."""
        actions = [
            Action(stage, Op(op), microbatch)
            for stage, op, microbatch in zip(
                self.stage.tolist(), self.op.tolist(), self.microbatch.tolist(), strict=True
            )
        ]
        bounds = list(itertools.pairwise(self.ptr.tolist()))
        if self.overlapped is None:
            return tuple(tuple(actions[a:b]) for a, b in bounds)
        marks = self.overlapped.tolist()
        return tuple(tuple(_joined(actions[a:b], marks[a:b])) for a, b in bounds)

    def place(self, index: int) -> tuple[int, int]:
        """Return device, and position in its order, of the action at ``index`` of the columns.

        Raises
        ------
        ArgumentError
            If there is no such action.
        """
        if check_count("index", index, 0) >= len(self):
            raise ArgumentError(f"index {index} is of no action: there are {len(self)}, from 0")
        device = int(np.searchsorted(self.ptr, index, side="right")) - 1
        first = int(self.ptr[device])
        merged = 0 if self.overlapped is None else int(self.overlapped[first:index].sum())
        return device, index - first - merged

    def __len__(self) -> int:
        return len(self.op)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.placement == other.placement
            and self.n_microbatches == other.n_microbatches
            and self.n_batches == other.n_batches
            and self.weight_versions == other.weight_versions
            and all(
                np.array_equal(getattr(self, column), getattr(other, column))
                for column in ("op", "stage", "microbatch", "ptr", "overlapped")
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

        Raises
        ------
        ArgumentError
            For a mark on no device, or at no position from 0, and a width that is no whole number.
        """
        check_count("width", width, 0)
        mark = None if mark is None else _checked_mark(mark, self.n_devices)
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
        from pipesim.plot.html import schedule_html

        return schedule_html(self)


def _columns(devices: Iterable[DeviceOrder]) -> list[list[NDArray[Any]]]:
    """Return the columns of each device as arrays of their types, all of one length."""
    types = (np.int8, np.int32, np.int32, np.bool_)
    wanted = "devices must be a sequence of columns (ops, stages, microbatches) of each device"
    if not isinstance(devices, Iterable):
        raise ArgumentError(f"{wanted}, got {devices!r:.60} ({type(devices).__name__})")
    made: list[list[NDArray[Any]]] = []
    for device, given in enumerate(devices):
        try:
            columns: list[NDArray[Any]] = [
                np.asarray(c, t) for c, t in zip(given, types, strict=False)
            ]
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"{wanted}; of device {device} got {given!r:.60}: {error}"
            ) from None
        if (
            len(columns) < 3
            or len({column.shape for column in columns}) > 1
            or columns[0].ndim != 1
        ):
            raise ArgumentError(
                f"{wanted}, each with one number an action; of device {device} got {given!r:.60}"
            )
        made.append(columns)
    if not made:
        raise ArgumentError(f"{wanted}, got none; give at least one device")
    return made


def _checked_mark(mark: object, n_devices: int) -> tuple[int, int]:
    """Return the device and the position of a cell."""
    if not isinstance(mark, (tuple, list)) or len(mark) != 2:
        raise ArgumentError(f"mark must be (device, position) of a cell, got {mark!r:.60}")
    device = check_count("device of mark", mark[0], 0)
    position = check_count("position of mark", mark[1], 0)
    if device >= n_devices:
        raise ArgumentError(f"mark names device {device}; there are {n_devices}, from 0")
    return device, position


def _singles(order: Sequence[Action | Overlapped]) -> Iterator[tuple[Action, bool]]:
    """Yield the actions of an order, and whether each is overlapped with the next."""
    for listed in order:
        if isinstance(listed, Overlapped):
            yield from ((listed.forward, True), (listed.backward, False))
        else:
            yield listed, False


def _read_off(orders: Sequence[Sequence[tuple[Action, bool]]]) -> Placement:
    """Return the placement in which each stage lies where it is first named."""
    home: dict[int, int] = {}
    for device, order in enumerate(orders):
        for action, _ in order:
            home.setdefault(action.stage, device)
    missing = next(stage for stage in itertools.count() if stage not in home)
    if missing < len(home):
        raise ScheduleError(f"no action names stage {missing}; number stages from 0")
    for device, order in enumerate(orders):
        if not order:
            raise ScheduleError(
                f"device {device} lists nothing; list at least one action, or leave the device out"
            )
        if device not in home.values():
            raise ScheduleError(
                f"device {device} has no stage of its own: what it lists is of stages that lie on "
                "devices before it; give each stage one device"
            )
    return Placement([home[stage] for stage in range(len(home))])


def _joined(actions: list[Action], overlapped: list[bool]) -> Iterator[Action | Overlapped]:
    """Yield the actions of a device; those that overlap as one."""
    position = 0
    while position < len(actions):
        if overlapped[position] and position + 1 < len(actions):
            yield Overlapped(actions[position], actions[position + 1])
            position += 2
        else:
            yield actions[position]
            position += 1
