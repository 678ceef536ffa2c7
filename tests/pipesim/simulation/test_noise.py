"""Noise: what is drawn, that it can be repeated, and what it makes of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, noises

import pipesim as ps
from pipesim.errors import ArgumentError, PipeError, UnknownNameError
from pipesim.ops import COLLECTIVES, COMPUTE, SENDS, Op
from pipesim.simulation import Empirical, Failures, LogNormal, Normal, Scenarios

ONE = ps.Costs(1, 1)
normal = NormalDist().cdf


@cache
def many_tasks() -> ps.TaskGraph:
    """Return 20,000 compute tasks of a second each, on one device."""
    return ps.lower(ps.schedule("gpipe", 1, 10_000), step="none")


def factors(noise: ps.Noise, scenario: int = 0) -> np.ndarray:
    """Return the seconds of each of many tasks, which are the factors that were drawn."""
    graph = many_tasks()
    return noise.applied(graph, ONE.of(graph), scenario).duration


def assert_distributed(values: np.ndarray, cdf: Callable[[float], float]) -> None:
    """Hold the largest gap between both cumulative shares below what 1 in 1,000 samples has.

    Kolmogorov and Smirnov's bound is 1.95 / sqrt(n); a table of 2^14 quantiles adds its step.
    """
    n = len(values)
    wanted = np.array([cdf(x) for x in np.sort(values)])
    steps = np.arange(n + 1) / n
    gap = max(np.abs(steps[1:] - wanted).max(), np.abs(steps[:-1] - wanted).max())
    assert gap < 1.95 / math.sqrt(n) + 2**-14


def assert_alike(one: np.ndarray, other: np.ndarray) -> None:
    """Do the same for two samples."""
    values = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (one, other)]
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(1 / len(one) + 1 / len(other))


# Distributions


def test_normal() -> None:
    """Mean 1 and the given deviation."""
    drawn = factors(ps.Noise(seed=1, task=Normal(0.1)))
    assert_distributed(drawn, lambda x: normal((x - 1) / 0.1))
    assert drawn.mean() == pytest.approx(1, abs=0.003)
    assert drawn.std() == pytest.approx(0.1, rel=0.02)
    assert 0.5 < drawn.min() < 0.75 < 1.25 < drawn.max() < 1.5  # tails of 20,000 draws


def test_normal_is_never_negative() -> None:
    """One in six would be, of this one; they are 0."""
    drawn = factors(ps.Noise(seed=1, task=Normal(1.0)))
    assert drawn.min() == 0
    assert (drawn == 0).mean() == pytest.approx(normal(-1), abs=0.01)


def test_tails() -> None:
    """The rarest draws, beyond 1 in 2^14, come from finer tables, in one scenario or many.

    Of 400,000 normal draws 10 are expected beyond 4.05 deviations on each side.
    """
    noise = ps.Noise(seed=1, task=Normal(0.1))
    drawn = np.stack([factors(noise, scenario) for scenario in range(20)])
    for side in ((drawn > 1.405).sum(), (drawn < 0.595).sum()):
        assert 2 <= side <= 22
    many = ps.simulate_many(many_tasks(), ONE, noise, 3, progress=False)
    for k in range(3):
        assert many.makespan[k] == ps.simulate(many_tasks(), ONE, noise=noise, scenario=k).makespan


def test_lognormal() -> None:
    """Mean 1; the logarithm has the given deviation."""
    drawn = factors(ps.Noise(seed=2, task=LogNormal(0.3)))
    assert_distributed(drawn, lambda x: normal((math.log(x) + 0.3**2 / 2) / 0.3))
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert np.log(drawn).std() == pytest.approx(0.3, rel=0.02)


def test_empirical() -> None:
    """Measured values over their mean, each as likely as the others, and nothing between them."""
    samples = [3.0, 1.0, 2.0, 10.0]
    drawn = factors(ps.Noise(seed=3, task=Empirical(samples)))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0.25, 0.5, 0.75, 2.5]
    assert counts / len(drawn) == pytest.approx([0.25] * 4, abs=0.012)
    assert Empirical(np.array(samples)) == Empirical(sorted(samples))
    twice = factors(ps.Noise(seed=3, task=Empirical([1.0, 1.0, 4.0])))
    assert (twice == 0.5).mean() == pytest.approx(2 / 3, abs=0.012)


@pytest.mark.parametrize("distribution", [Normal(0.2), LogNormal(0.4), Empirical([1, 2])])
@pytest.mark.parametrize("gpus", [2, 8, 1000])
def test_largest_of_several(distribution: Any, gpus: int) -> None:
    """GPUs that work in step wait for the slowest: its factor is the largest of as many draws."""
    drawn = factors(ps.Noise(seed=4, task=distribution, gpus_per_device=gpus))
    levels = np.random.default_rng(0).random((4000, gpus))
    assert_alike(drawn, distribution.quantile(levels.max(axis=1)))
    alone = factors(ps.Noise(seed=5, task=distribution))
    if gpus == 2:  # by pairing draws of one
        assert_alike(drawn, np.maximum(alone[::2], alone[1::2]))
    assert drawn.mean() > alone.mean()


def test_largest_of_very_many() -> None:
    """Where no level below 1 is left between the quantiles."""
    drawn = factors(ps.Noise(seed=4, task=Normal(0.1), gpus_per_device=10**9))
    assert 1.5 < drawn.min() <= drawn.max() < 2


@pytest.mark.parametrize(
    ("n", "moment"), [(2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (5, 1.162964)]
)
def test_replicas_wait_for_the_slowest(n: int, moment: float) -> None:
    """The mean of the largest of n normal factors is 1 + std * (the largest's expected value).

    Order statistics: 1 / sqrt(pi) for 2, 3 / (2 sqrt(pi)) for 3, and 1.16296 for 5 (Harter,
    "Expected values of normal order statistics", Biometrika 48, 1961).
    """
    noise = ps.Noise(seed=6, device=Normal(0.05))
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=n)
    many = ps.simulate_many(graph, ONE, noise, 3000, progress=False)
    slowdown = many.makespan / many.quiet_makespan
    assert slowdown.mean() == pytest.approx(1 + 0.05 * moment, abs=4 * 0.05 / math.sqrt(3000))
    # And GPUs in step are devices that wait for each other.
    together = ps.Noise(seed=7, device=Normal(0.05), gpus_per_device=n)
    one = ps.lower(ps.schedule("gpipe", 1, 2))
    assert_alike(slowdown, ps.simulate_many(one, ONE, together, 3000, progress=False).makespan / 4)


@dataclass(frozen=True)
class Uniform:
    """A distribution of one's own: between two factors."""

    low: float
    high: float

    def quantile(self, level: np.ndarray) -> np.ndarray:
        """Rise evenly."""
        return self.low + (self.high - self.low) * level


def test_distribution_of_your_own() -> None:
    """Whatever has quantiles; what it must not have is a factor below 0."""
    drawn = factors(ps.Noise(seed=1, task=Uniform(0.5, 1.5)))
    assert_distributed(drawn, lambda x: x - 0.5)
    wrong = ps.Noise(seed=1, task=Uniform(-0.5, 1.5))
    with pytest.raises(
        ArgumentError, match=r"factors must be finite and >= 0, but Uniform\(low=-0"
    ):
        ps.simulate(many_tasks(), ONE, noise=wrong)

    @dataclass
    class Changing:
        high: float = 1.0

        def quantile(self, level: np.ndarray) -> np.ndarray:
            return self.high * level

    with pytest.raises(ArgumentError, match="task must be hashable, as a frozen dataclass is, got"):
        ps.Noise(seed=1, task=Changing())


# What each is for


def test_operations_of_their_own() -> None:
    """Only those that are named vary."""
    noise = ps.Noise(seed=0, task={"F": Normal(0.1), "STEP": Empirical([0, 2])})
    graph = ps.lower(ps.schedule("1f1b", 4, 50))
    costs = ps.Costs(1, 2, optimizer_step=3).of(graph)
    drawn = noise.applied(graph, costs).duration
    for op in (Op.B, Op.SEND_F, Op.SEND_B):
        assert (drawn[graph.op == op] == costs.duration[graph.op == op]).all()
    assert len(np.unique(drawn[graph.op == Op.F])) > 190
    assert set(drawn[graph.op == Op.STEP]) <= {0.0, 6.0}


def test_messages_and_devices() -> None:
    """Messages have factors of their own; a device's factor is on all that it computes."""
    network = ps.Network(latency=0.5, bandwidth=1)
    costs = ps.Costs(1, 2, output_bytes=1, parameter_bytes=4, network=network)
    graph = ps.lower(ps.schedule("1f1b", 4, 50), n_replicas=2)
    tasks = costs.of(graph)
    of_messages = ps.Noise(seed=0, message=LogNormal(0.2)).applied(graph, tasks)
    varies = of_messages.duration != tasks.duration
    assert (varies == graph.is_op(SENDS | COLLECTIVES)).all()
    assert (of_messages.latency == tasks.latency).all()
    of_devices = ps.Noise(seed=0, device=LogNormal(0.2)).applied(graph, tasks)
    computes = graph.is_op(COMPUTE) & (tasks.duration > 0)
    ratio = of_devices.duration[computes] / tasks.duration[computes]
    assert (of_devices.duration[~computes] == tasks.duration[~computes]).all()
    ratios = [np.unique(ratio[graph.device[computes] == d].round(12)) for d in range(8)]
    assert [len(values) for values in ratios] == [1] * 8
    assert len(np.unique(ratios)) == 8


def test_slow_device() -> None:
    """A constant factor on what device 1 computes, and on nothing else."""
    noise = ps.Noise(seed=0, slow_devices={1: 2.0})
    costs = ps.Costs(1, 1, output_bytes=1, network=ps.Network(bandwidth=1))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2), step="none"), costs, noise=noise)
    assert draw(timeline) == grid("""
        0        | F0 F1 .. .. .. .. .. .. .. B1 .. B0
        0 send:1 | .. F0 F1 .. .. .. .. .. .. .. .. ..
        0 recv:1 | .. .. .. .. .. .. .. .. B1 .. B0 ..
        1        | .. .. F0 F0 F1 F1 B1 B1 B0 B0 .. ..
        1 send:0 | .. .. .. .. .. .. .. .. B1 .. B0 ..
        1 recv:0 | .. F0 F1 .. .. .. .. .. .. .. .. ..
    """)


