"""What the process of one row of ``benchmarks/simulator.py`` does; see there."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import _machine as machine
import numpy as np
from _rows import ENGINES, PHASES, Result, SimulatorCase

#: Untyped: some of what is measured may not be there yet.
ps: Any = importlib.import_module("pipesim")


def costs_of(network: str, n_devices: int) -> Any:
    """Return costs: F 1 ms, B 2 ms, 4 MiB a message."""
    net = ps.Network(latency=20e-6, bandwidth=25e9)
    if network == "shared":
        links = []
        for first in range(0, n_devices, 8):
            node = range(first, min(first + 8, n_devices))
            for step in (1, -1):
                pairs = tuple((d, d + step) for d in node if 0 <= d + step < n_devices)
                if pairs:
                    links.append(ps.Link(20e-6, 5e9, pairs))
        net = ps.Network(latency=20e-6, bandwidth=5e9, links=tuple(links))
    return ps.Costs(
        forward=1e-3,
        backward=2e-3,
        optimizer_step=1e-3,
        output_bytes=4 << 20,
        activation_bytes=64 << 20,
        parameter_bytes=256 << 20,
        network=net,
    )


def engine_function(name: str) -> Callable[[Any, Any], Any] | None:
    """Return the engine's function, or None where it has another name."""
    try:
        return getattr(importlib.import_module(ENGINES[name]), "run", None)
    except ImportError:
        return None


def metrics(timeline: Any) -> tuple[Any, ...]:
    """Return what is asked of every timeline."""
    return timeline.makespan, timeline.bubble_fraction, timeline.memory.peak


def one_round(case: SimulatorCase, n_devices: int, n_microbatches: int) -> Result:
    """Go once through all phases and parts; return one value each."""
    costs = costs_of(case.network, n_devices)
    result = Result(0, 0.0, {})
    gc.collect()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        machine.reset_peak()
        start = perf_counter()
        value = call()
        result.seconds[name] = [perf_counter() - start]
        # What earlier phases left resident counts as well.
        result.nbytes[name] = machine.peak() - at_start
        return value

    at_start = machine.reset_peak()
    schedule = timed("generate", lambda: ps.schedule("1f1b", n_devices, n_microbatches))
    graph = timed("lower", lambda: ps.lower(schedule))
    timeline = timed("simulate", lambda: ps.simulate(graph, costs, engine=case.engine))
    timed("metrics", partial(metrics, timeline))
    result.seconds["end to end"] = [sum(result.seconds[name][0] for name in PHASES)]
    result.n_tasks, result.makespan = len(graph), timeline.makespan
    if len(graph) <= 10**6:
        result.queued = queued(graph, timeline)
    del timeline
    run = engine_function(case.engine)
    if run is not None:
        tasks = timed("costs", lambda: costs.of(graph))
        timed("engine", lambda: run(graph, tasks))
    return result


def queued(graph: Any, timeline: Any) -> float:
    """Return the share of SENDs that waited for their link: for others than their own stream."""
    shape = graph.n_stages, graph.n_microbatches
    waited = n_sends = 0
    for send, producer in ((ps.Op.SEND_F, ps.Op.F), (ps.Op.SEND_B, ps.Op.B)):
        sends, producers = (np.flatnonzero(graph.op == op) for op in (send, producer))
        produced, sent = np.zeros(shape), np.zeros(shape)
        produced[graph.stage[producers], graph.microbatch[producers]] = timeline.end[producers]
        sent[graph.stage[sends], graph.microbatch[sends]] = timeline.end[sends]
        before = np.concatenate([np.zeros((shape[0], 1)), sent[:, :-1]], axis=1)
        reached = np.maximum(produced, before)[graph.stage[sends], graph.microbatch[sends]]
        waited += int((timeline.start[sends] > reached).sum())
        n_sends += len(sends)
    return waited / max(1, n_sends)


def rounds_for(seconds: float, quick: bool) -> int:
    """Return how many rounds follow a first one of so many seconds."""
    if quick or seconds > 4:
        return 3
    return min(51, max(5, int(2 / seconds)))


def measure(case: SimulatorCase, quick: bool) -> Result:
    """Be the process of one row."""
    machine.pin(case.n_cores)
    pace = machine.pace()
    start = perf_counter()
    one_round(case, 16, 16)
    first_call = perf_counter() - start
    if case.n_scenarios:
        return measure_noise(case, quick)
    result = one_round(case, case.n_devices, case.n_microbatches)
    result.first_call = first_call
    for _ in range(rounds_for(result.seconds["end to end"][0], quick)):
        again = one_round(case, case.n_devices, case.n_microbatches)
        for name, seconds in again.seconds.items():
            result.seconds[name] += seconds
    result.pace = (pace + machine.pace()) / 2
    return result


def measure_noise(case: SimulatorCase, quick: bool) -> Result:
    """Be the process of one row of scenarios."""
    noise = ps.Noise(task=ps.simulation.LogNormal(0.02), seed=0)
    graph = ps.lower(ps.schedule("1f1b", case.n_devices, case.n_microbatches))
    costs = costs_of(case.network, case.n_devices)
    seconds: list[float] = []
    while len(seconds) < 4 or (len(seconds) < 6 and not quick):
        start = perf_counter()
        ps.simulate_many(graph, costs, noise, case.n_scenarios)
        seconds.append(perf_counter() - start)
    return Result(len(graph), 0.0, {"scenarios": seconds})
