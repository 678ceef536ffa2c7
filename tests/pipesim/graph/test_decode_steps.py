"""Decode steps: slices that need a token of the last stage, and keep their keys and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drawing import draw, grid

import pipesim as ps
from pipesim.errors import ArgumentError, DeadlockError


def in_rounds(n_devices: int, n_groups: int, n_steps: int) -> ps.Schedule:
    """Return the order in which each group of requests takes a step in turn."""
    order = np.arange(n_groups * n_steps).reshape(n_groups, n_steps).T.ravel()
    schedule = ps.schedule("gpipe", n_devices, n_groups * n_steps)
    return schedule.with_microbatch_order(order).with_slices(n_steps)


def needed(graph: ps.TaskGraph, name: str) -> list[str]:
    """Return the names of the dependencies of a task."""
    task = next(k for k in range(len(graph)) if str(graph.task(k)) == name)
    return sorted(str(graph.task(int(k))) for k in graph.dependencies[task])


def test_a_step_needs_the_token_of_the_step_before() -> None:
    """By hand: one group of a prompt and two steps, on two devices."""
    graph = ps.lower(in_rounds(2, 1, 3), forward_only=True, prompt_slices=1)
    assert needed(graph, "0F0") == []
    assert needed(graph, "0F1") == ["0F0", "0RECV_F0<1"]
    assert needed(graph, "1F1") == ["1F0", "1RECV_F1"]
    assert needed(graph, "1SEND_F1>0") == ["1F1"]
    prompt = ps.lower(in_rounds(2, 1, 3), forward_only=True, prompt_slices=2)
    assert needed(prompt, "0F1") == ["0F0"]
    assert needed(prompt, "0F2") == ["0F1", "0RECV_F1<1"]
    one = ps.lower(in_rounds(1, 1, 2), forward_only=True, prompt_slices=1)
    assert needed(one, "0F1") == ["0F0"]


def test_tokens_go_to_decode_steps_alone() -> None:
    """The last slice of the prompt and each step but the last make a token that is needed."""
    graph = ps.lower(in_rounds(2, 1, 5), forward_only=True, prompt_slices=2)
    senders = (graph.op == ps.Op.SEND_F) & (graph.stage == 1)
    assert sorted(graph.microbatch[senders].tolist()) == [1, 2, 3]


def test_two_groups_on_three_devices_leave_one_of_three_steps_empty() -> None:
    timeline = ps.simulate(
        ps.lower(in_rounds(3, 2, 2), forward_only=True, prompt_slices=1), ps.Costs(1)
    )
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F2 .. F1 F3 .. ..
        1 | .. F0 F2 .. F1 F3 ..
        2 | .. .. F0 F2 .. F1 F3
    """)


@pytest.mark.parametrize("n_devices", [1, 2, 4])
@pytest.mark.parametrize("n_groups", [1, 3, 4, 7])
def test_a_round_takes_the_groups_or_the_way_through_the_pipeline(
    n_devices: int, n_groups: int
) -> None:
    """A round of m groups over p devices takes max(m f, p (f + latency)): p groups fill it."""
    latency, n_steps, p = 0.25, 5, n_devices
    costs = ps.Costs(1, network=ps.Network(latency=latency))
    graph = ps.lower(in_rounds(p, n_groups, n_steps), forward_only=True, prompt_slices=1)
    timeline = ps.simulate(graph, costs)
    assert np.array_equal(timeline.end, ps.simulate(graph, costs, engine="simpy").end)
    lap = p * (1 + latency) if p > 1 else 1.0
    last = n_groups - 1 + p + (p - 1) * latency  # of the last round, without a token behind it
    assert timeline.makespan == (n_steps - 1) * max(n_groups, lap) + last
    causes = timeline.why.idle_by_cause()
    idle = timeline.makespan - n_groups * n_steps
    assert causes.select_dtypes("number").sum(axis=1).to_numpy() == pytest.approx([idle] * p)


def test_a_device_with_the_first_and_last_stage_hands_itself_the_token() -> None:
    """By hand: stages 0 and 7 on device 0 of a V."""
    orders = [
        f"{d}F0 {7 - d}F0 {d}F1 {7 - d}F1 {7 - d}B1 {d}B1 {7 - d}B0 {d}B0".split() for d in range(4)
    ]
    placement = ps.Placement([0, 1, 2, 3, 3, 2, 1, 0])
    schedule = ps.Schedule.from_orders(orders, placement=placement).with_slices(2)
    graph = ps.lower(schedule, forward_only=True, prompt_slices=1)
    assert needed(graph, "0F1") == ["0F0", "7F0"]
    assert ps.simulate(graph, ps.Costs(1)).makespan == 2 * 8


def test_keys_and_values_live_until_the_last_slice() -> None:
    """By hand: two sequences of two slices, one after the other, or in rounds."""
    costs = ps.Costs(1, kv_cache_bytes=[[4, 1, 8, 2]] * 2)
    one_by_one = ps.lower(ps.schedule("gpipe", 2, 4).with_slices(2), forward_only=True)
    rounds = ps.lower(in_rounds(2, 2, 2), forward_only=True)
    assert ps.simulate(one_by_one, costs).memory.peak.tolist() == [10, 10]
    assert ps.simulate(rounds, costs).memory.peak.tolist() == [13, 13]
    whole = ps.lower(ps.schedule("gpipe", 2, 4), forward_only=True)
    assert ps.simulate(whole, costs).memory.peak.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "per_token"), [("llama3_8b", 2 * 8 * 128 / 2), ("deepseek_v3", 512 + 64)]
)
def test_models_know_the_bytes_of_their_keys(name: str, per_token: float) -> None:
    """Heads of a GPU; or the latent vectors, which all GPUs have (arXiv 2405.04434, table 1)."""
    model = ps.Transformer.preset(name, sequence_length=4096)
    costs = model.costs(
        [model.n_layers], microbatch_size=1, flops_per_second=1e15, tensor_parallel=2,
        slices=[3072, 1024],
    )  # fmt: skip
    nbytes = costs.microbatch(1).per_stage("kv_cache_bytes", 1)
    assert nbytes[0] == 2 * model.n_layers * 1024 * per_token


def test_what_cannot_decode_says_so(tmp_path: Path) -> None:
    schedule = in_rounds(2, 2, 2)
    for source, options in (
        (schedule, {}),
        (schedule.with_slices(1), {"forward_only": True}),
        (schedule, {"forward_only": True, "overlap": False}),
    ):
        with pytest.raises(ArgumentError, match="prompt_slices=1 needs forward_only=True"):
            ps.lower(source, prompt_slices=1, **options)
    two_chunks = ps.schedule("slimpipe", 2, 4, n_slices=4)
    with pytest.raises(DeadlockError, match=r"0F1 .* waits for 3F0"):
        ps.lower(two_chunks, forward_only=True, prompt_slices=1)
    graph = ps.lower(schedule, forward_only=True, prompt_slices=1)
    ps.simulate(graph, ps.Costs(1)).save(tmp_path / "steps.csv")
    assert ps.Timeline.load(tmp_path / "steps.csv").graph.prompt_slices == 1
