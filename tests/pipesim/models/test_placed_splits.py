"""Splits that balance devices, for a placement, a schedule or a graph, under a limit of memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from case_choice import covering
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, CostsWarning, PipeError
from pipesim.models.device_split import random_borders
from pipesim.models.placed_split import LayerModel, split_problem
from pipesim.simulation.simulate import predict_timeline

#: Sixteen equal layers and one four times as long, such as an LM head.
HEAD = [*[1e-3] * 16, 4e-3]
#: Times that differ by less are equal: the rest is rounding.
EXACT = 1 + 1e-9


def layers(seconds: Any, **columns: Any) -> ps.Layers:
    """Return layers whose F, I and W take as long each."""
    names = ("forward", "input_grad", "weight_grad")
    return ps.Layers({**{name: list(seconds) for name in names}, **columns})


def makespan(schedule: ps.Schedule, costs: ps.Costs) -> float:
    return ps.simulate(ps.lower(schedule), costs).makespan


def busiest(placement: ps.Placement, stages: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of the busiest device, from the seconds of stages in the last axis."""
    load = np.zeros((*stages.shape[:-1], placement.n_devices))
    for path in placement.paths:
        for stage, device in enumerate(path):
            load[..., device] += stages[..., stage] / placement.n_paths
    return load.max(axis=-1)


def random_stages(random: np.random.Generator, seconds: Any, n: int) -> NDArray[np.float64]:
    """Return the seconds of the stages of 2,000 random splits; shape ``(2000, n)``."""
    inner = [random.choice(len(seconds) - 1, n - 1, replace=False) + 1 for _ in range(2000)]
    borders = np.pad(np.sort(inner), ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(seconds))))
    stages: NDArray[np.float64] = np.diff(np.concatenate([[0], np.cumsum(seconds)])[borders])
    return stages


def all_splits(n_layers: int, n_stages: int) -> list[list[int]]:
    ends = [(0, *inner, n_layers) for inner in combinations(range(1, n_layers), n_stages - 1)]
    return [np.diff(borders).tolist() for borders in ends]


PLACEMENTS = {
    "linear": ps.Placement.linear(4),
    "looped": ps.Placement.looped(4, 3),
    "v": ps.Placement.v_shaped(6),
    "waves": ps.Placement.waves(4, 2),
    "bidirectional": ps.Placement.bidirectional(6),
    "irregular": ps.Placement([0, 1, 1, 2, 0, 0, 2]),
}


def test_devices_are_balanced_where_stages_cannot_be() -> None:
    """The heavy layer is a stage; the other stage of its device is short."""
    schedule = ps.schedule("zbv", 4, 16)
    by_stages = layers(HEAD).costs(8)
    by_devices = layers(HEAD).costs("balanced", placement=schedule.placement)
    assert makespan(schedule, by_stages) == pytest.approx(0.294)
    assert makespan(schedule, by_devices) == pytest.approx(0.265)
    # 20 layers' worth of work, on 4 devices with 5 each
    load = busiest(schedule.placement, by_devices.per_stage("forward", 8))
    assert load == pytest.approx(5e-3)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("kind", ["head", "random", "skewed"])
def test_no_random_split_has_a_less_busy_device(name: str, kind: str) -> None:
    random = np.random.default_rng(7)
    seconds = {
        "head": np.array([*[1.0] * 29, 6.0]),
        "random": random.uniform(0.2, 2, 30),
        "skewed": random.lognormal(0, 1, 30),
    }[kind]
    placement = PLACEMENTS[name]
    costs = layers(seconds).costs("balanced", placement=placement)
    least = busiest(placement, random_stages(random, seconds, placement.n_stages)).min()
    assert busiest(placement, costs.per_stage("forward", placement.n_stages)) <= least * EXACT


