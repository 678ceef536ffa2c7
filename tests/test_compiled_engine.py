"""The compiled engine: it agrees with SimPy's, exactly, on every graph."""

from __future__ import annotations

import os

from hypothesis import given, settings
from rules import assert_rules_hold
from strategies import cases

import pipesim as ps
from pipesim.engines import compiled, simpy_engine


def assert_engines_agree(graph: ps.TaskGraph, costs: ps.Costs | ps.TaskCosts) -> None:
    """Compare every start and end with ``==``."""
    tasks = costs if isinstance(costs, ps.TaskCosts) else costs.of(graph)
    for mine, other in zip(compiled.run(graph, tasks), simpy_engine.run(graph, tasks), strict=True):
        assert (mine == other).all()


@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")))
@given(cases())
def test_engines_agree(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """On random schedules, replicas, costs, networks, streams, rendezvous and hosts."""
    assert_engines_agree(*case)


@given(cases())
def test_rules_hold(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """And with the rules, said a second time without an engine."""
    graph, costs = case
    assert_rules_hold(ps.simulate(graph, costs), costs.of(graph))
