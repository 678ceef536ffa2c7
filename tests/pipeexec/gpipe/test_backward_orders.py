"""Orders of backwards and recomputes that nothing but GPipe's dependencies would define.

torchgpipe fixes the order of its backwards by dependencies between micro-batches. Without them
autograd recomputes all that it can early, and an order may be any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.graph.verify import verify
from pipesim.ops import Op


def gpipe(p: int, m: int, **options: Any) -> ps.Schedule:
    return ps.schedule("gpipe", p, m, **options)


def backwards(schedule: ps.Schedule) -> list[list[int | None]]:
    """Return the micro-batches of each device's backwards, in order."""
    return [[a.microbatch for a in order if a.op == Op.B] for order in schedule.orders]


def test_a_random_order_is_drawn_for_each_device() -> None:
    """By a seed, on which alone it depends; forwards stay in order."""
    schedule = gpipe(8, 16, backward_order="random", seed=3)
    drawn = backwards(schedule)
    assert all(sorted(order) == list(range(16)) for order in drawn)
    assert len({tuple(order) for order in drawn}) == 8
    assert drawn == backwards(gpipe(8, 16, backward_order="random", seed=3))
    assert drawn != backwards(gpipe(8, 16, backward_order="random", seed=4))
    for order in schedule.orders:
        assert [a.microbatch for a in order[:16] if a.op == Op.F] == list(range(16))


def test_orders_that_are_not_random_have_no_seed() -> None:
    """The default is the last micro-batch first."""
    assert backwards(gpipe(2, 3)) == backwards(gpipe(2, 3, seed=5)) == [[2, 1, 0]] * 2
    assert backwards(gpipe(2, 3, backward_order="forward")) == [[0, 1, 2]] * 2


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 2**64),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["per_peer", "single", "per_microbatch"]),
)
def test_random_orders_run(
    p: int, m: int, seed: int, overlap: bool, rendezvous: bool, streams: Any
) -> None:
    """None deadlocks, and none is faster than one that all devices share."""
    costs = ps.Costs(forward=1, backward=2, network=ps.Network(latency=1))
    options = {"overlap": overlap, "rendezvous": overlap and rendezvous, "streams": streams}
    schedule = gpipe(p, m, backward_order="random", seed=seed)
    verify(schedule)
    graph = ps.lower(schedule, skips=[(0, p - 1)] if p > 1 else [], **options)
    timeline, other = (ps.simulate(graph, costs, engine=e) for e in ("compiled", "simpy"))
    assert (timeline.start == other.start).all()
    assert (timeline.end == other.end).all()
    if overlap and streams == "per_peer" and not rendezvous:
        least = ps.simulate(ps.lower(gpipe(p, m)), costs).makespan
        assert least <= timeline.makespan


def simulated(schedule: ps.Schedule, **options: Any) -> ps.Timeline:
    """Simulate with activations of 10 bytes, of which an input of 3 is kept."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=10, output_bytes=3)
    return ps.simulate(ps.lower(schedule, step="none", **options), costs)


def test_recomputes_before_the_first_backward() -> None:
    """They take the activations of all micro-batches before any gives them back."""
    plain = simulated(gpipe(2, 2), recompute="always")
    assert draw(plain, transfers=False) == grid("""
        0 | F0 F1 R1 .. .. .. B1 B1 R0 B0 B0
        1 | .. F0 F1 R1 B1 B1 R0 B0 B0 .. ..
    """)
    early = simulated(gpipe(2, 2), recompute="always", recompute_first=True)
    assert draw(early, transfers=False) == grid("""
        0 | F0 F1 R1 R0 .. .. .. B1 B1 B0 B0
        1 | .. F0 F1 R1 R0 B1 B1 B0 B0 .. ..
    """)
    assert plain.memory.peak.tolist() == [10, 13]
    assert early.memory.peak.tolist() == [20, 20]


def test_the_last_micro_batch_may_keep_its_activations() -> None:
    early = simulated(gpipe(2, 3), recompute="except_last", recompute_first=True)
    assert draw(early, transfers=False, rows="1") == grid("""
        1 | .. F0 F1 F2 R1 R0 B2 B2 B1 B1 B0 B0 .. ..
    """)


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(3, 4),
        gpipe(3, 4, backward_order="forward"),
        gpipe(3, 4, backward_order="random"),
        ps.schedule("looped_bfs", 2, 3),
        ps.schedule("1f1b", 3, 1),
        ps.schedule("chimera", 4, 2),
    ],
)
def test_every_recompute_comes_first(schedule: ps.Schedule) -> None:
    """In the order of their backwards, and nothing else moves."""
    early, plain = (
        ps.lower(schedule, recompute="always", recompute_first=first) for first in (True, False)
    )
    assert len(early) == len(plain)
    for number, stream in enumerate(early.streams):
        queue = early.queues[number]
        ops, place = early.op[queue], early.replica[queue] * early.n_stages + early.stage[queue]
        for location in np.unique(place):
            again = np.flatnonzero((place == location) & (ops == Op.R))
            back = np.flatnonzero((place == location) & (ops == Op.B))
            if len(back):
                assert again.max() < back.min()
                order = early.microbatch[queue]
                assert order[again].tolist() == order[back].tolist()
        other = plain.queues[plain.streams.index(stream)]
        moved, stayed = (
            [str(graph.task(int(t))) for t in tasks if graph.op[t] != Op.R]
            for graph, tasks in ((early, queue), (plain, other))
        )
        assert moved == stayed


def test_recompute_first_without_recompute() -> None:
    """There is nothing to move."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), recompute_first=True)
    assert not (graph.op == Op.R).any()


def test_what_has_forwards_later_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="device 0, position 3: 0F2 comes after the first backward"
    ):
        ps.lower(ps.schedule("1f1b", 2, 4), recompute="always", recompute_first=True)
    with pytest.raises(ArgumentError, match="recompute_first must be True or False, got 1"):
        ps.lower(gpipe(2, 2), recompute_first=1)  # type: ignore[arg-type]


def test_wrong_orders() -> None:
    with pytest.raises(UnknownNameError, match="unknown backward_order 'backward'"):
        gpipe(2, 2, backward_order="backward")
    with pytest.raises(ArgumentError, match="seed must be at least 0, got -1"):
        gpipe(2, 2, backward_order="random", seed=-1)