@given(
    st.lists(st.integers(0, 9), min_size=6, max_size=9),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_small_splits_are_the_best_of_all(seconds: list[int], devices: list[int]) -> None:
    """And of splits with equally busy devices, stages are most even."""
    placement = ps.Placement([0, 1, 2, *devices])
    sums = np.concatenate([[0], np.cumsum(seconds)])

    def rank(split: list[int]) -> tuple[float, float]:
        stages = np.diff(sums[np.cumsum([0, *split])])
        return float(busiest(placement, stages)), float((stages**2).sum())

    forward = layers(seconds).costs("balanced", placement=placement).per_stage("forward", 6)
    best = min(map(rank, all_splits(len(seconds), 6)))
    assert (busiest(placement, forward), (forward**2).sum()) == pytest.approx(best)


@pytest.mark.parametrize("copies", [1, 3])
def test_one_stage_a_device_as_balanced_split(copies: int) -> None:
    seconds = [float(1 + i * i % 7) for i in range(24 * copies)]
    n = 8 * copies
    costs = layers(seconds).costs("balanced", placement=ps.Placement.linear(n))
    assert costs.forward == layers(seconds).costs(ps.balanced_split(seconds, n)).forward


SCHEDULES = {
    "zbv": ps.schedule("zbv", 3, 9),
    "interleaved": ps.schedule("interleaved_1f1b", 3, 12, n_chunks=2),
    "1f1b": ps.schedule("1f1b", 4, 16),
    "gpipe": ps.schedule("gpipe", 4, 16),
    "chimera": ps.schedule("chimera", 4, 8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_as_fast_as_with_any_split(name: str) -> None:
    """The backward of the last layer takes longer than its share, as that of a loss does."""
    schedule = SCHEDULES[name]
    columns = {"forward": [1.0, 1.5, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0], "output_bytes": [0.1] * 9}
    model = ps.Layers(columns | {"backward": [2.0] * 8 + [9.0]})
    if name == "zbv":
        model = layers(columns["forward"], output_bytes=[0.1] * 9)
    graph = ps.lower(schedule, overlap=name != "1f1b", recompute="always" if name == "gpipe" else
                     "listed")  # fmt: skip
    network = ps.Network(bandwidth=1.0)
    times = [ps.simulate(graph, model.costs(split, network=network)).makespan
             for split in all_splits(9, schedule.n_stages)]  # fmt: skip
    costs = model.costs("balanced", placement=graph, network=network)
    assert ps.simulate(graph, costs).makespan <= min(times) * EXACT


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [(ps.schedule("1f1b", 3, 6), "never"), (ps.schedule("1f1b", 3, 6), "always"),
     (ps.schedule("zbv", 2, 4), "never")],
)  # fmt: skip
def test_memory_limits_choose_among_splits(schedule: ps.Schedule, recompute: Any) -> None:
    """Of all splits that fit, as fast as the fastest; refused exactly where none fits."""
    graph = ps.lower(schedule, recompute=recompute)
    model = layers(
        [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 2.0],
        activation_bytes=[4.0, 4.0, 4.0, 2.0, 4.0, 4.0, 9.0],
        weight_grad_bytes=[2.0, 2.0, 5.0, 2.0, 2.0, 2.0, 2.0],
        output_bytes=[1.0] * 7,
        parameter_bytes=[9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0],
        optimizer_bytes=[3.0] * 7,
        backward_workspace_bytes=[0.0] * 6 + [20.0],
    )
    splits = all_splits(7, schedule.n_stages)
    timelines = [ps.simulate(graph, model.costs(split)) for split in splits]
    peaks = np.array([timeline.memory.peak.max() for timeline in timelines])
    times = np.array([timeline.makespan for timeline in timelines])
    for limit in np.unique(peaks)[::2]:
        timeline = ps.simulate(graph, model.costs("balanced", placement=graph, memory_limit=limit))
        assert timeline.memory.peak.max() <= limit
        assert timeline.makespan == pytest.approx(times[peaks <= limit].min())
    with pytest.raises(CostsError, match=r"no split of 7 layers .* on device \d"):
        model.costs("balanced", placement=graph, memory_limit=peaks.min() * 0.999)


def test_what_does_not_fit_on_one_replica_may_fit_on_several() -> None:
    """A schedule is one replica, which holds the whole state; the error says how to give more."""
    schedule = ps.schedule("1f1b", 2, 4)
    model = layers([1.0] * 8, optimizer_bytes=[8.0] * 8)
    with pytest.raises(CostsError, match=r"pipesim\.lower\(schedule, n_replicas=.*shard_optimizer"):
        model.costs("balanced", placement=schedule, memory_limit=16)
    graph = ps.lower(schedule, n_replicas=4, shard_optimizer=True)
    costs = model.costs("balanced", placement=graph, memory_limit=8)
    assert ps.simulate(graph, costs).memory.peak.max() == 8
    with pytest.raises(CostsError) as error:
        model.costs("balanced", placement=graph, memory_limit=7)
    assert "pipesim.lower" not in str(error.value)


@pytest.mark.slow
def test_a_limit_moves_layers_to_devices_with_fewer_microbatches() -> None:
    """Of 1F1B, the first device holds as many micro-batches as there are devices, the last one."""
    schedule = ps.schedule("1f1b", 4, 8)
    model = layers([1.0] * 16, activation_bytes=[3.0] * 16)
    # 4 layers a device would hold 4 * 4 * 3 = 48 bytes on the first.
    costs = model.costs("balanced", placement=schedule, memory_limit=40)
    assert ps.simulate(ps.lower(schedule), costs).memory.peak[:2].tolist() == [36, 36]
    assert costs.per_stage("forward", 4)[:2].tolist() == [3, 4]
    assert costs.per_stage("forward", 4).max() == 5


@pytest.mark.parametrize("name", [*SCHEDULES, "zb_h1", "recompute"])
def test_the_search_counts_bytes_as_timelines_do(name: str) -> None:
    """Bytes depend on the order of tasks alone, so that no search needs their times."""
    schedule = SCHEDULES.get(name, ps.schedule("zb_h1", 4, 8))
    graph = ps.lower(schedule, recompute="always" if name == "recompute" else "listed")
    random, n = np.random.default_rng(1), schedule.n_stages
    columns = {
        "activation_bytes": 10, "weight_grad_bytes": 15, "output_bytes": 5, "parameter_bytes": 3,
        "optimizer_bytes": 9, "gradient_bytes": 6,
    }  # fmt: skip
    nbytes = {x: (5 + random.integers(0, most, 20)).tolist() for x, most in columns.items()}
    model = layers([1.0] * 20, **nbytes)
    problem = split_problem(LayerModel(20, model.costs, has_ends=False), graph, np.zeros(9))
    for _ in range(10):
        inner = np.sort(random.choice(19, n - 1, replace=False)) + 1
        borders = np.array([0, *inner, 20])
        costs = model.costs(np.diff(borders))
        exact = ps.simulate(graph, costs).memory.peak
        assert problem.peak_bytes(borders).tolist() == exact.tolist()


@pytest.mark.parametrize("end", ["placement", "schedule", "graph"])
def test_one_device(end: str) -> None:
    """All layers are on its stage."""
    schedule = ps.schedule("1f1b", 1, 4)
    target: Any = {"placement": schedule.placement, "schedule": schedule}
    target = target.get(end, ps.lower(schedule))
    assert layers(HEAD).split("balanced", placement=target) == (17,)
    gpu = ps.Transformer(**LARGE_HEAD).costs("balanced", placement=target, **RATE)
    assert gpu.work is not None
    assert gpu.work.settings is not None
    assert gpu.work.settings["layers_per_stage"] == [LARGE_HEAD["n_layers"]]


def test_words() -> None:
    """One meaning for a number, a word, and both."""
    placement, model = ps.Placement.v_shaped(2), layers([1.0] * 7 + [5.0])
    balanced = model.costs("balanced", placement=placement)
    assert balanced == model.costs(4, placement=placement)
    assert balanced == model.costs(4, partition="balanced", placement=placement)
    assert balanced == ps.Costs.from_layers(model, "balanced", placement=placement)
    even = model.costs([2, 2, 2, 2])
    assert even == model.costs("even", placement=placement)
    assert even == model.costs(4, partition="even", placement=placement)
    assert even == model.costs([2, 2, 2, 2], placement=placement)
    assert even == model.costs("Ett|tt|tt|ttL", placement=placement)


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("balanced", {}, "split='balanced' needs the number of stages: give placement="),
        ("even", {"partition": "even"}, "split='even' needs the number of stages"),
        ("even", {"placement": ps.Placement.linear(3)}, "8 layers do not divide into 3 stages"),
        (
            "fair",
            {"placement": ps.Placement.linear(2)},
            "split must be a number of stages or the layers",
        ),
        (
            "even",
            {"placement": ps.Placement.linear(2), "partition": "balanced"},
            "give one of them",
        ),
        (3, {"placement": ps.Placement.linear(2)}, "split=3, but the placement has 2 stages"),
        (
            [2, 3, 3],
            {"placement": ps.Placement.linear(2)},
            "split has 3 stages, but the placement has 2",
        ),
        (
            "balanced",
            {"placement": ps.Placement.looped(3, 3)},
            "8 layers cannot be split .* 9 stages",
        ),
        ("balanced", {"placement": [0, 1]}, "placement must be a pipesim.Placement, a Schedule"),
        (
            "balanced",
            {"placement": ps.Placement.linear(2), "memory_limit": 9},
            "give the schedule as",
        ),
        (2, {"memory_limit": 9}, "memory_limit needs to know how many micro-batches"),
        (
            [4, 4],
            {"placement": ps.Placement.linear(2), "memory_limit": 9},
            'the splits of "balanced"',
        ),
        ([4, 4], {"launch": [1e-6]}, "launch has 1 values for 2 stages"),
        (
            "balanced",
            {"placement": SCHEDULES["1f1b"], "memory_limit": -1},
            "memory_limit must be bytes",
        ),
    ],
)
def test_mistakes(split: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipeError, match=message):
        layers([1.0] * 8).costs(split, **options)


