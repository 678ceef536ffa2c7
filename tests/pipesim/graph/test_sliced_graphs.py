"""Sequences in slices: what a slice waits for, which orders run, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import custom_schedules

import pipesim as ps
from pipesim.analysis.audit_data import DATA_NAMES, data_uses
from pipesim.errors import (
    ArgumentError,
    DeadlockError,
    GraphError,
    PipeError,
    ScheduleError,
    TimelineError,
)
from pipesim.graph import Tasks
from pipesim.scheduling.schedule import fewer_microbatches

TWO_STAGES = (
    ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"],
    ["1F0", "1F1", "1F2", "1B2", "1B1", "1B0"],
)


def two_stages(n_slices: int = 3) -> ps.Schedule:
    """Return one sequence in three slices, on two devices."""
    return ps.Schedule.from_orders(TWO_STAGES).with_slices(n_slices)


def needed(graph: ps.TaskGraph, name: str) -> list[str]:
    """Return the names of the dependencies of a task."""
    task = next(k for k in range(len(graph)) if str(graph.task(k)) == name)
    return sorted(str(graph.task(int(k))) for k in graph.dependencies[task])


# What a slice needs (rule 3), by hand


def test_a_slice_needs_the_one_before_and_its_backward_the_one_after() -> None:
    graph = ps.lower(two_stages())
    assert needed(graph, "0F0") == []
    assert needed(graph, "0F1") == ["0F0"]
    assert needed(graph, "1F2") == ["1F1", "1RECV_F2"]
    assert needed(graph, "1B2") == ["1F2"]
    assert needed(graph, "1B1") == ["1B2", "1F1"]
    assert needed(graph, "0B0") == ["0B1", "0F0", "0RECV_B0"]
    assert needed(graph, "0STEP") == ["0B0", "0B1", "0B2"]


def test_sequences_do_not_need_each_other() -> None:
    """Two sequences in two slices: 0 and 1, then 2 and 3."""
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2))
    assert needed(graph, "0F2") == []
    assert needed(graph, "0F3") == ["0F2"]
    assert needed(graph, "1B3") == ["1F3"]
    assert needed(graph, "1B2") == ["1B3", "1F2"]


def test_split_backwards_and_recomputes() -> None:
    """I needs I or B of the slice after, W its own I alone, and R the F that kept keys."""
    orders = [["0F0", "0F1", "0F2", "0I2", "0B1", "0W2", "0I0", "0W0"]]
    schedule = ps.Schedule.from_orders(orders).with_slices(3)
    graph = ps.lower(schedule, recompute="always")
    assert needed(graph, "0B1") == ["0F1", "0I2", "0R1"]
    assert needed(graph, "0I0") == ["0B1", "0F0", "0R0"]
    assert needed(graph, "0W2") == ["0I2"]
    assert needed(graph, "0R1") == ["0F1"]


def test_each_replica_has_its_own_slices() -> None:
    graph = ps.lower(two_stages(), n_replicas=2)
    tasks = [k for k in range(len(graph)) if str(graph.task(k)) == "1F1"]
    for k in tasks:
        replicas = {int(graph.replica[t]) for t in graph.dependencies[k]}
        assert replicas == {int(graph.replica[k])}


def test_an_evaluation_keeps_the_order_of_slices() -> None:
    graph = ps.lower(two_stages(), forward_only=True)
    assert needed(graph, "1F1") == ["1F0", "1RECV_F1"]
    assert graph.n_slices == 3


# Time and memory, by hand


@pytest.mark.usefixtures("each_engine")
def test_time() -> None:
    """Seq1F1B of two sequences in two slices, with messages of a second.

    F = 1, B = 2. Slice 1 is the last of the first sequence, so its B comes first.
    """
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4), step="none")
    timeline = ps.simulate(graph, ps.Costs(1, 2, network=ps.Network(latency=1)))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 F2 .. .. .. .. B1 B1 F3 B0 B0 .. .. .. B3 B3 B2 B2
        1 | .. .. F0 F1 B1 B1 F2 B0 B0 .. .. F3 B3 B3 B2 B2 .. .. ..
    """)


