"""`TaskCosts` and `CostTable`: seconds and bytes of each task of a graph, the input of engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_type

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


class CostTable(NamedTuple):
    """Costs of tasks; tasks with equal costs share a row.

    Attributes
    ----------
    duration
        Seconds that a task holds its stream; for a SEND ``nbytes / bandwidth``. Unused for a
        RECV, whose times follow from its SEND (rule 4). Shape ``(n_rows,)``, like the next three.
    latency
        Seconds of transfers.
    launch
        Seconds that the host needs to issue a task (rule 7).
    nbytes
        Bytes of each message, and bytes that each member contributes to a collective; 0 for other
        tasks.
    links
        Numbers of the links that a SEND holds while it lasts, or that the hops of a collective
        that begin at this member hold. Padded with -1; -1 for other tasks. Shape
        ``(n_rows, most links of a row)``.
    share
        For a bucket of gradients, the share of the seconds of the last backward after which the
        bucket is complete, 0 to 1; 1 for other tasks. Shape ``(n_rows,)``. None stands for ones:
        buckets are complete at the end of the backward.
    overlap_cost
        For a collective, the share of its speed that compute of its device loses beside it, 0 to 1;
        0 for other tasks. Shape ``(n_rows,)``. None stands for zeros.
    """

    duration: NDArray[np.float64]
    latency: NDArray[np.float64]
    launch: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    links: NDArray[np.int64]
    share: NDArray[np.float64] | None = None
    overlap_cost: NDArray[np.float64] | None = None

    def rows(self, rows: NDArray[Any]) -> CostTable:
        """Return a table of some rows, each as often as it is named.

        Parameters
        ----------
        rows
            Numbers of rows; shape ``(n,)``.

        Returns
        -------
        CostTable
            With ``n`` rows.
        """
        columns: Any = (None if column is None else column[rows] for column in self)
        return CostTable(*columns)


@dataclass(frozen=True)
class TaskCosts:
    """Seconds, bytes and links of each task of a graph.

    The properties `duration`, `latency`, `launch`, `nbytes`, `links` and `share` have one value a
    task. `pipesim.simulate` checks them.

    Attributes
    ----------
    table
        Costs, one row for all tasks with the same costs.
    row
        The row of each task; shape ``(len(graph),)``.
    drawn
        Sampled seconds of each task, used instead of ``table.duration``, such as with noise; shape
        ``(len(graph),)``, or None.
    costs
        The `pipesim.Costs` that the values come from, or None.
    issued
        Seconds at which each task is issued, used instead of the times that follow from ``launch``
        (rule 7), such as in a replay; shape ``(len(graph),)``, or None.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> tasks = ps.Costs(forward=1, backward=2).of(graph)
    >>> float(tasks.duration.sum())  # four F and four B
    12.0
    >>> ps.simulate(graph, tasks).makespan
    9.0
    """

    table: CostTable
    row: NDArray[Any]
    drawn: NDArray[np.float64] | None = None
    costs: Costs | None = None
    issued: NDArray[np.float64] | None = None

    @classmethod
    def of_tasks(
        cls,
        table: CostTable,
        costs: Costs | None = None,
        issued: NDArray[np.float64] | None = None,
    ) -> TaskCosts:
        """Return costs whose table has one row a task.

        Parameters
        ----------
        table
            Costs of tasks, row ``k`` those of task ``k``.
        costs
            The `pipesim.Costs` that they come from: timelines then have the bytes of memory. None
            for none.
        issued
            Seconds at which each task is issued; shape ``(len(graph),)``. None: the times follow
            from ``table.launch``.

        Returns
        -------
        TaskCosts
            Costs whose ``row`` is ``0, 1, 2, ...``

        Examples
        --------
        The second backward of stage 0 takes a second longer:

        >>> import pipesim as ps
        >>> from pipesim.costs import TaskCosts
        >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
        >>> table = ps.Costs(forward=1, backward=2).of(graph).per_task().table
        >>> table.duration[15] += 1
        >>> ps.simulate(graph, TaskCosts.of_tasks(table)).makespan
        10.0
        """
        check_type("table", table, CostTable)
        if costs is not None:
            from pipesim.costs.costs import Costs

            check_type("costs", costs, Costs)
        if issued is not None:
            check_type("issued", issued, np.ndarray, "give an array of seconds, one a task")
            if issued.shape != table.duration.shape or issued.dtype.kind not in "fiu":
                raise ArgumentError(
                    f"issued must be seconds of shape {table.duration.shape}, one a task, got "
                    f"{issued.dtype} of shape {issued.shape}"
                )
        return cls(table, np.arange(len(table.duration), dtype=np.int32), None, costs, issued)

    def per_task(self) -> TaskCosts:
        """Return the same costs with one row a task; its duration is the sampled one, if any.

        Returns
        -------
        TaskCosts
            Equal costs, whose arrays may be changed task by task.
        """
        table = self.table.rows(self.row)._replace(duration=self.duration)
        return TaskCosts.of_tasks(table, self.costs, self.issued)

    @property
    def duration(self) -> NDArray[np.float64]:
        """Seconds that each task holds its stream; shape ``(len(graph),)``."""
        if self.drawn is not None:
            return self.drawn
        values: NDArray[np.float64] = self.table.duration[self.row]
        return values

    @property
    def latency(self) -> NDArray[np.float64]:
        """Seconds of the latency of transfers, 0 for other tasks; shape ``(len(graph),)``."""
        values: NDArray[np.float64] = self.table.latency[self.row]
        return values

    @property
    def launch(self) -> NDArray[np.float64]:
        """Seconds that the host needs to issue each task; shape ``(len(graph),)``."""
        values: NDArray[np.float64] = self.table.launch[self.row]
        return values

    @property
    def nbytes(self) -> NDArray[np.float64]:
        """Bytes of each message or contribution to a collective; shape ``(len(graph),)``."""
        values: NDArray[np.float64] = self.table.nbytes[self.row]
        return values

    @property
    def share(self) -> NDArray[np.float64]:
        """Share of the last backward that each bucket needs; shape ``(len(graph),)``."""
        if self.table.share is None:
            return np.ones(len(self.row))
        values: NDArray[np.float64] = self.table.share[self.row]
        return values

    @property
    def links(self) -> NDArray[np.int64]:
        """Links that each SEND or member holds, or -1; shape ``(len(graph), most of a task)``."""
        values: NDArray[np.int64] = self.table.links[self.row]
        return values
