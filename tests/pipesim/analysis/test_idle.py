"""Where the bubble comes from: hand-drawn cases of each cause, and what holds of all timelines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kernels import as_python, compiled
from matplotlib.figure import Figure
from simulated_runs import run, without_costs
from strategies import COLLECTIVE_SECONDS, cases, noises

import pipesim as ps
from pipesim import plot
from pipesim.analysis import idle as idle_attribution
from pipesim.analysis.idle import CAUSES, causes_of_gaps, idle_shares
from pipesim.analysis.idle_gaps import Cause, Chain, Gaps, make_chain
from pipesim.cli import main
from pipesim.errors import ArgumentError, TimelineError, UnknownNameError
from pipesim.plot import paper_figure
from pipesim.simulation import LogNormal

pytestmark = pytest.mark.usefixtures("no_figures_left")


def causes(timeline: ps.Timeline) -> list[dict[str, float]]:
    """Return the causes that each device has."""
    rows = timeline.why.idle_by_cause().to_dict("records")
    return [{str(cause): s for cause, s in row.items() if s} for row in rows]


def drawn(timeline: ps.Timeline, durations: dict[str, float]) -> ps.Timeline:
    """Simulate again, with some tasks of other durations, by action."""
    graph, costs = timeline.graph, timeline.costs
    assert costs is not None
    tasks = costs.of(graph)
    seconds = tasks.duration.copy()
    for task in range(len(graph)):
        seconds[task] = durations.get(str(graph.task(task)), seconds[task])
    return ps.simulate(graph, replace(tasks, drawn=seconds))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (3, 2), (3, 5), (5, 8)])
def test_equal_stages_and_free_transfers(name: str, p: int, m: int) -> None:
    """The bubble is warm-up and cool-down alone: (p-1)(f+b) on each device."""
    table = run(name, p, m, ps.Costs(1, 2)).why.idle_by_cause()
    assert list(table.columns) == list(CAUSES)
    assert table.index.tolist() == list(range(p))
    assert table[["warm_up", "cool_down"]].sum(axis=1).tolist() == [(p - 1) * 3] * p
    assert table.to_numpy().sum() == p * (p - 1) * (1 + 2)


def test_phases_by_hand() -> None:
    """GPipe turns round in one gap, which is both; 1F1B waits for its first B, and drains."""
    assert causes(run("gpipe", 2, 3, ps.Costs(1, 2))) == [{"warm_up": 1, "cool_down": 2}] * 2
    # 0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    # 1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
    assert causes(run("1f1b", 2, 3, ps.Costs(1, 2))) == [
        {"warm_up": 2, "cool_down": 1},
        {"warm_up": 1, "cool_down": 2},
    ]


def test_causes_of_gaps_by_hand() -> None:
    """1F1B as above: each device waits twice, and each wait is of one phase."""
    gaps, seconds = causes_of_gaps(run("1f1b", 2, 3, ps.Costs(1, 2)))
    spans = zip(gaps.device.tolist(), gaps.since.tolist(), gaps.until.tolist(), strict=True)
    named = [{str(Cause(c)): row[c] for c in np.flatnonzero(row)} for row in seconds]
    assert list(zip(spans, named, strict=True)) == [
        ((0, 2, 4), {"warm-up": 2}),
        ((0, 9, 10), {"cool-down": 1}),
        ((1, 0, 1), {"warm-up": 1}),
        ((1, 10, 12), {"cool-down": 2}),
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("with_costs", [True, False])
def test_gaps_sum_to_their_device(name: str, with_costs: bool) -> None:
    """Causes of a gap sum to its length, and those of all gaps of a device to its row."""
    link = ps.Link(latency=0.25, bandwidth=2, pairs=((0, 1), (1, 2)))
    costs = ps.Costs(
        (1, 2, 1), 3, input_grad=2, weight_grad=1, output_bytes=1, parameter_bytes=5, launch=0.125,
        network=ps.Network(latency=0.5, bandwidth=4, links=(link,)),
    )  # fmt: skip
    graph = ps.lower(ps.schedule(name, 3, 4), n_replicas=2, hosts="per_device")
    noise = ps.Noise(seed=1, task=LogNormal(0.1))
    timeline = ps.simulate(graph, costs, noise=noise)
    if not with_costs:
        timeline = without_costs(timeline)
    gaps, seconds = causes_of_gaps(timeline)
    lengths = gaps.until - gaps.since
    assert (lengths > 0).all()
    assert (seconds >= 0).all()
    assert seconds.sum(axis=1) == pytest.approx(lengths)
    table = timeline.why.idle_by_cause()
    for device in range(timeline.n_devices):
        own = seconds[gaps.device == device].sum(axis=0)
        assert own == pytest.approx(table.loc[device].to_numpy(), abs=1e-9)


def test_no_gaps() -> None:
    """A device that always computes has none."""
    gaps, seconds = causes_of_gaps(run("gpipe", 1, 2, ps.Costs(1, 2)))
    assert len(gaps.device) == 0
    assert seconds.shape == (0, len(Cause))


def test_latency_and_bandwidth_by_hand() -> None:
    """One micro-batch there and back: each message takes 3 for its bytes and 5 beyond them."""
    network = ps.Network(latency=5, bandwidth=1)
    costs = ps.Costs(1, 2, output_bytes=3, network=network)
    expected = [
        {"warm_up": 1, "cool_down": 2, "latency": 10, "bandwidth": 6},
        {"warm_up": 1, "cool_down": 2, "latency": 10, "bandwidth": 6},
    ]
    timeline = run("gpipe", 2, 1, costs)
    assert causes(timeline) == expected
    assert causes(without_costs(timeline)) == expected
    assert causes(run("gpipe", 2, 1, costs, overlap=False)) == expected
    free = replace(costs, output_bytes=0.0)
    assert causes(run("gpipe", 2, 1, free))[0] == {"warm_up": 1, "cool_down": 2, "latency": 10}


def test_latency_in_the_steady_state() -> None:
    """It is latency that delays each round of 1F1B, not the order: the rest is the closed form."""
    table = run("1f1b", 3, 6, ps.Costs(1, 2, network=ps.Network(latency=0.5))).why.idle_by_cause()
    assert table[["warm_up", "cool_down"]].sum(axis=1).tolist() == [6, 6, 6]
    assert table["latency"].tolist() == [5, 5, 5]


def test_of_several_that_let_go_at_one_moment_the_largest_id_counts() -> None:
    """Else seconds would go from bandwidth to imbalance, or back: here many tasks end together."""
    network = ps.Network(bandwidth=1)
    slow = (1, 2, 1)
    costs = ps.Costs(
        slow, (2, 4, 2), input_grad=slow, weight_grad=slow, output_bytes=1, network=network
    )
    timeline = ps.simulate(ps.lower(ps.schedule("zb_h1", 3, 4)), costs)
    assert timeline.why.idle_by_cause()["bandwidth"].round(9).tolist() == [6, 3, 5]


def test_latency_that_follows_each_message_is_nobodys_cause() -> None:
    """Messages come as often as they are sent, however long they are under way."""
    costs = ps.Costs(forward=(2, 1), backward=1, network=ps.Network(latency=3))
    # 0 | F0 F0 F1 F1 .. .. .. .. .. .. .. .. B1 B0
    # 1 | .. .. .. .. .. F0 .. F1 B1 B0 .. .. .. ..
    # 1 waits 3 + 2 for F0, of which the mean is 1.5, then 1 for F1, since it is itself faster.
    assert causes(run("gpipe", 2, 2, costs))[1] == {
        "warm_up": 1.5, "cool_down": 1, "imbalance": 0.5 + 1, "latency": 3 + 3,
    }  # fmt: skip


def test_what_shortens_a_gap_shortens_its_sort_first() -> None:
    """Fast stages before it make a device wait less for tasks, and no less for messages."""
    costs = ps.Costs(forward=(1, 1, 2), backward=1, network=ps.Network(latency=3))
    # 0 | F0 F1 .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. B1 B0
    # 1 | .. .. .. .. F0 F1 .. .. .. .. .. .. .. .. B1 B0 .. .. .. ..
    # 2 | .. .. .. .. .. .. .. .. F0 F0 F1 F1 B1 B0 .. .. .. .. .. ..
    table = run("gpipe", 3, 2, costs).why.idle_by_cause()
    assert table["latency"].tolist() == [12, 12, 12]
    assert table.loc[2, "warm_up"] == 2


def test_a_slow_stage_by_hand() -> None:
    """GPipe, two devices: one takes 1, the other 2, where the mean is 1.5."""
    timeline = run("gpipe", 2, 2, ps.Costs(forward=(1, 2), backward=(1, 2)))
    # 0 | F0 F1 .. .. .. .. .. B1 .. B0
    # 1 | .. F0 F0 F1 F1 B1 B1 B0 B0 ..
    # 0 waits 5 for F0, F1 and B1 of the mean, less its own F1, and 0.5 more for each; then for B0.
    assert causes(timeline) == [
        {"warm_up": 1.5, "cool_down": 1.5, "imbalance": 2 + 1},
        {"warm_up": 1, "cool_down": 1},
    ]


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_stage_is_the_cause_on_every_device(slow: int) -> None:
    """Those that never wait for it directly included, and in proportion to micro-batches."""
    forward = tuple(2.0 if stage == slow else 1.0 for stage in range(4))
    few, many = (run("1f1b", 4, m, ps.Costs(forward, 2)).why.idle_by_cause() for m in (8, 28))
    others = [device for device in range(4) if device != slow]
    assert (many - few).loc[others, "imbalance"].to_numpy() == pytest.approx(20.0, abs=1e-6)
    assert many.drop(columns="imbalance").sum(axis=1).max() < 12
    assert (many.drop(columns=["warm_up", "cool_down", "imbalance"]) == 0).all(axis=None)


def test_contention_by_hand() -> None:
    """Messages of 2 s share one link; 1SEND_F0 waits a second for 0SEND_F1, and so on."""
    link = ps.Link(latency=0, bandwidth=1, pairs=((0, 1), (1, 2)))
    costs = ps.Costs(1, 1, output_bytes=2, network=ps.Network(links=(link,)))
    # link | .. 0F0 0F0 0F1 0F1 1F0 1F0 1F1 1F1
    # 2    | .. .. .. .. .. .. .. F0 .. F1 B1 B0
    assert causes(run("gpipe", 3, 2, costs))[2] == {
        "warm_up": 2, "cool_down": 2, "bandwidth": 4, "contention": 2,
    }  # fmt: skip


def test_contention_on_one_copy_stream() -> None:
    """A message behind another on its stream waits as it would for a link."""
    costs = ps.Costs(1, 3, output_bytes=2, network=ps.Network(bandwidth=1))
    table = run("gpipe", 2, 2, costs).why.idle_by_cause()
    # 0 sends F0 at 1..3, F1, which is there at 2, at 3..5.
    # 1 | .. .. .. F0 .. F1 B1 B1 B1 B0 B0 B0
    assert table.loc[1].to_dict() == {
        **dict.fromkeys(CAUSES, 0.0), "warm_up": 1, "bandwidth": 4, "contention": 1, "cool_down": 3,
    }  # fmt: skip


def test_host_by_hand() -> None:
    """F is issued at 3, B at 6, though it could start at 4."""
    assert causes(run("gpipe", 1, 1, ps.Costs(1, 1, launch=3))) == [{"host": 3 + 2}]


def test_nothing_happens_in_a_measured_gap() -> None:
    """A device that starts late, with all there that it needs, waits for its host."""
    timeline = run("gpipe", 1, 2, ps.Costs(1, 1))
    late = np.arange(4) * 0.25
    assert causes(ps.Timeline(timeline.graph, timeline.start + late, timeline.end + late)) == [
        {"host": 0.75}
    ]


def test_a_slow_task_by_hand() -> None:
    """1F1 takes 4 instead of 1: device 0 waits 3 longer."""
    timeline = drawn(run("gpipe", 2, 3, ps.Costs(1, 1)), {"1F1": 4.0})
    assert causes(timeline) == [
        {"warm_up": 1, "cool_down": 1, "straggler": 3},
        {"warm_up": 1, "cool_down": 1},
    ]


def test_a_slow_device_among_replicas() -> None:
    """It is slower than what is usual for its stage; without replicas it is a slow stage."""
    noise = ps.Noise(seed=0, slow_devices={1: 2.0})
    for n_replicas, cause in ((3, "straggler"), (2, "straggler"), (1, "imbalance")):
        graph = ps.lower(ps.schedule("1f1b", 2, 8), n_replicas=n_replicas)
        table = ps.simulate(graph, ps.Costs(1, 2), noise=noise).why.idle_by_cause()
        assert table.loc[0, cause] > 12
        assert table.loc[0, {"straggler", "imbalance"}.difference({cause}).pop()] == 0


def test_reductions_of_gradients() -> None:
    """Bytes are bandwidth, the rest latency; what a member waits for the last is the last one's."""
    network = ps.Network(bandwidth=1)
    costs = ps.Costs(1, 2, parameter_bytes=5, network=network)
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2)
    assert causes(ps.simulate(graph, costs)) == [{"bandwidth": 5}] * 2
    slow = replace(costs, network=replace(network, latency=2))
    assert causes(ps.simulate(graph, slow)) == [{"bandwidth": 5, "latency": 4}] * 2
    priced = replace(slow, reduce_grad=7)
    assert causes(ps.simulate(graph, priced)) == [{"bandwidth": 7}] * 2
    tasks = costs.of(graph)
    late = np.where((graph.device == 1) & graph.is_op(frozenset({ps.Op.B})), 6.0, tasks.duration)
    table = ps.simulate(graph, replace(tasks, drawn=late)).why.idle_by_cause()
    assert table.loc[0, ["straggler", "bandwidth"]].tolist() == [4, 5]
    assert table.sum(axis=1).tolist() == [9, 5]


