"""Copy streams of one micro-batch: names and codes, and head-of-line blocking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import named_schedules

import pipesim as ps
from pipesim.analysis.blocking import message_latency
from pipesim.errors import CapacityError, GraphError
from pipesim.graph import Tasks
from pipesim.graph.tasks import StreamKind
from pipesim.ops import TRANSFERS, Op

STREAMS = ("single", "per_peer", "per_microbatch")


def lowered(streams: Any, name: str = "gpipe", n: int = 3, m: int = 2, **options: Any) -> Any:
    return ps.lower(ps.schedule(name, n, m), streams=streams, **options)


# Names and codes


@given(st.integers(0, 2**31 - 2), st.integers(0, 2**31 - 2), st.sampled_from(["send", "recv"]))
def test_a_name_and_its_code_are_inverse(peer: int, microbatch: int, way: str) -> None:
    name = f"{way}:{peer}/{microbatch}"
    code = StreamKind.code(name)
    assert StreamKind.name(code) == name
    assert -(2**63) <= code < StreamKind.COLLECTIVE
    own = getattr(StreamKind, way)(np.array(peer))
    assert int(StreamKind.of_microbatch(own, np.array(microbatch))) == code
    assert StreamKind.peer(np.array([code, own, StreamKind.COPY])).tolist() == [peer, peer, -1]


@pytest.mark.parametrize(
    "name", ["send:3/-1", "compute/3", "copy/0", "send:3/x", f"send:{2**31}/0"]
)
def test_no_other_name_is_of_a_microbatch(name: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        StreamKind.code(name)


def test_there_is_a_stream_for_each_peer_direction_and_microbatch() -> None:
    graph = lowered("per_microbatch", "1f1b")
    middle = [name for device, name in graph.streams if device == 1]
    pairs = [(way, peer, m) for peer in (0, 2) for way in ("send", "recv") for m in range(2)]
    assert middle == ["compute", *(f"{way}:{peer}/{m}" for way, peer, m in pairs)]
    assert all(
        graph.task(t).stream.endswith(f"/{graph.microbatch[t]}")
        for t in np.flatnonzero(graph.is_op(TRANSFERS))
    )
    of_replicas = lowered("per_microbatch", "1f1b", n_replicas=2)
    assert (4, "send:5/1") in of_replicas.streams  # device 4 is the middle one of replica 1
    assert len(of_replicas.streams) == 2 * len(graph.streams) + 6  # gradients are reduced, too


def test_without_overlap_there_are_none() -> None:
    graph = lowered("per_microbatch", overlap=False)
    assert {name for _, name in graph.streams} == {"compute"}


def test_columns_name_streams_of_microbatches() -> None:
    """A graph of one's own may have them, of devices that are there."""
    send, recv = (StreamKind.code(name) for name in ("send:1/0", "recv:0/0"))
    tasks = Tasks([0, 5, 6, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0] * 4, [0, send, recv, 0])
    graph = ps.TaskGraph.build(tasks)
    assert graph.streams == (
        (0, "compute"), (0, "send:1/0"), (1, "compute"), (1, "recv:0/0"),
    )  # fmt: skip
    wrong = Tasks([0, 5, 6, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0] * 4,
                     [0, StreamKind.code("send:2/0"), recv, 0])  # fmt: skip
    with pytest.raises(GraphError, match="row 1: stream must be"):
        ps.TaskGraph.build(wrong)


def test_a_timeline_keeps_them(tmp_path: Path) -> None:
    graph = lowered("per_microbatch", "interleaved_1f1b", 2, 4, skips=[(0, 3)])
    timeline = ps.simulate(graph, ps.Costs(1.0, 2.0, network=ps.Network(0.5)))
    timeline.save(tmp_path / "timeline.csv")
    loaded = ps.Timeline.load(tmp_path / "timeline.csv")
    assert loaded.graph.streams == graph.streams
    assert (loaded.graph.stream == graph.stream).all()
    assert ps.Comparison(timeline, loaded).makespan_error == 0
    assert (ps.replay(loaded).end == timeline.end).all()
    ps.trace.save(tmp_path / "trace.json", timeline)
    assert '"send:1/3"' in (tmp_path / "trace.json").read_text()


