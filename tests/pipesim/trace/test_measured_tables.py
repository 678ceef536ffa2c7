"""Timelines from tables of measured tasks, against tables drawn by hand and simulated steps."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pipesim as ps
from pipesim.errors import AccuracyWarning, ArgumentError, TimelineError
from pipesim.trace.measured_table import read_step

#: Stage, operation, micro-batch and start of 1F1B on two stages; F takes 1 s, B 2 s.
ROWS = [
    (0, "F", 0, 10.0),
    (0, "F", 1, 11.0),
    (1, "F", 0, 11.5),
    (1, "B", 0, 12.5),
    (0, "B", 0, 15.0),
    (1, "F", 1, 14.5),
    (1, "B", 1, 15.5),
    (0, "B", 1, 18.0),
]
SECONDS = {"F": 1.0, "B": 2.0}


def table(rows: list[tuple[Any, ...]] = ROWS) -> pd.DataFrame:
    """Return the table drawn above."""
    frame = pd.DataFrame(rows, columns=["stage", "op", "microbatch", "start"])
    return frame.assign(duration=frame["op"].map(SECONDS).astype(float))


def times(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
    """Return start and end of each task of the first replica."""
    graph = timeline.graph
    return {
        str(graph.task(k)): (float(timeline.start[k]), float(timeline.end[k]))
        for k in np.flatnonzero(graph.replica == 0).tolist()
    }


def test_by_hand() -> None:
    """Messages leave when their data is ready; a device that is idle by then waits for them."""
    timeline = ps.Timeline.from_table(table())
    assert times(timeline) == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (1.5, 2.5), "1B0": (2.5, 4.5),
        "0B0": (5, 7), "1F1": (4.5, 5.5), "1B1": (5.5, 7.5), "0B1": (8, 10),
        "0SEND_F0": (1, 1), "1RECV_F0": (1, 1.5), "0SEND_F1": (2, 2), "1RECV_F1": (2, 2.5),
        "1SEND_B0": (4.5, 4.5), "0RECV_B0": (4.5, 5),
        "1SEND_B1": (7.5, 7.5), "0RECV_B1": (7.5, 8),
    }  # fmt: skip
    assert timeline.name == "1f1b"
    for engine in ("compiled", "simpy"):
        replayed = ps.replay(timeline, engine=engine)
        assert {x: t for x, t in times(replayed).items() if "RECV" not in x} == {
            x: t for x, t in times(timeline).items() if "RECV" not in x
        }
    costs = ps.Costs.from_timeline(timeline)
    assert (costs.forward, costs.backward) == ((1.0, 1.0), (2.0, 2.0))
    assert timeline.why.idle_by_cause().to_numpy().sum() == pytest.approx(timeline.idle.sum())
    predicted = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2), step="none"), costs)
    assert ps.Comparison(predicted, timeline).makespan_error == pytest.approx(0)


def _as_rows(timeline: ps.Timeline) -> pd.DataFrame:
    """Return the compute tasks of a timeline as another program would write them."""
    rows = timeline.all_rows()
    rows = rows[rows["op"].isin(["F", "B", "I", "W"])]
    return rows[["device", "stage", "op", "microbatch", "start", "end"]].sample(
        frac=1.0, random_state=1
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("eager_1f1b", {}),
        ("interleaved_1f1b", {"n_chunks": 2}),
        ("looped_bfs", {"n_chunks": 3}),
        ("zb_h1", {}),
        ("zbv", {}),
        ("hanayo", {"n_waves": 2}),
    ],
)
def test_a_simulated_step_comes_back(name: str, options: dict[str, int]) -> None:
    """Rows may be in any order."""
    graph = ps.lower(ps.schedule(name, 4, 8, **options), step="none")
    halves = {"input_grad": 1.0, "weight_grad": 0.875}
    costs = ps.Costs(1.0, 2.0, **halves, network=ps.Network(latency=0.25))
    simulated = ps.simulate(graph, costs)
    timeline = ps.Timeline.from_table(_as_rows(simulated))
    assert timeline.name == name
    assert timeline.makespan == simulated.makespan
    assert ps.replay(timeline).makespan == pytest.approx(simulated.makespan)
    ps.Comparison(simulated, timeline)  # of the same tasks


def test_devices_without_stages_and_chunks() -> None:
    """Chunk c of device d is stage ``c * n_devices + d``, in each replica."""
    simulated = ps.simulate(
        ps.lower(ps.schedule("interleaved_1f1b", 2, 4, n_chunks=2)), ps.Costs(1, 2)
    )
    rows = _as_rows(simulated)
    rows["chunk"] = rows["stage"] // 2
    both = pd.concat([rows.assign(replica=r, device=rows["device"] + 2 * r) for r in range(2)])
    timeline = ps.Timeline.from_table(both.drop(columns="stage"))
    assert (timeline.n_devices, timeline.graph.n_stages, timeline.graph.n_replicas) == (4, 4, 2)
    assert timeline.name == "interleaved_1f1b"
    numbered = both.assign(device=both["device"] % 2)  # each replica counts from 0
    again = ps.Timeline.from_table(numbered)
    np.testing.assert_array_equal(again.graph.device, timeline.graph.device)


@pytest.mark.parametrize("form", ["csv", "csv.gz", "parquet", "arrow"])
def test_files_and_their_words(tmp_path: Path, form: str) -> None:
    """Names of columns and operations, and the unit, are another program's."""
    frame = table().rename(columns={"microbatch": "mb", "start": "ts"})
    frame["op"] = frame["op"].map({"F": "forward-compute", "B": "bwd_step"})
    frame["ts"] = (frame["ts"] * 1000).astype("int64") + 10**18
    frame["duration"] = (frame["duration"] * 1000).astype("int64")
    frame.loc[len(frame)] = [0, "layernorm", 0, 10**18, 5]
    frame = pd.concat([frame.assign(step=4, duration=7), frame.assign(step=5)])
    path = tmp_path / f"tasks.{form}"
    source: object = path
    if form == "parquet":
        frame.to_parquet(path)
    elif form == "arrow":
        pyarrow = pytest.importorskip("pyarrow")
        source = pyarrow.Table.from_pandas(frame)
    else:
        text = frame.to_csv(index=False).encode()
        path.write_bytes(gzip.compress(text) if form == "csv.gz" else text)
    timeline = ps.Timeline.from_table(
        source,
        columns={"microbatch": "mb", "start": "ts"},
        ops={"bwd_step": "B", "layernorm": None},
        unit="ms",
        name="mine",
    )
    assert timeline.name == "mine"
    expected = ps.Timeline.from_table(table())
    np.testing.assert_allclose(timeline.start, expected.start)
    np.testing.assert_allclose(timeline.end, expected.end)


