"""Timelines: columns, names, and the file that keeps one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_timelines import same
from strategies import cases

import pipesim as ps
from pipesim.errors import PipeError, TimelineError
from pipesim.simulation import LogNormal
from pipesim.timeline.timeline import COLUMNS
from pipesim.utils.files import write_whole


@pytest.fixture
def timeline() -> ps.Timeline:
    """Two stages, two micro-batches, messages that last."""
    costs = ps.Costs(1, 2, output_bytes=3, network=ps.Network(latency=0.25, bandwidth=2))
    return ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)


def test_frame(timeline: ps.Timeline) -> None:
    """The public columns, a row a task, indexed by its id."""
    frame = timeline.frame
    assert tuple(frame.columns) == COLUMNS
    assert frame.index.name == "task"
    assert len(frame) == len(timeline) == len(timeline.graph)
    first = frame.loc[0].to_dict()
    assert first == {
        "device": 0, "stream": "compute", "op": "F", "stage": 0, "microbatch": 0,
        "start": 0.0, "end": 1.0, "nbytes": 0.0,
    }  # fmt: skip
    sends = frame[frame["op"] == "SEND_F"]
    assert sends["stream"].tolist() == ["send:1", "send:1"]
    assert sends["nbytes"].tolist() == [3.0, 3.0]
    assert frame[frame["op"] == "STEP"]["microbatch"].tolist() == [-1, -1]


def test_frame_of_a_partial_timeline(timeline: ps.Timeline) -> None:
    """Tasks that never started have no row; one that did not end has no end."""
    start, end = timeline.start.copy(), timeline.end.copy()
    start[5:], end[4:] = np.nan, np.nan
    partial = ps.Timeline(timeline.graph, start, end, timeline.nbytes)
    assert partial.frame.index.tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(partial.frame.loc[4, "end"])
    assert not partial.complete
    assert partial.ran.sum() == 4
    assert "only 4 ran" in repr(partial)


def test_names_and_repr(timeline: ps.Timeline) -> None:
    """By default the graph's name."""
    assert timeline.name == "gpipe"
    assert timeline.with_name("mine").name == "mine"
    assert re.fullmatch(
        r"<Timeline gpipe: \d+ tasks, makespan [\d.]+ s, bubble \d+\.\d%>", repr(timeline)
    )
    assert timeline.n_devices == 2
    assert timeline.complete


def test_one_value_a_task(timeline: ps.Timeline) -> None:
    """Columns of another length are refused."""
    with pytest.raises(TimelineError, match=r"of \d+ tasks got a column of shape \(3,\); give one"):
        ps.Timeline(timeline.graph, timeline.start[:3], timeline.end, timeline.nbytes)


@pytest.mark.slow
@given(case=cases(), data=st.data())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[ps.TaskGraph, ps.Costs],
    data: st.DataObject,
) -> None:
    """What is loaded is what was saved, also after a failure."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    if data.draw(st.booleans()):
        start, end = timeline.start.copy(), timeline.end.copy()
        failed = data.draw(st.integers(0, len(graph) - 1))
        end[failed:] = np.nan
        start[failed + 1 :] = np.nan
        timeline = ps.Timeline(graph, start, end, timeline.nbytes)
    path = tmp_path_factory.mktemp("timeline") / "mine.csv"
    timeline.save(path)
    loaded = ps.Timeline.load(path, costs=costs)
    assert same(timeline, loaded)
    assert loaded.name == "mine"
    assert loaded.costs is costs
    assert loaded.makespan == timeline.makespan
    # Or else kernels would be compiled once more for it.
    assert loaded.start.flags.writeable == timeline.start.flags.writeable


@pytest.mark.slow
@given(st.data())
def test_round_trip_of_any_number(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Measured times have all their bits."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1))
    times = st.floats(0, 1e9, allow_nan=False)
    start = np.array([data.draw(times) for _ in range(3)])
    end = start + np.array([data.draw(times) for _ in range(3)])
    path = tmp_path_factory.mktemp("timeline") / "mine.csv"
    timeline = ps.Timeline(graph, start, end, np.zeros(3))
    timeline.save(path)
    assert same(timeline, ps.Timeline.load(path))


def test_metrics_of_a_loaded_timeline(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Totals and critical path survive; memory needs costs."""
    timeline.save(tmp_path / "t.csv")
    loaded = ps.Timeline.load(tmp_path / "t.csv", costs=timeline.costs, name="again")
    assert loaded.name == "again"
    assert loaded.bubble_fraction == timeline.bubble_fraction
    assert loaded.why.critical_path().equals(timeline.why.critical_path())
    assert (loaded.memory.peak == timeline.memory.peak).all()
    with pytest.raises(TimelineError, match="has no costs"):
        _ = ps.Timeline.load(tmp_path / "t.csv").memory.peak


