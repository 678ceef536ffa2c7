"""The fast engine: the rules of docs/time.md as loops over arrays, compiled by numba.

If tasks ask for each link in order of their ids, every time depends only on times of smaller ids.
One pass in order of ids then suffices: `one_pass`, which stops at the first request out of order.
For several scenarios, `one_pass_batched` stops when any task waits for a link. Then `event_loop`
runs each stream until it reaches a shared link, and grants links in order of time. Times are
computed with ``max`` and ``+`` only, so that engines agree exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.simulation.engines.event_loop import event_loop, new_state
from pipesim.simulation.engines.one_pass import ScenarioBatch, one_pass, one_pass_batched, prune
from pipesim.simulation.engines.plan import Plan, make_plan, new_progress
from pipesim.simulation.noise import Noise

Floats = NDArray[np.float64]
#: Scenarios of one batch.
LANES = 32


def run(graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task, in seconds."""
    return run_plan(graph, make_plan(graph, costs))


def run_plan(graph: TaskGraph, plan: Plan) -> tuple[Floats, Floats]:
    """Return start and end of each task, in seconds, from the engine's columns."""
    times = run_in_one_pass(plan)
    return run_event_loop(graph, plan) if times is None else times


def run_in_one_pass(plan: Plan) -> tuple[Floats, Floats] | None:
    """Return start and end of each task (s), or None if tasks ask for a link out of order."""
    start, end = np.empty(len(plan.kind)), np.empty(len(plan.kind))
    return (start, end) if one_pass(plan, new_progress(plan), start, end) else None


def run_event_loop(graph: TaskGraph, plan: Plan) -> tuple[Floats, Floats]:
    """Return start and end of each task (s), whether or not tasks wait for links."""
    start, end = np.empty(len(graph)), np.full(len(graph), -1.0)
    event_loop(plan, new_state(plan, graph.queues.ptr, graph.queues.values), start, end)
    return start, end


class ScenarioBatches:
    """Scenarios of noise on one graph, ready to run in any number and on any thread.

    ``costs`` already include the constant factors of `Noise.slowed`.
    """

    def __init__(self, graph: TaskGraph, costs: TaskCosts, noise: Noise) -> None:
        self.graph, self.costs, self.noise = graph, costs, noise
        self.draws = noise.prepare(graph)
        self.plan = make_plan(graph, costs)
        ptr, needs = np.zeros_like(self.plan.needs_ptr), np.empty_like(self.plan.needs)
        reach = prune(self.plan, ptr, needs)
        self.pruned = self.plan._replace(needs_ptr=ptr, needs=needs)
        self.window = 1 << int(reach).bit_length()
        one_pass_batched.compile()  # its 64-bit arithmetic wraps round, which Python's does not

    def nbytes(self, n_scenarios: int) -> int:
        """Return bytes of the times that a call with so many scenarios holds at once."""
        event_loop = 24 * len(self.graph) if self.plan.n_links else 0  # if tasks compete for links
        return (24 if len(self.plan.partial) else 16) * self.window * n_scenarios + event_loop

    def __call__(self, scenarios: Sequence[int]) -> tuple[Floats, Floats]:
        """Return makespan (s), and seconds that all devices compute, of each scenario."""
        n = len(scenarios)
        times = np.empty((2, self.window, n))
        batch = ScenarioBatch(
            device_factor=self.noise.device_factors(self.graph.n_devices, scenarios),
            keys=self.noise.keys(scenarios),
            start=times[0],
            end=times[1],
            lasted=np.empty((self.window if len(self.plan.partial) else 0, n)),
            makespan=np.zeros(n),
            busy=np.zeros(n),
            competes=np.zeros(n, dtype=bool),
            ready=np.empty(n),
            seconds=np.empty(n),
            finish=np.empty(n),
        )
        one_pass_batched(self.pruned, self.draws, batch, new_progress(self.plan, n))
        for k in np.flatnonzero(batch.competes).tolist():
            drawn = self.noise.draw(self.graph, self.costs, scenarios[k])
            _, end = run_event_loop(self.graph, self.plan._replace(drawn=drawn))
            batch.makespan[k] = end.max()
        return batch.makespan, batch.busy
