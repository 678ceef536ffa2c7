"""Paths of a bidirectional pipeline and versions of weights, run for real."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from small_pipelines import (
    assert_same,
    call_within,
    cut,
    data,
    dense,
    mse,
    orders,
    pipeline,
    sgd,
    unsplit,
)
from torch import Tensor, nn
from torch.func import functional_call

import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipeexec.stages.module_call import WeightVersions
from pipesim.errors import ArgumentError
from pipesim.ops import Op

CHIMERA = orders(
    "0F0 0F1 1F2 1B2 1F3 1B3 0B0 0B1",
    "0F2 0F3 1F0 1B0 1F1 1B1 0B2 0B3",
    placement=ps.Placement.bidirectional(2),
)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"recompute": "always"}])
def test_copies_of_a_stage_learn_the_same(options: dict[str, Any]) -> None:
    """After three steps of both paths, the stages are where those of one pipeline are."""
    model = dense(2)
    stages, others = cut(model, [1, 1]), cut(copy.deepcopy(model), [1, 1])
    graph, plain = ps.lower(CHIMERA, **options), ps.lower(ps.schedule("gpipe", 2, 4))
    inputs, targets = data(12)
    with pipeline(stages, graph, mse, sgd) as both, pipeline(others, plain, mse, sgd) as one:
        for _ in range(3):
            actual = call_within(30, lambda: both.step(inputs, targets))
            wanted = one.step(inputs, targets)
            torch.testing.assert_close(actual.loss, wanted.loss)
        for stage, other in zip(stages, others, strict=True):
            for p, q in zip(stage.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q)
                torch.testing.assert_close(p.grad, q.grad)
        for first, second in zip(both.modules[:2], both.modules[2:], strict=True):
            assert_same([first], [second])
    assert actual.timeline.complete
    assert actual.peak_held == ((1, 1) if options == {"recompute": "always"} else (3, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"grad_norm": True, "recompute": "always"},
        {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2},
    ],
)
def test_paths_that_share_a_stage_train_one_module(options: dict[str, Any]) -> None:
    """Around a failed worker: after two steps, the stages are where those of one pipeline are."""
    placement = ps.Placement.rerouted(2, 2, 4, {(1, 1): 0})
    stages = cut(dense(2), [1, 1])
    others, (inputs, targets) = copy.deepcopy(stages), data(16)
    graph, plain = ps.lower(ps.order_by(placement, 4), **options), ps.schedule("gpipe", 2, 4)
    with (
        pipeline(stages, graph, mse, sgd) as rerouted,
        pipeline(others, ps.lower(plain), mse, sgd) as one,
    ):
        for _ in range(2):
            actual = call_within(30, partial(rerouted.step, inputs, targets))
            torch.testing.assert_close(actual.loss, one.step(inputs, targets).loss)
        for p, q in zip(
            nn.ModuleList(stages).parameters(), nn.ModuleList(others).parameters(), strict=True
        ):
            torch.testing.assert_close(p, q)
        held = rerouted.held_bytes(inputs, targets)
        assert [nbytes > 0 for nbytes in held] == graph.kinds.holds.ravel().tolist()


def test_copies_follow_the_stages() -> None:
    """Weights that the user loads between steps count on every path; so does the mode."""
    stages = cut(dense(2), [1, 1])
    inputs, targets = data(8)
    with pipeline(stages, ps.lower(CHIMERA)) as subject:
        subject.step(inputs, targets)
        with torch.no_grad():
            stages[0][0][0].weight.zero_()
        stages[1].eval()
        subject.step(inputs, targets)
        assert not subject.modules[2][0][0].weight.any()
        assert not subject.modules[3].training


def test_copies_have_the_modes_and_buffers_of_the_stages() -> None:
    """A frozen norm stays frozen on every path; what is loaded into buffers counts on all."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)]
    for stage in stages:
        stage[1].eval()
    others = copy.deepcopy(stages)
    inputs, targets = data(8)
    with pipeline(stages, ps.lower(CHIMERA)) as subject:
        for copies in (stages, others):
            copies[0][1].running_mean.fill_(3.0)
        result = call_within(30, lambda: subject.step(inputs, targets))
    whole = unsplit(others, ps.lower(CHIMERA), inputs, targets)
    assert torch.equal(result.loss, whole)
    assert_same(stages, others)