def test_columns_in_any_order(timeline: ps.Timeline, tmp_path: Path) -> None:
    """And more of them, as a spreadsheet may leave them."""
    frame = timeline.frame[list(reversed(COLUMNS))].assign(note="mine")
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert same(timeline, ps.Timeline.load(tmp_path / "t.csv"))


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A writer that fails leaves the old file, and nothing beside it."""
    path = tmp_path / "kept.csv"
    path.write_text("old")

    def fail(file: Path) -> None:
        file.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert path.read_text() == "old"
    write_whole(path, lambda file: file.write_text("new"))
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.csv"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_no_file(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """Nothing there, or a folder; the path is named."""
    path = tmp_path / "t.csv"
    make(path)
    with pytest.raises(TimelineError, match=rf"cannot read a timeline from {path}"):
        ps.Timeline.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"{}\n", b"\x00\xff\xfe" * 40, b"\x89PNG\r\n\x1a\n\x00", b'a,"b\n', b"1\n1,2\n"],
)
def test_no_csv(tmp_path: Path, content: bytes) -> None:
    """Whatever the file holds, what is raised is ours and names it."""
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(TimelineError, match=r"t\.csv"):
        ps.Timeline.load(path)


def test_cut_anywhere(tmp_path: Path) -> None:
    """After any number of bytes, whole lines included."""
    graph = ps.lower(ps.schedule("1f1b", 2, 1), step="none")
    path = tmp_path / "t.csv"
    ps.simulate(graph, ps.Costs(1, 2)).save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TimelineError, match=r"t\.csv"):
            ps.Timeline.load(path)


Edit = Callable[[pd.DataFrame], Any]


def put(row: int, column: str, value: object) -> Edit:
    """Return an edit of one cell."""

    def edit(rows: pd.DataFrame) -> None:
        rows.loc[row, column] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows.drop(columns="end"), "column 'end' is missing"),
        (lambda rows: rows.rename(columns={"start": "strat"}), "'start' is missing.*mean 'strat'"),
        (lambda rows: rows.iloc[:0], "it has no rows"),
        (lambda rows: rows.drop(index=0), "0F0 is missing"),
        (lambda rows: rows[rows["op"] != "B"], "0B0 is missing"),
        (lambda rows: rows[rows["stage"] != 0], "device"),
        (lambda rows: rows[rows["device"] != 1], "line 3 .* names a stream of no device"),
        (lambda rows: rows[rows["op"] != "RECV_F"], r"SEND_F0\) has no counterpart at the other"),
        (
            lambda rows: rows[rows["op"] != "SEND_B"],
            r"RECV_B[01]\) has no counterpart at the other",
        ),
        (lambda rows: rows.iloc[:-1], "it has the STEP of 1 of 2 stages"),
        (lambda rows: pd.concat([rows, rows.iloc[[3]]]), "is in the graph twice"),
        (lambda rows: rows.iloc[::-1], "deadlocks: 6 streams wait for each other"),
        (lambda rows: rows.iloc[[0, 2, 1, *range(3, len(rows))]], "ids must be a topological"),
        (put(0, "device", "x"), "line 2.*device is no number but 'x'"),
        (put(0, "device", ""), "line 2.*device is no number but ''"),
        (put(0, "device", "0.5"), r"line 2.*device is no number but '0\.5'"),
        (put(0, "device", -1), "line 2 .* has no valid device"),
        (put(0, "device", 10**30), "line 2 .* has no valid device"),
        (put(0, "device", 2), "device 2, but stage 0|stage 0 lies on"),
        (put(0, "device", 1), "0F0.* device"),
        (put(0, "stage", 10**9), "line 2 .* has no valid stage"),
        (put(0, "stage", -1), "line 2 .* has no valid stage"),
        (put(0, "stage", 1), "twice|0F0 is missing"),
        (put(0, "stage", 2), "is missing"),
        (put(0, "microbatch", 10**9), "line 2 .* has no valid microbatch"),
        (put(0, "microbatch", -1), "line 2 .* has no valid microbatch"),
        (put(0, "microbatch", 1), "twice|0F0 is missing"),
        (put(0, "microbatch", "nan"), "line 2.*microbatch is no number but 'nan'"),
        (put(0, "op", "f"), "line 2 .* names an unknown op"),
        (put(0, "op", ""), "line 2 .* names an unknown op"),
        (put(0, "op", "B"), "twice|is missing"),
        (put(0, "stream", "copmute"), "line 2 .* names an unknown stream"),
        (put(0, "stream", "send:x"), "line 2 .* names an unknown stream"),
        (put(0, "stream", "send:-1"), "line 2 .* names an unknown stream"),
        (put(0, "stream", "send:7"), "line 2 .* names a stream of no device"),
        (put(0, "stream", "recv:7"), "line 2 .* names a stream of no device"),
        (put(1, "stream", f"send:{'9' * 20}"), "line 3 .* names a stream of no device"),
        (put(1, "stream", f"recv:{2**62}"), "line 3 .* names a stream of no device"),
        (put(1, "stream", f"send:{'9' * 5000}"), "line 3 .* names an unknown stream"),
        (put(0, "stream", "send:1"), r"0F0\) is on stream 'send:1'; it belongs on 'compute'"),
        (put(0, "start", "abc"), "line 2.*start is no number but 'abc'"),
        (put(0, "start", "inf"), "line 2 .* has an infinite start"),
        (put(0, "start", ""), "line 2 .* ends before it starts, or has an infinite end"),
        (put(0, "start", 99), "line 2 .* ends before it starts, or has an infinite end"),
        (put(0, "end", "inf"), "line 2 .* ends before it starts, or has an infinite end"),
        (put(0, "end", -1), "line 2 .* ends before it starts, or has an infinite end"),
        (put(0, "nbytes", -1), "line 2 .* has no valid nbytes"),
        (put(0, "nbytes", ""), "line 2 .* has no valid nbytes"),
        (put(0, "nbytes", "inf"), "line 2 .* has no valid nbytes"),
    ],
)
def test_edited(timeline: ps.Timeline, tmp_path: Path, edit: Edit, message: str) -> None:
    """Each kind of edit, with the file, and with the line if one is at fault."""
    rows = timeline.frame.reset_index(drop=True).astype(object)
    edited = edit(rows)
    (rows if edited is None else edited).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(TimelineError, match=message) as caught:
        ps.Timeline.load(tmp_path / "t.csv")
    assert str(tmp_path / "t.csv") in str(caught.value)


FUZZED = ["", "x", "-1", "-2", "0", "1", "2", "3", "99", "0.5", "nan", "inf", "1e400", "9" * 25]
FUZZED += ["F", "STEP", "compute", "copy", "send:0", "recv:9", "send:" + "9" * 20, '"', ",", "\n"]


@pytest.mark.slow
@given(data=st.data())
def test_edited_in_any_way(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One cell replaced by anything: a timeline that holds, or an error of ours; nothing else."""
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), ps.Costs(1, 2, output_bytes=1))
    path = tmp_path_factory.mktemp("timeline") / "t.csv"
    timeline.save(path)
    lines = [line.split(",") for line in path.read_text().splitlines()]
    row = data.draw(st.integers(0, len(lines) - 1))
    column = data.draw(st.integers(0, len(COLUMNS) - 1))
    lines[row][column] = data.draw(st.sampled_from(FUZZED))
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    try:
        loaded = ps.Timeline.load(path)
    except PipeError:
        return
    ps.verify(loaded.graph)
    assert (loaded.graph.op == timeline.graph.op).all()


