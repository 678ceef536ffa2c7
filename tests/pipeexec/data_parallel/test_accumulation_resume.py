"""Gradient accumulation that is interrupted, has several losses, or meets batch norms."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import dense, mse
from test_accumulation import _parts, _replica, _run, _sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px
import pipesim as ps
from pipeexec.data_parallel import scaled_learning_rate
from pipeexec.distributed import Processes
from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipesim.errors import ArgumentError, BatchNormWarning, ExecutionError

# Resuming


def _through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _interrupted(
    make: Callable[[], tuple[px.GradientAccumulation, dict[str, Any]]],
    parts: list[tuple[Tensor, Tensor]],
    position: int,
    weighted: bool = False,
) -> None:
    """Train with and without an interruption after ``at`` micro-batches; weights are the same."""
    whole, _ = make()
    _run(whole, parts, weighted=weighted)
    first, saved = make()
    _run(first, parts[:position], weighted=weighted)
    states = {name: _through_a_file(x.state_dict()) for name, x in saved.items()}
    state = first.state_dict()
    _run(first, parts[position:], weighted=weighted)  # leaves the state as it is
    resumed, others = make()
    for name, other in others.items():
        other.load_state_dict(states[name])
    resumed.load_state_dict(_through_a_file(state))
    assert resumed.n_accumulated == position % resumed.n_steps
    _run(resumed, parts[position:], weighted=weighted)
    assert resumed.has_stepped
    states_now = [x.model.state_dict() for x in (resumed, whole)]
    assert all(torch.equal(value, states_now[1][name]) for name, value in states_now[0].items())


@pytest.mark.parametrize(("position", "weighted"), [(1, False), (5, False), (5, True), (3, True)])
def test_resumes_in_the_middle_bit_for_bit(position: int, weighted: bool) -> None:
    def make() -> tuple[px.GradientAccumulation, dict[str, Any]]:
        model = dense(2)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        saved = {"model": model, "optimizer": optimizer, "scaler": scaler}
        return px.GradientAccumulation(model, optimizer, 3, scaler=scaler), saved

    _interrupted(make, _parts(5, 1, 3, 2, 2, 4), position, weighted)


def _resume_case(processes: Processes, position: int) -> dict[str, Any]:
    """Resume two replicas with a batch norm, whose buffers DDP broadcasts."""

    def make() -> tuple[px.GradientAccumulation, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(dense(1), nn.BatchNorm1d(16), dense(1))
        ddp = DistributedDataParallel(model)
        optimizer = _sgd(model)
        return px.GradientAccumulation(ddp, optimizer, 3), {"model": ddp, "optimizer": optimizer}

    parts = _parts(2, 2, 2, 2, 2, 2, seed=processes.rank)
    _interrupted(make, parts, position)
    accumulation, _ = make()
    _run(accumulation, parts[:2])
    return accumulation.state_dict()


def test_replicas_resume_from_a_state_each(two_ranks: Ranks) -> None:
    for position in (2, 4):
        states = two_ranks.run(_resume_case, position=position)
    assert [x["rank"] for x in states] == [0, 1]
    gradients = [x["gradients"]["0.0.0.weight"] for x in states]
    assert not torch.equal(*gradients)  # each its own, before the sum
    model = nn.Sequential(dense(1), nn.BatchNorm1d(16), dense(1))
    alone = px.GradientAccumulation(model, _sgd(model), 3)
    with pytest.raises(ArgumentError, match="n_replicas=2, this process has n_replicas=1"):
        alone.load_state_dict(states[0])


def test_other_states_are_refused() -> None:
    model = dense(2)
    accumulation = px.GradientAccumulation(model, _sgd(model), 3)
    _run(accumulation, _parts(2, 2))
    state = accumulation.state_dict()
    before = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    for changed, text in (
        ({"n_steps": 4}, "n_steps=4, this GradientAccumulation has n_steps=3"),
        ({"n_accumulated": 3}, "n_accumulated=3 of n_steps=3"),
        ({"n_samples": [2]}, "1 n_samples"),
        ({"rank": 1}, "rank=1, this process has rank=0"),
        ({"shapes": state["shapes"] | {"more": [1]}}, "optimizer lacks, parameters 'more'"),
        ({"shapes": {**state["shapes"], "0.0.weight": [4, 9]}}, r"'0.0.weight' of shape \[4, 9\]"),
        ({"gradients": {}}, "0 gradients"),
        ({"gradients": {"0.0.weight": torch.ones(2)}}, "gradient of '0.0.weight'"),
    ):
        with pytest.raises(ArgumentError, match=text):
            accumulation.load_state_dict({**state, **changed})
    with pytest.raises(ArgumentError, match="lacks 'n_steps'"):
        accumulation.load_state_dict({})
    other = dense(3)
    with pytest.raises(ArgumentError, match=r"lacks parameters '\d"):
        px.GradientAccumulation(other, _sgd(other), 3).load_state_dict(state)
    after = [x.grad for x in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True) if a is not None)
    for call in (accumulation.state_dict, lambda: accumulation.load_state_dict(state)):
        with pytest.raises(ExecutionError, match="within a block"), accumulation.microbatch():
            call()


# Several losses


class _TwoHeads(nn.Module):
    """A trunk, and two heads that use no parameter of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = dense(1), nn.ModuleList([dense(1), dense(1)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        output: Tensor = self.heads[head](self.trunk(x))
        return output


class _Saved:
    """A tensor that a graph keeps for its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _two_losses(
    model: nn.Module, accumulation: px.GradientAccumulation, parts: list[tuple[Tensor, Tensor]]
) -> None:
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def keep(tensor: Tensor) -> _Saved:
        alive.add(saved := _Saved(tensor))
        return saved

    for inputs, targets in parts:
        with accumulation.microbatch(n_losses=2):
            for head in range(2):
                assert not alive  # one graph at a time
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
                    loss = mse(model(inputs, head), targets)
                assert alive
                accumulation.backward(loss)


def _losses_case(processes: Processes | None, unused: bool = False) -> None:
    torch.manual_seed(0)
    model = _TwoHeads()
    expected = copy.deepcopy(model)
    subject, events = model, []
    if processes is not None:
        subject, optimizer, events = _replica(model, find_unused_parameters=unused)
    else:
        optimizer = _sgd(model)
    its = _sgd(expected)
    accumulation = px.GradientAccumulation(subject, optimizer, 2)
    for step in range(3):
        seeds = [0] if processes is None else range(2)
        every = [_parts(2, 2, seed=10 * step + seed) for seed in seeds]
        _two_losses(subject, accumulation, every[0 if processes is None else processes.rank])
        assert accumulation.has_stepped
        its.zero_grad()
        inputs, targets = (torch.cat(x) for x in zip(*chain(*every), strict=True))
        (mse(expected(inputs, 0), targets) + mse(expected(inputs, 1), targets)).backward()
        its.step()
        for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, wanted.grad)
            torch.testing.assert_close(actual, wanted)
    if processes is not None:
        assert events.count("all_reduce") == events.count("step") == 3


def test_losses_go_back_one_after_the_other() -> None:
    _losses_case(None)


@pytest.mark.parametrize("unused", [False, True])
def test_several_losses_are_reduced_once_a_batch(two_ranks: Ranks, unused: bool) -> None:
    """Also parameters that only the first loss of the last micro-batch uses."""
    two_ranks.run(_losses_case, unused=unused)


def _early_head_case(processes: Processes) -> list[Tensor]:
    """Use a parameter in the first micro-batch alone, with ``find_unused_parameters``."""
    torch.manual_seed(0)
    ddp, optimizer, _ = _replica(_TwoHeads(), find_unused_parameters=True)
    accumulation = px.GradientAccumulation(ddp, optimizer, 2)
    for head, (inputs, targets) in enumerate(_parts(2, 2, seed=processes.rank)):
        with accumulation.microbatch():
            accumulation.backward(mse(ddp(inputs, head), targets))
    return [x.detach() for x in ddp.parameters()]


def test_a_parameter_that_the_last_micro_batch_does_not_use(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_early_head_case)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_losses_of_one_forward_and_wrong_counts() -> None:
    model, ((inputs, targets),) = dense(2), _parts(4)
    accumulation = px.GradientAccumulation(model, _sgd(model), 1)
    expected = copy.deepcopy(model)
    with accumulation.microbatch(n_losses=2):
        output = model(inputs)
        accumulation.backward(mse(output, targets), retain_graph=True)
        accumulation.backward(output.square().mean())
    output = expected(inputs)
    (mse(output, targets) + output.square().mean()).backward()
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)

    def go_back(n_times: int, n_losses: int) -> None:
        with accumulation.microbatch(n_losses=n_losses):
            for _ in range(n_times):
                accumulation.backward(mse(model(inputs), targets))

    with pytest.raises(ExecutionError, match="has had 1 of 2 backwards"):
        go_back(1, 2)
    with pytest.raises(ExecutionError, match=r"3 times in one block; give microbatch\(n_losses=3"):
        go_back(3, 2)
    with pytest.raises(ArgumentError, match="n_losses must be at least 1"):
        go_back(1, 0)
    go_back(2, 2)
    assert accumulation.has_stepped


def test_two_forwards_of_gpipe_go_back_by_themselves() -> None:
    module, ((inputs, targets),) = dense(2), _parts(4)
    model = px.GPipe(
        copy.deepcopy(module), [1, len(module) - 1], devices=["cpu"] * 2, chunks=2, threads=False
    )
    losses = [mse(model(inputs), targets), model(inputs).square().mean()]
    for loss in losses:
        loss.backward()
    (mse(module(inputs), targets) + module(inputs).square().mean()).backward()
    for actual, wanted in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)


# What accumulation is not


@pytest.mark.parametrize(
    ("reduction", "factor", "times"),
    [("mean", 1.0, 1.0), ("mean", 1 / 4, 4.0), ("sum", 1.0, 4.0), ("sum", 4.0, 1.0)],
)
def test_dividing_both_data_and_loss_is_wrong(reduction: str, factor: float, times: float) -> None:
    """Gradients are K times too small where a loss is divided that cutting the data has divided.

    `backward` divides by K = 4. That is right for means over micro-batches; not if the loop does so
    too, nor for sums over micro-batches, which are smaller already.
    """
    model, parts = dense(2), _parts(2, 2, 2, 2)
    whole = copy.deepcopy(model)
    inputs, targets = (torch.cat(x) for x in zip(*parts, strict=True))
    nn.functional.mse_loss(whole(inputs), targets, reduction=reduction).backward()
    accumulation = px.GradientAccumulation(model, _sgd(model), 4)
    for x, y in parts:
        with accumulation.microbatch():
            loss = nn.functional.mse_loss(model(x), y, reduction=reduction)
            accumulation.backward(loss * factor)
    for actual, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert actual.grad is not None
        torch.testing.assert_close(times * actual.grad, wanted.grad)


def _with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.BatchNorm1d(16)), nn.Linear(16, 16))


def _warnings(model: nn.Module, n_steps: int = 2, n_batches: int = 2) -> list[str]:
    accumulation = px.GradientAccumulation(model, _sgd(model), n_steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(accumulation, _parts(*[4] * n_steps * n_batches))
    return [str(x.message) for x in caught if issubclass(x.category, BatchNormWarning)]


def test_batch_norms_in_training_mode_are_named_once() -> None:
    (warning,) = _warnings(_with_norm())
    assert "'1.0' normalize each of 2 micro-batches" in warning
    (warning,) = _warnings(nn.Sequential(nn.BatchNorm1d(16, track_running_stats=False)).eval())
    assert "'0'" in warning  # which has no statistics but the micro-batch's
    frozen = _with_norm()
    frozen[1].eval()
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(_with_norm(), chunks=2)
    for model in (frozen, _with_norm().eval(), deferred, dense(2)):
        assert _warnings(model) == []
    assert _warnings(_with_norm(), n_steps=1) == []


def test_deferred_batch_norm_has_the_statistics_of_the_batch() -> None:
    plain = _with_norm()
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=2)
    parts = _parts(4, 4)
    _run(px.GradientAccumulation(deferred, _sgd(deferred), 2), parts)
    plain(torch.cat([inputs for inputs, _ in parts]))
    for actual, wanted in zip(deferred.buffers(), plain.buffers(), strict=False):
        if actual.shape == wanted.shape:
            torch.testing.assert_close(actual, wanted)


def test_pipelines_name_batch_norms_too() -> None:
    ((inputs, targets),) = _parts(8)

    def warnings_of(run: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                run()
        assert all(x.filename == __file__ for x in caught)
        return [str(x.message) for x in caught if issubclass(x.category, BatchNormWarning)]

    for deferred, n_chunks, n_warnings in ((False, 2, 1), (True, 2, 0), (False, 1, 0)):
        model = px.GPipe(_with_norm(), [2, 1], devices=["cpu"] * 2, chunks=n_chunks,
                         deferred_batch_norm=deferred, threads=False)  # fmt: skip
        texts = warnings_of(lambda model=model: model(inputs))  # type: ignore[misc]
        assert len(texts) == n_warnings
        assert all("'1.0'" in text and "deferred_batch_norm=True" in text for text in texts)
    layers = _with_norm()
    stages = [layers[:1], layers[1:]]
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, pin_threads=False) as pipeline:
        (text,) = warnings_of(lambda: pipeline.step(inputs, targets))
        assert "'1.0 of stage 1' normalize each of 4" in text
        assert warnings_of(lambda: pipeline.with_graph(graph).step(inputs, targets)) == []


@pytest.mark.parametrize(("rule", "expected"), [("linear", 1.6), ("sqrt", 0.4), ("none", 0.1)])
def test_learning_rates_are_scaled_by_a_named_rule(rule: Any, expected: float) -> None:
    assert scaled_learning_rate(0.1, 4096, 256, rule=rule) == pytest.approx(expected)
    with pytest.raises(ArgumentError, match="unknown rule 'cubic'"):
        scaled_learning_rate(0.1, 4096, 256, rule="cubic")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number"):
        scaled_learning_rate(-0.1, 4096, 256, rule=rule)
