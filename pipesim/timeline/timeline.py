"""`Timeline`: when each task of a graph ran, simulated or measured; saved and loaded.

Its methods call functions of other files, such as `pipesim.timeline.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.pricing import launches
from pipesim.errors import TimelineError, check_text, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.issue_order import issue_times
from pipesim.ops import COMPUTE, Op
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import Ints, bincount, count
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.analysis.prediction_interval import prediction_interval
    from pipesim.analysis.why import TimelineWhy
    from pipesim.plot.accessors import TimelinePlot
    from pipesim.plot.page.save import item_to_html
    from pipesim.timeline.memory import TimelineMemory
    from pipesim.timeline.rates import mfu
    from pipesim.trace.chrome_export import timeline_to_chrome
    from pipesim.trace.chrome_import import timeline_from_chrome
    from pipesim.trace.measured_table import timeline_from_table
    from pipesim.utils.accessors import Accessor


Floats = NDArray[np.float64]


def align_collectives(graph: TaskGraph, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return times in which members of a collective start when its last member arrives (rule 9).

    Each member's measured start is its own arrival. It stays if a member has no time, as in another
    process.
    """
    start = start.copy()
    for row in range(len(graph.collectives)):
        members = graph.collectives[row]
        latest = start[members].max()
        if not np.isnan(latest):  # clocks of two processes differ slightly: keep start <= end
            start[members] = np.fmin(latest, end[members])
    return start, end


#: Seconds up to which sums and squares of times are finite.
LONGEST = 1e150
#: Columns that every saved timeline has.
COLUMNS = ("device", "stream", "op", "stage", "microbatch", "start", "end", "nbytes")