def test_slow_link() -> None:
    """Seconds and latency of messages from 0 to 1; the way back is as it was."""
    noise = ps.Noise(seed=0, slow_links={(0, 1): 2.0})
    costs = ps.Costs(1, 1, output_bytes=1, network=ps.Network(latency=1, bandwidth=1))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), step="none"), costs, noise=noise)
    assert draw(timeline) == grid("""
        0        | F0 .. .. .. .. .. .. .. .. B0
        0 send:1 | .. F0 F0 .. .. .. .. .. .. ..
        0 recv:1 | .. .. .. .. .. .. .. .. B0 ..
        1        | .. .. .. .. .. F0 B0 .. .. ..
        1 send:0 | .. .. .. .. .. .. .. B0 .. ..
        1 recv:0 | .. .. .. F0 F0 .. .. .. .. ..
    """)


@pytest.mark.parametrize(("gpus", "chance"), [(1, 0.1), (2, 0.2), (20, 1.0)])
def test_failures(gpus: int, chance: float) -> None:
    """A task of a second is hit with the chance 1 / every a GPU, and lasts a pause longer."""
    noise = ps.Noise(seed=8, failures=Failures(every=10, pause=30), gpus_per_device=gpus)
    drawn = factors(noise)
    assert set(drawn) == ({1.0, 31.0} if chance < 1 else {31.0})
    assert (drawn > 1).mean() == pytest.approx(chance, abs=0.01)


