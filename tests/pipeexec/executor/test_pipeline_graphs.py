"""Graphs that pipelines run: any verified one, with its memory, times and replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from case_choice import covering
from hypothesis import given
from parity import check, everywhere, lowered, scheduled
from small_pipelines import (
    NAMES_WITHOUT_SLICES,
    Nap,
    assert_same,
    cut,
    data,
    dense,
    mse,
    orders,
    pipeline,
    unsplit,
)
from strategies import graphs
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor.op_handlers import HANDLERS
from pipeexec.stages.batches import split_batches
from pipesim.errors import ArgumentError
from pipesim.ops import Op
from pipesim.scheduling.registry import schedule_info

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


GRAPHS: dict[str, Callable[[], ps.TaskGraph]] = {
    "depth first": lambda: ps.lower(orders("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")),
    "mixed order": lambda: ps.lower(orders("0F1 0F0 0F2 0B2 0B1 0B0", "1F1 1F0 1B0 1F2 1B2 1B1")),
    "looped": lambda: ps.lower(
        orders(
            "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1",
            "1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1",
            placement=ps.Placement.looped(2, 2),
        ),
        recompute="always",
    ),
    "v": lambda: ps.lower(
        orders(
            "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
            "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
        )
    ),
    "all stages on one device": lambda: ps.lower(
        orders("0F0 1F0 2F0 2B0 0F1 1B0 1F1 2F1 0B0 2B1 1B1 0B1")
    ),
    "split backward": lambda: ps.lower(
        orders(
            "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
            "1F0 1F1 1I0 1F2 1I1 1I2 1W0 1W1 1W2",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W2 2W1 2W0",
        )
    ),
    "split backward, recomputed": lambda: ps.lower(
        orders("0F0 0F1 0I1 0I0 0W1 0W0", "1F0 1F1 1I1 1I0 1W0 1W1"), recompute="always"
    ),
    "both backwards": lambda: ps.lower(orders("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0")),
    "no overlap": lambda: lowered("1f1b", 3, overlap=False),
    "one copy stream": lambda: lowered("1f1b", 3, streams="single"),
    "rendezvous": lambda: lowered("1f1b", 3, rendezvous=True),
    "a host a device": lambda: lowered("gpipe", 3, hosts="per_device"),
    "everything at once": lambda: lowered(
        "gpipe", 3, streams="single", rendezvous=True, hosts="per_device", recompute="except_last"
    ),
    "torch's gpipe": lambda: ps.lower(ps.schedule("gpipe", 3, 4, backward_order="forward")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_any_verified_graph_runs(name: str) -> None:
    graph = GRAPHS[name]()
    check(cut(dense(graph.n_stages), [1] * graph.n_stages), graph, *data(13))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"), covering(product(NAMES_WITHOUT_SLICES, ["never", "always"]))
)
def test_parity_of_every_named_schedule(name: str, recompute: str) -> None:
    """Loss and gradients are the unsplit model's to the last bit.

    On four devices with fewer micro-batches, or twice as many; without recomputing on two as well.

    Four micro-batches on two devices are those of `test_many_processes`.
    """
    allows = schedule_info(name).allows
    sizes = [(4, 3) if allows(4, 3) else (4, 8)]
    if recompute == "never" and allows(2, 5):
        sizes.append((2, 5))
    for p, m in sizes:
        graph = lowered(name, p, m, recompute=recompute)
        check(cut(dense(graph.n_stages), [1] * graph.n_stages), graph, *data(2 * m + 1))


@pytest.mark.slow
@given(
    graph=graphs(
        only_chains=True,
        forward_only=False,
        n_replicas=1,
        sharded=(),
        shard_optimizer=False,
        shard_parameters="none",
        tied=(),
        grad_norm=False,
        expert_layers=(),
        expert_replicas=None,
        offload_to="host",
    ).filter(lambda graph: graph.n_slices == 1)
)
def test_parity_on_any_graph(graph: ps.TaskGraph) -> None:
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(graph.n_stages)]
    result = check(stages, graph, *data(2 * graph.n_microbatches + 1))
    if Op.OFFLOAD not in graph.op:  # how long a copy takes decides what is held beside it
        assert list(result.peak_held) == held_by_simulation(graph)


# Memory and time


def held_by_simulation(graph: ps.TaskGraph) -> list[int]:
    """Return the peak of activations of a byte each, on each device; inputs count nothing.

    What I leaves for W is a byte as well.
    """
    costs = ps.Costs(
        forward=1.0, input_grad=1.0, weight_grad=1.0, activation_bytes=1.0, weight_grad_bytes=1.0
    )
    return [int(peak) for peak in ps.simulate(graph, costs).memory.peak]


@pytest.mark.slow
@everywhere
@scheduled
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (4, 6)])
def test_activations_held_are_as_simulated(schedule: str, recompute: str, p: int, m: int) -> None:
    graph = lowered(schedule, p, m, recompute=recompute)
    result = check(cut(dense(p), [1] * p), graph, *data(m))
    assert list(result.peak_held) == held_by_simulation(graph)


def test_activations_held_by_gpipe_and_1f1b() -> None:
    """By hand: all of them; and on device i as many as there are devices from i on."""
    stages = cut(dense(3), [1, 1, 1])
    assert check(stages, lowered("gpipe", 3, 5), *data(5)).peak_held == (5, 5, 5)
    assert check(stages, lowered("1f1b", 3, 5), *data(5)).peak_held == (3, 2, 1)
    assert check(stages, lowered("gpipe", 3, 5, recompute="always"), *data(5)).peak_held == (1,) * 3


def nervous(p: int, seed: int) -> list[nn.Module]:
    """Return stages that sleep for random times, each up to 4 ms."""
    return [
        nn.Sequential(nn.Linear(16, 16), Nap(4e-3, 4e-3, seed=seed * p + index))
        for index in range(p)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {"recompute": "always"}),
        ("1f1b", {}),
        ("1f1b", {"recompute": "except_last", "overlap": False}),
        ("1f1b", {"streams": "single", "rendezvous": True}),
    ],
)
def test_stages_that_take_their_time_race_with_nobody(
    schedule: str, options: dict[str, Any], seed: int
) -> None:
    """Results are exact, and every task starts after whatever it waits for has ended."""
    check(nervous(3, seed), lowered(schedule, 3, 5, **options), *data(10))


@pytest.mark.measures_time
def test_stages_run_at_the_same_time() -> None:
    """Somewhere in the step, tasks of two devices overlap."""
    result = check(nervous(2, 0), lowered("gpipe", 2, 6), *data(6))
    timeline = result.timeline
    first, second = (
        np.flatnonzero((timeline.graph.device == device) & (timeline.graph.op == Op.F))
        for device in (0, 1)
    )
    overlap = (timeline.start[first][:, None] < timeline.end[second]) & (
        timeline.start[second] < timeline.end[first][:, None]
    )
    assert overlap.any()


@pytest.mark.measures_time
def test_durations_are_measured() -> None:
    """F and B that sleep 10 ms take at least that; F without sleep and transfers take less."""
    stages = [nn.Sequential(nn.Linear(16, 16), Nap(0.01, 0.01)), nn.Linear(16, 16)]
    timeline = check(stages, lowered("gpipe", 2, 3), *data(6)).timeline
    frame = timeline.frame
    slept = frame[(frame["stage"] == 0) & frame["op"].isin(["F", "B"])]
    assert len(slept) == 6
    assert (slept["end"] - slept["start"] >= 0.01).all()
    other = frame[(frame["stage"] == 1) & (frame["op"] == "F")]
    assert (other["end"] - other["start"]).median() < 0.01


def test_bytes_of_messages_are_measured() -> None:
    """Micro-batches of 4, 3, 3 and 3 samples of 16 floats, both ways; the rest carries none."""
    timeline = check(cut(dense(2), [1, 1]), lowered("1f1b", 2), *data(13)).timeline
    frame = timeline.frame
    sizes = {0: 256, 1: 192, 2: 192, 3: 192}
    messages = frame[frame["op"].str.contains("SEND|RECV")]
    assert len(messages) == 16
    assert (messages["nbytes"] == messages["microbatch"].map(sizes)).all()
    assert (frame.drop(messages.index)["nbytes"] == 0).all()


@pytest.mark.measures_time
def test_a_step_is_replayed_from_its_own_durations() -> None:
    """A check of the graph: what it leaves out would show as time missing.

    The median of 5 is within 10 %.
    """
    graph = lowered("1f1b", 2, 4)
    stages = [nn.Sequential(nn.Linear(16, 16), Nap(5e-3, 5e-3)) for _ in range(2)]
    errors = []
    with pipeline(stages, graph) as subject:
        for _ in range(5):
            timeline = subject.step(*data(8)).timeline
            errors.append(ps.replay(timeline).makespan / timeline.makespan - 1)
    assert abs(float(np.median(errors))) < 0.10


# The pipeline's own ways


def test_every_operation_of_one_process_has_its_work() -> None:
    graph = ps.lower(ps.schedule("1f1b", 1, 1))
    with px.Pipeline([nn.Linear(1, 1)], graph, ["cpu"], mse) as subject:
        parts = subject._model.parts
    assert {*HANDLERS, *(op for part in parts for op in part.handlers())} == set(Op)


def test_pipelines_that_share_stages_run_in_turn() -> None:
    """`with_graph`: other graphs of the same stages, devices and optimizers."""
    stages = cut(dense(4), [2, 2])
    first = lowered("gpipe", 2, recompute="always")
    second, other = lowered("1f1b", 2), lowered("1f1b", 2, 3)
    whole = copy.deepcopy(stages)
    reference = torch.optim.AdamW([p for stage in whole for p in stage.parameters()], lr=0.1)
    with pipeline(stages, first, mse, lambda p: torch.optim.AdamW(p, lr=0.1)) as subject:
        siblings = [subject, *(subject.with_graph(graph) for graph in (second, other))]
        for sibling in [*siblings, *siblings]:
            loss = sibling.step(*data(13)).loss
            reference.zero_grad()
            assert torch.equal(loss, unsplit(whole, sibling.graph, *data(13)))
            reference.step()
            assert_same(stages, whole)


def test_a_graph_that_places_stages_elsewhere_is_refused() -> None:
    with (
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2)) as subject,
        pytest.raises(ArgumentError, match=r"on \[0, 0\], this pipeline on \[0, 1\]"),
    ):
        subject.with_graph(ps.lower(orders("0F0 1F0 1B0 0B0")))


def test_preserved_restores_everything() -> None:
    """Parameters, buffers (also those that are not saved), gradients, optimizers."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)]
    stages[1].register_buffer("secret", torch.zeros(()), persistent=False)

    def count(module: nn.Module, *_: Any) -> None:
        module.secret.add_(1)

    stages[1].register_forward_hook(count)
    make = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731 - one line says it
    with pipeline(stages, lowered("1f1b", 2), mse, make) as subject:
        subject.step(*data(8))
        before = copy.deepcopy(stages)
        for actual, wanted in zip(stages, before, strict=True):
            for parameter, kept in zip(actual.parameters(), wanted.parameters(), strict=True):
                kept.grad = parameter.grad.clone()
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in subject.optimizers]
        numbers = [subject.n_steps, int(stages[1].secret)]
        with subject.preserved():
            subject.step(*data(8, seed=1))
            assert int(stages[1].secret) == 8
        assert_same(stages, before)
        assert [subject.n_steps, int(stages[1].secret)] == numbers
        for actual, wanted in zip(subject.optimizers, states, strict=True):
            torch.testing.assert_close(actual.state_dict(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("had_state", [True, False])
def test_preserved_leaves_an_optimizers_tensors_where_they_are(had_state: bool) -> None:
    """A CUDA graph reads them there. A state that there was not is gone again."""
    make = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1))  # noqa: E731 - one line says it
    with pipeline(cut(dense(2), [1, 1]), lowered("1f1b", 2), mse, make) as subject:
        if had_state:
            subject.step(*data(8))

        def tensors() -> list[torch.Tensor]:
            states = [x for o in subject.optimizers for s in o.state.values() for x in s.values()]
            return [*states, *(o.param_groups[0]["lr"] for o in subject.optimizers)]

        before = [(x, x.clone()) for x in tensors()]
        with subject.preserved():
            subject.step(*data(8, seed=1))
            for optimizer in subject.optimizers:
                optimizer.param_groups[0]["lr"].fill_(0.2)
                optimizer.param_groups[0]["weight_decay"] = 0.5
        after = tensors()
        assert len(before) == len(after) == (14 if had_state else 2)
        for (old, value), new in zip(before, after, strict=True):
            assert not had_state or old is new
            assert torch.equal(new, value)
        assert subject.optimizers[0].param_groups[0]["weight_decay"] == 0.01


def test_a_pipeline_says_what_it_is() -> None:
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2)) as subject:
        assert repr(subject) == (
            "<Pipeline of <TaskGraph gpipe: 34 tasks, 2 devices, 2 stages, 4 micro-batches, "
            "recompute=never> on cpu:0, cpu:1>"
        )


def test_host_seconds_are_counted() -> None:
    result = check(nervous(2, 0), lowered("gpipe", 2), *data(8))
    assert 0 < result.host_seconds < 60


@pytest.mark.parametrize(("n", "m", "sizes"), [(13, 4, [4, 3, 3, 3]), (4, 4, [1] * 4), (5, 1, [5])])
def test_batches_are_split_as_evenly_as_can_be(n: int, m: int, sizes: list[int]) -> None:
    batch = torch.arange(n), torch.arange(n) * 2
    parts, _, actual = split_batches(batch, None, m)
    assert actual == sizes
    assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])
    assert all(torch.equal(part[0] * 2, part[1]) for part in parts)
