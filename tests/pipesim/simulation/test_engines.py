"""Each engine against grids drawn by hand, and against the rules of time.

The numbers of the rules are those of docs/time.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid, times
from hypothesis import assume, given
from hypothesis import strategies as st
from rules import all_reduced, assert_rules_hold
from simulated_runs import run
from strategies import cases

import pipesim as ps
from pipesim.costs import TaskCosts
from pipesim.errors import (
    ArgumentError,
    CostsError,
    DeadlockError,
    NetworkError,
    TimelineError,
    UnknownNameError,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Tasks
from pipesim.ops import COMPUTE, RECVS, SENDS, Op
from pipesim.simulation.engines.plan import shared_links
from pipesim.utils.csr import CSR

pytestmark = pytest.mark.usefixtures("each_engine")

#: One second a byte: a message of ``output_bytes=1`` lasts a second.
SLOW = ps.Network(bandwidth=1)


def test_stream_runs_one_task_at_a_time_in_order() -> None:
    """Rules 1 and 2: device 1 could do F1 at 2, but its order says B0 first."""
    timeline = run("1f1b", 2, 3, ps.Costs(forward=1, backward=2))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
        1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
    """)


def test_gpipe_waits_for_the_slowest_stage() -> None:
    """Rule 3 with stages of different cost."""
    timeline = run("gpipe", 3, 2, ps.Costs(forward=(1, 2, 1), backward=(1, 1, 2)))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 .. .. .. .. .. .. .. B1 .. B0
        1 | .. F0 F0 F1 F1 .. .. .. B1 .. B0 ..
        2 | .. .. .. F0 .. F1 B1 B1 B0 B0 .. ..
    """)


def test_split_backward() -> None:
    """Rule 3: the gradient goes back after I; W fills the wait."""
    orders = [
        ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"],
    ]
    graph = ps.lower(ps.Schedule.from_orders(orders), step="none")
    timeline = ps.simulate(graph, ps.Costs(forward=1, input_grad=1, weight_grad=2))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 .. I0 .. I1 W0 W0 W1 W1
        1 | .. F0 I0 F1 I1 W0 W0 W1 W1 ..
    """)


def test_stages_of_one_device_hand_over_for_free() -> None:
    """Rule 4: the fold of a V has no message, the other edges have."""
    orders = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), step="none")
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=1, output_bytes=1, network=SLOW))
    assert draw(timeline, transfers=False) == grid(
        """
        0 | 0F0 ... ... ... ... 3F0 3B0 ... ... ... ... 0B0
        1 | ... ... 1F0 2F0 ... ... ... ... 2B0 1B0 ... ...
    """.replace("...", "..")
    )


def test_transfers_overlap_compute() -> None:
    """Rule 5: F1 is computed while F0 is under way; rule 4: both ends hold their streams."""
    costs = ps.Costs(forward=1, backward=2, output_bytes=1, network=SLOW)
    assert draw(run("1f1b", 2, 2, costs)) == grid("""
        0        | F0 F1 .. .. .. .. B0 B0 .. B1 B1
        0 send:1 | .. F0 F1 .. .. .. .. .. .. .. ..
        0 recv:1 | .. .. .. .. .. B0 .. .. B1 .. ..
        1        | .. .. F0 B0 B0 F1 B1 B1 .. .. ..
        1 send:0 | .. .. .. .. .. B0 .. .. B1 .. ..
        1 recv:0 | .. F0 F1 .. .. .. .. .. .. .. ..
    """)


def test_transfers_without_overlap() -> None:
    """Rule 5: both ends on ``compute``. F1 has long arrived when device 1 receives it, at 6."""
    costs = ps.Costs(forward=1, backward=2, output_bytes=1, network=SLOW)
    timeline = run("1f1b", 2, 2, costs, overlap=False)
    assert draw(timeline) == grid("""
        0 | F0  >F0 F1  >F1 ..  <B0 B0  B0  ..  <B1 B1  B1
        1 | ..  <F0 F0  B0  B0  >B0 F1  B1  B1  >B1 ..  ..
    """)
    assert times(timeline, "1RECV_F1") == (6, 6)


