"""Tokens a second, model FLOPs utilization, and the longest span of a device."""

from __future__ import annotations

import math

import numpy as np

from pipesim.costs.cost_fields import Workload
from pipesim.errors import ArgumentError, CostsWarning, TimelineError, check_type, number
from pipesim.ops import SCHEDULED
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller

#: Share by which sums of seconds may be off.
_ROUNDING = 1e-9


def tokens_per_second(timeline: Timeline) -> float:
    """Return the tokens a second of all replicas; see `Timeline.tokens_per_second`."""
    return timeline.throughput * _workload(timeline, None).tokens


def mfu(
    timeline: Timeline, workload: Workload | None = None, *, peak_flops: float | None = None
) -> float:
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
    >>> from pipesim.costs import Workload
    >>> timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), ps.Costs(1, 2))
    >>> timeline.makespan  # 2 micro-batches of 6 FLOPs on 2 GPUs of 1 FLOP/s each
    9.0
    >>> round(timeline.mfu(Workload(tokens=8, flops=6), peak_flops=1), 3)
    0.667
    """
    if workload is None and timeline.graph.forward_only:
        raise TimelineError(
            f"timeline {timeline.name!r} has no backwards, but the flops of its costs are those of "
            "forward and backward; give mfu(ps.costs.Workload(tokens=..., flops=...)) of a forward"
        )
    work = _workload(timeline, workload)
    peak: object = work.peak_flops if peak_flops is None else peak_flops
    if peak is None:
        raise ArgumentError(
            f"timeline {timeline.name!r}: the workload has no peak_flops; give mfu(peak_flops=...),"
            " the FLOP/s of the data sheet of one GPU"
        )
    rate = number(peak)
    if rate is None or not 0 < rate < math.inf:
        raise ArgumentError(f"peak_flops must be finite FLOP/s above 0, got {peak_flops!r:.60}")
    n_gpus = timeline.n_devices * work.gpus_per_device
    share = timeline.throughput * (work.flops / rate) / n_gpus
    if not share < math.inf:
        raise ArgumentError(
            f"the model FLOPs utilization would be {share}: peak_flops={rate:g} is too small "
            f"for {work.flops:g} FLOPs of a micro-batch; give the FLOP/s of one GPU's data sheet"
        )
    if share > 1 + _ROUNDING:
        warn_caller(
            f"the model FLOPs utilization of timeline {timeline.name!r} is {share:.3g}, above 1: "
            f"GPUs cannot do more than their peak; check the seconds of the costs, peak_flops "
            f"({rate:g} FLOP/s of one GPU), and the workload's flops ({work.flops:g} of a "
            f"micro-batch) and gpus_per_device ({work.gpus_per_device})",
            CostsWarning,
        )
    return share


def _workload(timeline: Timeline, workload: Workload | None) -> Workload:
    if workload is not None:
        advice = "give ps.costs.Workload(tokens=..., flops=...)"
        return check_type("workload", workload, Workload, advice)
    work = None if timeline.costs is None else timeline.costs.work
    if work is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no workload, so that its tokens and FLOPs are "
            "unknown; give Costs(workload=ps.costs.Workload(tokens=..., flops=...)), or "
            "mfu(workload=...)"
        )
    return work


def longest_span(timeline: Timeline) -> float:
    """Return the longest time of a device from its first start to its last end (s), without STEP.

    It is the interval at which steps follow each other if optimizers do not wait for each other.
    """
    graph = timeline.graph
    tasks = np.flatnonzero(graph.is_op(SCHEDULED))
    device = graph.device[tasks]
    first, last = np.full(graph.n_devices, math.inf), np.zeros(graph.n_devices)
    np.minimum.at(first, device, timeline.start[tasks])
    np.maximum.at(last, device, timeline.end[tasks])
    return float((last - first).max())
