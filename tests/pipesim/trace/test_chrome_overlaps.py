"""Traces with overlapped actions as timelines: what torch names ``PP:(0F2;0B0)OVERLAP_F_B``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_chrome_import import microseconds, read
from tracing import Event, event, ranges, traced, write

import pipesim as ps
from pipesim.errors import TimelineError
from pipesim.graph.dependencies import overlapped_pairs
from pipesim.trace.chrome_import import load

PAIR = "PP:(1F1;1B0)OVERLAP_F_B"
#: Two micro-batches on two devices; the second device overlaps from 20 to 50 us.
FIRST = [*ranges("0F0 0F1"), *ranges("0B0 0B1", 10, 60)]
BEFORE, AFTER = event("PP:1F0", 10, 20), event("PP:1B1", 50, 60)


def second(*inner: Event) -> list[Event]:
    """Return the second device's ranges; ``inner`` lie in the overlapped one."""
    return [BEFORE, event(PAIR, 20, 50), *inner, AFTER]


def paired(timeline: ps.Timeline) -> list[tuple[str, str]]:
    """Return the overlapped actions."""
    graph = timeline.graph
    pairs = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    return [(str(graph.task(f)), str(graph.task(b))) for f, b in zip(*pairs, strict=True)]


def test_by_hand(tmp_path: Path) -> None:
    """A range that has none of its halves is cut in the middle; both results come at its end."""
    timeline = read(tmp_path, FIRST, second())
    times = microseconds(timeline)
    assert paired(timeline) == [("1F1", "1B0")]
    assert (times["1F1"], times["1B0"]) == ((20, 35), (35, 50))
    assert times["1SEND_B0"] == (50, 50)
    assert times["0RECV_B0"] == (50, 60)
    assert ps.Costs.from_timeline(timeline).overlapped == pytest.approx((20e-6, 30e-6))
    assert ps.replay(timeline).makespan == pytest.approx(80e-6)


@pytest.mark.parametrize(
    ("inner", "forward", "backward"),
    [
        ((("PP:1F1", 21, 29), ("PP:1B0", 31, 50)), (21, 29), (31, 50)),
        ((("PP:1F1", 20, 30),), (20, 30), (30, 50)),  # the rest is the other's
        ((("PP:1B0", 30, 50),), (20, 30), (30, 50)),
        ((("PP:1F1", 20, 40), ("PP:1B0", 30, 50, 2)), (20, 35), (35, 50)),  # beside each other
        ((("PP:1B0", 20, 40), ("PP:1F1", 40, 50)), (20, 30), (30, 50)),  # the B first
        ((("PP:1F1", 21, 29), ("PP:1F1", 23, 27)), (23, 27), (27, 50)),  # twice, nested
    ],
)
def test_halves_with_ranges(
    tmp_path: Path,
    inner: tuple[tuple[Any, ...], ...],
    forward: tuple[int, int],
    backward: tuple[int, int],
) -> None:
    """Halves that have ranges keep their times, unless they ran at once."""
    events = [event(name, a, b, tid=tid[0] if tid else 1) for name, a, b, *tid in inner]
    timeline = read(tmp_path, FIRST, second(*events))
    times = microseconds(timeline)
    assert paired(timeline) == [("1F1", "1B0")]
    assert (times["1F1"], times["1B0"]) == (forward, backward)


def test_operations_show_the_halves(tmp_path: Path) -> None:
    """The B begins with autograd's first; what it waited for before is no one's work."""
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    events = [
        event("aten::mm", 21, 28, "cpu_op"),
        event("aten::mse_loss", 27, 29, "cpu_op"),
        event("gloo:recv", 15, 33),
        event("all of it", 20, 50, "cpu_op"),
        event(engine, 34, 40, "cpu_op"),
        event("aten::mm", 35, 39, "cpu_op"),
        event(engine, 41, 48, "cpu_op"),
    ]
    timeline = read(tmp_path, FIRST, second(*events))
    times = microseconds(timeline)
    assert paired(timeline) == [("1F1", "1B0")]
    assert (times["1F1"], times["1B0"]) == ((20, 29), (34, 50))
    only = read(tmp_path, FIRST, second(*events[3:]))  # a B alone shows no turn
    assert microseconds(only)["1F1"] == (20, 35)