@pytest.mark.parametrize(
    "schedule", [CHIMERA, ps.schedule("pipedream", 2, 4)], ids=["chimera", "pipedream"]
)
def test_hooks_of_parameters_are_refused(schedule: ps.Schedule) -> None:
    """They would see some of the micro-batches' gradients."""
    stages = cut(dense(2), [1, 1])
    stages[1][0][0].bias.register_hook(lambda gradient: gradient * 0)
    with (
        pipeline(stages, ps.lower(schedule)) as subject,
        pytest.raises(ArgumentError, match=r"parameter '1\.0\.bias' of stage 1 has hooks"),
    ):
        subject.step(*data(8))


def test_stages_that_cannot_be_copied() -> None:
    """Named, with the reason."""
    stages = cut(dense(2), [1, 1])
    stages[1].lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"stage 1 cannot be copied \(TypeError: cannot pickle"):
        pipeline(stages, ps.lower(CHIMERA))


def test_stages_that_refer_to_parameters_of_others() -> None:
    """A copy would have parameters that no step changes."""
    stages = cut(dense(2), [1, 1])
    stages[1].first = [stages[0]]  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"stage 1 cannot be copied, .*: 'first' of 'the stage"):
        pipeline(stages, ps.lower(CHIMERA))
    pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 4))).close()


def test_weights_are_no_activations() -> None:
    """Versions of weights do not count as held; devices count the peak over their stages."""
    stages = [nn.Linear(64, 64) for _ in range(2)]
    x = torch.randn(8, 64)
    with pipeline(stages, ps.lower(ps.schedule("pipedream", 2, 8)), mse, sgd) as subject:
        assert max(subject.held_bytes(x, x)) < 64 * 64 * 4
    looped = ps.lower(ps.schedule("interleaved_1f1b", 2, 4))
    with pipeline([nn.Linear(64, 64) for _ in range(4)], looped) as subject:
        held, devices = subject.held_bytes(x, x), subject.device_bytes(x, x)
        assert len(devices) == 2
        assert max(held) <= max(devices) < held[0] + held[2]


def test_one_path_of_several_can_be_run_alone() -> None:
    """A pipeline on two paths also runs a graph of the first; not one of other places."""
    with pipeline(cut(dense(2), [1, 1]), ps.lower(CHIMERA)) as subject:
        first = subject.with_graph(ps.lower(ps.schedule("1f1b", 2, 3)))
        assert first.step(*data(6)).timeline.complete
        with pytest.raises(ArgumentError, match=r"on \[1, 0\], this pipeline on \[0, 1\] and \[1,"):
            subject.with_graph(ps.lower(orders("1F0 1B0", "0F0 0B0")))