#: Two replicas of two stages, one micro-batch, with a program's calls: device loads data for 0.5 s
#: after it gathered parameters, and copies gradients for 0.25 s before it reduces them.
CALLS = [
    # replica, stage, op, micro-batch, start, end, bytes
    *[(r, s, "params-all-gather", -1, 0.25, 1.0, None) for r in range(2) for s in range(2)],
    *[row for r in range(2) for row in [
        (r, 0, "F", 0, 1.5, 2.5, None), (r, 1, "forward-recv", -1, 1.0, 2.75, None),
        (r, 0, "forward-send", -1, 2.5, 2.75, 8), (r, 1, "F", 0, 2.75, 3.75, None),
        (r, 1, "B", 0, 3.75, 5.75, None), (r, 1, "backward-send", -1, 5.75, 6.0, 8),
        (r, 0, "backward-recv", -1, 2.5, 6.0, None), (r, 0, "B", 0, 6.0, 8.0 + r, None),
    ]],
    *[(r, 1, "grads-reduce-scatter", -1, 6.25 + r, 8.0, None) for r in range(2)],
    *[(r, 0, "grads-reduce-scatter", -1, 8.25 + r, 10.0, None) for r in range(2)],
    *[(r, s, "optimizer", -1, 10.0, 10.5, None) for r in range(2) for s in range(2)],
]  # fmt: skip


