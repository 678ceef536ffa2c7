"""What does not fit in memory is refused before it is allocated."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import CapacityError, PipeError
from pipesim.graph.graph import TaskGraph
from pipesim.simulation.engines import compiled
from pipesim.utils import host_memory


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 24 GB left."""
    monkeypatch.setattr(host_memory, "available_memory", lambda: 24 * 10**9)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", list(ps.schedules().index))
def test_schedule_of_very_many_actions(name: str) -> None:
    """Refused at once, with what its graph would need: 48 bytes a task, its times included."""
    with pytest.raises(CapacityError) as caught:
        ps.schedule(name, 1_000_000, 1_000_000)
    assert str(caught.value) == (
        f"schedule {name!r} of 2e+12 actions needs 4.8e+04 GB and its graph of 6e+12 tasks "
        "2.88e+05 GB, but 24 GB are available; use fewer micro-batches, devices or replicas"
    )
    with pytest.raises(CapacityError, match=r"of 1e\+300 actions needs 1e\+291 GB"):
        ps.schedule(name, 10**400, 10**400)


@pytest.mark.usefixtures("_small")
def test_schedule_that_just_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 bytes an action while it is built."""
    monkeypatch.setattr(host_memory, "available_memory", lambda: 24 * 2 * 4 * 8)
    assert len(ps.schedule("1f1b", 4, 8)) == 64
    monkeypatch.setattr(host_memory, "available_memory", lambda: 24 * 2 * 4 * 8 - 1)
    with pytest.raises(CapacityError, match=r"of 64 actions needs .* its graph of 192 tasks"):
        ps.schedule("1f1b", 4, 8)


@pytest.mark.usefixtures("_small")
def test_graph_of_very_many_replicas() -> None:
    """10^10 tasks of 48 bytes."""
    schedule = ps.schedule("1f1b", 10, 100)
    with pytest.raises(CapacityError) as caught:
        ps.lower(schedule, n_replicas=10**10 // 6000)
    assert str(caught.value) == (
        "a graph of 1e+10 tasks needs 480 GB, and 24 GB are available; "
        "use fewer micro-batches, devices or replicas"
    )
    with pytest.raises(CapacityError, match=r"a graph of 1e\+300 tasks"):
        ps.lower(schedule, n_replicas=10**400)


def test_graph_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its dependencies are made."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4))
    monkeypatch.setattr(host_memory, "available_memory", lambda: 100)
    with pytest.raises(CapacityError, match="a graph of 34 tasks needs "):
        TaskGraph.of_kinds(graph.kinds, graph.kind, graph.microbatch)


def test_scenarios_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start and end of as many tasks as one may look back, for as many scenarios as run at once."""
    graph, costs, noise = ps.lower(ps.schedule("gpipe", 8, 16)), ps.Costs(1, 2), ps.Noise(seed=0)
    options: dict[str, Any] = {"n": 4, "progress": False}
    needed = compiled.ScenarioBatches(graph, costs.of(graph), noise).nbytes(1)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 4 * needed)
    ps.simulate_many(graph, costs, noise, n_jobs=4, **options)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 4 * needed - 1)
    with pytest.raises(CapacityError, match="running 4 x 1 scenarios of 712 tasks at once needs "):
        ps.simulate_many(graph, costs, noise, n_jobs=4, **options)