def test_failures_hit_long_tasks_more() -> None:
    """By their own seconds; messages are never hit."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4000), step="none")
    costs = ps.Costs(1, 3, output_bytes=1, network=ps.Network(bandwidth=0.1)).of(graph)
    noise = ps.Noise(seed=9, failures=Failures(every=20, pause=100))
    hit = noise.applied(graph, costs).duration - costs.duration
    assert set(hit) == {0.0, 100.0}
    assert not hit[graph.is_op(SENDS)].any()
    for op, chance in ((Op.F, 1 / 20), (Op.B, 3 / 20)):
        assert (hit[graph.op == op] > 0).mean() == pytest.approx(chance, abs=0.015)


# Repeating


EVERYTHING = ps.Noise(
    seed=1,
    task=LogNormal(0.1),
    device=Normal(0.1),
    message=LogNormal(0.3),
    gpus_per_device=4,
    failures=Failures(every=100, pause=10),
)


def test_seeds() -> None:
    """The same seed draws the same, another one draws anew, and so does another scenario."""
    drawn = factors(EVERYTHING)
    assert (drawn == factors(EVERYTHING)).all()
    assert (drawn == factors(replace(EVERYTHING, seed=np.int64(1)))).all()
    for other in (factors(replace(EVERYTHING, seed=2)), factors(EVERYTHING, scenario=1)):
        assert (drawn == other).mean() < 0.01


def test_draws_are_independent() -> None:
    """Of each other, and of the draws of other scenarios, seeds and purposes: no correlation.

    Of 20,000 independent pairs, 1 in 10^5 correlates by more than 4.4 / sqrt(20,000) = 0.031.
    """
    task = ps.Noise(seed=1, task=Normal(0.1))
    hit = ps.Noise(seed=1, failures=Failures(2, 1))
    rows = [factors(task, scenario=k) for k in range(4)]
    rows += [factors(replace(task, seed=seed)) for seed in (0, 2, 2**40)]
    rows += [factors(hit, scenario=k) for k in range(2)]
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.031
    for lag in (1, 2, 3, 128, 4096):
        assert abs(np.corrcoef(rows[0][lag:], rows[0][:-lag])[0, 1]) < 0.031
    devices = ps.Noise(seed=1, device=Normal(0.1)).device_factors(20_000, [0, 1])
    assert np.abs(np.corrcoef([*devices, *rows[:2]]) - np.eye(4)).max() < 0.031


def test_scenarios_are_the_same_on_any_number_of_threads() -> None:
    """And however many there are: fewer are the first of more."""
    nodes = ps.Nodes(2, port_bandwidth=8, nic_bandwidth=2, n_nics=1)
    for network in (ps.Network(bandwidth=4), ps.Network(nodes=nodes)):
        graph = ps.lower(ps.schedule("1f1b", 4, 6), n_replicas=2)
        costs = ps.Costs(1, 2, output_bytes=2, parameter_bytes=9, network=network)
        one, two, few = (
            ps.simulate_many(graph, costs, EVERYTHING, n, n_jobs=n_jobs, progress=False)
            for n, n_jobs in ((70, 1), (70, 2), (7, -1))
        )
        for column in ("makespan", "bubble_fraction"):
            assert (getattr(one, column) == getattr(two, column)).all()
            assert (getattr(one, column)[:7] == getattr(few, column)).all()
        assert len(np.unique(one.makespan)) == 70
        for k in (0, 31, 32, 69):
            assert one.makespan[k] == one.timeline(k).makespan


@pytest.mark.slow
@given(st.data())
def test_scenarios_are_what_simulate_says(data: st.DataObject) -> None:
    """With and without contention, rendezvous, launch and replicas, on the same bits."""
    graph, costs = data.draw(cases())
    noise = data.draw(noises(graph))
    many = ps.simulate_many(graph, costs, noise, 3, progress=False)
    assert many.quiet_makespan == ps.simulate(graph, costs).makespan
    for k in range(3):
        timeline = ps.simulate(graph, costs, noise=noise, scenario=k)
        assert many.makespan[k] == timeline.makespan
        assert many.timeline(k).makespan == timeline.makespan
        assert many.bubble_fraction[k] == pytest.approx(timeline.bubble_fraction, abs=1e-9)


@pytest.mark.slow
@given(cases())
def test_no_noise_at_all(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Noise that asks for nothing, or for a spread of 0, changes nothing."""
    graph, costs = case
    quiet = ps.simulate(graph, costs)
    zero = ps.Noise(
        seed=0,
        task=Normal(0),
        device=LogNormal(0),
        message=Empirical([3]),
        failures=Failures(every=1, pause=0),
        slow_devices={0: 1},
    )
    for noise in (ps.Noise(seed=0), zero):
        timeline = ps.simulate(graph, costs, noise=noise, scenario=5)
        assert (timeline.start == quiet.start).all()
        assert (timeline.end == quiet.end).all()
        many = ps.simulate_many(graph, costs, noise, 2, progress=False)
        assert (many.makespan == quiet.makespan).all()