def test_the_latency_of_a_kind_is_that_of_all_its_microbatches() -> None:
    """Without costs, that of the fastest message; each being on its own stream changes nothing."""
    graph = lowered("per_microbatch", "1f1b", 2, 3)
    timeline = ps.simulate(graph, ps.Costs(1.0, 2.0, network=ps.Network(0.5)))
    recvs = np.flatnonzero(graph.op == Op.RECV_F)
    start, end = timeline.start.copy(), timeline.end.copy()
    late = np.array([0.25, 0.0, 0.125])
    start[recvs], end[recvs] = start[recvs] + late, end[recvs] + late
    measured = ps.Timeline(graph, start, end, np.zeros(len(graph)))
    assert message_latency(measured)[recvs].tolist() == [0.5] * 3


def test_streams_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.utils.host_memory.available_memory", lambda: 100_000)
    lowered("per_peer", "1f1b", 4, 64)
    with pytest.raises(CapacityError, match='streams="per_microbatch" with 768 messages'):
        lowered("per_microbatch", "1f1b", 4, 64)


# Head-of-line blocking

#: GPipe with forwards and backwards of a second; a message takes 2 s, and with a rendezvous starts
#: when its receiver's stream has reached it. On a single stream 1SEND_F0 is behind 1RECV_F1, and so
#: 1 s late. On a stream a peer each message waits for the arrival of the one before.
BLOCKED = {
    "single": """
        0 | F0 F1 .. .. .. .. .. .. .. .. .. .. .. .. .. .. B1 .. .. B0
        1 | .. .. .. F0 .. F1 .. .. .. .. .. .. .. B1 .. .. B0 .. .. ..
        2 | .. .. .. .. .. .. .. F0 .. F1 B1 B0 .. .. .. .. .. .. .. ..
    """,
    "per_peer": """
        0 | F0 F1 .. .. .. .. .. .. .. .. .. .. .. .. .. B1 .. B0
        1 | .. .. .. F0 .. F1 .. .. .. .. .. .. B1 .. B0 .. .. ..
        2 | .. .. .. .. .. .. F0 .. F1 B1 B0 .. .. .. .. .. .. ..
    """,
    "per_microbatch": """
        0 | F0 F1 .. .. .. .. .. .. .. .. .. .. .. .. B1 B0
        1 | .. .. .. F0 F1 .. .. .. .. .. .. B1 B0 .. .. ..
        2 | .. .. .. .. .. .. F0 F1 B1 B0 .. .. .. .. .. ..
    """,
}


@pytest.mark.parametrize("engine", ["compiled", "simpy"])
@pytest.mark.parametrize("streams", STREAMS)
def test_messages_are_blocked_by_those_before_them(streams: str, engine: str) -> None:
    graph = lowered(streams, rendezvous=True, step="none")
    timeline = ps.simulate(graph, ps.Costs(1, 1, network=ps.Network(latency=2)), engine=engine)
    assert draw(timeline, transfers=False) == grid(BLOCKED[streams])


@given(named_schedules(), st.integers(0, 3), st.sampled_from([1.0, 4.0]))
def test_links_of_pairs_keep_the_senders_order(
    schedule: ps.Schedule, latency: int, bandwidth: float
) -> None:
    """Without a rendezvous, streams of micro-batches change nothing where each pair has a link."""
    costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, output_bytes=2,
                     network=ps.Network(latency, bandwidth))  # fmt: skip
    one, other = (ps.simulate(ps.lower(schedule, streams=s), costs) for s in STREAMS[1:])
    assert (one.start == other.start).all()
    assert (one.end == other.end).all()