def test_too_many_layers_to_search() -> None:
    with pytest.raises(ArgumentError, match="5000 layers would take too long"):
        layers([1.0] * 5000).costs("balanced", placement=ps.Placement.linear(4))


#: A transformer whose head takes as long as 9.3 of its layers.
LARGE_HEAD: dict[str, Any] = {
    "hidden_size": 64, "n_layers": 24, "n_heads": 4, "sequence_length": 32, "vocabulary_size": 8192
}  # fmt: skip
RATE: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 1e9}


def seconds_of(costs: ps.Costs, n_stages: int) -> NDArray[np.float64]:
    """Return the seconds of F and B of each stage."""
    return costs.per_stage("forward", n_stages) + costs.per_stage("backward", n_stages)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_random_split_of_a_transformer_has_a_less_busy_device(name: str, recompute: Any) -> None:
    """First and last stage have embedding and head, and may have no layer."""
    model, placement = ps.Transformer(**LARGE_HEAD), PLACEMENTS[name]
    n, random = placement.n_stages, np.random.default_rng(3)
    options: dict[str, Any] = RATE | {"recompute": recompute}
    costs = model.costs("balanced", placement=placement, **options)
    parts = seconds_of(model.costs([0, *[1] * 24, 0], **options), 26)
    inner = np.sort(random.integers(0, 25, (2000, n - 1)), axis=1)
    inner = inner[(np.diff(inner, axis=1) > 0).all(axis=1)]
    borders = np.pad(inner + 1, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 26)))
    stages = np.diff(np.concatenate([[0], np.cumsum(parts)])[borders])
    got = busiest(placement, seconds_of(costs, n))
    assert got <= busiest(placement, stages).min() * EXACT


