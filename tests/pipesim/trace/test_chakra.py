"""Chakra execution traces, read back by a reader of our own."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chakra_reader import Node, read_trace
from hypothesis import given
from same_timelines import KINDS, timeline_of_kind
from strategies import cases

import pipesim as ps
from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import COLLECTIVES, RECVS, SENDS, Op
from pipesim.trace.chakra import NODE_TYPES, CollectiveType, NodeType


def nodes(timeline: ps.Timeline, folder: Path) -> dict[int, Node]:
    """Write a timeline; return its nodes by id, after checks of their files."""
    paths = ps.trace.chakra.save(folder / "x", timeline)
    assert [path.name for path in paths] == [f"x.{d}.et" for d in range(timeline.n_devices)]
    by_id: dict[int, Node] = {}
    for device, path in enumerate(paths):
        metadata, listed = read_trace(path)
        assert metadata["timeline"] == timeline.name
        own = {node.id for node in listed}
        assert own == set(np.flatnonzero(timeline.graph.device == device).tolist())
        for node in listed:
            assert own.issuperset(node.data_deps + node.ctrl_deps)  # feeders know no other file
            assert node.attr["is_cpu_op"] is False
        by_id |= {node.id: node for node in listed}
    assert len(by_id) == len(timeline)
    return by_id


def waits(by_id: dict[int, Node]) -> set[tuple[int, int]]:
    """Return each task with a task that it waits for, messages included."""
    sends = {node.attr["comm_tag"]: node.id for node in by_id.values()
             if node.type == NodeType.COMM_SEND_NODE}  # fmt: skip
    recvs = [node for node in by_id.values() if node.type == NodeType.COMM_RECV_NODE]
    edges = {(node.id, sends[node.attr["comm_tag"]]) for node in recvs}
    return edges | {(n.id, dep) for n in by_id.values() for dep in n.data_deps + n.ctrl_deps}


@pytest.mark.parametrize("kind", KINDS)
def test_dependencies_and_durations(kind: str, tmp_path: Path) -> None:
    """Those of the timeline, but for what the format lacks: rendezvous and groups."""
    timeline = timeline_of_kind(kind)
    graph, by_id = timeline.graph, nodes(timeline, tmp_path)
    plain = replace(graph, options=replace(graph.options, rendezvous=False))
    plain = replace(plain, collectives=type(graph.collectives)(np.zeros(1, np.int32), np.empty(0)))
    precedence = plain.precedence
    pairs = zip(precedence.rows.tolist(), precedence.values.tolist(), strict=True)
    assert waits(by_id) == set(pairs)
    micros = np.round((timeline.end - timeline.start) * 1e6)
    assert [by_id[task].duration_micros for task in range(len(graph))] == micros.tolist()
    starts = np.round(timeline.start * 1e6)
    assert [by_id[task].start_time_micros for task in range(len(graph))] == starts.tolist()
    assert [by_id[task].name for task in range(len(graph))] == [
        str(graph.task(task)) for task in range(len(graph))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_messages(kind: str, tmp_path: Path) -> None:
    """Each SEND has a RECV of its tag, ends and bytes on the other device, and no other has it."""
    timeline = timeline_of_kind(kind)
    graph, by_id = timeline.graph, nodes(timeline, tmp_path)
    sends = np.flatnonzero(graph.is_op(SENDS)).tolist()
    tags = Counter(node.attr["comm_tag"] for node in by_id.values() if "comm_tag" in node.attr)
    assert set(tags.values()) == {2}
    assert len(tags) == len(sends) == graph.is_op(RECVS).sum()
    for send in sends:
        recv = int(graph.pair[send])
        one, other = by_id[send], by_id[recv]
        assert (one.type, other.type) == (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE)
        assert one.attr == other.attr
        ends = {"comm_src": graph.device[send], "comm_dst": graph.device[recv]}
        assert {name: one.attr[name] for name in ends} == ends
        assert one.attr["comm_size"] == timeline.nbytes[send]


def test_by_hand(tmp_path: Path) -> None:
    """Two stages, one micro-batch, on the first device."""
    costs = ps.Costs(1e-3, 2e-3, output_bytes=5, network=ps.Network(0.5e-3))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), step="none"), costs)
    path, _ = ps.trace.chakra.save(str(tmp_path / "x"), timeline)
    metadata, by_id = read_trace(path)
    assert metadata == {
        "version": "1.0.0", "schema": "1.0.2-chakra.1.0.0", "producer": "pipesim",
        "timeline": "gpipe",
    }  # fmt: skip
    none = {"is_cpu_op": False, "tensor_size": 0, "num_ops": 0}
    sent = {"is_cpu_op": False, "comm_src": 0, "comm_dst": 1, "comm_tag": 1, "comm_size": 5}
    got = {"is_cpu_op": False, "comm_src": 1, "comm_dst": 0, "comm_tag": 5, "comm_size": 5}
    assert by_id == [
        Node(0, "0F0", 4, [], [], 0, 1000, none),
        Node(1, "0SEND_F0", 5, [], [0], 1000, 0, sent),
        Node(6, "0RECV_B0", 6, [], [], 5000, 0, got),
        Node(7, "0B0", 4, [0], [6, 0], 5000, 2000, none),
    ]


def test_collectives(tmp_path: Path) -> None:
    """Bytes, type and group; the groups are in a file for ASTRA-sim."""
    timeline = timeline_of_kind("shards")
    by_id = nodes(timeline, tmp_path)
    groups = json.loads((tmp_path / "x.comm_groups.json").read_text())
    assert groups == {"1": [0, 4], "2": [1, 5], "3": [2, 6], "4": [3, 7]}
    types = {Op.REDUCE_GRAD: CollectiveType.REDUCE_SCATTER, Op.UNSHARD: CollectiveType.ALL_GATHER}
    for number in range(len(timeline.graph.collectives)):
        members = timeline.graph.collectives[number].tolist()
        op = timeline.graph.task(members[0]).op
        devices = [timeline.graph.task(member).device for member in members]
        for member in members:
            attributes = by_id[member].attr
            assert by_id[member].type == NodeType.COMM_COLL_NODE
            assert groups[attributes["pg_name"]] == devices
            assert attributes["comm_type"] == types[op]
            assert attributes["comm_size"] == 5


def test_types_of_collectives(tmp_path: Path) -> None:
    for kind, expected in (("replicas", CollectiveType.ALL_REDUCE),
                           ("experts", CollectiveType.ALL_TO_ALL)):  # fmt: skip
        by_id = nodes(timeline_of_kind(kind), tmp_path)
        types = {node.attr["comm_type"] for node in by_id.values() if "comm_type" in node.attr}
        assert expected in types


def test_a_collective_within_a_device(tmp_path: Path) -> None:
    """Both paths of a bidirectional pipeline may be on one device: there is nothing to send."""
    schedule = ps.schedule("gpipe", 1, 2)
    graph = ps.lower(schedule, grad_norm=True)
    by_id = nodes(ps.simulate(graph, ps.Costs(1, 2)), tmp_path)
    assert {node.type for node in by_id.values()} == {NodeType.COMP_NODE}
    assert not (tmp_path / "x.comm_groups.json").exists()


def test_copies_to_the_host(tmp_path: Path) -> None:
    by_id = nodes(timeline_of_kind("offload"), tmp_path)
    types = {node.name[1:4]: node.type for node in by_id.values()}
    assert types["OFF"] == NodeType.MEM_STORE_NODE
    assert types["REL"] == NodeType.MEM_LOAD_NODE
    sizes = {node.attr["tensor_size"] for node in by_id.values() if "OFFLOAD" in node.name}
    assert sizes == {2}


def test_files_of_another_timeline(tmp_path: Path) -> None:
    """A simulator would read the files of further devices, and older groups; neither is removed."""
    large, small = (
        ps.simulate(ps.lower(ps.schedule("1f1b", n, 2)), ps.Costs(1, 2)) for n in (3, 2)
    )
    for module, name in ((ps.trace.chakra, "x.2.et"), (ps.trace.hta, "rank2.json")):
        to = tmp_path / "x" if module is ps.trace.chakra else tmp_path
        for _ in range(2):
            module.save(to, large)
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ArgumentError, match=rf"has '{name}', of another timeline, which "):
            module.save(to, small)
        assert (tmp_path / name).read_bytes() == before
    ps.trace.chakra.save(tmp_path / "other", small)
    (tmp_path / "other.comm_groups.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"has 'other\.comm_groups\.json', of another"):
        ps.trace.chakra.save(tmp_path / "other", small)


def test_every_operation_has_a_type() -> None:
    assert set(NODE_TYPES) == set(Op)
    assert {op for op, kind in NODE_TYPES.items() if kind is NodeType.COMM_COLL_NODE} == COLLECTIVES


@pytest.mark.slow
@given(case=cases())
def test_any_timeline(
    case: tuple[ps.TaskGraph, ps.Costs], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every task is there, and the order of ids resolves all dependencies."""
    by_id = nodes(ps.simulate(*case), tmp_path_factory.mktemp("trace"))
    assert all(earlier < later for later, earlier in waits(by_id))


