"""Columns of tables of timelines, and a prediction beside a measurement of the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.prediction_interval import published_ends
from pipesim.errors import CostsWarning, TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.timeline.memory import reserved_memory
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked

if TYPE_CHECKING:
    import pandas as pd
    from pandas.api.extensions import ExtensionArray

    from pipesim.plot.page.save import item_to_html
    from pipesim.plot.timelines import comparison


#: Columns of `compare` that a table has only if a timeline has their values.
KNOWN_RESULTS = ("low", "high", "memory_limit", "fits", "tokens_per_second", "mfu")
#: Tasks of a graph up to which `compare` computes its gap.
MOST_TASKS = 200_000


def with_gaps(table: pd.DataFrame, timelines: Mapping[str, Timeline]) -> pd.DataFrame:
    """Return a table of `table_of` with the column ``gap``, if it is known for a timeline."""
    from pipesim.utils.packages import pandas as pd

    gaps = [math.nan if len(x) > MOST_TASKS else x.why.gap for x in timelines.values()]
    if not all(map(math.isnan, gaps)):
        table["gap"] = pd.array([None if math.isnan(x) else x for x in gaps], dtype="float64")
    return table


def table_of(timelines: Mapping[str, Timeline]) -> pd.DataFrame:
    """Return the table of `compare`, without its checks and warnings."""
    from pipesim.utils.packages import pandas as pd

    first = next(iter(timelines.values())).makespan
    rows = {name: summary(timeline) for name, timeline in timelines.items()}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("schedule")
    table.insert(1, "relative", table["makespan"] / first if first else float("nan"))
    further = [known_results(timeline) for timeline in timelines.values()]
    for name, column in known_columns(further).items():
        table[name] = column
    return table


def warn_of_other_models(rows: Iterable[tuple[str, int, int, Hashable]]) -> None:
    """Warn if different numbers of stages have the same costs of a stage, on as many devices.

    Each of ``rows`` has the name of a timeline, its numbers of devices and stages, and its costs.
    """
    of_costs: dict[Hashable, dict[int, str]] = {}
    listed = list(rows)
    if len({n_stages for _, _, n_stages, _ in listed}) < 2:
        return
    for name, n_devices, n_stages, costs in listed:
        of_costs.setdefault((n_devices, costs), {}).setdefault(n_stages, name)
    for (n_devices, _), names in of_costs.items():  # type: ignore[misc]  # keys are such pairs
        if len(names) > 1:
            stages = " and ".join(f"{name!r} {n_stages}" for n_stages, name in names.items())
            warn_caller(
                f"on {n_devices} devices {stages} stages have the same costs a stage, so that the "
                "models that are compared differ in size; give the costs of a device: "
                'per="device" in a sweep or --per device, and costs.in_chunks(placement) from '
                'Python (per="stage" says that costs a stage are meant)',
                CostsWarning,
            )
            return


def summary(timeline: Timeline) -> dict[str, float]:
    """Return the row of a timeline in `compare`, without ``relative``."""
    peak = 0.0 if timeline.costs is None else float(timeline.memory.peak.max())
    return {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "throughput": timeline.throughput,
        "peak_memory": peak or float("nan"),  # unknown, where the costs have no bytes
    }


def known_results(timeline: Timeline) -> dict[str, float | bool]:
    """Return the values of a timeline in those columns of `compare` that may be missing."""
    results: dict[str, float | bool] = {}
    ends = published_ends(timeline)
    if ends is not None:
        results["low"], results["high"] = ends
    limit = timeline.memory.limit
    if limit is not None:
        room = limit if timeline.costs is None else limit - reserved_memory(timeline)
        results["memory_limit"] = float(limit[room.argmin()])
    if timeline.memory.fits is not None:
        results["fits"] = timeline.memory.fits
    work = None if timeline.costs is None else timeline.costs.work
    if work is not None:
        results["tokens_per_second"] = timeline.tokens_per_second
    if work is not None and work.peak_flops is not None and not timeline.graph.forward_only:
        results["mfu"] = timeline.mfu()
    return results


def known_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, ExtensionArray]:
    """Return the columns of `known_results` that a row has; missing values are NA."""
    from pipesim.utils.packages import pandas as pd

    types = {name: "boolean" if name == "fits" else "float64" for name in KNOWN_RESULTS}
    return {
        name: pd.array([row.get(name) for row in rows], dtype=kind)  # type: ignore[call-overload]  # names of types by variable
        for name, kind in types.items()
        if any(row.get(name) is not None for row in rows)
    }


@checked
@dataclass(frozen=True)
class Comparison:
    """A prediction beside a measurement of the same tasks.

    Attributes
    ----------
    predicted
        Prediction, such as from `pipesim.simulate`.
    measured
        Measurement of the same tasks, such as from a `pipeexec.Pipeline`. Their rows may be in
        another order, as in a timeline from traces: tasks match by operation, stage, micro-batch,
        part, replica and device. See `matched`. Streams may have run them in another order, which
        `error_parts` cannot explain.

    Raises
    ------
    TimelineError
        If the two timelines have different tasks; the message names some.

    See Also
    --------
    pipesim.compare : Compare timelines of different tasks in a table.

    Examples
    --------
    Backwards that take 2.5 s in place of 2 s:

    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> predicted = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    >>> measured = ps.simulate(graph, ps.Costs(forward=1, backward=2.5))
    >>> ps.Comparison(predicted, measured)
    <Comparison gpipe: predicted 9 s, measured 10.5 s, error -14.3%>
    """

    predicted: Timeline
    measured: Timeline
    _rows: NDArray[np.int64] | None = field(init=False, repr=False, compare=False, default=None)

    if TYPE_CHECKING:  # registered by the rooms that have them
        plot = comparison
        to_html = item_to_html

    def __post_init__(self) -> None:
        rows = matching_rows(self.predicted.graph, self.measured.graph)
        object.__setattr__(self, "_rows", rows)

    @cached_property
    def matched(self) -> Timeline:
        """The measurement in the rows of the prediction: row k is one task in both timelines.

        It is ``measured`` itself if its rows and streams are those, and else on the predicted
        graph.
        """
        return with_rows_of(self.measured, self.predicted.graph, self._rows)

    @property
    def makespan_error(self) -> float:
        """Predicted over measured makespan, minus 1: negative if the run took longer."""
        measured = self.measured.makespan
        return self.predicted.makespan / measured - 1.0 if measured else float("nan")

    @property
    def by_op(self) -> pd.DataFrame:
        """Mean seconds of each operation, indexed by ``op``.

        Columns: ``count``, ``predicted``, ``measured`` (s), ``error`` (relative, signed).
        """
        from pipesim.utils.packages import pandas as pd

        frame = pd.DataFrame(
            {
                "op": self.predicted.all_rows()["op"],
                "predicted": self.predicted.duration,
                "measured": self.matched.duration,
            }
        )
        means = frame.groupby("op", sort=False).mean()
        means.insert(0, "count", frame.groupby("op", sort=False).size())
        means["error"] = means["predicted"] / means["measured"] - 1.0
        return means

    def error_parts(self, *, launch: float | None = None) -> pd.Series[float]:
        """Return the parts of the error of the makespan, by which values of tasks differ.

        See `pipesim.analysis.error_attribution.error_parts`.

        Parameters
        ----------
        launch
            Measured seconds of the host to issue a task; by default the measured timeline's issue
            times.

        Returns
        -------
        pandas.Series
            Seconds of ``durations``, ``spread``, ``transfers``, ``host``, ``hand_over`` and
            ``unexplained``. They sum to the predicted minus the measured makespan.
        """
        from pipesim.analysis.error_attribution import error_parts

        return error_parts(self.predicted, self.matched, launch=launch)

    def __repr__(self) -> str:
        return (
            f"<Comparison {self.measured.name}: predicted {self.predicted.makespan:.6g} s, "
            f"measured {self.measured.makespan:.6g} s, error {self.makespan_error:+.1%}>"
        )


# Tasks of two graphs, whose rows may be in another order.

#: Columns that tell a task from all others of its step.
_IDENTITY = ("op", "stage", "microbatch", "part", "peer_stage", "replica", "device")
#: Tasks that a message names.
_N_SHOWN = 3


def matching_rows(graph: TaskGraph, other: TaskGraph) -> NDArray[np.int64] | None:
    """Return the row of each task of ``graph`` in ``other``; None if rows and streams are equal.

    Rows of tasks that are equal in all columns match in their order. The error for tasks that one
    graph lacks names some.
    """
    if graph is other:
        return None
    own, others = _identities(graph), _identities(other)
    if own.shape == others.shape:
        if np.array_equal(own, others):
            same_streams = graph.streams == other.streams and np.array_equal(
                graph.stream, other.stream
            )
            return None if same_streams else np.arange(len(graph))
        order, other_order = np.lexsort(own), np.lexsort(others)
        if np.array_equal(own[:, order], others[:, other_order]):
            rows = np.empty(len(graph), np.int64)
            rows[order] = other_order
            return rows
    alone = _missing(own, others, graph), _missing(others, own, other)
    raise TimelineError(
        f"predicted ({graph!r}) and measured ({other!r}) are not of the same tasks: "
        + " and ".join(
            f"{tasks} {'is' if count == 1 else 'are'} only in the {role} one"
            for role, (count, tasks) in zip(("predicted", "measured"), alone, strict=True)
            if count
        )
        + "; simulate the graph that was run: pipesim.simulate(measured.graph, costs)"
    )


def _identities(graph: TaskGraph) -> NDArray[np.int64]:
    """Return the columns that tell tasks apart, shape ``(n_columns, n_tasks)``."""
    return np.stack([getattr(graph, name).astype(np.int64) for name in _IDENTITY])


def _missing(
    own: NDArray[np.int64], others: NDArray[np.int64], graph: TaskGraph
) -> tuple[int, str]:
    """Return how many tasks of a graph another one lacks, and the names of some."""
    left = Counter(map(tuple, others.T.tolist()))
    rows = []
    for row, identity in enumerate(map(tuple, own.T.tolist())):
        if left[identity]:
            left[identity] -= 1
        else:
            rows.append(row)
    names = [f"{graph.task(row).action} on device {graph.device[row]}" for row in rows[:_N_SHOWN]]
    if graph.n_replicas > 1:
        names = [
            f"{name} (replica {graph.replica[row]})" for name, row in zip(names, rows, strict=False)
        ]
    more = f" and {len(rows) - _N_SHOWN} more" if len(rows) > _N_SHOWN else ""
    return len(rows), ", ".join(names) + more


def with_rows_of(timeline: Timeline, graph: TaskGraph, rows: NDArray[np.int64] | None) -> Timeline:
    """Return a timeline of the same times on ``graph``, whose tasks are ``rows`` of its own."""
    if rows is None:
        return timeline
    sizes = timeline.nbytes if timeline.sizes is None else timeline.sizes
    return Timeline(
        graph,
        timeline.start[rows],
        timeline.end[rows],
        sizes=sizes[rows],
        costs=timeline.costs,
        name=timeline.name,
        issued=None if timeline.issued is None else timeline.issued[rows],
        limits=timeline.limits,
    )
