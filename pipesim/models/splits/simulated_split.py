"""Splits with which a graph takes the least time and fits in memory, by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipesim.costs.device_split import Floats, Ints, SplitProblem, balanced_borders, layer_counts
from pipesim.costs.fastest_split import fastest_borders
from pipesim.errors import CostsError, CostsWarning
from pipesim.graph.graph import TaskGraph
from pipesim.models.splits.split_problem import LayerModel, first_borders, split_problem
from pipesim.timeline.memory_limit import memory_limit, reserved_memory
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.units import format_bytes

#: Most simulations of a search, and most tasks in all of them.
_SIMULATIONS, _TASKS = 1000, 600_000


def fastest_split(model: LayerModel, graph: TaskGraph, limits: Floats | None) -> tuple[int, ...]:
    """Return the layers of each stage with which a graph takes the least time.

    Parameters
    ----------
    model
        Model to split.
    graph
        Tasks of a step.
    limits
        Most bytes of each device. None for the memory of the GPU, if the costs know it. That does
        not count if no split fits.

    Raises
    ------
    CostsError
        If no split is found that fits within ``limits``.

    Warns
    -----
    CostsWarning
        If no split is found that fits in the memory of the GPU.
    """
    simulations = _Simulations(model, graph, limits)
    first = first_borders(split_problem(model, graph))
    timeline = simulations.timeline(first)
    problem = _problem(simulations, first, timeline.memory_limit)
    best = _search(simulations, problem, first)
    if simulations.makespan(best) < np.inf:
        return layer_counts(best)
    if limits is not None:
        nearest = min([best, first], key=lambda x: _excess(simulations.timeline(x)).max())
        text = _excess_text(simulations.timeline(nearest), layer_counts(nearest), "memory_limit=")
        raise CostsError(text)
    problem = _problem(simulations, first, None)
    best = _search(replace(simulations, is_limited=False), problem, first)
    text = _excess_text(simulations.timeline(best), layer_counts(best), "the GPU has ")
    warn_caller(f"{text}. The split is the fastest without a limit", CostsWarning)
    return layer_counts(best)


def _excess(timeline: Timeline) -> Floats:
    """Return the bytes of each device beyond those that it may hold."""
    needed, limits = reserved_memory(timeline), memory_limit(timeline)
    return needed if limits is None else needed - limits


def _excess_text(timeline: Timeline, sizes: tuple[int, ...], limit: str) -> str:
    """Return by how much a split does not fit, and what to change; ``limit`` names the limit."""
    excess = _excess(timeline)
    device = int(excess.argmax())
    needed = reserved_memory(timeline)[device]
    text = (
        f"{limit}{format_bytes(needed - excess[device])}: no split of {sum(sizes)} layers "
        f"was found that fits; {list(sizes)} needs {format_bytes(needed)} on device {device}, "
        f"{format_bytes(excess[device])} too much. Give smaller micro-batches, recompute, more "
        "devices, or another schedule"
    )
    if timeline.graph.n_replicas > 1:
        return text
    return (
        f"{text}; this is a step of one replica: if several share the optimizer's state, give "
        "placement=pipesim.lower(schedule, n_replicas=..., shard_optimizer=True)"
    )


@dataclass(frozen=True)
class _Simulations:
    """Simulations of the splits of a model; see `fastest_split` for ``limits``."""

    model: LayerModel
    graph: TaskGraph
    limits: Floats | None
    is_limited: bool = True

    def timeline(self, borders: Ints) -> Timeline:
        """Return the timeline of a split."""
        from pipesim.simulation.simulate import predict_timeline

        costs = self.model.stage_costs(layer_counts(borders))
        limits = None if self.limits is None else self.limits.tolist()
        return predict_timeline(self.graph, costs, memory_limit=limits)

    def makespan(self, borders: Ints) -> float:
        """Return the seconds of a step, infinite for a split that does not fit."""
        timeline = self.timeline(borders)
        if self.is_limited and timeline.fits is False:
            return np.inf
        return float(timeline.makespan)


def _search(simulations: _Simulations, problem: SplitProblem, first: Ints) -> Ints:
    """Return the borders of the fastest split that the search finds."""
    starts = [balanced_borders(problem, [first]), first]
    most = min(_SIMULATIONS, _TASKS // max(1, len(simulations.graph)))
    return fastest_borders(problem, starts, simulations.makespan, most)


def _problem(simulations: _Simulations, first: Ints, limits: Floats | None) -> SplitProblem:
    """Return the problem of a graph, with seconds and bytes that are no sums over layers.

    Examples are messages that block, launches and workspaces. They are those of one split.
    """
    model, graph = simulations.model, simulations.graph
    costs = model.stage_costs(layer_counts(first))
    if limits is not None:
        limits = limits / (1 + costs.memory_reserve)
    problem = split_problem(model, graph, limits)
    on_compute, seconds = graph.on_compute, costs.of(graph).duration
    busy = np.bincount(graph.device[on_compute], seconds[on_compute], graph.n_devices)
    other_load = busy / graph.n_microbatches - problem.loads(first[None])[0]
    problem = replace(problem, other_load=other_load)
    if limits is None:
        return problem
    near = balanced_borders(problem, [first])
    others = simulations.timeline(near).peak_memory - problem.peak_bytes(near)
    return replace(problem, limit=problem.limit - others[problem.holder])