@checked_names
@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Start and end of every task of a graph. Time zero is when the step begins.

    Attributes
    ----------
    graph
        The graph of the tasks.
    start, end
        Seconds, shape ``(len(graph),)``; NaN for tasks that did not run, such as after a failure.
    sizes
        Bytes of each message, 0 for other tasks; None to take them from ``costs``. See `nbytes`.
    costs
        Costs that memory is computed with, or None.
    name
        Name in tables and plots; by default the graph's name.
    issued
        Seconds at which the host had issued each task (rule 7), shape ``(len(graph),)``, NaN if
        unknown. None to take them from the ``launch`` of ``costs``. See `issue_times`.
    limits
        Bytes that each device may hold, one number or one a device, kept as an array of shape
        ``(n_devices,)``. None to take the memory of a GPU from ``costs``. See `memory_limit`.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    >>> timeline
    <Timeline gpipe: 18 tasks, makespan 9 s, bubble 33.3%>
    >>> timeline.busy.tolist(), timeline.utilization.round(3).tolist()
    ([6.0, 6.0], [0.667, 0.667])
    """

    graph: TaskGraph
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    sizes: NDArray[np.float64] | None = None
    costs: Costs | None = None
    name: str = ""
    issued: NDArray[np.float64] | None = None
    limits: float | Sequence[float] | NDArray[np.float64] | None = None

    if TYPE_CHECKING:  # registered by the rooms that have them
        from_chrome = staticmethod(timeline_from_chrome)
        from_table = staticmethod(timeline_from_table)
        interval = prediction_interval
        memory = Accessor(TimelineMemory)
        mfu = mfu
        plot = Accessor(TimelinePlot)
        to_chrome = timeline_to_chrome
        to_html = item_to_html
        why = Accessor(TimelineWhy)

    def __post_init__(self) -> None:
        check_type("graph", self.graph, TaskGraph)
        for name in ("start", "end", "sizes", "issued"):
            column = getattr(self, name)
            if column is not None or name in ("start", "end"):
                object.__setattr__(self, name, _numbers(name, column, len(self.graph)))
        if self.costs is not None:
            check_type("costs", self.costs, Costs)
        if self.limits is not None:
            from pipesim.timeline.memory_limit import checked_memory_limit

            object.__setattr__(self, "limits", checked_memory_limit(self.limits, self.n_devices))
        if not check_text("name", self.name):
            object.__setattr__(self, "name", self.graph.name)
        for what, column in (("start", self.start), ("end", self.end)):
            for extreme in (np.fmin, np.fmax):  # both ignore NaN
                seconds = float(extreme.reduce(column, initial=0.0))
                if not abs(seconds) <= LONGEST:
                    raise TimelineError(
                        f"timeline {self.name!r}: the {what} of a task is {seconds} s; times must "
                        f"be finite and at most {LONGEST:g} s, so that their sums and squares are "
                        "finite too; NaN stands for a task that did not run"
                    )

    def __len__(self) -> int:
        return len(self.graph)

    def __repr__(self) -> str:
        share = "" if self.complete else f", only {int(self.ran.sum())} ran"
        return (
            f"<Timeline {self.name}: {len(self)} tasks{share}, makespan {self.makespan:.6g} s, "
            f"bubble {self.bubble_fraction:.1%}>"
        )

    @cached_property
    def nbytes(self) -> NDArray[np.float64]:
        """Bytes of each message, 0 for other tasks; shape ``(len(graph),)``."""
        if self.sizes is not None:
            return self.sizes
        return np.zeros(len(self)) if self.costs is None else self.costs.of(self.graph).nbytes

    @cached_property
    def issue_times(self) -> NDArray[np.float64]:
        """Seconds at which the host had issued each task; shape ``(len(graph),)``.

        They are `issued`, or else follow from the ``launch`` of `costs` (rule 7). Unknown times
        are 0, so that no delay is attributed to the host. `pipeexec` records `issued` for CPU
        workers only, since clocks of GPUs do not show the times of the host.
        """
        if self.issued is not None:
            return np.nan_to_num(self.issued, nan=0.0)
        if self.costs is None:
            return np.zeros(len(self))
        if self.costs.n_microbatches is not None:
            return issue_times(self.graph, self.costs.of(self.graph).launch)
        return issue_times(self.graph, launches(self.costs, self.graph), self.graph.kind)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.graph.n_devices

    @property
    def ran(self) -> NDArray[np.bool_]:
        """True for each task that ran to its end; shape ``(len(graph),)``."""
        return ~np.isnan(self.end)

    @property
    def complete(self) -> bool:
        """Whether every task ran."""
        return bool(self.ran.all())

    def check_complete(self, purpose: str) -> None:
        """Raise `TimelineError` if tasks did not run.

        Parameters
        ----------
        purpose
            First words of the error's advice, such as ``"replay needs"``; ``a whole one`` follows.
        """
        check_text("purpose", purpose)
        if not self.complete:
            raise TimelineError(
                f"timeline {self.name!r} is partial: {int((~self.ran).sum())} of {len(self)} tasks "
                f"did not run; {purpose} a whole one"
            )

    @property
    def makespan(self) -> float:
        """Seconds from time zero to the end of the last task; 0 if nothing ran."""
        latest = float(np.fmax.reduce(self.end, initial=np.nan))
        return 0.0 if np.isnan(latest) else latest

    @property
    def duration(self) -> NDArray[np.float64]:
        """Seconds of each task; shape ``(len(graph),)``, NaN for tasks that did not run."""
        return self.end - self.start

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """Seconds that each device computes (F, B, I, W, R, STEP); shape ``(n_devices,)``."""
        kinds = self.graph.kinds
        seconds = np.zeros(len(kinds))
        _add_durations(self.graph.kind, self.start, self.end, seconds)
        return bincount(kinds.device, seconds * kinds.is_op(COMPUTE), self.n_devices)

    @property
    def idle(self) -> NDArray[np.float64]:
        """Seconds of the makespan that each device does not compute; shape ``(n_devices,)``."""
        return self.makespan - self.busy

    @property
    def utilization(self) -> NDArray[np.float64]:
        """Share of the makespan that each device computes, 0..1; shape ``(n_devices,)``."""
        return self.busy / self.makespan if self.makespan else np.zeros(self.n_devices)

    @property
    def bubble_fraction(self) -> float:
        """Share of all devices' time that is not computing, 0..1; recompute counts as computing."""
        if not self.makespan:
            return 1.0
        # A quotient of sums: exact if times are whole numbers, as in the closed forms.
        return max(0.0, float(self.idle.sum()) / (self.n_devices * self.makespan))

    @property
    def throughput(self) -> float:
        """Micro-batches a second of all replicas; 0 if the makespan is 0."""
        kinds = self.graph.kinds
        first = np.flatnonzero((kinds.op == Op.F) & (kinds.stage == 0) & kinds.completes)
        n_microbatches = int(count(self.graph.kind, len(kinds))[first].sum())
        rate = n_microbatches / self.makespan if self.makespan else 0.0
        if math.isinf(rate):
            raise TimelineError(
                f"timeline {self.name!r} lasts {self.makespan} s: too short a time for a "
                "throughput; costs are in seconds"
            )
        return rate

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all replicas: `throughput` times the tokens of a micro-batch.

        Raises
        ------
        TimelineError
            If the costs have no workload.
        """
        from pipesim.timeline.rates import tokens_per_second

        return tokens_per_second(self)

    def with_name(self, name: str) -> Timeline:
        """Return the same timeline under another name.

        Parameters
        ----------
        name
            Name in tables and plots.

        Returns
        -------
        Timeline
            A copy with this name.
        """
        return replace(self, name=check_text("name", name))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The tasks that started, one row each, indexed by task id.

        Columns: those of `TaskGraph.frame`, and ``start``, ``end`` (s), ``nbytes`` (of messages).
        """
        frame = self.all_rows()
        return frame[frame["start"].notna()]

    def all_rows(self) -> pd.DataFrame:
        """Return all tasks, those that did not start included, one row each.

        Returns
        -------
        pandas.DataFrame
            The columns of `frame`, indexed by task id; ``start`` and ``end`` are NaN for tasks that
            did not run.

        Examples
        --------
        >>> import pipesim as ps
        >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(1, 2))
        >>> print(timeline.all_rows()[["op", "stage", "microbatch", "start", "end"]].head(2))
                  op  stage  microbatch  start  end
        task
        0          F      0           0    0.0  1.0
        1     SEND_F      0           0    1.0  1.0
        """
        frame = self.graph.frame
        for name in ("start", "end", "nbytes"):
            frame.insert(COLUMNS.index(name), name, getattr(self, name))
        return frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return all tasks as a PyCapsule of Arrow, with the columns of `save`.

        Programs that know the PyCapsule protocol read a timeline itself:
        ``polars.DataFrame(timeline)``, ``pandas.DataFrame.from_arrow(timeline)`` and
        ``pyarrow.table(timeline)``, which duckdb queries. pyarrow must be installed.
        """
        from pipesim.timeline.arrow_tables import arrow_table

        return arrow_table(self).__arrow_c_stream__(requested_schema)

    def save(self, path: Path | str) -> None:
        """Write all tasks with the columns of `frame`, whole or not at all.

        The file is Parquet if its name ends in ``.parquet``, else CSV. Parquet needs pyarrow
        (``pip install 'pipesim[parquet]'``), and has the settings of the graph and the checksum in
        its metadata, not in columns.

        Further columns:

        - ``issued``, if the times at which tasks were issued are recorded or follow from the
          ``launch`` of ``costs``;
        - ``hosts``, and each option of the graph that its tasks do not show, such as ``grad_sync``
          and ``weight_versions``, if it is not the default;
        - ``checksum``, whose first row has the checksum of the file.

        Parameters
        ----------
        path
            File to write; an existing one is replaced.
        """
        from pipesim.timeline import arrow_tables, tables

        if _is_parquet(path):
            arrow_tables.save(self, path)
        else:
            tables.save_csv(self, path)

    @classmethod
    def load(cls, path: Path | str, *, costs: Costs | None = None, name: str = "") -> Timeline:
        """Read a timeline that `save` wrote, including its graph.

        The file is Parquet if its name ends in ``.parquet``, else CSV. A CSV without a checksum is
        read too. Empty that column if you change a file by hand.

        Parameters
        ----------
        path
            File that `save` wrote.
        costs
            Costs of the timeline, which the file does not hold: memory, links and lower bounds
            follow from them. None for none.
        name
            Name of the timeline; by default the name of the file, without its suffix.

        Returns
        -------
        Timeline
            Times and graph of the file. Each number has all its bits.

        Raises
        ------
        TimelineError
            If the file is missing, lacks a column or has one twice, was truncated, has impossible
            values (naming the line), or was changed after it was written.

        Examples
        --------
        >>> import tempfile
        >>> import pipesim as ps
        >>> costs = ps.Costs(forward=1, backward=2)
        >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline.save(f"{folder}/step.csv")
        ...     ps.Timeline.load(f"{folder}/step.csv", costs=costs, name="again")
        <Timeline again: 18 tasks, makespan 9 s, bubble 33.3%>
        """
        from pipesim.timeline import arrow_tables, tables

        check_text("name", name)
        if costs is not None:
            check_type("costs", costs, Costs)
        if _is_parquet(path):
            return arrow_tables.load(path, costs=costs, name=name)
        return tables.load_csv(path, costs=costs, name=name)


def _is_parquet(path: object) -> bool:
    return isinstance(path, str | Path) and str(path).lower().endswith(".parquet")


def _numbers(name: str, column: object, n_tasks: int) -> NDArray[np.float64]:
    """Return a column as an array of floats, one a task."""
    try:
        values = np.asarray(column)
    except ValueError:  # a sequence of sequences of different lengths
        values = np.empty((0, 0), dtype=object)
    if values.shape != (n_tasks,):
        raise TimelineError(
            f"{name}: a timeline of {n_tasks} tasks got a column of shape {values.shape}; give one "
            "value a task"
        )
    if values.dtype.kind not in "fiu":
        raise TimelineError(f"{name} must be an array of numbers, got one of {values.dtype}")
    return values.astype(np.float64, copy=False)


@kernel()
def _add_durations(
    kind: Ints, start: NDArray[np.float64], end: NDArray[np.float64], seconds: NDArray[np.float64]
) -> None:
    """Add the duration of each task that ran to its kind's ``seconds``."""
    for task in range(len(kind)):
        if not np.isnan(end[task]):
            seconds[kind[task]] += end[task] - start[task]