@pytest.mark.slow
@given(st.data())
def test_rows_sum_to_idle(data: st.DataObject) -> None:
    """Exactly, in any order, none below 0; of noise, and of times with jitter and no costs too."""
    graph, costs = data.draw(cases())
    noise = data.draw(st.none() | noises(graph))
    timeline = ps.simulate(graph, costs, noise=noise)
    jitter = data.draw(st.sampled_from([0.0, 0.0, 1e-3, 0.5]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    start, end = (t + jitter * random.random(len(graph)) for t in (timeline.start, timeline.end))
    recorded = costs if data.draw(st.booleans()) else None
    timeline = ps.Timeline(graph, start, np.maximum(start, end), timeline.nbytes, recorded)
    table = timeline.why.idle_by_cause()
    assert (table.sum(axis=1) == timeline.idle).all()
    assert (table.to_numpy()[:, ::-1].sum(axis=1) == timeline.idle).all()
    assert (table[timeline.idle >= 0] >= 0).all(axis=None)


@pytest.mark.slow
@given(cases(), st.sampled_from(["host", "bandwidth", "latency", "imbalance"]))
def test_what_costs_nothing_is_no_cause(case: tuple[ps.TaskGraph, ps.Costs], cause: str) -> None:
    """Nor is anything a straggler where no task differs from the others of its stage."""
    graph, costs = case
    # Some stages may share their optimizer steps, others not.
    assume(cause != "imbalance" or len(set(graph.optimizer_shares.tolist())) == 1)
    times = ("forward", "backward", "input_grad", "weight_grad", "overlapped", "recompute",
             "optimizer_step", "dispatch", "reorder", "reorder_gradients")  # fmt: skip
    copies = dict.fromkeys(("offload", "reload"))
    measured = {**dict.fromkeys(COLLECTIVE_SECONDS), **copies}
    no_latency = ps.Network(bandwidth=2.0, host=ps.HostLink(bandwidth=2.0))
    without: dict[str, dict[str, Any]] = {
        "host": {"launch": 0.0},
        "bandwidth": {"network": costs.network.unlimited(), "output_seconds": 0.0, **measured},
        "latency": {"network": no_latency, "output_seconds": 0.0, **copies},
        # An R with experts runs their exchanges, too, as a part of its own time.
        "imbalance": {
            **dict.fromkeys(times, 1.0),
            "exchange_dispatch": 0.0,
            "exchange_combine": 0.0,
        },
    }
    timeline = ps.simulate(graph, replace(costs, **without[cause]))
    largest = timeline.why.idle_by_cause().max()
    assert largest[[cause, "straggler"]].max() <= 1e-9 * timeline.makespan


@pytest.mark.parametrize("engine", ["compiled", "simpy"])
def test_segments_of_a_slow_stage_are_no_stragglers(engine: ps.Engine) -> None:
    """Exchanges that take no time leave the causes of a stage without segments."""
    schedule = ps.schedule("1f1b", 3, 4)
    costs = ps.Costs(forward=(1, 2, 1), backward=(2, 5, 2))
    shares = (0.2, 0.7, 0.1), (0.1, 0.7, 0.2), (0.1, 0.7, 0.2)  # of F, B and I
    in_segments = replace(costs, segments=[((1,),) * 3, shares, shares], expert_layers=(0, 1, 1))
    plain = ps.simulate(ps.lower(schedule), costs, engine=engine)
    graph = ps.lower(schedule, expert_layers=(0, 1, 1))
    timeline = ps.simulate(graph, in_segments, engine=engine)
    assert timeline.makespan == pytest.approx(plain.makespan)
    table, expected = (x.why.idle_by_cause().to_numpy() for x in (timeline, plain))
    assert table == pytest.approx(expected)


@pytest.mark.slow
def test_compiled_and_plain() -> None:
    """Loops give the same answer, compiled or not."""
    network = ps.Network(latency=0.25, bandwidth=2)
    costs = ps.Costs((1, 2, 1), 2, output_bytes=1, launch=0.125, network=network)
    graph = ps.lower(ps.schedule("1f1b", 3, 6), n_replicas=2)
    timeline = ps.simulate(graph, costs, noise=ps.Noise(seed=1, task=LogNormal(0.1)))
    with as_python():
        plain = timeline.why.idle_by_cause()
    with compiled():
        assert timeline.why.idle_by_cause().equals(plain)


def test_shares_sum_to_the_bubble() -> None:
    timelines = {name: run(name, 3, 4, ps.Costs((1, 2, 1), 2)) for name in ("gpipe", "1f1b")}
    table = idle_shares(timelines)
    assert table.index.tolist() == ["gpipe", "1f1b"]
    assert table.sum(axis=1).tolist() == pytest.approx(
        [timeline.bubble_fraction for timeline in timelines.values()]
    )


def test_tasks_that_overlap() -> None:
    """As clocks may have it: what is idle in all is shared out, and nothing is below 0."""
    whole = run("gpipe", 1, 2, ps.Costs(1, 1))
    for ends, idle in (([2, 2, 3, 5], 0), ([3, 3, 3, 5], -2), ([1.5, 2, 3, 6], 0.5)):
        start = np.array([0.0, 1.0, 2.0, 4.0])
        timeline = ps.Timeline(whole.graph, start, np.array(ends, dtype=np.float64))
        assert timeline.idle.tolist() == [idle]
        assert timeline.why.idle_by_cause().to_numpy().sum() == idle
        assert timeline.why.idle_by_cause()["host"].tolist() == [max(idle, 0)]


def test_a_partial_timeline_is_refused() -> None:
    """What its tasks waited for is not known."""
    whole = run("gpipe", 2, 2, ps.Costs(1, 2))
    end = whole.end.copy()
    end[-2:] = np.nan
    with pytest.raises(TimelineError, match=r"'gpipe' is partial: 2 of 16 tasks did not run"):
        ps.Timeline(whole.graph, whole.start, end).why.idle_by_cause()


# Chains that meet many tasks before their gap.


def chain_seconds(chain: Chain, task: int, now: float) -> dict[int, tuple[float, Counter[int]]]:
    """Walk a chain: return when it reaches each task, and its seconds by cause until then.

    It is a chain of tasks with equal times that the host never delays.
    """
    reached, seconds = {}, Counter[int]()
    while task >= 0:
        reached[task] = now, seconds.copy()
        start, transferred = chain.start[task], min(now, chain.transfer_end[task])
        seconds[Cause.LATENCY] += now - transferred
        seconds[chain.task_cause[task]] += transferred - start
        seconds[Cause.CONTENTION] += start - chain.ready[task]
        now, task = chain.ready[task], chain.blocker[task]
    return reached


def walked(chain: Chain, gaps: Gaps, gap: int) -> tuple[int, list[float]]:
    """Return the number of steps until both chains of a gap meet, and the seconds of each cause."""
    chain_to_end = chain_seconds(chain, gaps.task[gap], gaps.until[gap])
    chain_to_start = chain_seconds(chain, gaps.previous[gap], gaps.since[gap])
    meeting = next(task for task in chain_to_end if task in chain_to_start)
    (now, seconds), (other_now, others) = chain_to_end[meeting], chain_to_start[meeting]
    seconds.subtract(others)
    seconds[chain.task_cause[meeting]] += now - other_now
    if gaps.phase[gap] >= 0:
        seconds[gaps.phase[gap]] = seconds.pop(Cause.WARM_UP) + seconds.pop(Cause.COOL_DOWN)
    n_steps = list(chain_to_end).index(meeting) + list(chain_to_start).index(meeting)
    return n_steps, [seconds[cause] for cause in Cause]


@pytest.mark.slow
def test_a_long_pipeline_by_a_walk() -> None:
    """Jumps along chains of thousands of tasks add up the same seconds as single steps."""
    network = ps.Network(latency=0.125, bandwidth=4)
    timeline = run("1f1b", 16, 220, ps.Costs(1, 2, output_bytes=1, network=network))
    assert len(timeline) > 20_000
    assert (timeline.why.idle_by_cause().sum(axis=1) == timeline.idle).all()
    gaps, seconds = causes_of_gaps(timeline)
    assert (seconds.sum(axis=1) == gaps.until - gaps.since).all()
    chain, n_steps = make_chain(timeline), []
    for gap in range(100, len(gaps.task), 300):
        n, expected = walked(chain, gaps, gap)
        assert seconds[gap].tolist() == expected
        n_steps.append(n)
    assert min(n_steps) < 500 < 2_000 < max(n_steps)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_jumps_where_clocks_are_inexact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain may reach a task before its start, and tasks may take no time, as in single steps."""
    network = ps.Network(latency=0.5, bandwidth=4)
    costs = ps.Costs(
        (1, 2, 1), 3, input_grad=2, weight_grad=1, output_bytes=1, parameter_bytes=5, launch=0.125,
        network=network,
    )  # fmt: skip
    timeline = run(name, 3, 8, costs, n_replicas=2)
    start = timeline.start + 3 * np.random.default_rng(0).random(len(timeline))
    duration = np.where(np.arange(len(timeline)) % 7, timeline.duration, 0.0)
    timeline = replace(timeline, start=start, end=start + duration)
    chain = make_chain(timeline)
    waits = np.flatnonzero(chain.blocker >= 0)
    reached = np.minimum(chain.start, chain.ready)[waits]
    assert (reached < chain.start[chain.blocker[waits]]).sum() > 20
    with as_python():
        _, in_steps = causes_of_gaps(timeline)
        monkeypatch.setattr(idle_attribution, "_FEW_STEPS", 0)
        _, in_jumps = causes_of_gaps(timeline)
    assert in_jumps == pytest.approx(in_steps, abs=1e-12)


# The figure, and the command line.


def test_bars_are_as_long_as_their_causes() -> None:
    """Stacked from 0 in the order of the legend, device 0 on top; causes that are not have none."""
    timeline = run("1f1b", 3, 6, ps.Costs((1, 1, 2), 2, network=ps.Network(latency=0.5)))
    ax = Figure(figsize=(7.16, 2.0), layout="constrained").add_subplot()
    assert timeline.plot.idle(ax=ax, unit="s", title="1f1b") is ax
    table = timeline.why.idle_by_cause()
    shown = [cause for cause in Cause if table[CAUSES[cause]].any()]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [str(cause) for cause in shown]
    left = np.zeros(3)
    for cause in shown:
        parts = [bar for bar in ax.patches if bar.get_gid() == f"idle:{CAUSES[cause]}"]
        assert [bar.get_x() for bar in parts] == pytest.approx(left.tolist())
        left += table[CAUSES[cause]]
        assert [bar.get_x() + bar.get_width() for bar in parts] == pytest.approx(left.tolist())
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert ax.get_title(loc="left") == "1F1B"


def test_every_cause_looks_different() -> None:
    """In colour, and in hatch or lightness."""
    from pipesim.plot.charts import LOOKS

    assert set(LOOKS) == set(Cause)
    assert len({op for op, _ in LOOKS.values()}) == len(Cause)
    hatches = [hatch for _, hatch in LOOKS.values() if hatch]
    assert len(set(hatches)) == len(hatches) == len(Cause) - 3


def test_a_figure_without_a_bubble() -> None:
    ax = run("gpipe", 1, 2, ps.Costs(1, 2)).plot.idle()
    assert not ax.patches
    assert ax.get_legend() is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: plot.idle(t.graph), ArgumentError, "timeline must be a pipesim.Timeline"),
        (lambda t: t.plot.idle(ax=plt), ArgumentError, "ax must be a matplotlib Axes"),
        (lambda t: t.plot.idle(unit="hours"), UnknownNameError, "unit of time 'hours'"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(run("gpipe", 2, 2, ps.Costs(1, 2)))


ARGS = ["--devices", "2", "--microbatches", "3", "--forward", "1e-3", "--backward", "2e-3"]


def test_simulate_prints_causes(capsys: pytest.CaptureFixture[str]) -> None:
    """A row a device in ms, the causes that there are."""
    assert main(["simulate", "1f1b", *ARGS, "--idle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["idle", "(ms)", "warm-up", "cool-down"],
        ["0", "2.0000", "1.0000"],
        ["1", "1.0000", "2.0000"],
    ]
    assert main(["simulate", "1f1b", *ARGS]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:-4]


@pytest.mark.slow
def test_compare_prints_and_draws_causes(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row a schedule, as shares of all time; the figure has a chart each, on one scale."""
    figures: list[Figure] = []
    monkeypatch.setattr(paper_figure, "save", lambda figure, path: figures.append(figure))
    figure = ["--plot", str(tmp_path / "figure.png")]
    assert main(["compare", "gpipe", "1f1b", *ARGS, "--idle", *figure]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines[-3:]] == [
        ["warm-up", "cool-down"],
        ["8.3%", "16.7%"],
        ["12.5%", "12.5%"],
    ]
    *_, first, second = figures[0].axes
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["GPipe, idle", "1F1B, idle"]
    assert first.get_xlim() == second.get_xlim()


def test_overlapped_actions_are_nobodys_fault() -> None:
    """Halves of overlapped actions are compared with their like: no straggler, no imbalance."""
    graph = ps.lower(ps.schedule("dualpipe", 4, 8))
    network = ps.Network(latency=0.25)
    costs = ps.Costs(1, input_grad=1, weight_grad=1, overlapped=2.5, network=network)
    table = ps.simulate(graph, costs).why.idle_by_cause()
    assert not table[["imbalance", "straggler", "bandwidth", "contention", "host"]].any(axis=None)
    assert (table["latency"] > 0).all()


def test_reductions_without_bandwidth_are_latency() -> None:
    """Over endless bandwidth an all-reduce is its latencies."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=2)
    costs = ps.Costs(1, 2, optimizer_step=1, parameter_bytes=4, network=ps.Network(latency=0.5))
    table = ps.simulate(graph, costs).why.idle_by_cause()
    assert not table["bandwidth"].any()
    slow = ps.Network(latency=0.5, bandwidth=1.0)
    assert ps.simulate(graph, replace(costs, network=slow)).why.idle_by_cause()["bandwidth"].all()