@pytest.mark.usefixtures("each_engine")
def test_memory() -> None:
    """Each slice holds its activations from F to B, as any micro-batch does (rule 10).

    F = B = 1, two sequences in two slices. Device 0 holds at most p + k - 1 = 3 slices: F3 begins
    when B1 ends.
    """
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4), step="none")
    timeline = ps.simulate(graph, ps.Costs(1, 1, activation_bytes=5))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 F2 .. B1 F3 B0 .. B3 B2
        1 | .. F0 F1 B1 F2 B0 F3 B3 B2 ..
    """)
    assert timeline.memory.peak.tolist() == [15, 10]
    memory = timeline.memory()
    own = memory[memory["device"] == 0] if "device" in memory else memory.loc[[0]]
    held = dict(zip(own["time"], own["nbytes"], strict=True))  # the last of each moment
    assert [held[t] for t in (0, 1, 2, 5, 7, 9, 10)] == [5, 10, 15, 15, 10, 5, 0]


def test_slices_hold_less_than_whole_sequences() -> None:
    """Four sequences on four devices: 1F1B holds 4 sequences, Seq1F1B in 4 slices 7 quarters."""
    whole = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 4)), ps.Costs(4, 8, activation_bytes=4))
    sliced = ps.simulate(
        ps.lower(ps.schedule("seq1f1b", 4, 16, n_slices=4)), ps.Costs(1, 2, activation_bytes=1)
    )
    chunks = ps.simulate(
        ps.lower(ps.schedule("slimpipe", 4, 16)), ps.Costs(0.5, 1, activation_bytes=0.5)
    )
    assert whole.memory.peak.max() == 16
    assert sliced.memory.peak.max() == 7
    assert chunks.memory.peak.max() == 4 + 1.5
    assert whole.makespan == 7 * 12
    assert sliced.makespan == 19 * 3
    assert chunks.makespan == 35 * 1.5


@pytest.mark.usefixtures("each_engine")
@given(schedule=custom_schedules(), seconds=st.integers(1, 4))
def test_an_order_that_runs_takes_as_long_as_without_slices(
    schedule: ps.Schedule, seconds: int
) -> None:
    """A stage runs one task at a time, so that slices forbid orders, and delay none."""
    costs = ps.Costs(1, 2, input_grad=seconds, weight_grad=1, network=ps.Network(latency=0.5))
    timeline, other = (ps.simulate(ps.lower(x), costs) for x in (schedule, schedule.with_slices(1)))
    key = [np.lexsort((t.graph.microbatch, t.graph.kind)) for t in (timeline, other)]
    assert (timeline.start[key[0]] == other.start[key[1]]).all()
    assert (timeline.end[key[0]] == other.end[key[1]]).all()


@pytest.mark.parametrize("name", ["seq1f1b", "slimpipe"])
def test_idle_times_sum_to_their_device(name: str) -> None:
    timeline = ps.simulate(
        ps.lower(ps.schedule(name, 3, 6, n_slices=3)),
        ps.Costs(1, 2, output_bytes=1, network=ps.Network(latency=0.25, bandwidth=4)),
    )
    causes = timeline.why.idle_by_cause()
    total = timeline.makespan - timeline.frame.query("stream == 'compute'").groupby("device")[
        ["start", "end"]
    ].sum().eval("end - start")
    assert causes.select_dtypes("number").sum(axis=1).to_numpy() == pytest.approx(total.to_numpy())


def test_audit_names_the_keys_and_values() -> None:
    """Queues keep the order of slices too. F and R read them; each B needs all later ones."""
    graph = ps.lower(two_stages(), recompute="always")
    table = ps.audit(graph, ps.Costs(1, 2))
    assert table.loc["F needs F", "redundant"] == 4
    assert table.loc["B needs B", "redundant"] == 4
    names = [list(DATA_NAMES)[number] for number in data_uses(graph)[0]]
    assert names.count("keys_values") == 2 * (3 + 2 + 2)
    assert names.count("keys_values_gradient") == 2 * (2 + 2)


# Graphs and files keep the number of slices


def test_copies_and_files_keep_the_slices(tmp_path: Path) -> None:
    schedule = two_stages()
    assert schedule.n_slices == 3
    assert "3 slices a sequence" in repr(schedule)
    assert schedule.with_name("x").n_slices == 3
    assert schedule.with_updates(1, "one") == schedule
    assert schedule != schedule.with_slices(1)
    assert "slices" not in repr(schedule.with_slices(1))
    graph = ps.lower(schedule)
    assert replace(graph).n_slices == graph.with_name("x").n_slices == 3
    timeline = ps.simulate(graph, ps.Costs(1, 2))
    timeline.save(tmp_path / "a.csv")
    back = ps.Timeline.load(tmp_path / "a.csv")
    assert back.graph.n_slices == 3
    assert needed(back.graph, "1B1") == ["1B2", "1F1"]
    back.save(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    text = (tmp_path / "a.csv").read_text().splitlines()
    column = text[0].split(",").index("n_slices")
    lines = [line.split(",") for line in text]
    lines[0][column], lines[0][text[0].split(",").index("checksum")] = "n_slices", "checksum"
    for line in lines[1:]:
        line[column] = "4"
    (tmp_path / "c.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    with pytest.raises(TimelineError, match="no whole number of sequences of n_slices=4"):
        ps.Timeline.load(tmp_path / "c.csv")


def test_a_graph_of_own_tasks() -> None:
    """Without `lower`: two slices of one stage."""
    columns = [[ps.Op.F, ps.Op.F, ps.Op.B, ps.Op.B], [0] * 4, [0] * 4, [0, 1, 1, 0], [0] * 4]
    tasks = Tasks(*(np.array(column, dtype=np.int64) for column in columns))
    graph = ps.TaskGraph.build(tasks, n_slices=2)
    assert needed(graph, "0F1") == ["0F0"]
    assert needed(graph, "0B0") == ["0B1", "0F0"]
    with pytest.raises(GraphError, match="n_slices=3"):
        ps.TaskGraph.build(tasks, n_slices=3)


# Refused, with why


@pytest.mark.parametrize(
    ("orders", "task"),
    [
        ([["0F1", "0F0", "0B1", "0B0"]], "0F1 .position 0. waits for 0F0"),
        ([["0F0", "0F1", "0B0", "0B1"]], "0B0 .position 2. waits for 0B1"),
        ([["0F0", "0B0", "0F1", "0B1"]], "0B0 .position 1. waits for 0B1"),
    ],
)
def test_orders_that_cannot_run(orders: list[list[str]], task: str) -> None:
    schedule = ps.Schedule.from_orders(orders)
    ps.verify(schedule)
    for check in (ps.verify, ps.lower):
        with pytest.raises(DeadlockError, match=task):
            check(schedule.with_slices(2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_schedules_of_whole_sequences_cannot_run_slices(name: str) -> None:
    """They run backwards from the first micro-batch; GPipe's reverse order suits all slices."""
    schedule = ps.schedule(name, 2, 4)
    if name == "gpipe":
        ps.verify(schedule.with_slices(4))
        return
    with pytest.raises(DeadlockError, match="wait for each other"):
        ps.verify(schedule.with_slices(2))