def step_by_definition(
    stages: Sequence[nn.Module], graph: ps.TaskGraph, inputs: Tensor, targets: Tensor
) -> None:
    """Train the stages for a step as the definition of its schedule has it.

    Micro-batch by micro-batch through the whole model, each stage with the weights that the
    schedule says: those after as many steps as come before its F on the stage's device, or, where
    they are double-buffered, after those of all mini-batches but the last.
    """
    m, of_batch = graph.n_microbatches, graph.n_microbatches // graph.n_batches
    tasks = list(graph)
    history = [[snapshot(stage)] for stage in stages]
    optimizers = [sgd(stage.parameters()) for stage in stages]
    parts = list(zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True))

    def version(stage: int, microbatch: int) -> int:
        if graph.weight_versions == "double_buffered":
            return max(0, microbatch // of_batch - 1)
        order = [t for t in tasks if t.stage == stage and t.op in (Op.F, Op.STEP)]
        began = [(t.op, t.microbatch) for t in order].index((Op.F, microbatch))
        return sum(t.op == Op.STEP for t in order[:began])

    for task in (task for task in tasks if task.op == Op.STEP):
        module, done = stages[task.stage], task.microbatch or 0
        module.zero_grad()
        for microbatch in range(done + 1 - of_batch, done + 1):
            weights = [history[s][version(s, microbatch)] for s in range(len(stages))]
            weights = [{k: p.clone().requires_grad_() for k, p in own.items()} for own in weights]
            x, y = parts[microbatch]
            for stage, own in zip(stages, weights, strict=True):
                x = functional_call(stage, own, (x,))
            (mse(x, y) / of_batch).backward()
            for name, p in module.named_parameters():
                gradient = weights[task.stage][name].grad
                p.grad = gradient if p.grad is None else p.grad + gradient
        optimizers[task.stage].step()
        history[task.stage].append(snapshot(module))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    ("n_batches", "versions"), [(8, "stashed"), (4, "stashed"), (2, "double_buffered")]
)
def test_weights_are_those_that_the_schedule_says(
    n_batches: int, versions: Any, recompute: Any
) -> None:
    """Each forward, and its backward, sees its version; each step adds its own gradients."""
    model = dense(3)
    schedule = ps.schedule("1f1b", 3, 8).with_updates(n_batches, versions)
    graph = ps.lower(schedule, recompute=recompute)
    inputs, targets = data(16)
    stages, others = cut(model, [1, 1, 1]), cut(copy.deepcopy(model), [1, 1, 1])
    with one_thread():
        step_by_definition(others, graph, inputs, targets)
    with pipeline(stages, graph, mse, sgd) as subject:
        result = call_within(30, lambda: subject.step(inputs, targets))
        for stage, other in zip(stages, others, strict=True):
            for p, q in zip(stage.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert subject.step(inputs, targets).loss < result.loss


def test_double_buffered_updates_are_one_step_late() -> None:
    """W(t+1) = W(t) - lr * gradient(W(t-1)), to the last bit; the first of a call has no delay."""
    model, n_batches, steps = dense(2), 5, 2
    whole = copy.deepcopy(model)
    batches = [data(4, seed=k) for k in range(steps * n_batches)]
    with one_thread():
        optimizer, previous = sgd(whole.parameters()), whole
        for number, (inputs, targets) in enumerate(batches):
            current = copy.deepcopy(whole)
            late = previous if number % n_batches else current
            for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (mse(late(x), y) / 2).backward()
            for p, q in zip(whole.parameters(), late.parameters(), strict=True):
                p.grad, q.grad = q.grad, None
            optimizer.step()
            previous = current
    graph = ps.lower(ps.schedule("pipedream_2bw", 2, 2 * n_batches, n_batches=n_batches))
    with pipeline(cut(model, [1, 1]), graph, mse, sgd) as subject:
        for first in range(0, len(batches), n_batches):
            parts = zip(*batches[first : first + n_batches], strict=True)
            subject.step(*(torch.cat(part) for part in parts))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


def test_versions_are_let_go() -> None:
    """No more are kept than the newest and those in flight; two where they are double-buffered."""
    layer = nn.Linear(2, 2)
    stashed = WeightVersions(layer, batch_size=1, double_buffered=False)
    stashed.reset()
    for microbatch in range(3):
        stashed.begin_microbatch(microbatch)
    for microbatch in range(3):
        stashed.end_microbatch(microbatch)
        stashed.add_version()
        stashed.begin_microbatch(microbatch + 3)
    assert sorted(stashed.kept) == [1, 2, 3]
    double = WeightVersions(layer, batch_size=2, double_buffered=True)
    double.reset()
    for microbatch in range(8):
        double.begin_microbatch(microbatch)
        assert double.weights(microbatch) is double.kept[max(0, microbatch // 2 - 1)]
        double.end_microbatch(microbatch)
        if microbatch % 2:
            double.add_version()
        assert len(double.kept) <= 2
    double.clear()
    assert not list(double.parameters())
