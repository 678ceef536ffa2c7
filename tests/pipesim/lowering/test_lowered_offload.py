"""OFFLOAD and RELOAD tasks of `lower(offload=...)`: their choice, places, streams and times."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs.pricing import copied_bytes
from pipesim.errors import ArgumentError, CostsError, MemoryLimitWarning, NetworkError
from pipesim.graph import Tasks
from pipesim.ops import COPIES, Op
from tests.helpers.rules import assert_rules_hold, dependencies
from tests.helpers.strategies import costs, lowerings

LINK = ps.Network(host=ps.HostLink(latency=0.0, bandwidth=4.0))
COSTS = ps.Costs(1, 2, activation_bytes=4, network=LINK)


def queue(graph: ps.TaskGraph, device: int, stream: str) -> str:
    """Return the tasks of a stream, in order."""
    number = graph.streams.index((device, stream))
    return " ".join(str(graph.task(task)) for task in graph.queues[number].tolist())


def offloaded(graph: ps.TaskGraph) -> str:
    """Return the OFFLOADs of a graph, in order of their ids."""
    return " ".join(str(graph.task(t)) for t in np.flatnonzero(graph.op == Op.OFFLOAD).tolist())


def times(timeline: ps.Timeline, *actions: str) -> list[tuple[float, float]]:
    """Return start and end of some tasks."""
    graph = timeline.graph
    ids = {str(graph.task(k)): k for k in range(len(graph))}
    return [(timeline.start[ids[a]], timeline.end[ids[a]]) for a in actions]


def test_streams_of_the_middle_device() -> None:
    """Micro-batch 0 is needed again two tasks after its F, within prefetch + 1, and stays."""
    graph = ps.lower(ps.schedule("1f1b", 3, 4), offload="all", step="none")
    assert queue(graph, 1, "compute") == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert queue(graph, 1, "offload") == "1OFFLOAD1 1OFFLOAD2"
    assert queue(graph, 1, "reload") == "1RELOAD1 1RELOAD2"
    assert (2, "offload") not in graph.streams  # 1F1B's last stage needs all at once


FILL_AND_DRAIN = ps.Schedule.from_orders(
    [["0F0", "0F1", "0F2", "0F3", "0B3", "0B2", "0B1", "0B0"]], n_microbatches=4
)


def test_grid_of_one_device() -> None:
    """Copies of 1 s beside F of 1 s and B of 2 s; a RELOAD runs while the task before its B runs.

    ::

        compute  F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0
        offload     O0 O1 O2
        reload               R2    R1    R0
    """
    timeline = ps.simulate(ps.lower(FILL_AND_DRAIN, offload="all", step="none"), COSTS)
    assert offloaded(timeline.graph) == "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"
    copies = ("0OFFLOAD0", "0OFFLOAD1", "0OFFLOAD2", "0RELOAD2", "0RELOAD1", "0RELOAD0")
    assert times(timeline, *copies) == [(1, 2), (2, 3), (3, 4), (4, 5), (6, 7), (8, 9)]
    assert timeline.makespan == 12
    # F takes 4 at its start; an OFFLOAD gives them back at its end, a RELOAD takes them at its
    # start, B gives them back at its end.
    held = timeline.memory().groupby("time")["nbytes"].last()
    assert held.to_dict() == {0: 4, 1: 8, 2: 8, 3: 8, 4: 8, 6: 8, 8: 8, 10: 4, 12: 0}
    assert timeline.memory.peak.tolist() == [8]
    assert ps.simulate(ps.lower(FILL_AND_DRAIN), COSTS).memory.peak.tolist() == [16]
    # An OFFLOAD takes host memory at its start, a RELOAD gives it back at its end.
    host = timeline.memory.host()
    assert list(zip(host["time"], host["nbytes"], strict=True)) == [
        (0, 0), (1, 4), (2, 8), (3, 12), (5, 8), (7, 4), (9, 0)
    ]  # fmt: skip
    assert timeline.memory.peak_host.tolist() == [12]


def test_slow_copies_delay_backwards() -> None:
    """Copies of 4 s: O0 1-5, O1 5-9, O2 9-13; R2 13-17, R1 17-21, R0 21-25; B0 25-27."""
    slow = replace(COSTS, network=ps.Network(host=ps.HostLink(1.0, 4 / 3)))
    timeline = ps.simulate(ps.lower(FILL_AND_DRAIN, offload="all", step="none"), slow)
    assert times(timeline, "0OFFLOAD2", "0RELOAD2", "0RELOAD1", "0RELOAD0") == [
        (9, 13), (13, 17), (17, 21), (21, 25)
    ]  # fmt: skip
    assert timeline.makespan == 27
    causes = timeline.why.idle_by_cause().loc[0]
    assert causes.sum() == pytest.approx(27 - 12)
    # The chain of waits has four copies whole, 1 s of latency each, of which 15 s were idle.
    assert set(causes[causes > 0].index) <= {"bandwidth", "latency", "schedule_order", "cool_down"}
    assert (causes[["bandwidth", "latency"]] > 0).all()


def test_copies_on_the_compute_stream() -> None:
    """Without overlap, an OFFLOAD follows the SEND of its F, a RELOAD comes before RECV and B."""
    graph = ps.lower(ps.schedule("1f1b", 3, 4), offload="all", overlap=False, step="none")
    assert queue(graph, 1, "compute") == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1OFFLOAD1 1RECV_B0 1B0 1SEND_B0 "
        "1RECV_F2 1F2 1SEND_F2 1OFFLOAD2 1RELOAD1 1RECV_B1 1B1 1SEND_B1 "
        "1RECV_F3 1F3 1SEND_F3 1RELOAD2 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3"
    )
    assert {name for _, name in graph.streams} == {"compute"}


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ("none", ""),
        (0, ""),
        ("all", "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"),
        (1.0, "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"),
        (0.25, "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"),
        ("longest:0.5", "0OFFLOAD0 0OFFLOAD1"),  # lifespans are 7, 5, 3 and 1 tasks
        ("longest:0.49", "0OFFLOAD0"),
        ("longest:1", "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"),
        ({0: "longest:0.5"}, "0OFFLOAD0 0OFFLOAD1"),
        (["all"], "0OFFLOAD0 0OFFLOAD1 0OFFLOAD2"),
    ],
)
def test_values(offload: Any, expected: str) -> None:
    graph = ps.lower(FILL_AND_DRAIN, offload=offload)
    assert offloaded(graph) == expected
    shares = 0.25 if offload == 0.25 else 1
    assert (graph.offload_shares == shares).all()
    again = graph.options.source
    assert again is not None
    assert offloaded(ps.lower(again.schedule, **again.arguments)) == expected


def test_the_longest_of_a_device_are_of_its_first_chunk() -> None:
    """PipeOffload's choice: the chunks that live longest are those of the lower stages."""
    schedule = ps.schedule("interleaved_1f1b", 4, 8, n_chunks=2)
    graph = ps.lower(schedule, offload="longest:0.5")
    tasks = np.flatnonzero(graph.op == Op.OFFLOAD)
    assert np.bincount(graph.stage[tasks], minlength=8).tolist() == [8, 8, 8, 8, 0, 0, 0, 0]