def test_protobuf_reads_it(tmp_path: Path) -> None:
    """Messages are those of our schema: nothing is left over as an unknown field."""
    from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

    from pipesim.trace.chakra import messages

    path, *_ = ps.trace.chakra.save(tmp_path / "x", timeline_of_kind("plain"))
    data, place, count = path.read_bytes(), 0, 0
    kinds = [messages().metadata, *[messages().node] * len(timeline_of_kind("plain"))]
    while place < len(data):
        length, place = _DecodeVarint32(data, place)
        message = kinds[count].FromString(data[place : place + length])
        assert message.SerializeToString() == data[place : place + length]
        place, count = place + length, count + 1
    assert count > 30


@pytest.mark.parametrize(
    ("prefix", "what", "error", "message"),
    [
        ("x", 3, ArgumentError, "a trace is of a Timeline, got int"),
        ("", "plain", ArgumentError, "prefix must end in the beginning of a name"),
        ("no/x", "plain", ArgumentError, r"cannot write .*no/x\.0\.et"),
        ("x", "failed", TimelineError, "a Chakra trace"),
    ],
)
def test_mistakes(
    prefix: str, what: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    timeline = timeline_of_kind(what) if isinstance(what, str) else what
    with pytest.raises(error, match=message):
        ps.trace.chakra.save(f"{tmp_path}/{prefix}", timeline)
    assert list(tmp_path.iterdir()) == []


def test_times_and_bytes_beyond_the_format(tmp_path: Path) -> None:
    graph = ps.lower(ps.schedule("gpipe", 2, 1))
    for costs, what in ((ps.Costs(1e20, 1), "us"), (ps.Costs(1, 1, output_bytes=1e20), "bytes")):
        with pytest.raises(TimelineError, match=rf"the .*{what}.* a Chakra trace has 64 bits"):
            ps.trace.chakra.save(tmp_path / "x", ps.simulate(graph, costs))


def test_without_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipesim.trace.chakra import messages

    messages.cache_clear()
    for name in ("google.protobuf", "google.protobuf.descriptor_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArgumentError, match=r"needs protobuf, .* pip install 'pipesim\[chakra\]'"):
        ps.trace.chakra.save(tmp_path / "x", timeline_of_kind("plain"))
