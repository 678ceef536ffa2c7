"""Two configurations of one model: equal by mathematics, or broken by a layer that is named."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeexec as px
from pipeexec.validation.small_runs import small_runs
from pipesim.errors import PipeError
from pipesim.planning.choice import PlanChoice

WIDTH = 4


def mlp() -> nn.Sequential:
    """Linear layers, and norms over the features of one sample."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH),
        nn.GroupNorm(2, WIDTH), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def check(
    model: Any, b: dict[str, Any], loss_fn: Any = nn.functional.mse_loss, **options: Any
) -> Any:
    """Compare the whole model at once with another configuration."""
    return px.check_equivalent(model, {}, b, batch(), loss_fn, **options)


@pytest.mark.parametrize(
    "b",
    [
        {"n_microbatches": 2},
        {"n_microbatches": 4, "recompute": "always"},
        {"n_stages": 2, "n_microbatches": 4},
        {"n_replicas": 2, "n_microbatches": 2},
        {"n_stages": 2, "n_replicas": 2, "n_microbatches": 2, "schedule": "zb_h1"},
        {"n_stages": 4, "n_chunks": 2, "n_microbatches": 4, "recompute": "except_last"},
    ],
)
def test_equal_by_mathematics(b: dict[str, Any]) -> None:
    """Accumulation, stages, replicas and recompute give the gradients of torch, up to rounding."""
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    report = check(model, b)
    assert report.equal, report
    assert report.layers == ()
    assert list(report.table.index) == [path for path, _ in model.named_parameters()]
    x, y = batch()
    assert report.losses == pytest.approx([float(nn.functional.mse_loss(model(x), y).detach())] * 2)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_single_precision() -> None:
    """Rounding in single precision is wider, and still explained."""
    report = check(mlp(), {"n_stages": 2, "n_microbatches": 4}, dtype=None)
    assert report.equal
    assert 1e-6 < report.table["gradient_limit"].max() < 1e-2


class Shift(nn.Module):
    """Add one number to all features."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_a_gradient_of_zero() -> None:
    """A shift before a norm has no gradient but rounding, which Adam turns into an update."""
    layers = list(mlp())
    report = check(nn.Sequential(*layers[:2], Shift(), *layers[2:]), {"n_microbatches": 4})
    row = report.table.loc["2.shift"]
    assert 0 < row["gradient"] < 1e-14
    assert row["adam"] > 1e3 * row["sgd"] > 0
    assert report.equal, report.table.to_string()


class Centered(nn.Module):
    """Subtract the mean of the micro-batch; no norm of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    """Scale by the number of calls."""

    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return x * self.n_calls


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(WIDTH), "mean and variance of a micro-batch"),
        (nn.Dropout(0.5), "draws random numbers"),
        (Centered(), "depends on the other samples"),
        (Counting(), "changes from call to call"),
    ],
)
def test_the_layer_is_named(layer: nn.Module, reason: str) -> None:
    """The innermost module that differs alone is named, and no other."""
    layers = list(mlp())
    model = nn.Sequential(*layers[:3], nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), *layers[4:])
    report = check(model, {"n_microbatches": 2})
    assert not report.equal
    (broken,) = report.layers
    assert (broken.path, broken.kind) == ("3.1", type(layer).__name__)
    assert reason in broken.reason
    assert "3.1" in str(report)
    assert not report.table["equal"].all()


def test_layers_that_would_break_but_do_not() -> None:
    """Batch norm in evaluation mode, and micro-batches of the same samples, are equal."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    assert check(copy.deepcopy(model).eval(), {"n_microbatches": 2}).equal
    a, b = {"n_microbatches": 4}, {"n_microbatches": 2, "n_replicas": 2}
    report = px.check_equivalent(model, a, b, batch(), nn.functional.mse_loss)
    assert report.equal, report


def test_a_mean_over_unmasked_values() -> None:
    """Micro-batches with unlike numbers of values: the loss is named; with its count, equal."""
    x, y = batch()
    y[:3] = 0

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target)[target != 0] ** 2).mean()

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return ((output - target)[target != 0] ** 2).sum(), (target != 0).sum()

    report = px.check_equivalent(mlp(), {}, {"n_microbatches": 2}, (x, y), mean)
    assert not report.equal
    assert [layer.path for layer in report.layers] == ["loss_fn"]
    assert "return (sum, count)" in report.layers[0].reason
    assert px.check_equivalent(mlp(), {}, {"n_microbatches": 2}, (x, y), counted).equal


def test_a_mean_over_no_value() -> None:
    """A micro-batch without any value makes the loss NaN there alone: the loss is named."""
    x, y = batch()
    y[:4] = 0

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target)[target != 0] ** 2).mean()

    report = px.check_equivalent(mlp(), {}, {"n_microbatches": 2}, (x, y), mean)
    assert [layer.path for layer in report.layers] == ["loss_fn"]
    assert "finite for the batch, but not for each of 1 and 2" in report.layers[0].reason
    assert not report.equal


@pytest.mark.filterwarnings("error")
def test_losses_that_overflow() -> None:
    """No layer is named, as none differs; the note says why nothing can be compared."""
    report = check(mlp(), {"n_microbatches": 2}, lambda output, y: (output - y).sum() * 1e308 * 10)
    assert not report.equal
    assert report.layers == ()
    assert "are not both finite; look at the inputs" in report.notes[0]


def test_buffers() -> None:
    """Running statistics of unlike micro-batches differ and are listed, but do not count."""
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH))
    names = [f"0.{name}" for name, _ in norm.named_buffers()]
    report = check(copy.deepcopy(model).eval(), {"n_microbatches": 2})
    assert (report.equal, report.buffers) == (True, ())
    report = check(model, {"n_stages": 2, "n_microbatches": 1})
    assert (report.equal, report.buffers) == (True, ())
    report = check(model, {"n_microbatches": 2})
    assert set(report.buffers) == set(names)
    assert f"buffers that differ after a step: {names[0]}" in str(report)


def tied() -> nn.Sequential:
    """Return layers of which the first and the last have one weight."""
    model = mlp()
    last = model[5]
    assert isinstance(last, nn.Linear)
    last.weight = model[0].weight  # type: ignore[assignment]
    return model


def test_tied_weights_on_one_stage() -> None:
    """Weights may be tied on one stage."""
    assert check(tied(), {"n_microbatches": 2}).equal


class _Scaled(torch.autograd.Function):
    """Identity whose gradient grows with the micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * len(gradient)