def test_a_search_in_vain_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the splits with the fewest bytes do not fit, no others are simulated."""
    simulated = []

    def count(*arguments: Any, **options: Any) -> ps.Timeline:
        simulated.append(arguments)
        return predict_timeline(*arguments, **options)

    monkeypatch.setattr("pipesim.models.placed_split.predict_timeline", count)
    model = layers([1.0] * 40, activation_bytes=[1.0] * 40)
    with pytest.raises(CostsError, match="no split of 40 layers"):
        model.split("balanced", placement=ps.schedule("1f1b", 4, 6), memory_limit=18)
    assert 64 <= len(simulated) < 80
    simulated.clear()
    with pytest.raises(CostsError, match="no split of 10 layers"):  # of 84 splits
        layers([1.0] * 10, activation_bytes=[1.0] * 10).split(
            "balanced", placement=ps.schedule("1f1b", 4, 6), memory_limit=3
        )
    assert 64 <= len(simulated) < 80


@pytest.mark.slow
def test_a_transformer_for_a_schedule() -> None:
    """As `Costs.transformer`, as settings of the workload give again, and faster than even."""
    sizes = LARGE_HEAD | {"n_layers": 12}
    model, schedule = ps.Transformer(**sizes), ps.schedule("zbv", 2, 4)
    costs = model.costs("balanced", placement=schedule, **RATE)
    assert ps.Costs.transformer("balanced", placement=schedule, **sizes, **RATE) == costs
    assert costs.work is not None
    assert costs.work.settings is not None
    assert ps.Costs.transformer(**costs.work.settings) == costs
    by_devices = model.costs("balanced", placement=schedule.placement, **RATE)
    even = model.costs("even", placement=schedule.placement, **RATE)
    assert even == model.costs([3] * 4, **RATE)
    times = [makespan(schedule, x) for x in (costs, by_devices, even)]
    assert times[0] <= times[1] < times[2]
    with pytest.raises(ArgumentError, match="n_layers is missing"):
        ps.Costs.transformer("even", placement=schedule, hidden_size=64, **RATE)


@pytest.mark.slow
def test_the_memory_of_a_gpu_is_a_limit_if_it_can_be_kept() -> None:
    """Given as `memory_limit`, it must be kept."""
    sizes = {"n_layers": 9, "vocabulary_size": 64, "sequence_length": 512}
    model = ps.Transformer(**LARGE_HEAD | sizes)
    graph = ps.lower(ps.schedule("1f1b", 3, 6))

    def costs(memory: float, **options: Any) -> ps.Costs:
        gpu = ps.GPU(flops=1e9, bandwidth=1e9, memory=memory)
        return model.costs("balanced", placement=graph, microbatch_size=1, gpu=gpu, **options)

    def peak(costs: ps.Costs) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(ps.simulate(graph, costs).memory.peak.max())

    free = peak(costs(1e12))
    assert peak(costs(0.9 * free)) <= 0.9 * free
    with pytest.warns(
        CostsWarning, match="the GPU has .*: no split of 9 layers .* too much"
    ) as warned:
        tight = costs(0.1 * free)
    assert warned[0].filename == __file__  # in `costs` above
    assert "placement=pipesim.lower(schedule, n_replicas=..., shard_opti" in str(warned[0].message)
    assert peak(tight) == free
    with pytest.raises(CostsError, match="no split of 9 layers was found that fits"):
        costs(1e12, memory_limit=0.1 * free)
    with pytest.raises(CostsError, match="no split of 9 layers was found that fits"):
        costs(1e12, memory_limit=[free, free, 0.1 * free])


#: A transformer whose layers wait for the host on a GPU, and whose head and embedding do not.
LAUNCHED: dict[str, Any] = {
    "hidden_size": 512, "n_layers": 24, "n_heads": 8, "sequence_length": 1024,
    "vocabulary_size": 400_000,
}  # fmt: skip
SLOW_HOST = {"flops": 2e14, "bandwidth": 1.5e12, "launch": 5e-5}


@pytest.mark.slow
def test_the_search_keeps_splits_whose_launches_hide_behind_kernels() -> None:
    """The host launches a layer of the last stage while the GPU computes the head."""
    model, schedule = ps.Transformer(**LAUNCHED), ps.schedule("gpipe", 4, 8)
    balanced, even = (
        model.costs(split, placement=schedule, microbatch_size=1, gpu=SLOW_HOST)
        for split in ("balanced", "even")
    )
    assert makespan(schedule, balanced) <= makespan(schedule, even) * EXACT


@pytest.mark.parametrize(
    ("name", "launch", "recompute"),
    covering(product([*SCHEDULES, "zb_h1"], [0.0, 5e-5], ["never", "except_last"])),
)
def test_no_step_is_faster_than_its_lower_bound(name: str, launch: float, recompute: Any) -> None:
    """The search leaves out splits by this bound. A GPU may wait for its host in some layers."""
    schedule = SCHEDULES.get(name, ps.schedule("zb_h1", 4, 8))
    graph, random = ps.lower(schedule, recompute=recompute), np.random.default_rng(5)
    model, gpu = ps.Transformer(**LAUNCHED), ps.GPU(**SLOW_HOST | {"launch": launch})

    def costs(layers_per_stage: Sequence[int]) -> ps.Costs:
        return model.costs(layers_per_stage, microbatch_size=1, gpu=gpu)

    def least_costs(layers_per_stage: Sequence[int]) -> ps.Costs:
        return model.costs(layers_per_stage, microbatch_size=1, gpu=replace(gpu, launch=0.0))

    problem = split_problem(LayerModel(24, costs, True, least_costs), graph)
    for _ in range(20):
        borders = random_borders(problem, random)
        step = ps.simulate(graph, costs(np.diff(borders).tolist())).makespan
        bound = problem.lower_bound(borders[None])[0]
        assert 0 < bound <= step * EXACT
