"""`Plans`, the ranked configurations of a plan, and `Plan`, one of them with its timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.timeline.timeline import Timeline

__all__ = ["Plan", "Plans"]


@dataclass(frozen=True)
class Plan:
    """One configuration with its costs, schedule, graph and timeline, each built on demand.

    Attributes
    ----------
    problem
        Model, cluster and batch.
    evaluation
        Configuration, step and memory.
    """

    problem: PlanProblem
    evaluation: Evaluation

    @property
    def choice(self) -> PlanChoice:
        """The configuration."""
        return self.evaluation.choice

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.evaluation.step

    @cached_property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return self.problem.costs(self.choice)

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the operations of each device."""
        return self.problem.schedule(self.choice, self.costs)

    @cached_property
    def graph(self) -> TaskGraph:
        """Task graph of all replicas."""
        return self.problem.graph(self.choice, self.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated step of all replicas."""
        limits = self.problem.limits(self.choice)
        return simulate(self.graph, self.costs, memory_limit=limits)


@dataclass(frozen=True)
class Plans:
    """Configurations of a plan: the ranked ones first, then those that were ruled out.

    Attributes
    ----------
    problem
        Model, cluster and batch.
    evaluations
        One a configuration: simulated ones by rank, then the others.
    seconds
        Seconds of the search.
    complete
        Whether the search ended; False if it was interrupted.
    percentile
        Percentile of noisy steps by which the best are ranked; None without noise.
    notes
        Assumptions and limits to show beside the results, a sentence each.
    """

    problem: PlanProblem
    evaluations: tuple[Evaluation, ...]
    seconds: float = math.nan
    complete: bool = True
    percentile: float | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def ranked(self) -> tuple[Evaluation, ...]:
        """Simulated configurations that fit, best first."""
        return tuple(x for x in self.evaluations if x.status == "simulated")

    @property
    def best(self) -> Plan:
        """The configuration of rank 0."""
        return self.plan(0)

    def plan(self, rank: int) -> Plan:
        """Return the configuration with a rank, 0 for the best."""
        return Plan(self.problem, self.ranked[rank])

    def __len__(self) -> int:
        return len(self.evaluations)