def test_replicas_in_a_file(tmp_path: Path) -> None:
    """One more column for several replicas; loading joins their reductions again."""
    schedule = ps.schedule("1f1b", 2, 2)
    costs = ps.Costs(1, 2, parameter_bytes=4, network=ps.Network(bandwidth=1))
    noise = ps.Noise(seed=0, task=LogNormal(0.3), message=LogNormal(0.3))
    path = tmp_path / "t.csv"
    alone = ps.simulate(ps.lower(schedule), costs)
    alone.save(path)
    assert path.read_text().splitlines()[0].split(",") == [*COLUMNS, "checksum"]
    assert "replica" not in alone.frame
    timeline = ps.simulate(ps.lower(schedule, n_replicas=3), costs, noise=noise)
    timeline.save(path)
    assert path.read_text().splitlines()[0].split(",") == [*COLUMNS, "checksum", "replica"]
    loaded = ps.Timeline.load(path, costs=costs)
    assert same(loaded, timeline)
    assert loaded.graph.n_replicas == 3
    assert loaded.frame["replica"].tolist() == timeline.frame["replica"].tolist()
    assert (loaded.memory.peak == timeline.memory.peak).all()
    assert (loaded.busy == timeline.busy).all()
    assert ps.replay(loaded).makespan == pytest.approx(timeline.makespan)