def test_kernels(tmp_path: Path) -> None:
    """On a GPU it lasts from its first kernel to its last."""
    events = [
        event("cudaLaunchKernel", 21, 22, "cuda_runtime", correlation=1),
        event("gemm", 30, 40, "kernel", tid=99, correlation=1),
        event("cudaLaunchKernel", 44, 45, "cuda_runtime", tid=2, correlation=2),
        event("gemm", 42, 49, "kernel", tid=98, correlation=2),
    ]
    times = microseconds(read(tmp_path, FIRST, second(*events)))
    assert (times["1F1"], times["1B0"]) == ((30, 39.5), (39.5, 49))


def test_messages(tmp_path: Path) -> None:
    """They are used when the action starts, or by its B where they left later."""
    device = [
        *ranges("1F0 1B0 1F1", 10, 10), event("PP:(1F2;1B1)OVERLAP_F_B", 61, 79),
        event("PP:1B2", 79, 90),
    ]  # fmt: skip
    ends = [*ranges("0F0 0F1"), *ranges("0B1 0B2", 10, 82)]
    times = microseconds(read(tmp_path, [*ends, event("PP:(0F2;0B0)OVERLAP_F_B", 40, 60)], device))
    assert times["0RECV_B0"] == (30, 40)
    assert times["0SEND_F2"] == (60, 60)  # what the F half computed is there at the end
    assert times["1RECV_F2"] == (60, 61)
    halves = [event("PP:0F2", 22, 28), event("PP:0B0", 32, 60)]
    late = read(tmp_path, [*ends, event("PP:(0F2;0B0)OVERLAP_F_B", 22, 60), *halves], device)
    assert microseconds(late)["0RECV_B0"] == (30, 32)


def test_guessed_times_move_no_clock(tmp_path: Path) -> None:
    """When a half began or ended within a range is no bound for the clocks."""
    ends = [*ranges("0F0 0F1"), *ranges("0B1 0B2", 10, 82)]
    whole = event("PP:(0F2;0B0)OVERLAP_F_B", 22, 60)  # its B waits until 50, past the middle
    device = [*ranges("1F0", 10, 10), event("PP:1B0", 20, 50), event("PP:1F1", 50, 60),
              event("PP:1F2", 61, 65), *ranges("1B1 1B2", 8, 65)]  # fmt: skip
    imported = load(write(tmp_path, [[*ends, whole], device]))
    assert (imported.offsets.tolist(), imported.residual) == ([0, 0], 0)
    device[3] = event("PP:1F2", 39, 40)  # its input came early, while the B ran
    device[1:3] = [event("PP:1B0", 20, 22), event("PP:1F1", 22, 39)]
    imported = load(write(tmp_path, [[*ends, whole], device]))
    assert (imported.offsets.tolist(), imported.residual) == ([0, 0], 0)


def test_gaps_are_charged(tmp_path: Path) -> None:
    """To the F half where nothing was waited for, and between the halves to the B."""
    halves = event("PP:1F1", 24, 30), event("PP:1B0", 34, 50)
    times = microseconds(read(tmp_path, FIRST, second(*halves), gaps="charge"))
    assert (times["1F1"], times["1B0"]) == ((20, 30), (30, 50))


