"""Gradients received before R, on one stream for compute and copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.ops import Op

COSTS = ps.Costs(
    forward=1.0, backward=2.0, output_bytes=1.0, network=ps.Network(latency=0.0, bandwidth=1.0)
)


def queue(graph: ps.TaskGraph, device: int) -> list[str]:
    """Return what a device does after its forwards."""
    tasks = [str(graph.task(i).action) for i in range(len(graph)) if graph.device[i] == device]
    return [task for task in tasks if not any(op in task for op in ("F", "STEP"))]


def lowered(first: bool = False, waits: bool = True) -> ps.TaskGraph:
    schedule = ps.schedule("gpipe", 2, 2)
    return ps.lower(
        schedule, recompute="always", overlap=False, rendezvous=True, step="none",
        recompute_first=first, recompute_waits=waits,
    )  # fmt: skip


def test_order_by_hand() -> None:
    """The gradient of each micro-batch, then its R; all of both where R comes first."""
    assert queue(lowered(waits=False), 0) == ["0R1", "0RECV_B1", "0B1", "0R0", "0RECV_B0", "0B0"]
    assert queue(lowered(), 0) == ["0RECV_B1", "0R1", "0B1", "0RECV_B0", "0R0", "0B0"]
    first = queue(lowered(first=True), 0)
    assert [task for task in first if "RECV" in task] == ["0RECV_B1", "0RECV_B0"]
    assert [task for task in first if "B" in task and "RECV" not in task] == ["0B1", "0B0"]
    for microbatch in "01":
        assert first.index(f"0RECV_B{microbatch}") < first.index(f"0R{microbatch}")
    assert first.index("0RECV_B0") < first.index("0B1")
    assert first.index("0R0") < first.index("0B1")


def test_times_by_hand() -> None:
    """Two stages, one micro-batch, F and messages 1, B 2.

    ::

        device 0 | F S . . . . . R R R ...     S, R: a message sent, received; r: recompute
    """
    schedule = ps.schedule("gpipe", 2, 1)
    options = {"recompute": "always", "overlap": False, "rendezvous": True, "step": "none"}
    waits = ps.simulate(ps.lower(schedule, recompute_waits=True, **options), COSTS)
    fills = ps.simulate(ps.lower(schedule, **options), COSTS)
    # F 0-1, message 1-2, F 2-3, r 3-4, B 4-6, message 6-7, then r and B, or B alone.
    assert waits.makespan == 7 + 1 + 2
    assert fills.makespan == 7 + 2


#: 1F1B on one stream with rendezvous deadlocks anyway: neighbours send to each other.
CASES = [
    ("1f1b", {}),
    *(("gpipe", {"rendezvous": r, "recompute_first": f}) for r in (0, 1) for f in (0, 1)),
]


@given(
    st.sampled_from(CASES),
    st.integers(2, 4),
    st.integers(1, 5),
    st.sampled_from(["always", "except_last"]),
)
def test_each_gradient_comes_before_its_recompute(
    case: tuple[str, dict[str, int]], p: int, m: int, recompute: str
) -> None:
    """In every queue; the same tasks as without, verified, and one answer of both engines."""
    name, flags = case
    schedule = ps.schedule(name, p, m)
    options = {"recompute": recompute, "overlap": False, **{k: bool(v) for k, v in flags.items()}}
    graph = ps.lower(schedule, recompute_waits=True, **options)
    ps.verify(graph)
    assert len(graph) == len(ps.lower(schedule, **options))
    place = {str(graph.task(i).action): i for i in range(len(graph))}
    for i in np.flatnonzero(graph.is_op(frozenset({Op.R}))):
        stage, microbatch = int(graph.stage[i]), int(graph.microbatch[i])
        if stage < p - 1:
            assert place[f"{stage}RECV_B{microbatch}"] < i
    compiled, simpy = (ps.simulate(graph, COSTS, engine=x) for x in ("compiled", "simpy"))
    assert np.array_equal(compiled.start, simpy.start)
    assert np.array_equal(compiled.end, simpy.end)


def test_it_needs_one_stream() -> None:
    """Where transfers overlap, nothing ever waits that R could fill."""
    with pytest.raises(ArgumentError, match="recompute_waits=True, but transfers overlap"):
        ps.lower(ps.schedule("gpipe", 2, 2), recompute="always", recompute_waits=True)
    with pytest.raises(ArgumentError, match="recompute_waits must be True or False, got 1"):
        ps.lower(ps.schedule("gpipe", 2, 2), overlap=False, recompute_waits=1)  # type: ignore[arg-type]