def test_noise_on_costs_that_were_drawn() -> None:
    """What one noise made of the costs, another varies further, in one scenario or many."""
    graph = ps.lower(ps.schedule("gpipe", 2, 3))
    twice = ps.Noise(seed=0, slow_devices={0: 2.0, 1: 2.0})
    drawn = ps.Noise(seed=1, task=LogNormal(0.3)).applied(graph, ONE.of(graph))
    timeline = ps.simulate(graph, drawn, noise=twice)
    assert timeline.makespan == 2 * ps.simulate(graph, drawn).makespan
    many = ps.simulate_many(graph, drawn, twice, 2, progress=False)
    assert many.makespan.tolist() == [timeline.makespan] * 2


# Scenarios


def scenarios(n: int = 101, progress: bool = False) -> Scenarios:
    """Return scenarios of a small step."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    noise = ps.Noise(seed=0, task=LogNormal(0.1))
    return ps.simulate_many(graph, ps.Costs(1, 2), noise, n, progress=progress)


def test_percentiles() -> None:
    """Of each column by itself; of 101 scenarios they are scenarios."""
    many = scenarios()
    frame = many.percentiles([0, 25, 50, 100])
    assert frame.index.tolist() == [0, 25, 50, 100]
    assert frame.index.name == "percentile"
    assert list(frame) == ["makespan", "slowdown", "bubble_fraction"]
    sorted_ = np.sort(many.makespan)
    assert frame["makespan"].tolist() == pytest.approx(sorted_[[0, 25, 50, 100]])
    assert frame["slowdown"].tolist() == pytest.approx(sorted_[[0, 25, 50, 100]] / 15)
    assert frame["bubble_fraction"].tolist() == pytest.approx(
        np.sort(many.bubble_fraction)[[0, 25, 50, 100]]
    )
    assert many.percentiles().index.tolist() == [1, 5, 25, 50, 75, 95, 99]
    for wrong in ([], [-1], [50, 101], [math.nan], 50, ["50"], None):
        with pytest.raises(ArgumentError, match="levels must be percentiles from 0 to 100, got"):
            many.percentiles(wrong)  # type: ignore[arg-type]


def test_scenarios_say_what_they_are() -> None:
    """In a line; each can be looked at."""
    many = scenarios()
    assert len(many) == 101
    assert repr(many) == (
        f"<Scenarios of 1f1b: 101, median makespan {np.median(many.makespan):.6g} s, "
        "without noise 15 s>"
    )
    assert many.timeline(100).makespan == many.makespan[100]
    with pytest.raises(ArgumentError, match="there is no scenario 101 of 101, counted from 0"):
        many.timeline(101)
    with pytest.raises(ArgumentError, match="scenario must be at least 0, got -1"):
        many.timeline(-1)


@pytest.mark.parametrize("progress", [True, False])
def test_progress(
    progress: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown on request, after some time: all scenarios are counted."""
    from pipesim.utils import progress as bars

    bar = bars.tqdm
    monkeypatch.setattr(bars, "tqdm", lambda **options: bar(**{**options, "delay": 0}))
    scenarios(70, progress)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("70/70" in shown.err) == progress