def test_calls_of_a_program() -> None:
    """Collectives start when their last member calls them; time beside them is theirs."""
    names = ["replica", "stage", "op", "microbatch", "start", "end", "bytes"]
    frame = pd.DataFrame(CALLS, columns=names)
    timeline = ps.Timeline.from_table(frame)
    assert timeline.makespan == 10.25
    assert times(timeline) == {
        "0UNSHARD0.forward": (0, 1.25), "1UNSHARD0.forward": (0, 0.75),
        "0F0": (1.25, 2.25), "0SEND_F0": (2.25, 2.5), "1RECV_F0": (2.25, 2.5),
        "1F0": (2.5, 3.5), "1B0": (3.5, 5.5), "1SEND_B0": (5.5, 5.75), "0RECV_B0": (5.5, 5.75),
        "0B0": (5.75, 7.75),
        "0REDUCE_GRAD": (8.75, 9.75), "1REDUCE_GRAD": (6.5, 7.75),
        "0STEP": (9.75, 10.25), "1STEP": (9.75, 10.25),
    }  # fmt: skip
    kept = times(ps.Timeline.from_table(frame, gaps="keep"))
    assert kept["0UNSHARD0.forward"] == (0, 0.75)
    assert (kept["0REDUCE_GRAD"], kept["1REDUCE_GRAD"]) == ((9.0, 9.75), (7.0, 7.75))
    messages = timeline.graph.is_op(ps.ops.TRANSFERS)
    assert set(timeline.nbytes[messages]) == {8.0}
    assert ps.replay(timeline).makespan == pytest.approx(10.25)


def test_several_reductions_of_a_stage_are_buckets() -> None:
    """They are numbered in order of time."""
    frame = table()
    frame["end"] = frame["start"] + frame["duration"]
    reductions = [(s, "REDUCE_GRAD", -1, t, 1.0, t + 1) for s in range(2) for t in (21.0, 20.0)]
    frame = pd.concat([frame, pd.DataFrame(reductions, columns=frame.columns)])
    both = pd.concat([frame.assign(replica=r) for r in range(2)]).drop(columns="duration")
    tasks = times(ps.Timeline.from_table(both, gaps="keep"))
    assert (tasks["0REDUCE_GRAD.0"], tasks["0REDUCE_GRAD.1"]) == ((10, 11), (11, 12))


def test_a_forward_alone() -> None:
    """A table without backwards is of a forward-only step."""
    frame = table([row for row in ROWS if row[1] == "F"])
    assert ps.Timeline.from_table(frame).graph.forward_only