@pytest.mark.parametrize(("d", "v"), [(4, 2), (8, 2), (8, 4)])
def test_table_of_pipeoffload(d: int, v: int) -> None:
    """Table 1 of arXiv 2503.01328, with T_F = T_B = T_W = 1 s of a chunk, and M = d here.

    Bubbles of 1F1B, v (d - 1) (T_F + T_B + T_W), and of 1F1B-I, 1 / v of it. Activations of 1F1B
    are M, of 1F1B-I less than (v + 1) / v M. With half of them offloaded they are at most the
    (v + 1) / (2 v) M of GIS-H, which offloads nothing and waits longer.
    """
    network = ps.Network(host=ps.HostLink(bandwidth=10 / v))
    whole = ps.Costs(v, 2 * v, activation_bytes=1, network=network)
    chunk = replace(whole, forward=1, backward=2, activation_bytes=1 / v)
    work = 2 * d * v * 3
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", d, 2 * d)), whole)
    assert timeline.makespan - work == v * (d - 1) * 3
    assert timeline.memory.peak.max() == d
    schedule = ps.schedule("interleaved_1f1b", d, 2 * d, n_chunks=v)
    for offload, most in (("none", (v + 1) / v), ("longest:0.5", (v + 1) / (2 * v))):
        timeline = ps.simulate(ps.lower(schedule, offload=offload), chunk)
        assert timeline.makespan - work == pytest.approx((d - 1) * 3)
        assert timeline.memory.peak.max() <= most * d