# Mistakes


def noise_of(**options: Any) -> ps.Noise:
    """Return noise with a seed."""
    return ps.Noise(**{"seed": 0, **options})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ps.Noise(device=Normal(0.1)),
            r"random noise needs a seed, so that it can be repeated: Noise\(seed=0\)",
        ),
        (lambda: ps.Noise(seed=-1), "seed must be at least 0, got -1"),
        (lambda: ps.Noise(seed=1.5), r"seed must be a whole number, got 1\.5 \(float\)"),
        (lambda: ps.Noise(seed=True), "seed must be a whole number, got True"),
        (lambda: ps.Noise(seed="1"), "seed must be a whole number, got '1'"),
        (lambda: Empirical([]), "samples are empty; give at least one measured value"),
        (lambda: Empirical([1, -2]), r"samples must be finite and >= 0, got -2\.0"),
        (lambda: Empirical([1, math.nan]), "samples must be finite and >= 0, got nan"),
        (lambda: Empirical([1, math.inf]), "samples must be finite and >= 0, got inf"),
        (lambda: Empirical([0, 0]), "samples are all 0; a factor cannot be made of them"),
        (lambda: Empirical("slow"), "samples must be numbers, got 'slow'"),
        (lambda: Empirical([[1], [1, 2]]), "samples must be numbers"),
        (lambda: Normal(-0.1), r"std must be finite and >= 0, got -0\.1"),
        (lambda: Normal(math.nan), "std must be finite and >= 0, got nan"),
        (lambda: Normal("1"), "std must be finite and >= 0, got '1'"),
        (lambda: LogNormal(math.inf), "sigma must be finite and >= 0, got inf"),
        (lambda: LogNormal(None), "sigma must be finite and >= 0, got None"),
        (lambda: Failures(0, 1), "every must be a finite number .above 0., got 0"),
        (lambda: Failures(-1, 1), "every must be a finite number .above 0., got -1"),
        (lambda: Failures(math.inf, 1), "every must be a finite number .above 0., got inf"),
        (lambda: Failures(1, -1), "pause must be a finite number .at least 0., got -1"),
        (lambda: Failures(1, math.nan), "pause must be a finite number .at least 0., got nan"),
        (
            lambda: noise_of(task=0.1),
            r"task must be a distribution, such as Normal\(0\.02\), got 0",
        ),
        (lambda: noise_of(task=Normal), "task must be a distribution, .*got <class"),
        (lambda: noise_of(task={"F": 2}), "F must be a distribution, .*got 2"),
        (lambda: noise_of(device="normal"), "device must be a distribution, .*got 'normal'"),
        (lambda: noise_of(message=1), "message must be a distribution, .*got 1"),
        (
            lambda: noise_of(failures=100),
            r"must be a pipesim\.simulation\.Failures, got 100",
        ),
        (lambda: noise_of(gpus_per_device=0), "gpus_per_device must be at least 1, got 0"),
        (lambda: noise_of(gpus_per_device=1.5), "gpus_per_device must be a whole number, got 1.5"),
        (lambda: noise_of(slow_devices={0: 0}), r"slow_devices\[0\] must be a factor > 0, got 0"),
        (lambda: noise_of(slow_devices={2: -1}), r"slow_devices\[2\] must be a factor > 0, got -1"),
        (lambda: noise_of(slow_devices={0: math.nan}), "must be a factor > 0, got nan"),
        (
            lambda: noise_of(slow_devices=[3]),
            r"slow_devices must be a mapping, such as \{3: 1\.2\}",
        ),
        (
            lambda: noise_of(slow_links=3),
            r"slow_links must be a mapping, such as \{\(0, 1\): 1\.2\}",
        ),
        (lambda: noise_of(slow_links={(0, 1): 0}), r"slow_links\[\(0, 1\)\] must be a factor > 0"),
        (
            lambda: noise_of(slow_links={3: 2}),
            "slow_links names pairs of sender and receiver, such as",
        ),
        (lambda: noise_of(slow_links={(0, 1, 2): 2}), r"pairs of .*got \(0, 1, 2\)"),
    ],
)
def test_bad_noise(make: Callable[[], object], message: str) -> None:
    """Found when it is made."""
    with pytest.raises(ArgumentError, match=message):
        make()