def test_clocks_that_differ_by_hours() -> None:
    """Messages align clocks: the offset is the middle of what they allow."""
    frame = table()
    frame.loc[frame["stage"] == 1, "start"] += 7200.0
    step = read_step(frame)
    assert step.offsets.tolist() == [0.0, pytest.approx(-7200.0, abs=0.5)]
    assert step.residual == 0
    expected = ps.Timeline.from_table(table())
    assert step.timeline.makespan == pytest.approx(expected.makespan)
    assert step.timeline.name == "1f1b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.assign(start=[*f["start"][:7], 17.5]), None),
        (lambda f: f.assign(start=[*f["start"][:7], 16.0]),
         r"row 7 \(0, B, 1, 16.0, 2.0\) starts 1 s before row 4 ends, 0B0 on the same device"),
        (lambda f: pd.concat([f, f[2:3]], ignore_index=True),
         r"row 8 .* is the same task as row 2, 1F0"),
        (lambda f: f.assign(duration=[-1.0, *f["duration"][1:]]), "row 0 .* ends before it starts"),
        (lambda f: f.assign(start=[np.nan, *f["start"][1:]]), r"row 0 .* has no finite start"),
        (lambda f: f[f["microbatch"] == 1], r"0F0 is missing"),
        (lambda f: f.drop(index=6), r"1B1 is missing"),
        (lambda f: f[f["stage"] == 1], r"0F0 is missing"),
        (lambda f: f.assign(device=[0, 0, 1, 1, 0, 0, 1, 0]),
         r"row 5 .* has its stage on another device than before"),
        (lambda f: f.assign(op=["FWD2", *f["op"][1:]]),
         r"row 0 .* has an op that is not read; did you mean 'FWD'.*ops=\{'FWD2': 'F'\}"),
        (lambda f: f.assign(op=["ALL_TO_ALL", *f["op"][1:]]), "row 0 .* has an op of which"),
        (lambda f: f.assign(microbatch=[None, *f["microbatch"][1:]]),
         r"row 0 .* is of a micro-batch, and has none"),
        (lambda f: f.assign(microbatch=[0.5, *f["microbatch"][1:]]), "row 0 .* valid microbatch"),
        (lambda f: f.assign(stage=["a", *f["stage"][1:]]), r"row 0 .* has no number as stage"),
        (lambda f: f.rename(columns={"microbatch": "mb"}),
         r"no column 'microbatch', the micro-batch; its columns are 'stage', 'op', 'mb'"),
        (lambda f: f.drop(columns="stage"), r"no column 'stage'"),
        (lambda f: f.drop(columns="duration"), r"no column 'end'"),
        (lambda f: f.drop(columns="stage").assign(chunk=0), r"no column 'stage'"),
        (lambda f: f.assign(chunk=0).rename(columns={"stage": "x"}), r"no column 'stage'"),
        (lambda f: f[:0], r"has no rows"),
        (lambda f: pd.concat([f, f[["op"]]], axis=1), r"several columns 'op'"),
        (lambda f: pd.concat([f, pd.DataFrame([(1, "SEND_F", 0, 12.5, 0.1)], columns=f.columns)],
                             ignore_index=True), r"row 8 .* is of a message to no stage"),
        (lambda f: pd.concat([f, pd.DataFrame([(0, "SEND_F", -1, 11.0, 0.1)], columns=f.columns)],
                             ignore_index=True),
         r"row 8 .* is one of 1 SEND_F of its stage without micro-batch, for 2 F"),
        (lambda f: f.assign(op=["B" if x == "F" else "F" for x in f["op"]]),
         r"of no step that could run: .* deadlocks"),
        (lambda f: f.assign(nbytes=-1.0), r"row 0 .* has no valid nbytes"),
        (lambda f: f.assign(start=pd.to_datetime(f["start"], unit="s")),
         r"column 'start' has values of type datetime64.*total_seconds"),
        (lambda f: f.assign(end=f["start"] + 5.0), "row 0 .* has an end that is not start"),
        (lambda f: pd.concat([f, pd.DataFrame([(0, "F", 2, 15.5, 0.0), (0, "F", 3, 16.0, 0.5)],
                                              columns=f.columns)], ignore_index=True),
         r"row 8 .* starts 0 s before row 4|row 9 .* starts 0.5 s before row 4 ends, 0B0"),
        (lambda f: pd.concat([f, pd.DataFrame([(0, "W", 0, 17.0, 0.5)], columns=f.columns)],
                             ignore_index=True), "row 8 .* is a part of a backward whose B"),
        (lambda f: pd.concat([f, *[pd.DataFrame([(0, "REDUCE_GRAD", -1, 20.0, 1.0)],
                                                columns=f.columns)] * 2], ignore_index=True),
         "row 9 .* is the same REDUCE_GRAD"),
        (lambda f: f.assign(microbatch=[10**9, *f["microbatch"][1:]]), "row 0 .* valid microbatch"),
        (lambda f: f.assign(microbatch=f["microbatch"] + 1), "0F0 is missing; .* count from 0"),
        (lambda f: f.assign(op=None), "row 0 .* has no op"),
        (lambda f: f.assign(step=[1, "a"] * 4), "column 'step' has values of different types"),
        (lambda f: f[f["op"] == "none"].assign(op="F"), "has no rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_pipeline(change: Any, message: str | None) -> None:
    """The message names the first row that is wrong, by the index of the table."""
    frame = change(table())
    if message is None:
        ps.Timeline.from_table(frame)  # not every change is wrong
        return
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.from_table(frame)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, "has no column 'step'"),
        ({"unit": "min"}, "unknown unit 'min'"),
        ({"gaps": "all"}, "gaps"),
        ({"columns": {"mb": "x"}}, "unknown column 'mb'"),
        ({"columns": {"start": "duration"}}, "several columns 'duration'"),
        ({"columns": ["x"]}, "columns must be a mapping, got"),
        ({"ops": {"F": "forwards"}}, "unknown operation of ops.'F'. 'FORWARDS'; did you mean"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    """Options that are no options."""
    with pytest.raises((ArgumentError, TimelineError), match=message):
        ps.Timeline.from_table(table(), **options)


def test_the_step_to_read() -> None:
    """It is a value of the table, by default the greatest."""
    frame = pd.concat([table().assign(step=17), table().assign(step=9, duration=0.5)])
    assert ps.Timeline.from_table(frame).makespan == 10
    assert ps.Timeline.from_table(frame, step=9).makespan == 8.5
    with pytest.raises(ArgumentError, match="no step 3; it has 9, 17"):
        ps.Timeline.from_table(frame, step=3)


def test_numbers_in_texts_are_numbers() -> None:
    """Device ``cuda:2`` comes before ``cuda:10``, and step 9 before step 10."""
    graph = ps.lower(ps.schedule("1f1b", 12, 12), step="none")
    rows = _as_rows(ps.simulate(graph, ps.Costs(1, 2)))
    named = rows.assign(device="cuda:" + rows["device"].astype(str)).drop(columns="stage")
    both = pd.concat([named.assign(step="step 9"), named.assign(step="step 10", end=named["end"])])
    timeline = ps.Timeline.from_table(both.assign(start=both["start"] + (both["step"] == "step 9")))
    assert timeline.name == "1f1b"
    np.testing.assert_array_equal(timeline.graph.device, timeline.graph.stage)
    assert ps.replay(timeline).makespan == 12 * 3 + 11 * 3


def test_clocks_that_nothing_connects() -> None:
    """Replicas without a reduction, an hour apart: the makespan is that of no step."""
    frame = table()
    both = pd.concat(
        [frame.assign(replica=0), frame.assign(replica=1, start=frame["start"] + 3600)]
    )
    with pytest.warns(AccuracyWarning, match="devices 0 and 2 have no messages .* 3590 s apart"):
        ps.Timeline.from_table(both)
    near = both.assign(start=both["start"] - 3599 * both["replica"])
    assert ps.Timeline.from_table(near).makespan == 11  # of one clock, as far as anyone can tell


def test_a_send_after_its_message_was_used() -> None:
    """Its call was late, as the message was not."""
    sends = pd.DataFrame([(0, "SEND_F", 0, 60.0, 1.0)], columns=table().columns)
    frame = pd.concat([table().assign(nbytes=5.0), sends.assign(nbytes=7.0)])
    timeline = ps.Timeline.from_table(frame)
    assert timeline.makespan == 10
    assert times(timeline)["0SEND_F0"] == (1.5, 1.5)
    assert timeline.nbytes.max() == 7  # of the message alone


def test_messages_that_leave_when_their_device_is_idle() -> None:
    """Each waits for a message that left when it became idle."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4), step="none")
    simulated = ps.simulate(graph, ps.Costs(1, 1, network=ps.Network(latency=2.0)))
    timeline = ps.Timeline.from_table(_as_rows(simulated))
    assert ps.replay(timeline).makespan == simulated.makespan


@pytest.mark.parametrize("kind", ["Int64", "int16", "category", "string"])
def test_types_of_columns(kind: str) -> None:
    """Whole numbers may be of any type that holds them, and times of small ones."""
    frame = table().assign(start=(table()["start"] * 2).astype("int64"), duration=4)
    frame["duration"] = frame["op"].map({"F": 2, "B": 4})
    if kind in ("Int64", "int16"):
        frame = frame.astype(dict.fromkeys(("stage", "microbatch", "start", "duration"), kind))
    else:
        frame = frame.astype({"op": kind})
    timeline = ps.Timeline.from_table(frame.set_index(["stage", "op"], drop=False), unit="ms")
    assert timeline.makespan == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("name", "options", "n_pairs", "read_name"),
    [("dualpipev", {}, 41, "dualpipev"), ("1f1b", {"merged": "delayed_w"}, 24, "measured")],
)
def test_overlapped_action(
    name: str, options: dict[str, str], n_pairs: int, read_name: str
) -> None:
    """An F and a B or I with the same times are one action; those alone tell the F's share."""
    schedule = ps.schedule(name, 4, 10, **options)
    seconds = {"forward": 1, "backward": 2, "input_grad": 1, "weight_grad": 1}
    timeline = ps.simulate(
        ps.lower(schedule),
        ps.Costs(**seconds, network=ps.Network(latency=0.125)),  # type: ignore[arg-type]
    )
    frame = timeline.frame
    frame = frame[frame["op"].isin(["F", "B", "I", "W"])].sort_values(["device", "start"])
    first = frame["overlapped"] & (frame["op"] == "F")
    assert first.sum() == n_pairs
    second = first.shift(1, fill_value=False)
    for one, other, column in ((first, second, "end"), (second, first, "start")):
        frame.loc[one, column] = frame.loc[other, column].to_numpy()
    read = ps.Timeline.from_table(frame)
    assert (read.name, read.makespan) == (read_name, pytest.approx(timeline.makespan))
    compute = np.isin(timeline.graph.op, [ps.Op.F, ps.Op.B, ps.Op.I, ps.Op.W])
    assert sorted(read.end[np.isin(read.graph.op, [ps.Op.F, ps.Op.B, ps.Op.I, ps.Op.W])]) == (
        pytest.approx(sorted(timeline.end[compute]))
    )
    assert ps.replay(read).makespan == pytest.approx(timeline.makespan)