def test_stages_differ() -> None:
    schedule = ps.schedule("gpipe", 3, 4)
    for offload in ({0: "all", 2: 0.5}, "all/none/0.5", ["all", 0, 0.5]):
        graph = ps.lower(schedule, offload=offload)
        assert set(graph.stage[graph.op == Op.OFFLOAD].tolist()) == {0, 2}
        assert graph.offload_shares.tolist() == [1, 1, 0.5]


@pytest.mark.parametrize(("prefetch", "first"), [(0, 8), (1, 6), (2, 4), (3, 3)])
def test_prefetch(prefetch: int, first: float) -> None:
    """RELOAD of micro-batch 1 may run beside as many tasks before B1 as ``prefetch`` says."""
    costs = replace(COSTS, network=ps.Network(host=ps.HostLink(0.0, 1e9)))
    graph = ps.lower(FILL_AND_DRAIN, offload="all", prefetch=prefetch, step="none")
    start, _ = times(ps.simulate(graph, costs), "0RELOAD1")[0]
    assert start == pytest.approx(first, abs=1e-6)


def test_recomputed_microbatches_move_their_input() -> None:
    """All of it whatever the share, and nothing of stage 0, whose input is the caller's."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4), recompute="always", offload=0.5)
    assert offloaded(graph) == " ".join(f"1OFFLOAD{m}.input" for m in range(3))
    costs = replace(COSTS, output_bytes=3, activation_bytes=8)
    timeline = ps.simulate(graph, costs)
    assert set(timeline.nbytes[graph.is_op(COPIES)].tolist()) == {3.0}
    mixed = ps.lower(ps.schedule("gpipe", 2, 4), recompute="except_last", offload=0.5, prefetch=0)
    moved = {str(mixed.task(t)): float(ps.simulate(mixed, costs).nbytes[t])
             for t in np.flatnonzero((mixed.op == Op.OFFLOAD) & (mixed.stage == 1))}  # fmt: skip
    assert moved["1OFFLOAD0.input"] == 3.0
    assert all(n == (3.0 if a.endswith("input") else 4.0) for a, n in moved.items())


def test_evaluations_offload_nothing() -> None:
    graph = ps.lower(FILL_AND_DRAIN, offload="all", forward_only=True)
    assert not graph.is_op(COPIES).any()


def test_sharded_stages_offload_nothing() -> None:
    schedule = ps.schedule("gpipe", 3, 4)
    graph = ps.lower(schedule, sharded=0, offload="all")
    assert set(graph.stage[graph.op == Op.OFFLOAD].tolist()) == {1, 2}
    with pytest.raises(ArgumentError, match=r"offload names stage 0, which is sharded.*leave it"):
        ps.lower(schedule, sharded=0, offload={0: "all"})


def test_gpus_of_one_switch_share_a_link() -> None:
    """Two devices F0 F1 F2 F3 at once: their OFFLOADs take turns, the lower id first."""
    schedule = ps.Schedule.from_orders(
        [["0F0", "0F1", "0F2", "0F3", "0B3", "0B2", "0B1", "0B0"]], n_microbatches=4
    )
    graph = ps.lower(schedule, n_replicas=2, offload="all", step="none")
    own = ps.simulate(graph, COSTS)
    shared = ps.simulate(graph, replace(COSTS, network=ps.Network(host=ps.HostLink(0.0, 4.0, 2))))
    first = np.flatnonzero((graph.op == Op.OFFLOAD) & (graph.microbatch == 0))
    assert own.start[first].tolist() == [1, 1]
    assert shared.start[first].tolist() == [1, 2]
    assert shared.why.idle_by_cause().loc[1, "contention"] >= 0


# Costs


def test_measured_seconds_and_bytes() -> None:
    """They replace those by the link and the share, and need no link."""
    graph = ps.lower(FILL_AND_DRAIN, offload=0.5, step="none")
    costs = ps.Costs(1, 2, activation_bytes=4, offload=0.25, reload=0.5, offload_bytes=3)
    timeline = ps.simulate(graph, costs)
    assert times(timeline, "0OFFLOAD0", "0RELOAD2") == [(1, 1.25), (4, 4.5)]
    assert timeline.memory.peak.tolist() == [1 + 1 + 4 + 4]  # as F3 starts, O2 has not ended
    copies = graph.kinds.is_op(COPIES)
    assert copied_bytes(graph, costs)[copies].tolist() == [3, 3]
    more = replace(costs, offload_bytes=5)
    with pytest.raises(CostsError, match=r"offload_bytes of stage 0 are 5.*activation_bytes 4"):
        ps.simulate(graph, more)


def test_costs_without_a_host_link() -> None:
    graph = ps.lower(FILL_AND_DRAIN, offload="all")
    with pytest.raises(CostsError, match=r"graph 'custom' has OFFLOAD tasks.*host=HostLink\("):
        ps.simulate(graph, ps.Costs(1, 2, activation_bytes=4))


def test_costs_from_a_timeline() -> None:
    """A timeline shows the seconds of copies, and its costs their bytes."""
    costs = replace(COSTS, output_bytes=1, network=ps.Network(host=ps.HostLink(0.125, 8.0)))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4), offload=0.5), costs)
    again = ps.Costs.from_timeline(timeline)
    assert again.offload == again.reload == (0.375, 0.375)
    assert ps.simulate(timeline.graph, again).makespan == pytest.approx(timeline.makespan)
    unpriced = replace(timeline, costs=None, sizes=timeline.nbytes)
    bare = ps.Costs.from_timeline(unpriced, activation_bytes=4)
    assert bare.offload_bytes == (2.0, 2.0)
    faster = ps.Network(host=ps.HostLink(0.0, 2.0))
    assert ps.Costs.from_timeline(timeline, network=faster).offload is None
    assert ps.replay(timeline).makespan == pytest.approx(timeline.makespan)


def test_timeline_files(tmp_path: Path) -> None:
    graph = ps.lower(ps.schedule("gpipe", 2, 4), offload=[0.5, 0.25], prefetch=2)
    timeline = ps.simulate(graph, COSTS)
    timeline.save(tmp_path / "timeline.csv")
    loaded = ps.Timeline.load(tmp_path / "timeline.csv", costs=COSTS)
    assert loaded.graph.prefetch == 2
    assert loaded.graph.offload_shares.tolist() == [0.5, 0.25]
    assert (loaded.memory.peak == timeline.memory.peak).all()
    assert (loaded.graph.dependencies.values == graph.dependencies.values).all()
    ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4)), COSTS).save(tmp_path / "plain.csv")
    assert "prefetch" not in (tmp_path / "plain.csv").read_text().splitlines()[0]


def test_host_links() -> None:
    """Presets have those of their data sheets; a device of several GPUs has a share."""
    a100, h100 = ps.Network.preset("dgx_a100", 1.0), ps.Network.preset("dgx_h100", efficiency=0.5)
    assert a100.host == ps.HostLink(10e-6, 32e9, 2)
    assert h100.host == ps.HostLink(10e-6, 32e9)
    assert ps.Network.preset("dgx_a100", 1.0, 4).host == ps.HostLink(10e-6, 16e9)
    assert a100.grouped(4).host == ps.HostLink(10e-6, 16e9)
    assert a100.scaled(latency=2, bandwidth=0.5).host == ps.HostLink(20e-6, 16e9, 2)
    assert ps.Network.from_dict(a100.to_dict()) == a100
    assert ps.Network.from_dict({"host": {"bandwidth": 1e9}}).host == ps.HostLink(0.0, 1e9)
    assert "copies to hosts" in a100._repr_html_()
    with pytest.raises(NetworkError, match=r"host must be a pipesim\.HostLink, got 3"):
        ps.Network(host=3)  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match="host: bandwidth must be > 0"):
        ps.HostLink(0.0, 0.0)
    with pytest.raises(NetworkError, match="no link to the memory of the hosts"):
        ps.Network().resolve_host(np.array([0]), np.array([True]), 1)


# Bad input


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (1.5, r"offload must be \"none\", \"all\", a share.*; got 1.5"),
        (-0.5, "got -0.5"),
        (True, "got True"),
        ("half", "got 'half'"),
        ("longest", "got 'longest'"),
        ("longest:2", "got 'longest:2'"),
        (float("nan"), "got nan"),
        (None, "got None"),
        ({}, "mapping that names no stage"),
        ({5: "all"}, "offload names stage 5; there are 1 stages"),
        (["all", "all"], "offload has 2 values, and there are 1 stages"),
        ({0: 2}, "offload of stage 0 must be"),
    ],
)
def test_bad_values(offload: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.lower(FILL_AND_DRAIN, offload=offload)


def test_nothing_lives_long_enough() -> None:
    with pytest.raises(ArgumentError, match=r"within prefetch \+ 1 = 10 compute tasks.*a smaller"):
        ps.lower(FILL_AND_DRAIN, offload="all", prefetch=9)
    with pytest.raises(ArgumentError, match="prefetch must be"):
        ps.lower(FILL_AND_DRAIN, prefetch=-1)


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.0], [1.5], "x", 3])
def test_bad_shares_of_a_built_graph(shares: Any) -> None:
    tasks = Tasks(*([x] for x in (0, 0, 0, 0, 0)))
    with pytest.raises(ArgumentError, match="offload_shares"):
        ps.TaskGraph.build(tasks, offload_shares=shares)


# Properties


@st.composite
def offloading(draw: st.DrawFn) -> tuple[ps.TaskGraph, ps.Costs]:
    """Draw graphs that offload activations, and costs that suit them."""
    schedule, options = draw(lowerings())
    value = draw(st.sampled_from(["all", 0.25, 0.5, "longest:0.5"]))
    prefetch = draw(st.sampled_from([1, 0]))
    options |= {"offload": value, "prefetch": prefetch, "forward_only": False}
    try:
        graph = ps.lower(schedule, **options)
    except ArgumentError:  # nothing lives long enough
        reject()
    drawn = draw(costs(graph.n_stages, graph.n_devices))
    return graph, replace(drawn, tied_bytes=1.0) if graph.tied else drawn


@pytest.mark.slow
@given(offloading())
def test_engines_agree_and_keep_the_rules(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    graph, prices = case
    ps.verify(graph)
    timeline, other = (ps.simulate(graph, prices, engine=e) for e in ("compiled", "simpy"))
    assert (timeline.start == other.start).all()
    assert (timeline.end == other.end).all()
    assert_rules_hold(timeline, prices.of(graph))
    assert [set(graph.dependencies[k].tolist()) for k in range(len(graph))] == dependencies(graph)
    assert (timeline.why.idle_by_cause().sum(axis=1) == timeline.idle).all()


@pytest.mark.slow
@given(offloading())
def test_peaks_are_those_of_the_changes(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Host memory is empty at the end; a device never holds less than nothing, or more than all."""
    graph, prices = case
    timeline = ps.simulate(graph, prices)
    host = timeline.memory.host()
    assert (host["nbytes"] > -1e-9).all()
    assert np.allclose(host.groupby("host")["nbytes"].last(), 0.0)
    assert np.allclose(host.groupby("host")["nbytes"].max(), timeline.memory.peak_host)
    moved = copied_bytes(graph, prices)[graph.kind]
    assert moved[graph.op == Op.OFFLOAD].sum() == moved[graph.op == Op.RELOAD].sum()


