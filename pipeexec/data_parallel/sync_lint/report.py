"""`sync_report`: find useless and missing all-reduces of gradients in a trace or a timeline."""

from __future__ import annotations

from pathlib import Path

from pipeexec.data_parallel.sync_lint.findings import SyncReport
from pipeexec.data_parallel.sync_lint.timeline_report import timeline_report
from pipeexec.data_parallel.sync_lint.trace_report import trace_report
from pipesim.errors import ArgumentTypeError
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path


def sync_report(source: str | Path | Timeline) -> SyncReport:
    """Return the report of `pipeexec.watch_sync` on a recorded trace or a timeline.

    In a trace:

    - A micro-step is the backward between two forwards of DDP.
    - ``no_sync()`` is not recorded: ``"forward_outside_no_sync"`` is reported as ``"added_to"``,
      and ``"forward_inside_no_sync"`` as ``"unsynchronized_step"``.
    - Bytes are recorded only with NCCL.
    - All-reduces outside DDP are not judged.

    In a timeline:

    - Each stage of each replica is a model, and a micro-step is a micro-batch.
    - Replicas with equal findings share one.
    - A graph without STEP counts as stepped at its end.
    - A stage without another replica, or sharded (``graph.sharded``), has nothing to synchronize; a
      note names it.

    Parameters
    ----------
    source
        A trace of one rank, as `torch.profiler.profile` exports it, of a loop over
        DistributedDataParallel; or a timeline, measured or simulated, of a graph with REDUCE_GRADs.

    Returns
    -------
    SyncReport
        Counts, findings and notes; ``print`` shows it as text.

    Raises
    ------
    TimelineError
        If the file cannot be read, is no trace, or has no forward of DDP; or if the timeline is
        partial, or has no backward.
    CapacityError
        If the file is too large for memory.

    See Also
    --------
    pipeexec.watch_sync : Watch a loop while it runs.
    pipesim.lower : Its ``grad_sync`` chooses the micro-batches that reduce.

    Examples
    --------
    Four micro-batches reduce gradients each, where one reduction a step would do:

    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync="every")
    >>> report = px.sync_report(ps.simulate(graph, ps.Costs(forward=1e-3, backward=2e-3)))
    >>> report.n_calls, [(finding.kind, finding.n_calls) for finding in report.findings]
    (16, [('added_to', 3), ('added_to', 3)])
    """
    if isinstance(source, Timeline):
        return timeline_report(source)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(
            f"source must be the path of a trace, or a pipesim.Timeline, got {source!r:.60}"
        )
    return trace_report(check_path("source", source))