def test_one_copy_stream_blocks_at_its_head() -> None:
    """Rule 1: device 1 could send F0 at 5, but its copy stream waits for F1 from device 0."""
    costs = ps.Costs(forward=(3, 1, 1), backward=1, output_bytes=1, network=SLOW)
    assert draw(run("gpipe", 3, 2, costs), rows="^[12]$|send:2|1 recv:0|2 recv:1") == grid("""
        1        | .. .. .. .. F0 .. .. F1 .. .. .. .. B1 B0 .. ..
        1 recv:0 | .. .. .. F0 .. .. F1 .. .. .. .. .. .. .. .. ..
        1 send:2 | .. .. .. .. .. F0 .. .. F1 .. .. .. .. .. .. ..
        2        | .. .. .. .. .. .. F0 .. .. F1 B1 B0 .. .. .. ..
        2 recv:1 | .. .. .. .. .. F0 .. .. F1 .. .. .. .. .. .. ..
    """)
    assert draw(run("gpipe", 3, 2, costs, streams="single"), rows="^[12]") == grid("""
        1        | ..  ..  ..  ..  F0  ..  ..  F1  ..  ..  ..  ..  B1  ..  B0  ..  ..
        1 copy   | ..  ..  ..  <F0 ..  ..  <F1 >F0 >F1 ..  ..  <B1 ..  >B1 ..  >B0 ..
        2        | ..  ..  ..  ..  ..  ..  ..  ..  F0  F1  B1  B0  ..  ..  ..  ..  ..
        2 copy   | ..  ..  ..  ..  ..  ..  ..  <F0 <F1 ..  ..  >B1 >B0 ..  ..  ..  ..
    """)


def test_without_rendezvous_the_sender_goes_ahead() -> None:
    """Rule 4: F1 is sent at 3 although device 1 computes until 5."""
    costs = ps.Costs(forward=(1, 3), backward=1, output_bytes=1, network=SLOW)
    assert draw(run("gpipe", 2, 2, costs, overlap=False)) == grid("""
        0 | F0  >F0 F1  >F1 ..  ..  ..  ..  ..  <B1 B1  <B0 B0
        1 | ..  <F0 F0  F0  F0  F1  F1  F1  B1  >B1 B0  >B0 ..
    """)


def test_with_rendezvous_the_sender_waits() -> None:
    """Rule 6: the same, but F1 is sent when device 1 has come to receive it."""
    costs = ps.Costs(forward=(1, 3), backward=1, output_bytes=1, network=SLOW)
    assert draw(run("gpipe", 2, 2, costs, overlap=False, rendezvous=True)) == grid("""
        0 | F0  >F0 F1  ..  ..  >F1 ..  ..  ..  ..  <B1 B1  <B0 B0
        1 | ..  <F0 F0  F0  F0  <F1 F1  F1  F1  B1  >B1 B0  >B0 ..
    """)


def test_recompute_fills_the_wait_for_the_gradient() -> None:
    """Rule 3: R needs only F, so device 0 recomputes while device 1 is still going forward."""
    costs = ps.Costs(forward=1, backward=2)
    assert draw(run("1f1b", 2, 3, costs, recompute="always"), transfers=False) == grid("""
        0 | F0 F1 R0 .. .. B0 B0 F2 R1 B1 B1 R2 .. B2 B2
        1 | .. F0 R0 B0 B0 F1 R1 B1 B1 F2 R2 B2 B2 .. ..
    """)


def test_recompute_without_overlap_does_not_wait_for_the_message() -> None:
    """Rules 3 and 5: R comes before the RECV of the gradient on the one stream."""
    costs = ps.Costs(forward=1, backward=1, output_bytes=1, network=SLOW)
    timeline = run("gpipe", 2, 1, costs, overlap=False, recompute="always")
    assert draw(timeline) == grid("""
        0 | F0  >F0 R0  ..  ..  <B0 B0
        1 | ..  <F0 F0  R0  B0  >B0 ..
    """)


def test_except_last_saves_the_last_recompute() -> None:
    """The last micro-batch keeps its activations: one R less on the critical path."""
    costs = ps.Costs(forward=1, backward=2)
    assert draw(run("1f1b", 2, 3, costs, recompute="except_last"), transfers=False) == grid("""
        0 | F0 F1 R0 .. .. B0 B0 F2 R1 B1 B1 .. B2 B2
        1 | .. F0 R0 B0 B0 F1 R1 B1 B1 F2 B2 B2 .. ..
    """)
    assert draw(run("gpipe", 2, 2, costs, recompute="except_last"), transfers=False) == grid("""
        0 | F0 F1 .. .. .. B1 B1 R0 B0 B0
        1 | .. F0 F1 B1 B1 R0 B0 B0 .. ..
    """)