@pytest.mark.slow
@given(lowerings())
def test_every_offload_has_its_reload(case: tuple[ps.Schedule, dict[str, Any]]) -> None:
    schedule, options = case
    graph = ps.lower(schedule, **options)
    cells = [
        {(*graph.task(t).action[2:], graph.task(t).replica, graph.task(t).stage)
         for t in np.flatnonzero(graph.op == op)}
        for op in (Op.OFFLOAD, Op.RELOAD)
    ]  # fmt: skip
    assert cells[0] == cells[1]


def test_costs_of_a_timeline_with_recomputes_give_its_time_again(tmp_path: Path) -> None:
    """Copies of inputs are shorter than those of activations; a file has no bytes of either."""
    network = ps.Network(latency=1e-6, bandwidth=1e9, host=ps.HostLink(latency=0, bandwidth=1e9))
    costs = ps.Costs(
        1e-3, 2e-3, recompute=1e-3, output_bytes=1e5, activation_bytes=1e7, network=network
    )
    graph = ps.lower(ps.schedule("1f1b", 4, 8), offload=0.5, recompute="except_last")
    timeline = ps.simulate(graph, costs)
    timeline.save(tmp_path / "run.csv")
    for other in (timeline, ps.Timeline.load(tmp_path / "run.csv")):
        again = ps.simulate(other.graph, ps.Costs.from_timeline(other))
        assert again.makespan == pytest.approx(timeline.makespan)