def test_refused(tmp_path: Path) -> None:
    schedule = ps.schedule("1f1b", 2, 6)
    with pytest.raises(ScheduleError, match="n_slices=4 does not divide the 6 micro-batches"):
        schedule.with_slices(4)
    for bad in (0, 1.5, "2", True):
        with pytest.raises(PipeError, match="n_slices"):
            schedule.with_slices(bad)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="n_slices=3, but 2 micro-batches a mini-batch"):
        ps.verify(schedule.with_slices(3).with_updates(3, "stashed"))
    with pytest.raises(ScheduleError, match="slices of sequence 1 take several paths"):
        ps.verify(ps.schedule("chimera", 2, 6).with_slices(2))
    sliced = two_stages()
    with pytest.raises(ScheduleError, match=r"call with_slices\(3\) again after loading"):
        sliced.save(tmp_path / "a.csv")
    with pytest.raises(ArgumentError, match="3 slices a sequence"):
        ps.lower(sliced).save_torch_csv(tmp_path / "a.csv")
    with pytest.raises(ScheduleError, match="give a multiple of 3"):
        fewer_microbatches(sliced, 2)
    with pytest.raises(ArgumentError, match="multiples of n_slices"):
        ps.schedule("seq1f1b", 2, 5)
    with pytest.raises(ArgumentError, match="at least as many slices as there are devices"):
        ps.schedule("slimpipe", 4, 4, n_slices=2)