def outlined(timeline: ps.Timeline, keep: bool) -> list[list[Event]]:
    """Return the ranges of a simulation, those of overlapped actions too; halves if ``keep``."""
    ranks, rows = traced(timeline), timeline.frame.itertuples()
    rows_by_name = {
        (r.device, f"PP:{r.stage}{r.op}{r.microbatch}"): r for r in rows if r.overlapped
    }
    for device, events in enumerate(ranks):
        halves = sorted(
            (e for e in events if (device, e["name"]) in rows_by_name),
            key=lambda e: (e["ts"], "F" not in e["name"]),
        )
        for forward, backward in zip(halves[::2], halves[1::2], strict=True):
            name = f"PP:({forward['name'][3:]};{backward['name'][3:]})OVERLAP_F_B"
            events.append(event(name, forward["ts"], backward["ts"] + backward["dur"]))
            if not keep:
                events.remove(forward)
                events.remove(backward)
    return ranks


@pytest.mark.slow
@given(
    keep=st.booleans(), p=st.integers(1, 4), extra=st.integers(0, 3), both=st.floats(1.5e-3, 9e-3)
)
def test_a_simulated_run_comes_back(
    tmp_path_factory: pytest.TempPathFactory, keep: bool, p: int, extra: int, both: float
) -> None:
    """The same tasks, the same overlapped actions, and the same makespan replayed.

    Of DualPipeV, and of merged F and I whose halves have ranges: without, nothing shows the I.
    """
    costs = ps.Costs(
        1e-3, 2e-3, 1e-3, 1e-3, overlapped=both, network=ps.Network(latency=1e-4)
    )  # fmt: skip
    schedule = ps.schedule("dualpipev", p, 2 * p + extra)
    if keep and extra % 2:
        schedule = ps.schedule("1f1b", p, 2 * p + extra, merged="delayed_w")
    graph = ps.lower(schedule, step="none", hosts="per_device")
    timeline = ps.simulate(graph, costs)
    paths = write(tmp_path_factory.mktemp("traces"), outlined(timeline, keep))
    back = ps.Timeline.from_chrome(paths)
    assert sorted(paired(back)) == sorted(paired(timeline))
    expected, actual = microseconds(timeline), microseconds(back)
    assert expected.keys() == actual.keys()
    if keep:
        for name in expected:
            if "_" not in name:
                assert actual[name] == pytest.approx(expected[name], abs=0.01)
    assert ps.replay(back).makespan == pytest.approx(timeline.makespan, abs=1e-8)
    needs = back.graph.dependencies
    assert (back.start[needs.rows] >= back.end[needs.values] - 1e-9).all()
    assert np.isclose(back.makespan, timeline.makespan)


def test_names_of_ones_own(tmp_path: Path) -> None:
    """Halves may have other names than the action."""
    own = r"my(?P<stage>\d)(?P<op>[FB])(?P<microbatch>\d)"
    events = [
        {**e, "name": e["name"].replace("PP:", "my") if e["name"] != PAIR else PAIR}
        for e in second(event("PP:1F1", 20, 24), event("PP:1B0", 24, 50))
    ]
    first = [{**e, "name": e["name"].replace("PP:", "my")} for e in FIRST]
    assert microseconds(read(tmp_path, first, events, pattern=own))["1F1"] == (20, 24)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("PP:(1F1;1W0)OVERLAP_F_B", {}, r"rank1.json: range .*: .*overlaps F with W; write the F"),
        ("PP:(1F1)OVERLAP_F_B", {}, "is not an action"),
        ("PP:(1F1;1B7)OVERLAP_F_B", {}, "1B0 is missing on rank 1|0F2 is missing"),
        ("PP:(1F1;1B1)OVERLAP_F_B", {}, "1B0 is missing|1B1 is there twice"),
        (PAIR, {"pattern": r"PP:\d(?P<op>[FB])(?P<microbatch>\d)"}, "give it a group .*stage"),
    ],
)
def test_bad_names(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    """Actions that cannot be simulated, and pairs that are no part of the step."""
    with pytest.raises(TimelineError, match=message):
        read(tmp_path, FIRST, [BEFORE, event(name, 20, 50), AFTER], **options)