def test_host_memory_of_unequal_micro_batches() -> None:
    """Micro-batches 1, 2 and 3 live long enough on stage 0; 3 and 2 are away at one time."""
    nbytes = [[1e6, 2e6, 3e6, 4e6]] * 2
    network = ps.Network(host=ps.HostLink(latency=0, bandwidth=1e30))
    costs = ps.Costs([[1, 2, 3, 4]] * 2, 2, activation_bytes=nbytes, network=network)
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4), offload="all", prefetch=0), costs)
    moved = timeline.frame.query("op == 'OFFLOAD'")
    assert timeline.memory.peak_host.tolist() == [moved["nbytes"].sum()]
    assert set(moved["nbytes"]) <= {*nbytes[0]}


# On a peer


def test_a_peer_holds_what_its_pair_offloads() -> None:
    """By hand: copies of 0.5 s over the link between both, whose ends hold the bytes meanwhile.

    Device 1 has its own micro-batches, and one of device 0 from OFFLOAD to RELOAD::

        0 compute | F0 F1 F2 .. .. .. B2 B2 B1 B1 B0 B0
        0 offload | .. O0
        0 reload  |                         R0
        1 compute | .. F0 F1 F2 B2 B2 B1 B1 B0 B0
    """
    link = ps.Link(0.0, 8.0, ((0, 1), (1, 0)))
    costs = ps.Costs(1, 2, activation_bytes=4, network=ps.Network(links=[link]))
    schedule = ps.schedule("gpipe", 2, 3)
    graph = ps.lower(schedule, offload={0: "longest:0.34"}, offload_to="peer", step="none")
    timeline = ps.simulate(graph, costs)
    assert graph.offload_peers.tolist() == [1, 0]
    copies = [(str(graph.task(k)), timeline.start[k], timeline.end[k])
              for k in np.flatnonzero(graph.is_op(COPIES))]  # fmt: skip
    assert copies == [("0OFFLOAD0", 1, 1.5), ("0RELOAD0", 8, 8.5)]
    assert timeline.makespan == 12, "as without: the copies hide"
    assert timeline.memory.peak.tolist() == [8, 16]
    assert timeline.memory.peak_host.tolist() == [0]
    held = timeline.memory()
    held = held[held["device"] == 1].set_index("time")["nbytes"]
    assert held[1.0].tolist()[-1] == 8, "F of micro-batch 0, and that of device 0"
    with pytest.warns(MemoryLimitWarning, match="device 1 needs 16.0 B of 15.0 B"):
        ps.simulate(graph, costs, memory_limit=15)


