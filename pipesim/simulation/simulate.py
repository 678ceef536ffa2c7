"""`simulate`: a task graph and its costs to a timeline, by the engine of your choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs
from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import (
    ArgumentError,
    CostsError,
    CostsWarning,
    EngineWarning,
    MemoryLimitWarning,
    check_count,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.lowering.issue_order import issue_times
from pipesim.network.collectives import group_of_gpus, half, ring
from pipesim.network.links import Nodes
from pipesim.network.network import Network
from pipesim.ops import Op
from pipesim.simulation.equal_replicas import run_compiled, run_simpy
from pipesim.simulation.noise import Noise
from pipesim.simulation.overlap_cost import Engine
from pipesim.timeline.memory_limit import checked_memory_limit, limit_text, static_text
from pipesim.timeline.timeline import LONGEST, Timeline
from pipesim.utils import jit
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import Bytes


def warn_of_costs(graph: TaskGraph, costs: object) -> None:
    """Warn where costs of a transformer do not suit their network or the recompute of a graph.

    - The seconds of stages include collectives between the GPUs of a device. They are those of the
      network with which the costs were built, and do not change with ``costs.network``.
    - Backwards of costs with ``recompute="full"`` or ``"selective"`` recompute already.
    """
    work = costs.work if isinstance(costs, Costs) else None
    if not isinstance(costs, Costs) or work is None:
        return
    difference = _network_difference(work, costs.network)
    if difference:
        warn_caller(
            "costs: the seconds of F, B, I, W and R include collectives between the "
            f"{work.gpus_per_device} GPUs of a device, of the network that the costs were built "
            f"with; simulated is one with {difference}, and these seconds do not change with it; "
            "costs.rebuilt(network=...) gives the costs on it",
            CostsWarning,
        )
    mode = (work.settings or {}).get("recompute", "none")
    if mode != "none" and graph.is_op(frozenset({Op.R})).any():
        warn_caller(
            f"costs: their backwards include a recompute (recompute={mode!r}), and the graph has "
            'tasks R, so that activations are recomputed twice; give lower(recompute="never"), or '
            'costs.rebuilt(recompute="none")',
            CostsWarning,
        )


def _network_difference(work: Workload, network: Network) -> str:
    """Return the rates between GPUs of a device that differ from those of the costs, as text.

    Empty if none differ, if the network to simulate has no nodes, and if the costs are not of a
    transformer on a GPU that shares its layers with others.
    """
    built, present, settings = work.built_nodes, network.nodes, work.settings or {}
    if present is None or "gpu" not in settings or work.gpus_per_device == 1:
        return ""
    if built is None:
        return "nodes (built without nodes, where they are free)"
    measured = built.collectives is not None or present.collectives is not None
    before, after = (_rates(nodes, work.gpus_per_device, measured) for nodes in (built, present))
    return ", ".join(
        f"a {name} of {value:.4g} {unit} (built with {before[name, unit]:.4g})"
        for (name, unit), value in after.items()
        if value != before[name, unit]
    )


def _rates(nodes: Nodes, n_gpus: int, has_measured: bool) -> dict[tuple[str, str], float]:
    """Return the numbers that seconds of collectives between GPUs of a device follow from.

    ``has_measured``: whether to include those of `NodeCollectives`.
    """
    group = group_of_gpus(nodes, n_gpus)
    own = group.collectives
    of_collectives = {
        ("latency of an all-reduce", "s"): ring(group, 0.0),
        ("latency of an all-gather", "s"): half(group, 0.0),
        ("bandwidth of an all-reduce", "bytes/s"): (
            group.bandwidth if own is None else own.rate(n_gpus, group.bandwidth)
        ),
    }
    return {
        ("group", "nodes"): group.n_nodes,
        ("bandwidth", "bytes/s"): group.bandwidth,
        ("latency inside a node", "s"): group.port_latency,
        ("latency between nodes", "s"): group.nic_latency if group.n_nodes > 1 else 0.0,
        **(of_collectives if has_measured else {}),
    }


#: Columns of costs that must be numbers of at least 0.
_CHECKED = ("duration", "latency", "launch", "nbytes")
#: Tasks of a graph of which a warning simulates changes.
_FEW_TASKS = 1000
ENGINES: dict[str, Engine] = {"compiled": run_compiled, "simpy": run_simpy}


@checked_names
def simulate(
    graph: TaskGraph,
    costs: Costs | TaskCosts,
    *,
    engine: str = "compiled",
    noise: Noise | None = None,
    scenario: int = 0,
    memory_limit: Bytes | Sequence[Bytes] | None = None,
) -> Timeline:
    """Predict the start and end of each task of ``graph``.

    Parameters
    ----------
    graph
        Graph from `pipesim.lower`; verified first.
    costs
        Costs of each stage, or, to replay a run, of each task.
    engine
        ``"compiled"``, or ``"simpy"``, the readable reference. Their results are equal. If numba is
        missing or switched off, SimPy's engine replaces the compiled one, with an `EngineWarning`.
    noise, scenario
        Noise that varies the durations, and the number of its scenario, from 0. Without noise, 0
        is the only scenario. `pipesim.simulate_many` simulates many scenarios at once.
    memory_limit
        Bytes that a device may hold, one number or one a device; by default the memory of a GPU in
        the workload of the costs, if any. The times do not depend on it. `Timeline.memory.fits`
        says whether each device stays within. Leave out some GB for CUDA, NCCL and the allocator,
        which are not counted, or give the costs a ``memory_reserve``.

    Returns
    -------
    Timeline
        Start and end of each task, in seconds from the start of the step; shape ``(len(graph),)``.

    Raises
    ------
    CostsError
        - If the costs lack an operation of the graph or have another number of stages.
        - If a task would end after more than 1e150 s.
        - For a ``memory_limit``, if the costs have no bytes.
    GraphError
        If the graph breaks an invariant; `DeadlockError` if tasks would wait for each other for
        ever. No task is simulated then.
    NetworkError
        If a link names a device that the graph does not have.

    Warns
    -----
    CostsWarning
        If costs with tensor parallelism were built with another network of nodes than theirs
        (`Costs.rebuilt` builds them anew), and if both the costs and the graph recompute.
    MemoryLimitWarning
        If a device needs more bytes than it may hold. It names up to three devices, and for a small
        graph up to three changes that fit; `Timeline.memory.changes_that_fit` tries more of them.

    Examples
    --------
    Two devices and two micro-batches, each F 1 s and each B 2 s:

    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    >>> timeline.makespan
    9.0
    >>> timeline.idle.tolist()
    [3.0, 3.0]
    """
    timeline = predict_timeline(
        graph, costs, engine=engine, noise=noise, scenario=scenario, memory_limit=memory_limit
    )
    warn_of_costs(graph, costs)
    warn_of_memory_limit(timeline)
    return timeline


def predict_timeline(
    graph: TaskGraph,
    costs: Costs | TaskCosts,
    *,
    engine: str = "compiled",
    noise: Noise | None = None,
    scenario: int = 0,
    memory_limit: Bytes | Sequence[Bytes] | None = None,
) -> Timeline:
    """Return the timeline of `simulate`, without a warning if it does not fit in memory.

    Functions that simulate many graphs use it; arguments and errors are those of `simulate`.
    """
    check_name("engine", engine, ENGINES)
    scenario = check_count("scenario", scenario, minimum=0)
    tasks = checked_costs(graph, costs)
    limits = None if memory_limit is None else checked_memory_limit(memory_limit, graph.n_devices)
    if noise is not None:
        tasks = checked_noise(noise).applied(graph, tasks, scenario)
    elif scenario:
        raise ArgumentError(
            f"scenario={scenario} without noise: nothing varies, so that there is scenario 0 "
            "alone; give noise=ps.Noise(...), or leave scenario out"
        )
    run = _engine(engine)
    with np.errstate(over="ignore"):
        start, end = run(graph, tasks)
    _check_times(graph, end)
    if tasks.row is graph.kind and tasks.costs and tasks.issued is None:
        # costs imply bytes and issue times
        timeline = Timeline(graph, start, end, None, tasks.costs, limits=limits)
    else:
        issued = issue_times(graph, tasks.launch) if tasks.issued is None else tasks.issued
        timeline = Timeline(
            graph, start, end, tasks.nbytes, tasks.costs, issued=issued, limits=limits
        )
    if limits is not None and timeline.memory.fits is None:
        raise CostsError(
            "memory_limit is given, but the costs have no bytes, so that nothing is known of "
            "memory; give activation_bytes, parameter_bytes, optimizer_bytes, ..., or leave "
            "memory_limit out"
        )
    return timeline


def warn_of_memory_limit(timeline: Timeline) -> None:
    """Warn if a device needs more bytes than it may hold, and name changes that fit."""
    if timeline.memory.fits is not False:
        return
    advice, changes = "timeline.memory.changes_that_fit() simulates changes that would fit", []
    if timeline.graph.options.source is None:
        advice = "lower(schedule) makes graphs for which changes_that_fit() finds changes that fit"
    elif len(timeline.graph) <= _FEW_TASKS:
        table = timeline.memory.changes_that_fit(quick=True).head(3)
        changes = [
            f"{change} (makespan {relative - 1:+.1%})"
            for change, relative in zip(table["change"], table["relative"], strict=True)
        ]
        advice += ", such as " + ", or ".join(changes) if changes else ""
    if not changes and (needs := static_text(timeline)):
        advice = f"{needs}; {advice}"
    warn_caller(f"{limit_text(timeline)}; {advice}", MemoryLimitWarning)


def checked_costs(graph: TaskGraph, costs: Costs | TaskCosts) -> TaskCosts:
    """Verify a graph and its costs; return the costs of its tasks."""
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"simulate takes a TaskGraph, got {type(graph).__name__}; lower the schedule first: "
            "ps.simulate(ps.lower(schedule), costs)"
        )
    if not isinstance(costs, (Costs, TaskCosts)):
        raise ArgumentError(f"costs must be a pipesim.Costs, got {costs!r}")
    verify(graph)
    tasks = costs.of(graph) if isinstance(costs, Costs) else costs
    _check(graph, tasks)
    return tasks


def checked_noise(noise: object) -> Noise:
    """Return ``noise``; raise `ArgumentError` if it is no `Noise`."""
    if not isinstance(noise, Noise):
        raise ArgumentError(
            f"noise must be a pipesim.Noise, such as "
            f"ps.Noise(task=ps.simulation.LogNormal(0.02), seed=0), got {noise!r}"
        )
    return noise


def _engine(name: str) -> Engine:
    if name == "compiled" and not jit.available():
        warn_caller(
            "numba is missing or switched off; SimPy's engine serves instead of the compiled one, "
            "with the same answer some hundred times more slowly",
            EngineWarning,
        )
        name = "simpy"
    return ENGINES[name]


def _check(graph: TaskGraph, costs: TaskCosts) -> None:
    """Raise unless each task has finite costs of at least 0; engines take them as they are."""
    if len(costs.row) != len(graph):
        raise CostsError(f"got the costs of {len(costs.row)} tasks for a graph of {len(graph)}")
    columns = [(name, getattr(costs.table, name)) for name in _CHECKED]
    for name in ("share", "overlap_cost"):
        column = getattr(costs.table, name)
        good = np.ones(1) if column is None else ((column >= 0) & (column <= 1))[costs.row]
        if not good.all():
            task = graph.task(int(np.argmin(good)))
            raise CostsError(
                f"{name} of {task} (task {task.id}) must be 0 to 1, got "
                f"{column[costs.row[task.id]]}"
            )
    of_tasks = [("duration", costs.drawn), ("issued", costs.issued)]
    for name, values in (*columns, *of_tasks):
        if values is None:
            continue
        good = np.isfinite(values) & (values >= 0)
        if good.all():
            continue
        if values is not costs.drawn and values is not costs.issued:
            good, values = good[costs.row], values[costs.row]
        task = graph.task(int(np.argmin(good)))
        raise CostsError(
            f"{name} of {task} (task {task.id}) must be finite and >= 0, got {values[task.id]}"
        )


def _check_times(graph: TaskGraph, end: NDArray[np.float64]) -> None:
    """Raise unless times are such that their sums and squares are finite."""
    if end.max(initial=0.0) <= LONGEST:  # not so where one is NaN
        return
    task = graph.task(int(np.argmin(end <= LONGEST)))
    raise CostsError(
        f"{task} (task {task.id}) would end at {end[task.id]:g} s, beyond {LONGEST:g}: too late to "
        "calculate with; costs are in seconds, so check them, and bandwidths and noise"
    )
