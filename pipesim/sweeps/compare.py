"""`compare`: a table of timelines, a row each, and their page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipesim.analysis.compare import table_of, warn_of_other_models, with_gaps
from pipesim.errors import ArgumentError
from pipesim.plot.page.save import page_path
from pipesim.plot.page.save import to_html as write_page
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import Bytes

if TYPE_CHECKING:
    import pandas as pd


@checked_names
def compare(
    timelines: Mapping[str, Timeline],
    *,
    memory_limit: Bytes | Sequence[Bytes] | None = None,
    to_html: Path | str | None = None,
) -> pd.DataFrame:
    """Return one row a timeline, in the given order.

    Parameters
    ----------
    timelines
        Timelines by name.
    memory_limit
        Bytes that a device may hold, one number or one a device; by default each timeline's own
        `Timeline.memory.limit`.
    to_html
        A file to write an interactive page of all timelines to, below each other on one time axis;
        see `pipesim.plot.to_html`.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``makespan`` (s), ``relative`` (makespan over that of the first),
        ``bubble_fraction`` (0..1), ``throughput`` (micro-batches a second), and ``peak_memory``
        (bytes of the fullest device; NaN without bytes in the costs).

        Further columns, each only if it is known for one of the timelines:

        - ``low``, ``high``: ends of the interval of 80 % (s), see `Timeline.interval`; missing
          where it has only a band;
        - ``memory_limit``: bytes that a device may hold; if devices differ, those of the device
          with the least room;
        - ``fits``: whether each device stays within its limit, the allocator's reserve included,
          which ``peak_memory`` leaves out; missing if unknown;
        - ``tokens_per_second``, of all replicas;
        - ``mfu`` (0..1), as `Timeline.mfu`;
        - ``gap``: `Timeline.why.gap`, the makespan over a bound that no order goes below, minus 1;
          missing if unknown, and for graphs of more than 200,000 tasks, whose bound takes seconds.

    Warns
    -----
    CostsWarning
        If two timelines have as many devices and the same costs of a stage, but different numbers
        of stages. The one with more stages is then of a larger model.

    See Also
    --------
    pipesim.sweep : Simulate many configurations, a row for each.
    pipesim.Comparison : A prediction beside a measurement of the same tasks.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    >>> graphs = {name: ps.lower(ps.schedule(name, 2, 4)) for name in ("gpipe", "1f1b")}
    >>> timelines = {name: ps.simulate(graph, costs) for name, graph in graphs.items()}
    >>> print(ps.compare(timelines)[["makespan", "peak_memory"]])
              makespan  peak_memory
    schedule
    gpipe         15.0          4.0
    1f1b          15.0          2.0
    """
    if not isinstance(timelines, Mapping) or not timelines:
        raise ArgumentError(
            f"compare takes a mapping of names to timelines with at least one, got {timelines!r}"
        )
    for name, timeline in timelines.items():
        if not isinstance(timeline, Timeline):
            raise ArgumentError(f"{name!r} is no Timeline but {type(timeline).__name__}")
    if memory_limit is not None:
        timelines = {
            name: replace(timeline, limits=checked_memory_limit(memory_limit, timeline.n_devices))
            for name, timeline in timelines.items()
        }
    warn_of_other_models(
        (name, timeline.n_devices, timeline.graph.n_stages, timeline.costs)
        for name, timeline in timelines.items()
        if timeline.costs is not None
    )
    if to_html is not None:
        write_page(page_path("to_html", to_html), timelines)
    return with_gaps(table_of(timelines), timelines)