def test_one_host_issues_for_all_devices() -> None:
    """Rule 7: 16 tasks of one second each to issue, messages included, in clock-cycle order."""
    costs = ps.Costs(forward=1, backward=1, launch=1)
    assert draw(run("gpipe", 2, 2, costs, hosts="one"), transfers=False) == grid("""
        0 | .. F0 .. .. F1 .. .. .. .. .. .. .. B1 .. .. .. B0
        1 | .. .. .. .. .. F0 .. .. F1 B1 .. .. .. B0 .. .. ..
    """)


def test_one_host_a_device() -> None:
    """Rule 7: each issues its own eight."""
    costs = ps.Costs(forward=1, backward=1, launch=1)
    assert draw(run("gpipe", 2, 2, costs, hosts="per_device"), transfers=False) == grid("""
        0 | .. F0 .. F1 .. .. B1 .. B0
        1 | .. .. F0 .. F1 B1 .. B0 ..
    """)


def test_launch_of_each_stage() -> None:
    """Rule 7: host 1 issues its RECV, F, B and SEND at 3, 6, 9 and 12."""
    costs = ps.Costs(forward=1, backward=1, launch=(1, 3))
    timeline = run("gpipe", 2, 1, costs, hosts="per_device")
    assert draw(timeline, transfers=False) == grid("""
        0 | .. F0 .. .. .. .. .. .. .. .. .. .. B0
        1 | .. .. .. .. .. .. F0 .. .. B0 .. .. ..
    """)


def test_launch_of_short_and_long_tasks() -> None:
    """Rule 7: a host that is ahead of its device costs nothing but the first launch."""
    timeline = run("gpipe", 1, 3, ps.Costs(forward=2, backward=2, launch=1))
    assert draw(timeline) == grid("0 | .. F0 F0 F1 F1 F2 F2 B2 B2 B1 B1 B0 B0")


def test_latency_delays_both_ends_of_a_receive() -> None:
    """Rule 4: RECV.start = SEND.start + latency, RECV.end = SEND.end + latency."""
    network = ps.Network(latency=2, bandwidth=1)
    timeline = run("gpipe", 2, 1, ps.Costs(1, 1, output_bytes=3, network=network))
    assert draw(timeline) == grid("""
        0        | F0 .. .. .. .. .. .. .. .. .. .. .. .. B0
        0 send:1 | .. F0 F0 F0 .. .. .. .. .. .. .. .. .. ..
        0 recv:1 | .. .. .. .. .. .. .. .. .. .. B0 B0 B0 ..
        1        | .. .. .. .. .. .. F0 B0 .. .. .. .. .. ..
        1 send:0 | .. .. .. .. .. .. .. .. B0 B0 B0 .. .. ..
        1 recv:0 | .. .. .. F0 F0 F0 .. .. .. .. .. .. .. ..
    """)


def test_receive_that_is_reached_late() -> None:
    """Rule 4: RECV.start = reached (8) when the head came at 7; it still ends with the tail."""
    network = ps.Network(latency=2, bandwidth=1)
    costs = ps.Costs(forward=(1, 2), backward=1, output_bytes=3, network=network)
    timeline = run("gpipe", 2, 2, costs, overlap=False)
    assert times(timeline, "0SEND_F1") == (5, 8)
    assert times(timeline, "1F0") == (6, 8)
    assert times(timeline, "1RECV_F1") == (8, 10)


@pytest.mark.parametrize(
    ("nbytes", "bandwidth"), [(0, 1.0), (5, float("inf"))], ids=["no bytes", "endless bandwidth"]
)
def test_pure_latency_holds_nothing(nbytes: float, bandwidth: float) -> None:
    """Rule 4: two messages of one moment share a link and do not wait for each other."""
    link = ps.Link(latency=1, bandwidth=bandwidth, pairs=((0, 1), (1, 2)))
    costs = ps.Costs(
        forward=(2, 1, 1), backward=1, output_bytes=nbytes, network=ps.Network(links=(link,))
    )
    timeline = run("gpipe", 3, 2, costs)
    assert times(timeline, "0SEND_F1") == (4, 4)
    assert times(timeline, "1SEND_F0") == (4, 4)
    assert times(timeline, "1RECV_F1") == (5, 5)
    assert times(timeline, "2RECV_F0") == (5, 5)


