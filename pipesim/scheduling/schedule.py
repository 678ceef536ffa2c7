"""`Schedule`: each device's order of compute actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    ScheduleError,
    check_count,
    check_name,
    check_text,
    check_type,
    number,
)
from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.orders import (
    DeviceOrder,
    action_columns,
    checked_columns,
    grid_text,
    infer_placement,
    join_overlapped,
    parse_orders,
    single_actions,
)
from pipesim.scheduling.placement import Placement
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from pipesim.plot.page.save import item_to_html


def _check_slices(numbers: Ints, n_slices: int) -> None:
    """Raise if an order takes the slices of a sequence apart."""
    slices = numbers.reshape(-1, n_slices)
    apart = (slices[:, :1] % n_slices != 0) | (slices != slices[:, :1] + np.arange(n_slices))
    for sequence in np.flatnonzero(apart.any(axis=1))[:1].tolist():
        raise ScheduleError(
            f"order has {slices[sequence].tolist()} in place of sequence {sequence}: a sequence is "
            f"{n_slices} slices, which stay together and in order; permute sequences"
        )


def _permutation(order: object, m: int) -> Ints:
    """Return an order as an array of whole numbers, checked to name each micro-batch once."""
    advice = f"give each micro-batch from 0 to {m - 1} once"
    if not isinstance(order, Sequence | np.ndarray) or isinstance(order, str | bytes):
        raise ArgumentError(f"order must be a sequence of micro-batches, got {order!r:.60}")
    values: list[Any] = list(order)
    if len(values) != m:
        raise ArgumentError(
            f"order has {len(values)} entries, but the schedule has {m} micro-batches; {advice}"
        )
    is_listed = np.zeros(m, dtype=bool)
    for place, value in enumerate(values):
        index = number(value)
        if index is None or not 0 <= index < m or index != int(index):
            raise ArgumentError(f"order has {value!r:.60} at position {place}; {advice}")
        if is_listed[int(index)]:
            raise ArgumentError(f"order has micro-batch {int(index)} twice; {advice}")
        is_listed[int(index)] = True
    return np.array(values).astype(np.int64)


def _check_groups(numbers: Ints, group: NDArray[Any], name: str, reason: str) -> None:
    """Raise if an order moves a micro-batch to another group, such as a path."""
    moved = np.flatnonzero(group[numbers] != group)
    if len(moved):
        place, microbatch = int(moved[0]), int(numbers[moved[0]])
        own = np.flatnonzero(group == group[place])
        raise ScheduleError(
            f"order has micro-batch {microbatch} of {name} {group[microbatch]} at position {place} "
            f"of {name} {group[place]}; {reason}, so give one of {own[0]} to {own[-1]} there"
        )


#: Which weights the F of a micro-batch sees; see `Schedule`.
Versions = Literal["one", "stashed", "double_buffered"]
VERSIONS: tuple[Versions, ...] = ("one", "stashed", "double_buffered")


class Recipe(NamedTuple):
    """Name and options with which the registry builds a schedule."""

    name: str
    options: Mapping[str, Any]


@checked_names
@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A placement, and the order of the compute actions (F, B, I, W) of each device.

    A schedule may also list recomputes (R), each between its F and its backward, to fix their
    places in the order.

    The actions are stored as columns; `orders` returns them as `Action` objects. A schedule is not
    checked when it is created, so that a wrong one can be inspected. `pipesim.verify` checks it,
    and `pipesim.lower` calls `verify` first.

    Attributes
    ----------
    name
        Name in tables and plots.
    placement
        Which device holds which stage.
    n_microbatches
        Number of micro-batches of a step.
    op, stage, microbatch
        Operation, stage and micro-batch of each action, the actions of device 0 first.
    ptr
        Actions ``ptr[d]`` to ``ptr[d + 1]`` are device ``d``'s; shape ``(n_devices + 1,)``.
    overlapped
        Marks each F that runs overlapped with the B listed right after it; None if none does.
    n_batches
        Number of mini-batches, which have equally many micro-batches. An optimizer step follows
        each mini-batch.
    weight_versions
        - ``"one"``: a stage has one set of weights, and a step is one mini-batch.
        - ``"stashed"``: F sees the newest weights, which are kept for its backward (PipeDream,
          arXiv 1806.03377, section 3.3).
        - ``"double_buffered"``: F of mini-batch ``t`` sees the weights after the step of
          mini-batch ``t - 2``, so that a stage never has more than two versions (PipeDream-2BW,
          arXiv 2006.09503, 3.1).
    n_slices
        Number of slices of a sequence. With ``n_slices=k``, micro-batch ``s * k + j`` is slice
        ``j`` of sequence ``s``. Its F needs the F of slice ``j - 1`` on its stage, and its B the B
        of slice ``j + 1``. See `with_slices`.
    recipe
        Name and options with which `pipesim.schedule` built it, whatever its name is now; None for
        your own orders. It is not compared.

    Examples
    --------
    >>> import pipesim as ps
    >>> orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    >>> schedule = ps.Schedule.from_orders(orders)
    >>> schedule
    <Schedule custom: 2 devices, 2 stages, 2 micro-batches, 8 actions>
    >>> schedule == ps.schedule("1f1b", n_devices=2, n_microbatches=2)
    True
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
    recipe: Recipe | None = None
    n_slices: int = 1

    if TYPE_CHECKING:  # registered by the rooms that have them
        to_html = item_to_html

    @classmethod
    def from_columns(
        cls, name: str, placement: Placement, n_microbatches: int, devices: Iterable[DeviceOrder]
    ) -> Schedule:
        """Make a schedule from ``(ops, stages, microbatches)`` of each device.

        A fourth column marks each F that is overlapped with the B after it.

        Parameters
        ----------
        name
            Name in tables and plots.
        placement
            Which device holds which stage.
        n_microbatches
            Number of micro-batches of a step.
        devices
            For each device, columns of numbers of equal length: operations (`pipesim.Op`), stages
            and micro-batches of its actions, in order.

        Returns
        -------
        Schedule
            The orders, not verified.

        Examples
        --------
        One device that runs F and B of stage 0 and micro-batch 0:

        >>> import pipesim as ps
        >>> columns = [([ps.Op.F, ps.Op.B], [0, 0], [0, 0])]
        >>> print(ps.Schedule.from_columns("one", ps.Placement.linear(1), 1, columns).grid())
        device 0 | 0F0 0B0
        """
        columns = checked_columns(devices)
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
        """Make a schedule from your own orders, one sequence of actions (or their texts) a device.

        Parameters
        ----------
        orders
            For each device, its actions in order: `Action`, `Overlapped`, or texts such as
            ``"0F0"``.
        placement
            Which device holds which stage. By default it is inferred from the actions: a stage lies
            on the first device that lists it.
        n_microbatches
            Number of micro-batches of a step; by default the largest one listed, plus one.
        name
            Name in tables and plots.

        Returns
        -------
        Schedule
            The orders, not verified.

        Raises
        ------
        ScheduleError
            If a schedule may not list an action of this kind. If the placement is inferred: also
            if a device lists nothing, or no stage that is not on an earlier device.

        Examples
        --------
        >>> import pipesim as ps
        >>> schedule = ps.Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
        >>> print(schedule.grid())
        device 0 | 0F0 0B0
        device 1 | 1F0 1B0
        >>> ps.simulate(ps.lower(schedule), ps.Costs(forward=1, backward=2)).makespan
        6.0
        """
        parsed = parse_orders(orders)
        if not any(parsed):
            raise ScheduleError("a schedule needs at least one action; got none")
        if placement is None:
            placement = infer_placement(parsed)
        check_type("placement", placement, Placement)
        if len(parsed) != placement.n_devices:
            raise ScheduleError(
                f"got the orders of {len(parsed)} devices for a placement on "
                f"{placement.n_devices}; give one order a device"
            )
        singles = [list(single_actions(order)) for order in parsed]
        if n_microbatches is None:
            n_microbatches = 1 + max(a.microbatch or 0 for order in singles for a, _ in order)
        return cls.from_columns(name, placement, n_microbatches, map(action_columns, singles))

    @classmethod
    def load(cls, path: Path | str, name: str | None = None) -> Schedule:
        """Read a schedule from a file, torch's CSV or a grid; the content decides which.

        - The CSV has a row a rank (device) and a cell an action, as torch.distributed.pipelining
          writes it. Empty cells are skipped.
        - A grid is the text that `grid` returns, with or without the labels.

        Messages, reductions of gradients and FSDP's ``UNSHARD`` and ``RESHARD`` may be listed and
        are left out: `pipesim.lower` adds the tasks that are simulated. The placement and the
        number of micro-batches are inferred from the actions. If stages lie on two devices each,
        one half of the micro-batches must use one device and the other half the other.

        `pipesim.verify` checks the schedule, like any other. A checksum that `save` wrote is
        checked; delete it from a file that you change by hand.

        Parameters
        ----------
        path
            The file, UTF-8.
        name
            Name of the schedule; by default the name of the file, without its suffix.

        Returns
        -------
        Schedule
            The orders, not verified.

        Raises
        ------
        ScheduleError
            - If the file cannot be read or has another form.
            - If it has a cell that is no action, or a SEND without its RECV, naming row and column
              (from 1).
            - If it was changed after it was written.

        Examples
        --------
        >>> import tempfile
        >>> import pipesim as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.schedule("1f1b", 2, 2).save(f"{folder}/mine.csv")
        ...     ps.Schedule.load(f"{folder}/mine.csv")
        <Schedule mine: 2 devices, 2 stages, 2 micro-batches, 8 actions>
        """
        from pipesim.scheduling.files import read_schedule

        if name is not None:
            check_text("name", name)
        return read_schedule(path, name)

    def save(self, path: Path | str) -> None:
        """Write the schedule to a file that `load` reads: a grid as ``.txt``, else torch's CSV.

        torch.distributed.pipelining reads the CSV as ``compute_only``. `TaskGraph.save_torch_csv`
        writes it with messages. One cell has a checksum after its action, which torch ignores; in
        a grid the checksum is the last word.

        Parameters
        ----------
        path
            File to write; an existing one is replaced.

        Raises
        ------
        ScheduleError
            If there are several mini-batches, weight versions, slices of a sequence, edges of
            stages, or paths that share stages or are more than two, which neither form can hold.
            For a CSV, if there are recomputes, which only a grid can hold.
        """
        from pipesim.scheduling.files import write_schedule

        write_schedule(self, path)

    def with_name(self, name: str) -> Schedule:
        """Return the same schedule under another name.

        Parameters
        ----------
        name
            Name in tables and plots; graphs and timelines of the schedule have it too.

        Returns
        -------
        Schedule
            A copy with this name.
        """
        return replace(self, name=check_text("name", name))

    def with_updates(self, n_batches: int, weight_versions: Versions) -> Schedule:
        """Return the same orders, divided into mini-batches that each update the weights.

        Parameters
        ----------
        n_batches
            Number of mini-batches, a divisor of the number of micro-batches. An optimizer step
            follows each.
        weight_versions
            ``"one"``, ``"stashed"`` or ``"double_buffered"``, as the attribute.

        Returns
        -------
        Schedule
            A copy with these mini-batches and weight versions.

        Examples
        --------
        Four micro-batches, two a mini-batch (PipeDream):

        >>> import pipesim as ps
        >>> schedule = ps.schedule("1f1b", n_devices=2, n_microbatches=4).with_updates(2, "stashed")
        >>> graph = ps.lower(schedule)
        >>> int(graph.is_op(frozenset({ps.Op.STEP})).sum())  # two on each of two stages
        4
        """
        check_name("weight_versions", weight_versions, VERSIONS)
        n_batches = check_count("n_batches", n_batches)
        if self.n_microbatches % n_batches:
            raise ScheduleError(
                f"n_batches={n_batches} mini-batches cannot share {self.n_microbatches} "
                "micro-batches evenly; give a divisor"
            )
        return self._ordered_anew(n_batches=n_batches, weight_versions=weight_versions)

    def with_slices(self, n_slices: int) -> Schedule:
        """Return the same orders, with micro-batches that are slices of sequences.

        A slice sees the keys and values of the earlier slices of its sequence, as causal attention
        needs them (Seq1F1B, arXiv 2406.03488, section 3). So its F needs the F of the slice before
        on the same stage, and its B the B of the slice after.

        Parameters
        ----------
        n_slices
            Number of slices of a sequence; 1 for none. `n_microbatches` counts slices.

        Returns
        -------
        Schedule
            A copy whose micro-batches are slices.
        """
        if self.n_microbatches % check_count("n_slices", n_slices):
            raise ScheduleError(
                f"n_slices={n_slices} does not divide the {self.n_microbatches} micro-batches of "
                f"schedule {self.name!r}: each is one slice; give a divisor"
            )
        return self._ordered_anew(n_slices=int(n_slices))

    def with_microbatch_order(self, order: Sequence[int] | NDArray[Any]) -> Schedule:
        """Return the same schedule with another order of micro-batches.

        Where this schedule runs micro-batch ``k``, the result runs ``order[k]``, in all stages and
        operations. Before costs, micro-batches are alike, so that the result is as valid. For
        costs that differ between micro-batches, it takes as long as this schedule would with
        ``order[k]`` numbered ``k``. Reductions after every k micro-batches (``grad_sync`` of
        `pipesim.lower`) still take them by their numbers.

        Parameters
        ----------
        order
            A permutation: each micro-batch once. Micro-batches keep their path of a placement with
            several paths, and their mini-batch.

        Returns
        -------
        Schedule
            A copy with this order; the schedule itself if the order is that of the numbers.

        Examples
        --------
        1F1B, the short micro-batches first:

        >>> import numpy as np
        >>> import pipesim as ps
        >>> seconds = [2.0, 1.0, 3.0]
        >>> print(ps.schedule("1f1b", 2, 3).with_microbatch_order(np.argsort(seconds)).grid())
        device 0 | 0F1 0F0 0B1 0F2 0B0 0B2
        device 1 | 1F1 1B1 1F0 1B0 1F2 1B2
        """
        m = self.n_microbatches
        numbers, places = _permutation(order, m), np.arange(m)
        path = self.placement.path_of(m)
        _check_groups(numbers, path, "path", "paths take the micro-batches that they took before")
        batch = places * self.n_batches // m
        _check_groups(numbers, batch, "mini-batch", "a step follows each mini-batch")
        _check_slices(numbers, self.n_slices)
        if np.array_equal(numbers, places):
            return self
        microbatch = numbers[self.microbatch].astype(np.int32)
        return self._ordered_anew(microbatch=microbatch, recipe=None)

    def _ordered_anew(self, **changes: Any) -> Schedule:
        """Return the schedule with other fields; subclasses drop the time that they predict."""
        return replace(self, **changes)

    @cached_property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.placement.n_devices

    @cached_property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def device(self) -> NDArray[np.int32]:
        """Device of each action."""
        return np.repeat(np.arange(self.n_devices, dtype=np.int32), np.diff(self.ptr))

    @cached_property
    def path(self) -> NDArray[np.int64]:
        """Path of each action's micro-batch through the placement."""
        return self.placement.path_of(self.n_microbatches)[self.microbatch]

    @cached_property
    def orders(self) -> tuple[tuple[Action | Overlapped, ...], ...]:
        """The compute actions of each device, one sequence a device."""
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
        return tuple(tuple(join_overlapped(actions[a:b], marks[a:b])) for a, b in bounds)

    def place(self, index: int) -> tuple[int, int]:
        """Return the device of the action at ``index`` of the columns, and its position there.

        Parameters
        ----------
        index
            Index of an action in the columns `op`, `stage` and `microbatch`.

        Returns
        -------
        tuple of int
            Device, and position in its order. An overlapped pair has one position.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.schedule("1f1b", 2, 2).place(5)  # four actions of device 0 come first
        (1, 1)
        """
        if check_count("index", index, 0) >= len(self):
            raise ArgumentError(f"there is no action {index}: the schedule has {len(self)}, from 0")
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
            and self.n_slices == other.n_slices
            and all(
                np.array_equal(getattr(self, column), getattr(other, column))
                for column in ("op", "stage", "microbatch", "ptr", "overlapped")
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        slices = f" ({self.n_slices} slices a sequence)" if self.n_slices > 1 else ""
        return (
            f"<Schedule {self.name}: {self.n_devices} devices, {self.n_stages} stages, "
            f"{self.n_microbatches} micro-batches{slices}, {len(self)} actions>"
        )

    def grid(self, mark: tuple[int, int] | None = None, width: int = 12) -> str:
        """Return the orders as text, a row a device.

        Parameters
        ----------
        mark
            ``(device, position)`` of a cell to put in ``>...<``; rows are then cut to the cells
            within ``width`` positions of it.
        width
            Number of positions to show on each side of the marked cell.

        Returns
        -------
        str
            One line a device.

        Examples
        --------
        >>> import pipesim as ps
        >>> schedule = ps.schedule("1f1b", n_devices=2, n_microbatches=2)
        >>> print(schedule.grid())
        device 0 | 0F0 0F1 0B0 0B1
        device 1 | 1F0 1B0 1F1 1B1
        >>> print(schedule.grid(mark=(1, 2), width=1))
        device 0 | ... 0F1 0B0   0B1
        device 1 | ... 1B0 >1F1< 1B1
        """
        return grid_text(self.orders, mark, width)


# Schedules of some of the actions of another schedule, in its order


def kept_actions(schedule: Schedule, kept: NDArray[np.bool_]) -> Schedule:
    """Return the schedule with the actions that ``kept`` marks, in the same order.

    An F whose overlapped B is left out runs alone.
    """
    n_before = np.concatenate([[0], np.cumsum(kept)])
    overlapped = schedule.overlapped
    if overlapped is not None:
        pairs = overlapped & np.append(kept[1:], False)
        overlapped = pairs[kept] if pairs[kept].any() else None
    return replace(
        schedule,
        op=schedule.op[kept],
        stage=schedule.stage[kept],
        microbatch=schedule.microbatch[kept],
        ptr=n_before[schedule.ptr],
        overlapped=overlapped,
    )


def forward_actions(schedule: Schedule) -> Schedule:
    """Return the F of a schedule, as one mini-batch with one version of the weights.

    Each device keeps the order of its F. The order can run if that of the schedule can.
    """
    forwards = kept_actions(schedule, schedule.op == Op.F)
    return replace(forwards, n_batches=1, weight_versions="one")


def fewer_microbatches(schedule: Schedule, n_microbatches: int) -> Schedule:
    """Return a schedule with fewer micro-batches, as one mini-batch.

    The first micro-batches of each path are kept. They are numbered anew, so that each path has the
    numbers that `Placement.path_of` gives it.

    >>> import pipesim as ps
    >>> print(fewer_microbatches(ps.schedule("gpipe", 2, 3), 2).grid())
    device 0 | 0F0 0F1 0B1 0B0
    device 1 | 1F0 1F1 1B1 1B0
    """
    n_paths, most = schedule.placement.n_paths, schedule.n_microbatches
    if not n_paths <= check_count("n_microbatches", n_microbatches) <= most:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {most} micro-batches, and its placement {n_paths} "
            f"paths; it cannot run with {n_microbatches} micro-batches: give {n_paths} to {most}"
        )
    if n_microbatches % schedule.n_slices:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_slices} slices a sequence; it cannot run "
            f"with {n_microbatches} micro-batches: give a multiple of {schedule.n_slices}"
        )
    old, new = (schedule.placement.path_of(n) for n in (most, n_microbatches))
    number = np.full(most, -1, dtype=schedule.microbatch.dtype)
    for path in range(n_paths):
        targets = np.flatnonzero(new == path)
        number[np.flatnonzero(old == path)[: len(targets)]] = targets
    fewer = kept_actions(schedule, number[schedule.microbatch] >= 0)
    return replace(
        fewer,
        n_microbatches=n_microbatches,
        microbatch=number[fewer.microbatch],
        n_batches=1,
        weight_versions="one",
        recipe=None,
    )
