"""Skip connections: tensors that go from a stage to a later one beside the pipeline's outputs.

The numbers of the rules are those of docs/time.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rules import assert_rules_hold, dependencies
from strategies import noises, skipping_cases

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, GraphError, ScheduleError, TimelineError
from pipesim.graph import Tasks
from pipesim.graph.tasks import StreamKind
from pipesim.graph.verify import verify
from pipesim.ops import COMPUTE, EXCHANGES, SENDS, TRANSFERS

mpl.use("agg")

#: The name of a slice of `Timeline.to_chrome`.
PATTERN = r"(?P<stage>[0-9]+)(?P<op>[A-Z_]+)(?P<microbatch>[0-9]*)(?:[<>](?P<peer>[0-9]+))?"


def costs(skip_bytes: Any = 3, **options: Any) -> ps.Costs:
    """Outputs are free; a skip of 3 bytes lasts 3 s."""
    network = ps.Network(latency=options.pop("latency", 0), bandwidth=1)
    return ps.Costs(forward=1, backward=1, skip_bytes=skip_bytes, network=network, **options)


def unet(p: int = 3, m: int = 2, **options: Any) -> ps.TaskGraph:
    """GPipe with a skip from the first to the last stage."""
    options = {"skips": [(0, p - 1)], "step": "none", **options}
    return ps.lower(ps.schedule("gpipe", p, m), **options)


def test_portals_go_straight_to_the_target() -> None:
    """A message a skip and micro-batch, on the copy streams of the two devices; rules 3 and 4."""
    shown = draw(ps.simulate(unet(), costs()), rows="^.$|:2|2 .*:0")
    assert shown == grid("""
        0        | F0 F1 .. .. .. .. .. .. .. .. .. .. B1 .. .. B0
        0 send:2 | .. F0 F0 F0 F1 F1 F1 .. .. .. .. .. .. .. .. ..
        0 recv:2 | .. .. .. .. .. .. .. .. .. B1 B1 B1 B0 B0 B0 ..
        1        | .. F0 F1 .. .. .. .. .. .. B1 B0 .. .. .. .. ..
        1 send:2 | .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. ..
        1 recv:2 | .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. ..
        2        | .. .. .. .. F0 .. .. F1 B1 B0 .. .. .. .. .. ..
        2 send:0 | .. .. .. .. .. .. .. .. .. B1 B1 B1 B0 B0 B0 ..
        2 recv:0 | .. F0 F0 F0 F1 F1 F1 .. .. .. .. .. .. .. .. ..
    """)


def test_without_portals_they_go_from_stage_to_stage() -> None:
    """Beside the output, which F of each stage on the way waits for too."""
    shown = draw(ps.simulate(unet(portals=False), costs()), rows="^.$|send")
    assert shown == grid("""
        0        | F0 F1 .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. B1 .. .. B0
        0 send:1 | .. F0 F0 F0 F1 F1 F1 .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. ..
        1        | .. .. .. .. F0 .. .. F1 .. .. .. .. .. .. .. .. B1 .. .. B0 .. .. .. ..
        1 send:0 | .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. B1 B1 B1 B0 B0 B0 ..
        1 send:2 | .. .. .. .. .. F0 F0 F0 F1 F1 F1 .. .. .. .. .. .. .. .. .. .. .. .. ..
        2        | .. .. .. .. .. .. .. .. F0 .. .. F1 B1 B0 .. .. .. .. .. .. .. .. .. ..
        2 send:1 | .. .. .. .. .. .. .. .. .. .. .. .. .. B1 B1 B1 B0 B0 B0 .. .. .. .. ..
    """)


def test_without_overlap_they_are_on_compute() -> None:
    """Rule 5: sent right after the F that makes them, received right before the F that needs."""
    assert draw(ps.simulate(unet(overlap=False), costs())) == grid("""
        0 | F0 >F0 >F0 >F0 F1 >F1 >F1 >F1 .. .. .. <B1 <B1 B1 .. <B0 <B0 B0
        1 | .. F0  ..  ..  .. F1  ..  ..  .. .. B1 ..  ..  .. B0 ..  ..  ..
        2 | .. <F0 <F0 <F0 F0 <F1 <F1 <F1 F1 B1 >B1 >B1 >B1 B0 >B0 >B0 >B0 ..
    """)


def test_a_single_copy_stream_blocks_what_is_behind_a_skip() -> None:
    """Rule 1: F1 of stage 1 waits for an output of no bytes, behind the skip of F0."""
    assert draw(ps.simulate(unet(streams="single"), costs())) == grid("""
        0      | F0  F1  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  B1  ..  ..  B0
        0 copy | ..  >F0 >F0 >F0 >F1 >F1 >F1 ..  ..  ..  <B1 <B1 <B1 <B0 <B0 <B0 ..
        1      | ..  F0  ..  ..  F1  ..  ..  ..  ..  ..  B1  ..  ..  B0  ..  ..  ..
        1 copy | ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..  ..
        2      | ..  ..  ..  ..  ..  ..  ..  F0  F1  B1  B0  ..  ..  ..  ..  ..  ..
        2 copy | ..  <F0 <F0 <F0 <F1 <F1 <F1 ..  ..  ..  >B1 >B1 >B1 >B0 >B0 >B0 ..
    """)


def test_rendezvous_waits_for_the_receiver() -> None:
    """Rule 6: F1 is sent once the RECV of F0 has ended, 2 s of latency later."""
    sent = [
        draw(ps.simulate(unet(rendezvous=rendezvous), costs(latency=2)), rows="0 send:2")[:40]
        for rendezvous in (False, True)
    ]
    assert sent == [
        "0 send:2 | .. F0 F0 F0 F1 F1 F1 .. .. ..",
        "0 send:2 | .. F0 F0 F0 .. .. F1 F1 F1 ..",
    ]


def names(graph: ps.TaskGraph) -> list[str]:
    return [str(graph.task(k)) for k in range(len(graph))]


def test_text_forms() -> None:
    """A message of skips names the stage at its other end, beside the output to the same stage."""
    messages = [name for name in names(unet(2, 1)) if "SEND" in name or "RECV" in name]
    assert messages == [
        "0SEND_F0", "1RECV_F0", "0SEND_F0>1", "1RECV_F0<0",
        "1SEND_B0", "0RECV_B0", "1SEND_B0>0", "0RECV_B0<1",
    ]  # fmt: skip
    for text in ("0F0>1", "0SEND_F0<1", "1RECV_F0>0", "0SEND_F0>", "0SEND_F0>x"):
        with pytest.raises(ArgumentError, match="is not an action"):
            ps.Action.parse(text)


def test_recompute_does_not_wait_for_skips() -> None:
    """R reads what its F kept; B alone waits for the gradient that comes back."""
    graph = unet(recompute="always")
    needed = {
        str(graph.task(k)): sorted(str(graph.task(int(t))) for t in graph.dependencies[k])
        for k in range(len(graph))
    }
    assert needed["2F0"] == ["2RECV_F0", "2RECV_F0<0"]
    assert needed["2R0"] == ["2F0"]
    assert needed["0B0"] == ["0F0", "0R0", "0RECV_B0", "0RECV_B0<2"]
    assert needed["2SEND_B0>0"] == ["2B0"]


def test_gradients_go_back_after_the_input_gradient() -> None:
    """Where the backward is split, I sends the gradient of a skip and waits for it."""
    graph = ps.lower(ps.schedule("zb_h1", 3, 3), skips=[(0, 2)], step="none")
    for k in np.flatnonzero(graph.peer_stage >= 0):
        if graph.task(int(k)).op == ps.Op.SEND_B:
            assert [graph.task(int(t)).op for t in graph.dependencies[k]] == [ps.Op.I]
    assert "2SEND_B0>0" in names(graph)


def test_stages_of_one_device_hand_over_for_free() -> None:
    """The two ends of a V have no message; those of a skip inside it have."""
    orders = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    schedule = ps.Schedule.from_orders(orders)
    assert not (ps.lower(schedule, skips=[(0, 3)]).peer_stage >= 0).any()
    assert sum(">" in name for name in names(ps.lower(schedule, skips=[(0, 2), (0, 3)]))) == 2
    without = ps.lower(schedule, skips=[(0, 3)], portals=False)  # the border 1-2 is free
    assert sorted(name for name in names(without) if ">" in name) == [
        "0SEND_F0>1", "1SEND_B0>0", "2SEND_F0>3", "3SEND_B0>2"
    ]  # fmt: skip


def test_one_message_carries_all_that_crosses_a_border() -> None:
    """Without portals, a message has the sum of the skips that cross between its stages."""
    skips = {(0, 2): 3, (1, 3): 4, (0, 3): 8}
    graph = ps.lower(ps.schedule("gpipe", 4, 1), skips=list(skips), portals=False)
    nbytes = costs(skips).of(graph).nbytes
    sent = {str(graph.task(k)): nbytes[k] for k in np.flatnonzero(graph.is_op(SENDS)) if nbytes[k]}
    assert sent == {
        "0SEND_F0>1": 11, "1SEND_F0>2": 15, "2SEND_F0>3": 12,
        "3SEND_B0>2": 12, "2SEND_B0>1": 15, "1SEND_B0>0": 11,
    }  # fmt: skip


@pytest.mark.parametrize("p", [2, 3, 6])
@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_portals_save_the_copies_in_between(p: int, nbytes: int) -> None:
    """One micro-batch, skip 0 to p-1: the last F starts after one copy, or after one a border."""
    starts = []
    for portals in (True, False):
        timeline = ps.simulate(unet(p, 1, portals=portals), costs(nbytes))
        frame = timeline.frame
        starts.append(frame[(frame["op"] == "F") & (frame["stage"] == p - 1)]["start"].item())
        hops = 1 if portals else p - 1
        assert timeline.nbytes[timeline.graph.is_op(SENDS)].sum() == 2 * hops * nbytes
    assert starts == [max(p - 1, 1 + nbytes), (p - 1) * (1 + nbytes)]


@pytest.mark.slow
@given(skipping_cases())
def test_random_skips(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """What is lowered is as the rules say, and both engines keep them."""
    graph, price = case
    verify(replace(graph))  # a copy is not verified yet
    needed = [set(graph.dependencies[k].tolist()) for k in range(len(graph))]
    assert needed == dependencies(graph)
    timeline, other = (ps.simulate(graph, price, engine=e) for e in ("compiled", "simpy"))
    assert_rules_hold(timeline, price.of(graph))
    assert (timeline.start == other.start).all()
    assert (timeline.end == other.end).all()


@pytest.mark.slow
@given(st.data())
def test_engines_agree_with_noise(data: st.DataObject) -> None:
    """Skips on slow links, drawn durations and all."""
    graph, price = data.draw(skipping_cases())
    noise = data.draw(noises(graph))
    one, other = (ps.simulate(graph, price, engine=e, noise=noise) for e in ("compiled", "simpy"))
    assert (one.start == other.start).all()
    assert (one.end == other.end).all()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "dualpipev"])
@pytest.mark.parametrize("latency", [0, 3])
def test_skips_cost_nothing_without_bytes(name: str, latency: int) -> None:
    """On endless bandwidth a skip is there before the output that comes stage by stage."""
    schedule = ps.schedule(name, 4, 8)
    n = schedule.n_stages
    skips = {(0, n - 1), (1, n - 2), (1, 2)}
    network = ps.Network(latency=latency)
    times = []
    for options in ({}, {"skips": skips}, {"skips": skips, "portals": False}):
        graph = ps.lower(schedule, **options)
        free = ps.Costs(forward=2, backward=4, input_grad=2, weight_grad=2, network=network,
                        skip_bytes=9 if options else None)  # fmt: skip
        frame = ps.simulate(graph, free).frame
        computed = frame[frame["op"].isin([op.name for op in COMPUTE])]
        key = ["op", "stage", "microbatch"]
        times.append(computed.sort_values(key)["start"].tolist())
    assert times[0] == times[1] == times[2]


def test_vectors_of_a_sharded_stage_are_in_order_before_a_skip_sends_them() -> None:
    """Stage 1 is on the same device and could wait; the message to stage 2 cannot."""
    schedule = ps.Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]])
    graph = ps.lower(schedule, skips=[(0, 2)], n_replicas=2, sharded=[0], exchange_work="compute")
    verify(replace(graph))
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=1, reorder=5))
    frame = timeline.frame
    sorts = (frame["op"] == "REORDER") & (frame["part"] == EXCHANGES.index("vectors"))
    sent = frame[(frame["op"] == "SEND_F") & (frame["stage"] == 0)]
    assert sent["start"].min() >= frame[sorts]["end"].max()


def test_recomputed_forwards_keep_what_skips_bring() -> None:
    """Rule 10: the input of stage 2 is 2 bytes of output and 3 of the skip; 5 are kept.

    Stage 1 passes the skip on, where it is not a portal's, and keeps nothing of it.
    """
    price, kept = costs(activation_bytes=10, output_bytes=(2, 2, 2)), [0, 2, 5]
    for portals in (True, False):
        timeline = ps.simulate(unet(1 + 2, 1, recompute="always", portals=portals), price)
        memory = timeline.memory()
        assert [memory[memory["device"] == d]["nbytes"].iloc[1] for d in range(3)] == kept
        assert timeline.memory.peak.tolist() == [10, 10, 10]


def test_replicas_and_paths_have_skips_of_their_own() -> None:
    """A message for each replica, and for each path of a bidirectional pipeline."""
    graph = unet(3, 2, n_replicas=2)
    assert ((graph.peer_stage >= 0) & (graph.replica == 1)).sum() == 8
    two_ways = ps.lower(ps.schedule("chimera", 4, 4), skips=[(0, 3)])
    sends = np.flatnonzero((two_ways.peer_stage == 3) & two_ways.is_op(SENDS))
    ends = {(int(two_ways.device[k]), int(two_ways.device[two_ways.pair[k]])) for k in sends}
    assert ends == {(0, 3), (3, 0)}


def test_saved_and_loaded(tmp_path: Path) -> None:
    """Costs as JSON, timelines as CSV, with what prices the messages again."""
    price = costs({(0, 3): 2, (1, 2): 5})
    price.save(tmp_path / "costs.json")
    assert ps.Costs.load(tmp_path / "costs.json") == price
    assert hash(price) == hash(ps.Costs.load(tmp_path / "costs.json"))
    for portals in (True, False):
        graph = unet(4, 2, skips=[(1, 2), (0, 3)], portals=portals)
        timeline = ps.simulate(graph, price)
        timeline.save(tmp_path / "timeline.csv")
        loaded = ps.Timeline.load(tmp_path / "timeline.csv", costs=price)
        assert names(loaded.graph) == names(graph)
        assert loaded.graph.skips == graph.skips == ((0, 3), (1, 2))
        assert loaded.graph.portals is portals
        assert (loaded.start == timeline.start).all()
        assert (loaded.nbytes == price.of(loaded.graph).nbytes).all()
        assert loaded.why.critical_path().equals(timeline.why.critical_path())
    with pytest.raises(TimelineError, match=r"line 5 .* has no valid peer_stage"):
        break_file(tmp_path / "timeline.csv", "peer_stage", 3, 9)


def break_file(path: Path, column: str, row: int, value: int) -> None:
    """Load a timeline with one value changed."""
    import pandas as pd

    rows = pd.read_csv(path)
    rows.loc[row, column] = value
    rows.to_csv(path, index=False)
    ps.Timeline.load(path)


def test_chrome_round_trip(tmp_path: Path) -> None:
    """Skips are in a trace by name, and come back from it."""
    timeline = ps.simulate(unet(3, 2), costs(output_bytes=1))
    timeline.to_chrome(tmp_path / "trace.json")
    back = ps.Timeline.from_chrome(tmp_path / "trace.json", pattern=PATTERN)
    assert back.graph.skips == ((0, 2),)

    def times(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
        ends = zip(timeline.start.round(6), timeline.end.round(6), strict=True)
        kept = dict(zip(names(timeline.graph), ends, strict=True))
        return {name: time for name, time in kept.items() if "RECV" not in name}

    assert times(back) == times(timeline)
    assert sum("<" in name for name in names(back.graph)) == 4


@pytest.mark.parametrize("portals", [True, False])
def test_costs_from_a_timeline(portals: bool) -> None:
    """What each skip carries is read from its messages, or from the costs."""
    graph = unet(4, 3, skips=[(0, 3), (1, 2)], portals=portals)
    price = costs({(0, 3): 2, (1, 2): 5}, output_bytes=1)
    timeline = ps.simulate(graph, price)
    assert ps.Costs.from_timeline(timeline).skip_bytes == price.skip_bytes
    assert ps.Costs.from_timeline(timeline).output_bytes == (1, 1, 1, 0)
    shown = ps.Timeline(graph, timeline.start, timeline.end, timeline.nbytes)
    if portals:
        again = ps.Costs.from_timeline(shown)
        assert again.skip_bytes == price.skip_bytes
        assert ps.simulate(graph, again).makespan == pytest.approx(timeline.makespan)
    else:
        with pytest.raises(TimelineError, match="skip 1-2, which shares"):
            ps.Costs.from_timeline(shown)
        assert ps.Costs.from_timeline(shown, skip_bytes=1).skip_bytes == 1


def test_what_explains_a_timeline_knows_skips() -> None:
    """Error parts, replay, idle causes and the critical path."""
    graph = unet(3, 4)
    slow, fast = (ps.simulate(graph, costs(nbytes)) for nbytes in (3, 1))
    parts = ps.Comparison(predicted=slow, measured=fast).error_parts()
    assert parts["transfers"] == slow.makespan - fast.makespan == parts.sum()
    assert ps.replay(slow).makespan == slow.makespan
    causes = slow.why.idle_by_cause()
    assert causes["bandwidth"].sum() > fast.why.idle_by_cause()["bandwidth"].sum()
    assert "SEND_F" in slow.why.critical_path()["op"].tolist()


def test_plots_show_which() -> None:
    """Where messages have cells of their own, a skip's has its other end beside the number."""
    timeline = ps.simulate(unet(overlap=False), costs())
    ax = timeline.plot(ax=Figure().add_subplot())
    (numbers,) = (a for a in ax.artists if a.get_gid() == "cells:numbers")
    skips = [text for text in numbers.texts if ">" in text or "<" in text]
    assert sorted(skips) == ["0<0", "0<2", "0>0", "0>2", "1<0", "1<2", "1>0", "1>2"]


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ([(2, 0)], r"skip \(2, 0\) does not lead from a stage to a later one of 0..2"),
        ([(0, 3)], r"does not lead .* 0..2"),
        ([(-1, 1)], r"does not lead .* 0..2"),
        ([(0, 1), (0, 1)], r"skip \(0, 1\) is given twice"),
        ([(0, 1.5)], r"\(0, 1.5\) is no skip; give pairs"),
        ([(0, True)], "is no skip; give pairs"),
        ([3], "3 is no skip; give pairs"),
        (3, "skips must be pairs of stages"),
        ("0-1,2", "'2' is no skip connection"),
    ],
)
def test_wrong_skips(skips: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        unet(skips=skips)


def test_skips_as_text() -> None:
    """As the command line has them."""
    assert unet(skips="0-2, 0-1").skips == unet(skips=["0-1", "0-2"]).skips == ((0, 1), (0, 2))


@pytest.mark.parametrize(
    ("skip_bytes", "message"),
    [
        (-1, "skip_bytes must be finite bytes >= 0, got -1"),
        ({(0, 2): float("nan")}, "skip_bytes of 0-2 must be finite"),
        ({(0, 1, 2): 1}, "skip_bytes: .* is no skip"),
        ({(0, 1): 3, "0-1": 3}, "skip_bytes gives skip 0-1 twice"),
        ("much", "skip_bytes must be finite"),
        ({(0, 1): 3}, "skip 0-1, which the graph lacks .it has: 0-2"),
        ({}, "skip_bytes lacks skip 0-2"),
    ],
)
def test_wrong_skip_bytes(skip_bytes: Any, message: str) -> None:
    with pytest.raises(CostsError, match=message):
        ps.simulate(unet(), costs(skip_bytes))


@pytest.mark.parametrize(
    ("op", "stage", "peer"), [("SEND_F", 1, 0), ("RECV_F", 0, 1), ("F", 0, 1), ("SEND_F", 0, 7)]
)
def test_columns_of_ones_own(op: str, stage: int, peer: int) -> None:
    """A message that names a stage on the wrong side, and a task that is no message."""
    columns = np.array([[ps.Op[op], stage, stage, 0, 0], [ps.Op.F, 1 - stage, 1 - stage, 0, 0]]).T
    with pytest.raises(GraphError, match=f"row 0: {op} of stage {stage} has peer_stage {peer}"):
        ps.TaskGraph.build(Tasks(*columns, peer_stage=np.array([peer, -1])))


def test_graphs_of_ones_own() -> None:
    """By default, skips are those that the messages name."""
    graph = unet(3, 1, skips=[(0, 2)], portals=False)
    columns = (graph.op, graph.device, graph.stage, graph.microbatch)
    stream = [StreamKind.code(graph.streams[s][1]) for s in graph.stream]
    tasks = Tasks(*columns, stream, peer_stage=graph.peer_stage)  # type: ignore[arg-type]
    assert ps.TaskGraph.build(tasks).skips == ((0, 1), (1, 2))
    again = ps.TaskGraph.build(tasks, skips=[(0, 2)], portals=False)
    assert (costs().of(again).nbytes == costs().of(graph).nbytes).all()
    with pytest.raises(GraphError, match="stages 0 and 1 have messages of a skip"):
        ps.TaskGraph.build(tasks, skips=[(0, 2)])
    lone = np.flatnonzero(np.array(names(graph)) != "1RECV_F0<0")
    cut = Tasks(*(np.asarray(c)[lone] for c in (*columns, stream)),
                   peer_stage=graph.peer_stage[lone])  # fmt: skip
    with pytest.raises(GraphError, match=r"0SEND_F0>1.* has no counterpart"):
        verify(ps.TaskGraph.build(cut))


def test_schedules_and_torch_have_no_skips(tmp_path: Path) -> None:
    """A schedule's file lists no message of a skip, and torch's runtime sends none."""
    with pytest.raises(ArgumentError, match="has skip connections"):
        unet().save_torch_csv(tmp_path / "x.csv")
    (tmp_path / "y.csv").write_text("0F0,0SEND_F0>1,0B0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="is a message of a skip connection"):
        ps.Schedule.load(tmp_path / "y.csv")


def test_only_messages_name_another_stage() -> None:
    graph = unet(4, 2, skips=[(0, 2), (1, 3)])
    assert graph.is_op(TRANSFERS)[graph.peer_stage >= 0].all()
    assert "peer_stage" in ps.simulate(graph, costs()).frame
    assert "peer_stage" not in ps.simulate(unet(skips=[]), costs()).frame