def shared(forward: tuple[int, int, int], nbytes: int) -> ps.Timeline:
    """Run GPipe on a line of three devices whose forward messages share one link."""
    link = ps.Link(latency=0, bandwidth=1, pairs=((0, 1), (1, 2)))
    network = ps.Network(links=(link,))
    costs = ps.Costs(forward=forward, backward=1, output_bytes=nbytes, network=network)
    return run("gpipe", 3, 2, costs)


def test_shared_link_serves_the_smaller_id_of_one_moment() -> None:
    """Rule 8: 0SEND_F1 and 1SEND_F0 both want the link at 4; 0SEND_F1 was issued first."""
    timeline = shared(forward=(2, 1, 1), nbytes=1)
    assert draw(timeline, rows="^0$|^1$|^2$|0 send:1|1 send:2") == grid("""
        0        | F0 F0 F1 F1 .. .. .. .. .. .. B1 B0
        0 send:1 | .. .. F0 .. F1 .. .. .. .. .. .. ..
        1        | .. .. .. F0 .. F1 .. .. .. B1 B0 ..
        1 send:2 | .. .. .. .. .. F0 F1 .. .. .. .. ..
        2        | .. .. .. .. .. .. F0 F1 B1 B0 .. ..
    """)


def test_shared_link_serves_who_came_first() -> None:
    """Rule 8: at 11, 2SEND_F0 has waited since 9, and 1SEND_F1, of the smaller id, since 10."""
    link = ps.Link(latency=0, bandwidth=1, pairs=((0, 1), (1, 2), (2, 3)))
    costs = ps.Costs(
        forward=(1, 3, 1, 1),
        backward=1,
        output_bytes=(3, 1, 1, 0),
        network=ps.Network(links=(link,)),
    )
    timeline = run("gpipe", 4, 3, costs)
    names = [str(timeline.graph.task(task)) for task in range(len(timeline))]
    assert names.index("1SEND_F0") < names.index("1SEND_F1") < names.index("2SEND_F0")
    drawn = draw(timeline, rows="^[0-2]$|0 send:1|1 send:2|2 send:3")
    assert [line[:50].rstrip() for line in drawn.splitlines()] == [
        "0        | F0 F1 F2 .. .. .. .. .. .. .. .. .. ..",
        "0 send:1 | .. F0 F0 F0 F1 F1 F1 .. F2 F2 F2 .. ..",
        "1        | .. .. .. .. F0 F0 F0 F1 F1 F1 .. F2 F2",
        "1 send:2 | .. .. .. .. .. .. .. F0 .. .. .. .. F1",
        "2        | .. .. .. .. .. .. .. .. F0 .. .. .. ..",
        "2 send:3 | .. .. .. .. .. .. .. .. .. .. .. F0 ..",
    ]


def test_links_of_their_own_do_not_wait() -> None:
    """Rule 4: without sharing, both go at once, and so do the two directions of a pair."""
    costs = ps.Costs(forward=(2, 1, 1), backward=1, output_bytes=1, network=SLOW)
    timeline = run("gpipe", 3, 2, costs)
    assert times(timeline, "0SEND_F1") == times(timeline, "1SEND_F0") == (4, 5)


def test_collective_starts_when_all_members_are_there() -> None:
    """Rule 9: device 1 is there at 4, device 0 at 6; 2(n-1)/n * 4/2 + 2(n-1) * 1 = 4 s."""
    costs = ps.Costs(
        forward=1, backward=2, parameter_bytes=4, network=ps.Network(latency=1, bandwidth=2)
    )
    assert draw(ps.simulate(all_reduced(), costs)) == grid("""
        0 | F0 .. .. .. B0 B0 RG RG RG RG
        1 | .. F0 B0 B0 .. .. RG RG RG RG
    """)


def test_collective_of_one_is_free() -> None:
    """Rule 9 with n = 1."""
    one_each = CSR(np.array([0, 1, 2]), np.array([4, 5]))
    graph = replace(all_reduced(), collectives=one_each)
    costs = ps.Costs(
        forward=1, backward=2, parameter_bytes=4, network=ps.Network(latency=1, bandwidth=2)
    )
    timeline = ps.simulate(graph, costs)
    assert times(timeline, "1REDUCE_GRAD") == (4, 4)
    assert times(timeline, "0REDUCE_GRAD") == (6, 6)


def test_optimizer_step_waits_for_all_gradients() -> None:
    """STEP comes after the last backward of its stage."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=1, optimizer_step=2))
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 .. .. B1 B0 ST ST
        1 | .. F0 F1 B1 B0 ST ST ..
    """)