class Scaled(nn.Module):
    """Module of `_Scaled`."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Scaled.apply(x)  # type: ignore[no-untyped-call]
        return result


def test_a_wrong_backward() -> None:
    """Gradients before the layer differ, and no others; no output does, and the note says so."""
    layers = list(mlp())
    report = check(nn.Sequential(*layers[:3], Scaled(), *layers[3:]), {"n_microbatches": 2})
    assert report.losses[0] == pytest.approx(report.losses[1], rel=1e-12)
    assert report.table["equal"].tolist() == [False] * 4 + [True] * 6
    assert not report.equal
    assert report.layers == ()
    assert "no layer differs alone; the gradient of " in report.notes[0]


def choice(**values: Any) -> PlanChoice:
    """Return a configuration of 64 GPUs."""
    defaults = {
        "tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 4, "microbatch_size": 2,
        "n_microbatches": 16, "schedule": "1f1b", "n_chunks": 1, "recompute": "none",
        "shard_optimizer": True, "sequence_parallel": True, "layers_per_stage": (2, 2, 2, 2),
    } | values  # fmt: skip
    return PlanChoice(**defaults)


def test_choices_of_a_plan() -> None:
    """Counts are scaled down; sizes of micro-batches keep their ratio."""
    one = choice()
    other = choice(microbatch_size=4, data_parallel=8, n_microbatches=4, recompute="full",
                   schedule="interleaved_1f1b", n_chunks=2)  # fmt: skip
    small, large = small_runs(one, other, 16, 6)
    assert (small.n_devices, small.n_replicas, small.n_microbatches) == (2, 2, 4)
    assert (large.n_stages, large.n_replicas, large.n_microbatches) == (4, 2, 2)
    assert (small.recompute, large.recompute) == ("never", "always")
    report = px.check_equivalent(mlp(), one, other, batch(16), nn.functional.mse_loss)
    assert report.equal, report
    assert "not run: tensor parallelism, the sharded optimizer" in report.notes[0]
    model = nn.Sequential(*mlp()[:4], nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    report = px.check_equivalent(model, one, other, batch(16), nn.functional.mse_loss)
    assert [layer.path for layer in report.layers] == ["4"]
    assert [run.n_parts for run in small_runs(one, choice(microbatch_size=3), 48, 6)] == [6, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": {"n_microbatches": 3}}, "b: 8 samples do not divide into 3 equal micro-batches"),
        ({"b": {"n_stages": 7}}, "b has 7 stages, but the model has 6 layers"),
        ({"b": {"stages": 2}}, r"unknown key of b 'stages'; did you mean 'n_stages'"),
        ({"b": {"n_stages": 3, "n_chunks": 2}}, "3 stages do not divide into 2 chunks"),
        ({"b": {"n_stages": 2, "schedule": "zbv"}}, "zbv has 4 stages on 2 devices, not 2"),
        ({"b": {"recompute": "full"}}, "unknown b: recompute 'full'"),
        ({"a": choice()}, "a must be a mapping such as"),
        (
            {"a": choice(), "b": choice(microbatch_size=3)},
            "8 samples .* give a batch of 48 samples",
        ),
        ({"model": 3}, "model must be an nn.Sequential"),
        ({"batch": 3}, "batch must be a pair of inputs and targets"),
        ({"model": nn.Sequential(nn.Tanh())}, "model has no parameter that needs a gradient"),
        ({"model": mlp().requires_grad_(False)}, "model has no parameter that needs a gradient"),
        ({"model": mlp().bfloat16(), "dtype": None}, "torch.bfloat16 has too few digits"),
        ({"dtype": torch.float16}, "torch.float16 has too few digits .* dtype=torch.float64"),
        ({"model": tied(), "b": {"n_stages": 2}}, r"b: stages 0 and 1 of 2 share .*n_stages=1"),
        (
            {"a": {"n_stages": 2, "n_microbatches": 4, "schedule": "pipedream_2bw"}},
            "a: pipedream_2bw computes gradients with older weights",
        ),
        (
            {"a": {"n_stages": 2, "n_microbatches": 4, "schedule": "seq1f1b"}},
            "a: seq1f1b runs slices of sequences",
        ),
        ({"batch": (batch()[0] * math.nan, batch()[1])}, "batch: the inputs have NaN"),
        ({"learning_rate": 0}, "learning_rate must be finite and above 0"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    """The argument is named, and a value that works."""
    good: dict[str, Any] = {
        "model": mlp(), "a": {}, "b": {}, "batch": batch(), "loss_fn": nn.functional.mse_loss,
    }  # fmt: skip
    with pytest.raises(PipeError, match=message):
        px.check_equivalent(**good | changes)
