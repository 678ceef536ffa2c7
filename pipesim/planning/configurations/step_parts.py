"""Split the seconds of a step, and the bytes of its fullest device, into parts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipesim.analysis.idle import idle_by_cause
from pipesim.costs.costs import Costs
from pipesim.errors import CostsWarning
from pipesim.graph.graph import TaskGraph
from pipesim.network.network import Network
from pipesim.ops import Op
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import costs_of
from pipesim.timeline.memory_breakdown import memory_breakdown
from pipesim.timeline.timeline import Timeline

#: Parts of a step, in the order of a table.
PARTS = (
    *("compute", "tensor_parallel", "recompute"),
    *("warm_up_cool_down", "imbalance", "schedule_order", "host"),
    *("messages", "reduction_and_optimizer"),
)
#: Parts below this share of the step are due to rounding.
_ROUNDING = 1e-12
#: Operations that each micro-batch runs once.
_ONCE = frozenset({Op.F, Op.B, Op.I, Op.W})
#: Causes of idle time of each part, without messages and reductions.
_CAUSES = {
    "warm_up_cool_down": ("warm_up", "cool_down"),
    "imbalance": ("imbalance", "straggler"),
    "schedule_order": ("schedule_order",),
    "host": ("host", "latency", "bandwidth", "contention"),
}


def step_parts(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a simulated step in parts that sum to its makespan.

    The graph is simulated again with some costs removed, one after the other:

    ======================= =======================================================================
    part                    seconds
    ======================= =======================================================================
    reduction_and_optimizer makespan, minus that without REDUCE_GRAD, UNSHARD and STEP
    messages                the latter, minus that without messages, copies to and from the host
                            (OFFLOAD, RELOAD) and exchanges of experts that are tasks, too
    warm_up_cool_down,      mean idle time of a device in this last simulation, by cause; see
    imbalance,              `pipesim.analysis.idle`. ``host`` is 0 unless the costs have launches.
    schedule_order, host
    recompute               mean of a device: R, and the recompute inside B and I
    tensor_parallel         mean of a device: collectives of tensor, context and expert parallelism
                            inside F, B, I and W
    compute                 mean of a device: the rest of F, B, I and W
    ======================= =======================================================================

    Costs that are of no `Transformer` have no known recompute or collectives inside B; these
    seconds are part of ``compute`` then.

    Returns
    -------
    dict
        Seconds of each of `PARTS`. ``math.fsum`` of the values is exactly the makespan.

    Raises
    ------
    TimelineError
        If the timeline has no costs, or tasks of it did not run.
    """
    timeline.check_complete("the parts of a step need")
    graph, costs = timeline.graph, costs_of(timeline)
    steady = replace(
        costs, reduce_grad=0.0, unshard=0.0, optimizer_step=0.0, tied_bytes=0.0, reduce_copies=0.0
    )
    local = replace(steady, network=Network(), output_seconds=0.0, offload=0.0, reload=0.0)
    if graph.kinds.has_segments:
        local = replace(local, exchange_dispatch=0.0, exchange_combine=0.0)
    without_tail = predict_timeline(graph, steady).makespan
    alone = predict_timeline(graph, local)
    idle = idle_by_cause(alone).mean()
    parts = dict.fromkeys(PARTS, 0.0)
    parts["reduction_and_optimizer"] = timeline.makespan - without_tail
    parts["messages"] = without_tail - alone.makespan
    for part, causes in _CAUSES.items():
        parts[part] = float(sum(idle[cause] for cause in causes))
    parts |= _busy_parts(alone, costs)
    return _exact(timeline.makespan, parts)


def _busy_parts(alone: Timeline, built: Costs) -> dict[str, float]:
    """Return the mean busy seconds of a device: compute, collectives, recompute.

    ``alone`` is the step without messages and reductions; ``built`` are costs as a model gave them.
    """
    graph, whole = alone.graph, float(alone.busy.mean())
    settings = None if built.work is None else built.work.settings
    if not settings or "layers_per_stage" not in settings:
        first = _busy_once(graph, built)
        return {"compute": first, "tensor_parallel": 0.0, "recompute": whole - first}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        once = built.rebuilt(recompute="none")
        without_collectives = once.rebuilt(network=Network(host=built.network.host))
    first, compute = _busy_once(graph, once), _busy_once(graph, without_collectives)
    return {"compute": compute, "tensor_parallel": first - compute, "recompute": whole - first}


def _busy_once(graph: TaskGraph, costs: Costs) -> float:
    """Return the mean seconds of a device in F, B, I and W."""
    seconds = costs.of(graph).duration
    return float(seconds[graph.is_op(_ONCE)].sum()) / graph.n_devices


def _exact(total: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Return parts rounded so that their exact sum is ``total``; ``compute`` takes the rest."""
    unit, least = float(np.spacing(total)), _ROUNDING * total
    rounded = {
        name: float(np.rint(part / unit) * unit) if abs(part) > least else 0.0
        for name, part in parts.items()
    }
    rounded["compute"] = 0.0
    rounded["compute"] = math.fsum([total, *(-part for part in rounded.values())])
    return {name: rounded[name] for name in PARTS}


def memory_parts(timeline: Timeline) -> dict[str, float]:
    """Return the bytes of the fullest device by kind; see `Timeline.memory_breakdown`.

    ``total`` is their sum, the allocator's reserve included.
    """
    table = memory_breakdown(timeline)
    fullest = int(table["total"].to_numpy().argmax())
    return {str(kind): float(table[kind].to_numpy()[fullest]) for kind in table}