def test_very_many_scenarios() -> None:
    """Refused before their results have a place."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4))
    with pytest.raises(
        CapacityError, match=r"holding all scenarios needs 8e\+06 GB, .*fewer than n"
    ):
        ps.simulate_many(graph, ps.Costs(1, 2), ps.Noise(seed=0), 10**14)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_numbers_of_replicas(wrong: Any) -> None:
    """Whole, and at least one."""
    with pytest.raises(PipeError, match=rf"n_replicas must be .*got {re.escape(repr(wrong))}"):
        ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=wrong)


def test_available_memory() -> None:
    """More than a megabyte, less than an exabyte."""
    assert 2**20 < host_memory.available_memory() < 2**60


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda px: px.ShardedEmbedding(10**12, 10**6),
            r"of n_rows=10{12}, dim=10{6} needs 4e",
        ),
        (
            lambda px: px.ShardedEmbedding([5, 10**12], 8),
            r"of n_rows=\[5, 10{12}\], dim=8 needs",
        ),
        (lambda px: px.ShardedEmbedding(10**30, 10**30), r"needs 4e\+51 GB, .*over more"),
        (lambda px: px.workers(10**12, link=ps.Network(1e-3)), r"n=10{12} workers needs 2e\+06 GB"),
    ],
)
def test_modules_and_devices(make: Callable[[Any], object], message: str) -> None:
    """Before torch's allocator is asked."""
    import pipeexec

    with pytest.raises(CapacityError, match=message):
        make(pipeexec)


@pytest.mark.slow
def test_a_module_on_a_device_without_memory_of_this_machine() -> None:
    """Nothing is allocated."""
    import torch

    from pipeexec.demo_models.gpt import gpt

    with torch.device("meta"):
        assert len(gpt(n_layers=2, d_model=1 << 20)) == 4


def test_capacity_is_a_memory_error() -> None:
    """So that callers who catch Python's own get it."""
    assert issubclass(CapacityError, MemoryError)
    assert issubclass(CapacityError, PipeError)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ps.Placement.linear(10**13), r"a placement of 1e\+13 stages needs 1.2e\+06 GB"),
        (lambda: ps.Placement.looped(10**6, 10**7), r"a placement of 1e\+13 stages"),
        (lambda: ps.Placement.v_shaped(10**12), r"a placement of 2e\+12 stages"),
        (lambda: ps.Placement.waves(10**6, 10**7), r"a placement of 2e\+13 stages"),
        (lambda: ps.Placement.bidirectional(10**12), r"a placement of 2e\+12 stages"),
        (lambda: ps.Placement(range(10**13)), r"a placement of 1e\+13 stages"),
        (lambda: ps.Costs(1).per_stage("forward", 10**13), r"a placement of 1e\+13 stages"),
        (lambda: ps.Network(0, 1).all_reduce(1, range(10**13)), "all-reduce of 10,000,000,000,000"),
        (lambda: ps.sweep({"n_devices": range(1, 10**13), "schedule": ["gpipe"]}),
         r"a sweep of 1e\+13 rows needs 4e\+07 GB"),
        (lambda: ps.sweep({"n_devices": range(1, 10**30), "schedule": ["gpipe"]}),
         r"a sweep of 1e\+30 rows"),
        (lambda: ps.sweep({key: [1] * 10**4 for key in ("n_devices", "n_microbatches", "forward")}),
         r"a sweep of 1e\+12 rows"),
    ],
)  # fmt: skip
def test_counts_that_multiply(make: Callable[[], object], what: str) -> None:
    """The product is looked at before anything of it is made."""
    with pytest.raises(CapacityError, match=what):
        make()


def test_orders_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a list that never ends, memory is the limit; of skips and shards, what there can be."""
    schedule = ps.schedule("1f1b", 2, 2)
    with pytest.raises(PipeError, match=r"skip \(0, 1\) is given twice"):
        ps.lower(schedule, skips=itertools.repeat((0, 1)))
    with pytest.raises(PipeError, match="sharded names stage 1"):
        ps.lower(schedule, sharded=itertools.count())
    monkeypatch.setattr(host_memory, "available_memory", lambda: 10**7)
    with pytest.raises(CapacityError, match=r"an order of more than 65,535 actions \(device 0\)"):
        ps.Schedule.from_orders([itertools.repeat("0F0")])  # type: ignore[list-item]


def test_chunks_of_many_devices() -> None:
    """Counted in one pass, not in one a device."""
    assert ps.Placement.linear(50_000).n_chunks == 1
    assert ps.Placement.bidirectional(4).n_chunks == ps.Placement.v_shaped(3).n_chunks == 2