@pytest.mark.slow
@given(cases())
def test_rules_hold(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Rules 1 to 9, exactly, on random graphs, costs and networks."""
    graph, costs = case
    assert_rules_hold(ps.simulate(graph, costs), costs.of(graph))


@pytest.mark.slow
@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    m=st.integers(2, 5),
    forward=st.tuples(*[st.integers(1, 4)] * 4),
    nbytes=st.tuples(*[st.integers(1, 4)] * 4),
    streams=st.sampled_from(["per_peer", "single", "per_microbatch"]),
)
def test_rules_hold_where_all_share_one_link(
    name: str, m: int, forward: tuple[int, ...], nbytes: tuple[int, ...], streams: Any
) -> None:
    """Rule 8 with many ties and long queues."""
    pairs = tuple((a, b) for a in range(4) for b in range(4) if abs(a - b) == 1)
    network = ps.Network(links=(ps.Link(0, 1, pairs),))
    costs = ps.Costs(forward, backward=2, output_bytes=nbytes, network=network)
    timeline = run(name, 4, m, costs, streams=streams)
    assert_rules_hold(timeline, costs.of(timeline.graph))


@pytest.mark.slow
@given(cases())
def test_invariants(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Streams and links do one thing at a time, and what is needed has ended before."""
    graph, costs = case
    timeline, tasks = ps.simulate(graph, costs), costs.of(graph)
    start, end = timeline.start, timeline.end
    assert timeline.complete
    assert (start >= 0).all()
    assert (timeline.duration >= 0).all()
    for number in range(len(graph.queues)):
        queue = graph.queues[number]
        assert (end[queue][:-1] <= start[queue][1:]).all()
    needs = graph.dependencies
    before, after = needs.values, needs.rows
    if len(graph.partial_dependency):
        partly = before == graph.partial_dependency[after]
        assert (start[before[partly]] <= start[after[partly]]).all()
        before, after = before[~partly], after[~partly]
    assert (end[before] <= start[after]).all()
    recvs = np.flatnonzero(graph.is_op(RECVS))
    assert (start[graph.pair[recvs]] <= start[recvs]).all()
    assert (end[graph.pair[recvs]] <= end[recvs]).all()
    held = np.flatnonzero(graph.is_op(SENDS) & (tasks.duration > 0))
    for link in np.unique(tasks.links[held][tasks.links[held] >= 0]):
        own = held[(tasks.links[held] == link).any(axis=1)]
        own = own[np.argsort(start[own], kind="stable")]
        assert (end[own][:-1] <= start[own][1:]).all()


@pytest.mark.slow
@given(cases())
def test_lower_bounds(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """A step is no shorter than its longest chain, and than its busiest stream."""
    graph, costs = case
    timeline, duration = ps.simulate(graph, costs), costs.of(graph).duration
    chain = np.zeros(len(graph))
    for task in range(len(graph)):
        before = graph.precedence[task]
        partly = np.isin(before, graph.partial_dependency) & (graph.op[task] == Op.REDUCE_GRAD)
        ready = chain[before] - np.where(partly, duration[before], 0.0)
        chain[task] = ready.max(initial=0.0) + duration[task]
    assert timeline.makespan >= chain.max()
    for number in range(len(graph.queues)):
        busy = 0.0
        for task in graph.queues[number]:
            busy += duration[task]
        assert timeline.makespan >= busy
    assert (timeline.busy <= timeline.makespan * (1 + 1e-9)).all()


@pytest.mark.slow
@given(cases())
def test_simulation_is_repeatable(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Twice the same, from costs of stages or of tasks, and the graph is left as it was."""
    graph, costs = case
    one, two = ps.simulate(graph, costs), ps.simulate(graph, costs.of(graph))
    assert (one.start == two.start).all()
    assert (one.end == two.end).all()
    assert one.graph is two.graph is graph
    assert one.costs is two.costs is costs


@pytest.mark.slow
@given(cases())
def test_replay(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """A timeline replayed from its own durations is itself, but for what its host cost."""
    graph, costs = case
    timeline, tasks = (
        ps.simulate(graph, replace(costs, launch=0.0, launch_by_op=None)),
        costs.of(graph),
    )
    # Rounded durations may change who is first on a link, where two came at one moment.
    rounded = (timeline.duration != tasks.duration) & ~graph.is_op(RECVS)
    assume(not rounded.any() or shared_links(graph, tasks).max() < 0)
    again = ps.replay(timeline)
    assert again.makespan == pytest.approx(timeline.makespan, rel=1e-9, abs=1e-9)
    assert again.name == f"{timeline.name} replayed"


def test_replay_of_a_partial_timeline() -> None:
    """What did not run has no duration."""
    timeline = run("gpipe", 2, 2, ps.Costs(1, 2))
    end = timeline.end.copy()
    end[-3:] = np.nan
    with pytest.raises(TimelineError, match="'gpipe' is partial: 3 of 16 tasks did not run"):
        ps.replay(replace(timeline, end=end))


def test_durations_of_compute_tasks_are_kept() -> None:
    """What the timeline shows is what the costs say."""
    graph = ps.lower(ps.schedule("1f1b", 3, 3), recompute="always")
    costs = ps.Costs(forward=1, backward=2, recompute=0.5, optimizer_step=0.25)
    timeline = ps.simulate(graph, costs)
    compute = graph.is_op(COMPUTE)
    assert (timeline.duration[compute] == costs.of(graph).duration[compute]).all()


def test_schedules_are_not_simulated() -> None:
    """The message says how to lower it."""
    with pytest.raises(ArgumentError, match=r"got Schedule; lower the schedule first: ps\.simul"):
        ps.simulate(ps.schedule("gpipe", 2, 2), ps.Costs(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", [None, 1.0, {"forward": 1}])
def test_costs_are_costs(costs: Any) -> None:
    """A dictionary is none."""
    with pytest.raises(ArgumentError, match=r"costs must be a pipesim\.Costs, got"):
        ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)


def test_unknown_engine() -> None:
    """With the nearest one."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(UnknownNameError, match="unknown engine 'simpi'; did you mean 'simpy'"):
        ps.simulate(graph, ps.Costs(1, 2), engine="simpi")


def test_costs_of_other_stages_and_networks_of_other_devices() -> None:
    """Found before anything runs."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(CostsError, match="forward has 3 values for 2 stages"):
        ps.simulate(graph, ps.Costs((1, 2, 3), 2))
    network = ps.Network(links=(ps.Link(0, 1, ((0, 5),)),))
    with pytest.raises(NetworkError, match=r"link 0 names device 5; there are 2 devices, 0\.\.1"):
        ps.simulate(graph, ps.Costs(1, 2, network=network))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("duration", -1.0, r"duration of 0F0 \(task 0\) must be finite and >= 0, got -1\.0"),
        ("duration", float("nan"), r"duration of 0F0 \(task 0\) must be finite and >= 0, got nan"),
        ("duration", float("inf"), "duration of 0F0"),
        ("latency", -1.0, "latency of 0F0"),
        ("launch", float("nan"), "launch of 0F0"),
        ("nbytes", -1.0, "nbytes of 0F0"),
        ("share", 2.0, r"share of 0F0 \(task 0\) must be 0 to 1, got 2\.0"),
        ("overlap_cost", float("nan"), r"overlap_cost of 0F0 \(task 0\) must be 0 to 1, got nan"),
    ],
)
def test_bad_costs_of_a_task(column: str, value: float, message: str) -> None:
    """SimPy would take NaN for a time; the task is named instead."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    costs = ps.Costs(1, 2).of(graph)
    values = np.zeros(len(graph))
    values[0] = value
    table = costs.per_task().table._replace(**{column: values})
    with pytest.raises(CostsError, match=message):
        ps.simulate(graph, TaskCosts.of_tasks(table))
    if column == "duration":
        with pytest.raises(CostsError, match=message):
            ps.simulate(graph, replace(costs, drawn=values))


def test_costs_of_other_tasks() -> None:
    """As many values as tasks."""
    graph, other = (ps.lower(ps.schedule("gpipe", 2, m)) for m in (2, 3))
    with pytest.raises(
        CostsError, match=f"got the costs of {len(other)} tasks for a graph of {len(graph)}"
    ):
        ps.simulate(graph, ps.Costs(1, 2).of(other))


def test_deadlock_is_found_before_anything_runs() -> None:
    """A hand-built graph whose two tasks wait for each other."""
    columns = ([1, 0], [0, 0], [0, 0], [0, 0], [0, 0])  # B0 before F0
    graph = TaskGraph.build(Tasks(*(np.array(column) for column in columns)))
    with pytest.raises(DeadlockError, match=r"device 0, compute: 0B0 \(position 0\) waits for"):
        ps.simulate(graph, ps.Costs(1, 2))
