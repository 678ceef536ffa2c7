"""`Timeline`: when each task of a graph ran, simulated or measured; saved and loaded.

Its methods call functions of other files, such as `pipesim.timeline.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import TimelineError, check_flag, check_text, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.issue_order import issue_times
from pipesim.ops import COMPUTE, Op
from pipesim.utils.csr import Ints, bincount, count
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pipesim.costs.cost_fields import Workload


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

    def _repr_html_(self) -> str:
        from pipesim.plot.html import timeline_html

        return timeline_html(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from pipesim.plot.html import mimebundle

        return mimebundle(self)

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
        launch = self.costs.per_stage("launch", self.graph.n_stages)
        return issue_times(self.graph, launch[self.graph.stage])

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
    def peak_memory(self) -> NDArray[np.float64]:
        """Most bytes that each device holds (rule 10); shape ``(n_devices,)``.

        Raises
        ------
        TimelineError
            If the timeline has no costs, such as after loading it without.
        """
        from pipesim.timeline.memory import peak_memory

        return peak_memory(self)

    @property
    def memory_limit(self) -> NDArray[np.float64] | None:
        """Bytes that each device may hold; shape ``(n_devices,)``, or None if unknown.

        They are `limits`, or else the memory of a GPU in the workload of `costs`.
        """
        from pipesim.timeline.memory_limit import memory_limit

        return memory_limit(self)

    @property
    def fits(self) -> bool | None:
        """Whether no device needs more than its `memory_limit`, which it may reach.

        A device needs its `peak_memory` and the allocator's share of it, ``Costs.memory_reserve``.
        None if that is unknown: without a limit or costs, and for costs that have no bytes.

        Near the limit it is uncertain. CUDA's context, NCCL's buffers and blocks of the allocator
        take some GB besides, which are not counted: ``memory_reserve`` is 0 by default. The memory
        of a GPU is the nominal value of its data sheet, of which a part is not available.
        """
        from pipesim.timeline.memory_limit import fits

        return fits(self)

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

    def mfu(self, workload: Workload | None = None, *, peak_flops: float | None = None) -> float:
        """Return the model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B).

        It is the model FLOPs of all micro-batches of all replicas, over the FLOPs that all GPUs
        could do in the makespan at their peak. Recompute adds no model FLOPs.

        Parameters
        ----------
        workload
            FLOPs of a micro-batch, and GPUs of a device; by default those of `costs`.
        peak_flops
            FLOP/s of the data sheet of one GPU; by default those of the workload.

        Returns
        -------
        float
            Utilization, 0..1; 0 if the makespan is 0.

        Raises
        ------
        TimelineError
            If no workload is given and the costs have none, or the graph is forward-only: the
            FLOPs of costs are those of forward and backward.

        Warns
        -----
        CostsWarning
            For a utilization above 1, which no GPU reaches.

        Examples
        --------
        >>> import pipesim as ps
        >>> timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), ps.Costs(1, 2))
        >>> timeline.makespan  # 2 micro-batches of 6 FLOPs on 2 GPUs of 1 FLOP/s each
        9.0
        >>> round(timeline.mfu(ps.Workload(tokens=8, flops=6), peak_flops=1), 3)
        0.667
        """
        from pipesim.timeline.rates import mfu

        return mfu(self, workload, peak_flops)

    @cached_property
    def lower_bound(self) -> float:
        """A time (s) that no order of the same tasks goes below, at the same costs.

        If the timeline has a `memory_limit` and fits, the bound holds for the orders that fit.
        `pipesim.analysis.lower_bounds.lower_bound` says how it is computed. It is not raised
        further once it meets the makespan. NaN if it is unknown: without costs, and if durations
        are not those of the costs, as after a run or with noise.
        """
        from pipesim.analysis.lower_bounds.lower_bound import timeline_bound

        return timeline_bound(self)

    @property
    def gap(self) -> float:
        """Makespan over `lower_bound`, minus 1: 0 proves that no order is faster.

        An order may be optimal with a gap above 0, as the bound may be too low. NaN if the bound is
        unknown or 0.
        """
        from pipesim.analysis.lower_bounds.lower_bound import gap

        return gap(self)

    def memory(self) -> pd.DataFrame:
        """Return the bytes that each device holds over time (rule 10).

        A device's rows are the starts and ends of its compute tasks, and other times at which bytes
        change: the ends of reductions and OFFLOADs, and the starts of RELOADs.

        Returns
        -------
        pandas.DataFrame
            ``device``, ``time`` (s), ``nbytes``; by device, then in order of time. The first row of
            a device has the bytes that it holds throughout, at time 0.

        Raises
        ------
        TimelineError
            If the timeline has no costs.

        Examples
        --------
        GPipe holds the activations of all micro-batches:

        >>> import pipesim as ps
        >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
        >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
        >>> timeline.memory().groupby("device")["nbytes"].max().tolist()
        [2.0, 2.0]
        """
        from pipesim.timeline.memory import over_time

        return over_time(self)

    def host_memory(self) -> pd.DataFrame:
        """Return the bytes of offloaded activations that hosts hold over time.

        An OFFLOAD takes its bytes at its start, and the RELOAD gives them back at its end. The host
        of a device is the process that issues its tasks (``graph.host``).

        Returns
        -------
        pandas.DataFrame
            ``host``, ``time`` (s), ``nbytes``; by host, then in order of time. The first row of a
            host is at time 0.

        Examples
        --------
        >>> import pipesim as ps
        >>> graph = ps.lower(ps.schedule("gpipe", 2, 4), offload="all", prefetch=0)
        >>> network = ps.Network(host=ps.HostLink(bandwidth=1))
        >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1, network=network)
        >>> timeline = ps.simulate(graph, costs)
        >>> float(timeline.host_memory()["nbytes"].max())  # 3 micro-batches, 2 stages
        6.0
        """
        from pipesim.timeline.memory import host_memory

        return host_memory(self)

    @property
    def peak_host_memory(self) -> NDArray[np.float64]:
        """Most bytes of offloaded activations that each host holds; shape ``(n_hosts,)``."""
        from pipesim.timeline.memory import peak_host_memory

        return peak_host_memory(self)

    def memory_breakdown(self) -> pd.DataFrame:
        """Return the bytes that each device holds at its first peak, by what they are for.

        Returns
        -------
        pandas.DataFrame
            One row a device, in bytes:

            - ``parameters``, ``gradients`` and ``optimizer`` are held throughout.
            - ``activations`` of all micro-batches in flight, and gradients that wait for their W.
            - ``workspace`` of the task that runs at the peak.
            - ``buffers``: gradients that wait for a reduction while the next ones are added up.
            - ``reserve`` of the allocator: ``Costs.memory_reserve`` times `peak_memory`.
            - ``total``: the sum of the others, which is `peak_memory` and the reserve.

        Examples
        --------
        >>> import pipesim as ps
        >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1, parameter_bytes=5)
        >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
        >>> print(timeline.memory_breakdown()[["parameters", "gradients", "activations", "total"]])
                parameters  gradients  activations  total
        device
        0              5.0        5.0          2.0   12.0
        1              5.0        5.0          2.0   12.0
        """
        from pipesim.timeline.memory import memory_breakdown

        return memory_breakdown(self)

    def changes_that_fit(self, *, quick: bool = False, every: bool = False) -> pd.DataFrame:
        """Simulate changes of the configuration; return those that stay in the `memory_limit`.

        Changes:

        - recompute, fused attention and sequence parallelism of the layers, if the costs are from
          `Costs.transformer`, or else R tasks;
        - experts on more GPUs;
        - micro-batches of a half or a quarter of the size;
        - the other named schedules;
        - activations in host memory, if the network has a link to it;
        - a sharded optimizer; or instead of it parameters that replicas share too, gathered once a
          step or for every use.

        If none fits alone, two at a time are tried. Everything else stays as it was, such as
        options of `pipesim.lower`. Fields of the costs stay if they differ from those that the
        model's settings give.

        Schedules that take ``costs`` are ordered for those of the timeline. If a schedule has
        another number of stages, the layers of `Costs.transformer` are balanced again for it; other
        costs are shared evenly by the stages of a device. Costs without settings are proportional
        to the size of a micro-batch here: real kernels get slower.

        The simulations have about four million tasks together. ``attrs["n_untried"]`` of the table
        is the number of changes that were left out for this. If no change fits, the table is empty.
        If parameters, gradients and optimizer alone exceed the limit, ``attrs["advice"]`` is a text
        that says so: more devices, tensor parallelism or a sharded optimizer are needed then.

        Parameters
        ----------
        quick
            Whether to leave out other schedules and changes in pairs, which take most of the time.
        every
            Whether to list changes that do not fit too.

        Returns
        -------
        pandas.DataFrame
            One row a change, by makespan, those that fit first: ``change``, as arguments of
            `Costs.transformer`, `pipesim.schedule` or `pipesim.lower`, with the layers of each
            stage where they are balanced again; ``makespan`` (s);
            ``relative``, to the configuration as it is; ``peak_memory`` (bytes of the fullest
            device); ``fits``.

        Raises
        ------
        TimelineError
            If the timeline has no memory limit or no costs, or if its graph is not from
            `pipesim.lower`, such as one that was loaded.

        Examples
        --------
        >>> import pipesim as ps
        >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
        >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs, memory_limit=2)
        >>> table = timeline.changes_that_fit(quick=True)
        >>> print(table[["makespan", "peak_memory"]].set_index(table["change"]).tail(1))
                                   makespan  peak_memory
        change
        lower(recompute='always')      11.0          1.0
        """
        from pipesim.analysis.configurations import changes_that_fit

        return changes_that_fit(
            self, quick=check_flag("quick", quick), every=check_flag("every", every)
        )

    def critical_path(self) -> pd.DataFrame:
        """Return the chain of tasks that sets the makespan, first task first.

        The search goes backwards from the task that ends last, each time to the task that it waited
        for last. See `pipesim.analysis.critical_path.critical_path`.

        Returns
        -------
        pandas.DataFrame
            The columns of `frame`; ``waited_for``, the reason of a task's last wait, such as
            ``"dependency"`` or ``"message"``; and ``gap``, the time between the two tasks (s).

        Raises
        ------
        TimelineError
            If no task ran, or if measured times say that tasks waited for each other in a circle.

        Examples
        --------
        >>> import pipesim as ps
        >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
        >>> path = ps.simulate(graph, ps.Costs(forward=1, backward=2)).critical_path()
        >>> print(path.loc[path["device"] == 1, ["op", "microbatch", "end", "waited_for"]])
                  op  microbatch  end  waited_for
        task
        6     RECV_F           1  2.0     message
        7          F           1  3.0  dependency
        8          B           1  5.0  dependency
        12         B           0  7.0      stream
        13    SEND_B           0  7.0  dependency
        """
        from pipesim.analysis.critical_path import critical_path

        return critical_path(self)

    def idle_by_cause(self) -> pd.DataFrame:
        """Return each device's idle seconds by their cause.

        `pipesim.analysis.idle.idle_by_cause` defines the causes.

        Returns
        -------
        pandas.DataFrame
            Seconds, a row a device and a column a cause: ``warm_up``, ``cool_down``, ``imbalance``,
            ``latency``, ``bandwidth``, ``contention``, ``host``, ``straggler`` and
            ``schedule_order``. Rows sum exactly to `idle`.

        Examples
        --------
        >>> import pipesim as ps
        >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
        >>> timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
        >>> print(timeline.idle_by_cause()[["warm_up", "cool_down", "latency"]])
                warm_up  cool_down  latency
        device
        0           1.0        2.0      0.0
        1           1.0        2.0      0.0
        """
        from pipesim.analysis.idle import idle_by_cause

        return idle_by_cause(self)

    def plot_idle(self, *, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw `idle_by_cause` as one bar a device, stacked by cause.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.
        **options
            ``legend``, ``unit`` and ``title``, as `pipesim.plot.idle` describes.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the drawing, neither shown nor saved.
        """
        from pipesim.plot.charts import idle

        return idle(self, ax=ax, **options)

    def plot(self, *, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw when each task ran, a row a device.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.
        **options
            ``transfers``, ``dependencies``, ``numbers``, ``legend``, ``unit`` and ``title``, as
            `pipesim.plot.timeline` describes.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the drawing, neither shown nor saved.
        """
        from pipesim.plot.timelines import timeline

        return timeline(self, ax=ax, **options)

    def to_html(self, path: Path | str, **options: Any) -> None:
        """Write an interactive page: one HTML file that works without a server and a network.

        Parameters
        ----------
        path
            File that ends in ``.html`` or ``.htm``.
        **options
            ``title`` and ``microbatches``, as `pipesim.to_html` describes.
        """
        from pipesim.plot.page.save import to_html

        to_html(path, self, **options)

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

        Columns: ``device``, ``stream``, ``op``, ``stage``, ``microbatch`` (-1 for operations on a
        whole stage), ``start``, ``end`` (s), ``nbytes`` (of messages).

        Further columns, each only if the graph has such tasks:

        - ``replica``;
        - ``overlapped``: 1 for the halves of overlapped actions;
        - ``peer_stage``: the stage at the other end of a message of skip connections, else -1;
        - ``part``: the bucket of a REDUCE_GRAD, or the exchange of an ALL_TO_ALL, else -1.
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
        from pipesim.utils.packages import pandas as pd

        graph = self.graph
        names = np.array([op.name for op in Op], dtype=object)
        streams = np.array([name for _, name in graph.streams], dtype=object)
        columns = {
            "device": graph.device,
            "stream": streams[graph.stream],
            "op": names[graph.op],
            "stage": graph.stage,
            "microbatch": graph.microbatch,
            "start": self.start,
            "end": self.end,
            "nbytes": self.nbytes,
        }
        if graph.n_replicas > 1:
            columns["replica"] = graph.replica
        if graph.kinds.overlapped.any():
            columns["overlapped"] = graph.kinds.overlapped[graph.kind]
        if (graph.kinds.peer_stage >= 0).any():
            columns["peer_stage"] = graph.peer_stage
        if (graph.kinds.part >= 0).any():
            columns["part"] = graph.part
        return pd.DataFrame(columns, index=pd.RangeIndex(len(graph), name="task"))

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
        - `lower`'s ``rendezvous``, ``hosts``, ``host_threads``, ``grad_sync``, ``skips``,
          ``portals``, ``prefetch`` and ``expert_replicas``, the shares that OFFLOADs move
          (``offload_shares``), and the schedule's ``n_batches``, ``n_slices`` and
          ``weight_versions``, each if it is not the default;
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

    def to_chrome(self, path: Path | str) -> None:
        """Write a Chrome trace that ui.perfetto.dev shows; see `pipesim.trace.save`.

        That function also takes several timelines. ``pipesim.hta.save`` writes files for
        HolisticTraceAnalysis. `from_chrome` reads the file back exactly.

        Parameters
        ----------
        path
            File that ends in ``.json``, or in ``.json.gz`` to compress it.
        """
        from pipesim.trace.chrome_export import save

        save(path, self)

    @classmethod
    def from_table(
        cls,
        table: object,
        *,
        columns: Mapping[str, str] | None = None,
        ops: Mapping[str, str | None] | None = None,
        unit: str = "s",
        step: object = None,
        gaps: str = "stages",
        name: str = "",
    ) -> Timeline:
        """Read one step of a run of another framework from a table of its measured tasks.

        The table has one row a task:

        - ``op``: a name of `pipesim.Op`, a word such as ``forward``, or a timer of Megatron-LM.
        - ``microbatch``: from 0; of the whole stage: -1 or missing. Messages without one are
          numbered in order of time: the k-th of a stage is that of its k-th F or backward.
        - ``stage`` or ``device``, or both. Stages count from 0. Without ``stage``, it is the number
          of the device within its replica, and with ``chunk``, ``chunk * n_devices`` more. Without
          ``device``, each stage of each replica is on its own.
        - ``start``, and ``end`` or ``duration``.
        - Optional: ``replica``, ``nbytes`` of messages (or ``bytes``), and ``step``.

        Other columns are ignored. Tasks may be missing: messages, which then leave when their data
        is ready, recomputes, which are then part of the backward, reductions and optimizer steps.
        Without backwards, the graph is forward-only. Several REDUCE_GRADs of a stage are its
        buckets. An UNSHARD gathers parameters for the next F or backward of its stage, or after its
        STEP. An F and a B of one device with the same times are an overlapped action, which one
        call ran.

        Time zero is the first start; waiting for a message counts from when it left. Clocks of
        devices are aligned by messages and collectives if these contradict them by more than
        100 us; see `pipesim.trace.clock_offsets.align_clocks`. The times of messages are those at
        which data moved; see `pipesim.trace.measured_tasks.timeline_of`. A REDUCE_TIED that ran
        before REDUCE_GRAD, as in Megatron-LM, comes after it in the graph (rule 3).

        ``pipesim.trace.measured_table.read_step`` returns the clock offsets and the residual error,
        too.

        Parameters
        ----------
        table
            A `pandas.DataFrame`, another library's table that Arrow reads, or a file: ``.parquet``,
            or CSV, also compressed by gzip.
        columns
            Name in the table of each of our columns that has another name there, such as
            ``{"microbatch": "mb"}``.
        ops
            Operation of each word of the table that is no name above, such as
            ``{"fwd_step": "F"}``. None leaves its rows out.
        unit
            Unit of all times: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
        step
            The step to read, a value of the column ``step``; by default the greatest.
        gaps
            Treatment of time between tasks in which a device waited for no message:

            - ``"stages"`` adds it to the operations on whole stages beside it, as a program copies
              gradients before a REDUCE_GRAD and loads data after an UNSHARD. All other tasks keep
              their times.
            - ``"charge"`` also adds it to any other task after it, so that costs include it.
            - ``"keep"`` leaves it idle.
        name
            Name of the timeline; by default that of the named schedule whose orders the tasks have,
            or else ``"measured"``.

        Returns
        -------
        Timeline
            One step.

        Raises
        ------
        TimelineError
            For a file that cannot be read, for columns that are missing, and for the first row that
            is in no pipeline: an unknown operation, a second row for one task, a task that overlaps
            another one of its device, a stage on a second device, an impossible value. For tasks of
            a micro-batch that are missing, and orders that cannot run.

        Warns
        -----
        AccuracyWarning
            If clocks cannot be aligned well: a message is still used before it was sent, by more
            than 1 % of the makespan.

        Examples
        --------
        Two devices that run F and B of two micro-batches:

        >>> import pandas as pd
        >>> import pipesim as ps
        >>> rows = [(0, "F", 0, 0), (0, "F", 1, 1), (1, "F", 0, 1), (1, "B", 0, 2), (0, "B", 0, 4),
        ...         (1, "F", 1, 4), (1, "B", 1, 5), (0, "B", 1, 7)]
        >>> table = pd.DataFrame(rows, columns=["stage", "op", "microbatch", "start"])
        >>> table["duration"] = table["op"].map({"F": 1, "B": 2})
        >>> ps.Timeline.from_table(table)
        <Timeline 1f1b: 16 tasks, makespan 9 s, bubble 33.3%>
        """
        from pipesim.trace.measured_table import read_step

        return read_step(
            table, columns=columns, ops=ops, unit=unit, step=step, gaps=gaps, name=name
        ).timeline

    @classmethod
    def from_chrome(
        cls,
        paths: Path | str | Iterable[Path | str],
        *,
        pattern: str | None = None,
        fields: Mapping[str, str | tuple[str, str]] | None = None,
        ops: Mapping[str, str | None] | None = None,
        only: Mapping[str, str | int] | None = None,
        step: int = -1,
        n_ranks: int | None = None,
        output_bytes: float | Sequence[float] = 0.0,
        gaps: str = "keep",
        name: str = "",
    ) -> Timeline:
        r"""Read one step of a run of another framework from Chrome traces, as torch.profiler's.

        A file that `to_chrome` wrote is read back exactly, without costs. If an argument other than
        ``name`` is given, its events are read instead, as those of another program.

        Each range of a trace's CPU, such as ``PP:1F3``, names the action of a call, or its event
        has the action in other fields (``fields``).

        - Ranges are complete events, or begin and end events.
        - An event with the correlation of a kernel launched it, whatever its category.
        - Kernels communicate if their names, the calls that launched them, or their ranges do.
        - Times of an action: from the first to the last of its kernels, including kernels that the
          autograd thread launched meanwhile. Without a GPU: those of its call, without the time of
          waiting for a message. See `pipesim.trace.working_times.working_times`.
        - A range of two overlapped actions, such as ``PP:(0F2;3B0)OVERLAP_F_B``, gives two tasks.
          Their times are those of ranges of single actions within it. Without such ranges, the B
          begins where the operations show it; without operations, at half of the range. See
          `pipesim.trace.working_times`.
        - Clocks of ranks are aligned by messages; see `pipesim.trace.clock_offsets.align_clocks`.
        - Transfers without a range get the times at which their data moved; see
          `pipesim.trace.measured_tasks.timeline_of`.

        ``pipesim.trace.chrome_import.load`` returns the clock offsets and the residual error, too.

        Parameters
        ----------
        paths
            One file a rank, ``.json`` or ``.json.gz``, or their directory. Each file is a device,
            in order of the ranks that files name, or else of the files. Or one file in which each
            process with ranges is a rank, by its number, as `to_chrome` writes it.
        pattern
            A regular expression for the whole name of a range, with the groups ``op``,
            ``microbatch`` and, unless each rank has one stage, ``stage``. By default torch's
            names, or else those of `to_chrome` (`pipesim.trace.range_names.PATTERNS`). Operations
            are those of `pipesim.Op`, or names such as ``forward``.
            Each name is matched once. Avoid patterns that backtrack without end, such as
            ``(a+)+b``.
        fields
            Places of ``op``, ``microbatch`` and, if events have them, ``stage`` and ``rank``, where
            names do not tell them. A place is ``name``, ``cat``, ``pid``, ``tid``,
            ``process_name``, ``thread_name`` or ``args.KEY``, where dots nest. Or a place and a
            regular expression with one group for the part of its text:
            ``("thread_name", r"PP rank (\d+)")``. Without ``rank``, each process is a rank;
            without ``stage``, the rank is the stage. Events without these fields are left out; an
            event without a micro-batch counts if ``ops`` has its word. Not with ``pattern``.
        ops
            Operations by the words of the file, such as ``{"forward-compute": "F"}``; None for
            words whose events to leave out.
        only
            Values that events must have at places, such as ``{"pid": 0}`` for one of several
            replicas in a file.
        step
            Number of the step among the whole steps in the traces; negative numbers count from
            the end. By default the last step.
        n_ranks
            Expected number of ranks; by default the number that the traces show.
        output_bytes
            Bytes of each message, as in `Costs`.
        gaps
            Treatment of time between tasks in which a device waited for no message, because it
            posted or fetched one, or ran other code: ``"keep"`` leaves it idle, ``"charge"`` adds
            it to the next task, so that costs and replays include it.
        name
            Name of the timeline; by default that of the first file, or the saved name. Of a file
            with several timelines: the name of the one to read.

        Returns
        -------
        Timeline
            One step. Of a file that `to_chrome` wrote: the timeline as it was saved.

        Raises
        ------
        TimelineError
            - For a file that cannot be read or was cut, or a file of `to_chrome` that was changed.
            - For compute ranges of one rank that ran at the same time on several threads.
            - For ranks that are missing or occur twice.
            - For impossible times.
            - For a pattern that cannot be used, and for files without a range.
            - For actions that are missing, unknown or occur twice in a step.

        Warns
        -----
        AccuracyWarning
            If clocks cannot be aligned well: a message is still used before it was sent, by more
            than 1 % of the makespan.

        Examples
        --------
        >>> import tempfile
        >>> import pipesim as ps
        >>> timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(1 / 3, 2 / 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline.to_chrome(f"{folder}/run.json")
        ...     again = ps.Timeline.from_chrome(f"{folder}/run.json")
        >>> again.makespan == timeline.makespan
        True
        """
        from pipesim.trace.chrome_import import load

        check_text("name", name)
        return load(
            paths,
            pattern=pattern,
            fields=fields,
            ops=ops,
            only=only,
            step=step,
            n_ranks=n_ranks,
            output_bytes=output_bytes,
            gaps=gaps,
            name=name,
        ).timeline


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