@pytest.mark.parametrize("p", [4, 5, 8, 9])
def test_bpipe(p: int) -> None:
    """1F1B holds at most k = ceil((p + 2) / 2) micro-batches, not p (Kim et al., ICML 2023).

    That is so on each device that offloads, and on its peer of an odd number. If p is even, k is
    the mean of both, so that a peer may hold one more while copies overlap.
    """
    schedule, k = ps.schedule("1f1b", p, 3 * p + 1), math.ceil((p + 2) / 2)
    costs = ps.Costs(1, 2, activation_bytes=1, network=ps.Network(bandwidth=2))
    plain = ps.simulate(ps.lower(schedule), costs)
    assert plain.memory.peak.tolist() == list(range(p, 0, -1))
    graph = ps.lower(schedule, offload=f"above:{k}", offload_to="peer")
    timeline = ps.simulate(graph, costs)
    assert timeline.memory.peak[: p // 2 - 1].tolist() == [k] * (p // 2 - 1)
    assert timeline.memory.peak.max() <= k + (p % 2 == 0)
    assert timeline.makespan == plain.makespan
    assert set(graph.device[graph.op == Op.OFFLOAD]) == set(range(p - k))
    on_host = ps.simulate(ps.lower(schedule, offload=f"above:{k}"), replace(
        costs, network=ps.Network(bandwidth=2, host=ps.HostLink(bandwidth=2))
    ))  # fmt: skip
    assert on_host.memory.peak.tolist() == [min(k, p - d) for d in range(p)]


def test_peers_are_of_one_replica() -> None:
    """In each layout; the middle of an odd number of devices keeps its activations."""
    options: dict[str, Any] = {"offload": "all", "offload_to": "peer", "n_replicas": 2}
    schedule = ps.schedule("gpipe", 3, 4)
    for layout, peers in (
        ("replica_major", [2, 1, 0, 5, 4, 3]),
        ("stage_major", [4, 5, 2, 3, 0, 1]),
    ):
        graph = ps.lower(schedule, layout=layout, **options)  # type: ignore[arg-type]
        assert graph.offload_peers.tolist() == peers
        assert set(graph.stage[graph.op == Op.OFFLOAD]) == {0, 2}
    with pytest.raises(ArgumentError, match="no activations to offload"):
        ps.lower(ps.schedule("gpipe", 1, 4), offload="all", offload_to="peer")
    with pytest.raises(ArgumentError, match='"above:4" for those beyond 4'):
        ps.lower(schedule, offload="above:0")