@pytest.mark.parametrize(
    ("replica", "message"),
    [
        ("x", "line 2: replica is no number but 'x'"),
        ("", "line 2: replica is no number but ''"),
        ("-1", "line 2 .* has no valid replica"),
        ("99", "line 2 .* has no valid replica"),
        ("2", "0F0 is missing"),
    ],
)
def test_bad_replica_in_a_file(tmp_path: Path, replica: str, message: str) -> None:
    """The line is named, or what is missing from it."""
    path = tmp_path / "t.csv"
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    ps.simulate(graph, ps.Costs(1, 2)).save(path)
    lines = path.read_text().splitlines()
    lines[1] = lines[1].rpartition(",")[0] + "," + replica
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.load(path)


def test_replicas_in_a_file_that_does_not_say_so(tmp_path: Path) -> None:
    """Without the column each task would be there twice."""
    path = tmp_path / "t.csv"
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    ps.simulate(graph, ps.Costs(1, 2)).save(path)
    lines = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TimelineError, match="it has the STEP of 4 of 2 stages"):
        ps.Timeline.load(path)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "dualpipe", "zbv"])
def test_file_keeps_what_the_graph_is(tmp_path: Path, name: str) -> None:
    """Rendezvous, hosts and versions of weights come back: the same memory, and the same replay."""
    graph = ps.lower(ps.schedule(name, 4, 8), rendezvous=True, hosts="per_device")
    costs = ps.Costs(
        forward=1,
        input_grad=1,
        weight_grad=1,
        optimizer_step=1,
        parameter_bytes=5,
        activation_bytes=1,
        network=ps.Network(latency=0.5),
    )
    timeline = ps.simulate(graph, costs)
    timeline.save(tmp_path / "t.csv")
    loaded = ps.Timeline.load(tmp_path / "t.csv", costs=costs)
    assert loaded.memory.peak.tolist() == timeline.memory.peak.tolist()
    assert loaded.graph.weight_versions == graph.weight_versions
    assert (loaded.graph.rendezvous, loaded.graph.host.tolist()) == (True, [0, 1, 2, 3])
    assert ps.replay(loaded).makespan == ps.replay(timeline).makespan
    assert loaded.why.idle_by_cause().equals(timeline.why.idle_by_cause())


def test_mini_batches_without_steps(tmp_path: Path) -> None:
    """How many there are is saved where no STEP shows it."""
    graph = ps.lower(ps.schedule("pipedream", 1, 2), step="none")
    timeline = ps.simulate(graph, ps.Costs(1, 2))
    timeline.save(tmp_path / "t.csv")
    assert same(timeline, ps.Timeline.load(tmp_path / "t.csv"))


def test_bad_settings_in_a_file(tmp_path: Path) -> None:
    """What is no setting, or another one further down, by its line."""
    graph = ps.lower(ps.schedule("pipedream", 2, 2), rendezvous=True, step="none")
    ps.simulate(graph, ps.Costs(1, 1)).save(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    for wrong, message in (
        (text.replace("True", "maybe"), "unknown rendezvous 'maybe'"),
        (text.replace("True", "False", 1), r"line 3 .*has another rendezvous than the first"),
        (text.replace("2,stashed", "x,stashed"), "n_batches is no number but 'x'"),
        (text.replace("2,stashed", "0,stashed"), "n_batches must be .*, got 0"),
        (text.replace("2,stashed", "3,stashed"), "2 micro-batches cannot be shared evenly"),
    ):
        (tmp_path / "t.csv").write_text(wrong)
        with pytest.raises(TimelineError, match=message):
            ps.Timeline.load(tmp_path / "t.csv")