def test_distributions_of_operations_are_named() -> None:
    """By the parameter and the operation."""
    with pytest.raises(ArgumentError, match="task F must be a distribution"):
        noise_of(task={"F": 3})
    with pytest.raises(UnknownNameError, match="task: unknown compute operation 3"):
        noise_of(task={3: Normal(0.1)})


def test_unknown_operation() -> None:
    """The error names the nearest one; noise of messages has no operation."""
    with pytest.raises(
        UnknownNameError, match=r"unknown compute operation 'STPE'; did you mean 'S"
    ):
        noise_of(task={"STPE": Normal(0.1)})
    names = "B, DISPATCH, F, I, R, REORDER, RESHARD, STEP, W"
    with pytest.raises(UnknownNameError, match=rf"'SEND_F'.*\(known: {names}\)"):
        noise_of(task={"SEND_F": Normal(0.1)})


@pytest.mark.parametrize(
    ("slow", "message"),
    [
        ({"slow_devices": {2: 2.0}}, r"device 2 is slow, but there are 2 devices, 0\.\.1"),
        ({"slow_devices": {-1: 2.0}}, "a slow device must be at least 0, got -1"),
        ({"slow_devices": {0.5: 2.0}}, "a slow device must be a whole number, got 0.5"),
        ({"slow_links": {(0, 7): 2.0}}, r"device 7 is slow, but there are 2 devices, 0\.\.1"),
    ],
)
def test_slow_devices_that_do_not_exist(slow: dict[str, Any], message: str) -> None:
    """Found when the noise meets a graph."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(ArgumentError, match=message):
        ps.simulate(graph, ONE, noise=noise_of(**slow))
    with pytest.raises(ArgumentError, match=message):
        ps.simulate_many(graph, ONE, noise_of(**slow), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 2.0}, "n must be a whole number, got 2.0"),
        ({"n": 2, "n_jobs": 0}, "n_jobs must be at least 1, got 0"),
        ({"n": 2, "n_jobs": -2}, "n_jobs must be at least 1, got -2"),
        (
            {"n": 2, "noise": None},
            r"noise must be a pipesim\.Noise, such as ps\.Noise\(task=.*None",
        ),
        ({"n": 2, "noise": Normal(0.1)}, r"noise must be a pipesim\.Noise, .*got Normal\(std"),
        ({"n": 2, "costs": 1.0}, r"costs must be a pipesim\.Costs, got 1\.0"),
        ({"n": 2, "graph": ps.schedule("gpipe", 2, 2)}, "got Schedule; lower the schedule first"),
    ],
)
def test_bad_scenarios(options: dict[str, Any], message: str) -> None:
    """Counts, noise, costs and graphs."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    arguments = {"graph": graph, "costs": ONE, "noise": noise_of(), "progress": False, **options}
    with pytest.raises(PipeError, match=message):
        ps.simulate_many(**arguments)


def test_bad_scenario() -> None:
    """A number from 0, of noise that is noise."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(ArgumentError, match="scenario must be at least 0, got -1"):
        ps.simulate(graph, ONE, noise=noise_of(), scenario=-1)
    with pytest.raises(ArgumentError, match=r"scenario must be a whole number, got 0\.5"):
        ps.simulate(graph, ONE, noise=noise_of(), scenario=0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"noise must be a pipesim\.Noise, .*got 0\.1"):
        ps.simulate(graph, ONE, noise=0.1)  # type: ignore[arg-type]
