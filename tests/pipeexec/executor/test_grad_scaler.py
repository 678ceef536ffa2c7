"""Scaled losses against torch's loop over the unsplit model with a `torch.amp.GradScaler`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from parity import lowered
from ranks import Ranks
from small_pipelines import cut, data, dense, mse, pipeline
from torch import Tensor, nn
from torch.amp import GradScaler

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ArgumentTypeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("error::pipesim.errors.LossWarning"),
]

N_MICROBATCHES = 3
Batch = tuple[Tensor, Tensor]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def scaler(scale: float = 2.0**10) -> GradScaler:
    """Return a scaler that grows soon."""
    return GradScaler("cpu", init_scale=scale, growth_interval=2)


def batches(overflow: int | None = 1) -> list[Batch]:
    """Return five batches; the loss of one overflows."""
    values = [data(12, seed=k) for k in range(5)]
    if overflow is not None:
        values[overflow][1].fill_(1e38)
    return values


class Steps(NamedTuple):
    """Results of steps: losses, scales after them, whether they were skipped, weights."""

    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    weights: list[Tensor]


def torch_steps(
    model: nn.Module,
    steps: Sequence[Batch],
    scaler: GradScaler,
    *,
    dtype: torch.dtype | None = None,
    max_norm: float | None = None,
) -> Steps:
    """Train the unsplit model with torch's loop, over the same micro-batches."""
    optimizer = adam(model.parameters())
    losses, scales, skipped = [], [], []
    for inputs, targets in steps:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(N_MICROBATCHES), targets.chunk(N_MICROBATCHES), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
                loss = mse(model(x), y) / N_MICROBATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        losses.append(total)
        scales.append(scaler.get_scale())
        skipped.append(scaler.get_scale() < scale)
    return Steps(losses, scales, skipped, [p.detach() for p in model.parameters()])


def pipeline_steps(
    subject: px.Pipeline,
    steps: Sequence[Batch],
    scaler: GradScaler,
    dtype: torch.dtype | None = None,
) -> Steps:
    losses, scales, skipped = [], [], []
    for inputs, targets in steps:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = subject.gather(subject.step(inputs, targets))
        losses.append(result.loss.item())
        scales.append(scaler.get_scale())
        skipped.append(result.skipped)
    weights = [p.detach() for m in subject.modules for p in m.parameters()]
    return Steps(losses, scales, skipped, weights)


def assert_equal_steps(actual: Steps, expected: Steps) -> None:
    assert actual.scales == expected.scales
    assert actual.skipped == expected.skipped
    assert actual.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("gpipe", {"recompute": "always"}),
        ("zb_h1", {}),
        ("1f1b", {"grad_sync": "bucketed", "n_replicas": 3}),
        ("1f1b", {"hosts": "per_device", "host_threads": True}),
    ],
)
def test_steps_are_those_of_torch(
    schedule: str, options: dict[str, Any], max_norm: float | None
) -> None:
    """The second one overflows: no stage steps, and the scale halves; later it grows."""
    model = dense(4)
    expected = torch_steps(copy.deepcopy(model), batches(), scaler(), max_norm=max_norm)
    assert expected.skipped == [False, True, False, False, False]
    n = N_MICROBATCHES // options.get("n_replicas", 1)
    graph = lowered(schedule, 2, n, grad_norm=True, **options)
    own = scaler()
    with pipeline(
        cut(model, [2, 2]), graph, mse, adam, grad_scaler=own, max_grad_norm=max_norm
    ) as subject:
        actual = pipeline_steps(subject, batches(), own)
    assert_equal_steps(actual, expected)
    for p, other in zip(actual.weights, expected.weights, strict=False):
        torch.testing.assert_close(p, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_scale_that_16_bits_do_not_hold(schedule: str) -> None:
    """Under autocast: steps are skipped until gradients are finite."""
    model = dense(4)
    steps = batches(overflow=None) * 4
    expected = torch_steps(copy.deepcopy(model), steps, scaler(2.0**30), dtype=torch.float16)
    assert 2 < sum(expected.skipped) < len(steps)
    own = scaler(2.0**30)
    graph = lowered(schedule, 2, N_MICROBATCHES, grad_norm=True)
    with pipeline(cut(model, [2, 2]), graph, mse, adam, grad_scaler=own) as subject:
        assert_equal_steps(pipeline_steps(subject, steps, own, torch.float16), expected)


def test_the_norm_is_that_of_the_gradients_without_the_scale() -> None:
    norms = []
    for own in (None, scaler(2.0**14)):
        graph = lowered("1f1b", 2, N_MICROBATCHES, grad_norm=True)
        with pipeline(cut(dense(4), [2, 2]), graph, mse, adam, grad_scaler=own) as subject:
            norms.append(subject.step(*data(12)).grad_norm)
    torch.testing.assert_close(norms[0], norms[1])


def test_a_loss_with_a_count() -> None:
    """Gradients are divided by the scale and by the count."""

    def loss_fn(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (output - y).square().sum(), y.numel()

    model, own = dense(4), scaler()
    expected = torch_steps(copy.deepcopy(model), batches(), scaler())
    graph = lowered("1f1b", 2, N_MICROBATCHES, grad_norm=True)
    with pipeline(cut(model, [2, 2]), graph, loss_fn, adam, grad_scaler=own) as subject:
        assert_equal_steps(pipeline_steps(subject, batches(), own), expected)


def test_training_goes_on_with_the_state_of_the_scaler() -> None:
    model = dense(4)
    expected = torch_steps(copy.deepcopy(model), batches(), scaler())
    graph = lowered("1f1b", 2, N_MICROBATCHES, grad_norm=True)
    stages, first, second = cut(model, [2, 2]), scaler(), GradScaler("cpu")
    with pipeline(stages, graph, mse, adam, grad_scaler=first) as subject:
        before = pipeline_steps(subject, batches()[:3], first)
        state = subject.optimizer_state_dict()
    second.load_state_dict(first.state_dict())
    with pipeline(stages, graph, mse, adam, grad_scaler=second) as subject:
        subject.load_optimizer_state_dict(state)
        after = pipeline_steps(subject, batches()[3:], second)
    assert before.scales + after.scales == expected.scales
    assert before.losses + after.losses == pytest.approx(expected.losses, rel=1e-4)


def test_steps_whose_gradients_add_up() -> None:
    """They have one scale, which the last of them changes."""
    model, own = dense(4), scaler()
    pairs = [(batches(None)[k], batches(None)[k + 1]) for k in (0, 2)]
    joined = [tuple(torch.cat(column) for column in zip(*pair, strict=True)) for pair in pairs]
    expected = torch_steps(copy.deepcopy(model), joined, scaler())  # type: ignore[arg-type]
    graph = lowered("1f1b", 2, N_MICROBATCHES, grad_norm=True)
    with pipeline(cut(model, [2, 2]), graph, mse, adam, grad_scaler=own) as subject:
        for first, second in pairs:
            subject.step(*first, accumulate=True)
            subject.step(*second)
        weights = [p.detach() for m in subject.modules for p in m.parameters()]
    assert own.get_scale() == expected.scales[-1]
    for p, other in zip(weights, expected.weights, strict=True):
        torch.testing.assert_close(p, other, rtol=1e-4, atol=1e-5)


def test_steps_without_a_trace_leave_the_scale() -> None:
    own = scaler()
    graph = lowered("1f1b", 2, N_MICROBATCHES, grad_norm=True)
    with pipeline(cut(dense(4), [2, 2]), graph, mse, adam, grad_scaler=own) as subject:
        state = own.state_dict()
        subject.held_bytes(*batches()[1])
        assert own.state_dict() == state


def test_a_scaler_that_is_switched_off_does_nothing() -> None:
    """As in torch, also without the norm in the graph."""
    disabled = GradScaler("cpu", enabled=False)
    graph = lowered("1f1b", 2, N_MICROBATCHES)
    losses = []
    for own in (None, disabled):
        with pipeline(cut(dense(4), [2, 2]), graph, mse, adam, grad_scaler=own) as subject:
            losses.append([subject.step(*batch).loss.item() for batch in batches(None)])
    assert losses[0] == losses[1]


def test_wrong_arguments_are_refused() -> None:
    stages, norm = cut(dense(2), [1, 1]), lowered("1f1b", 2, 2, grad_norm=True)
    with pytest.raises(ArgumentError, match=r"grad_scaler is given, but.*grad_norm=True"):
        pipeline(stages, lowered("1f1b", 2, 2), mse, adam, grad_scaler=scaler())
    with pytest.raises(ArgumentError, match="without an optimizer"):
        pipeline(stages, norm, grad_scaler=scaler())
    with pytest.raises(ArgumentTypeError, match=r"grad_scaler must be a torch.*GradScaler"):
        pipeline(stages, norm, mse, adam, grad_scaler=2.0**16)
    with (
        pipeline(stages, norm, mse, adam, grad_scaler=scaler()) as subject,
        pytest.raises(ArgumentError, match="grad_scaler is given, but"),
    ):
        subject.with_graph(lowered("gpipe", 2, 2))


def _in_process(processes: Processes, schedule: str, scales: list[float]) -> Any:
    stages: list[nn.Module | None] = list(cut(dense(4), [2, 2]))
    stages[1 - processes.rank] = None
    graph = lowered(schedule, 2, N_MICROBATCHES, grad_norm=True)
    own = scaler(scales[processes.rank])
    try:
        with px.Pipeline(
            stages, graph, ["cpu"], mse, adam, processes=processes, grad_scaler=own
        ) as subject:
            return tuple(pipeline_steps(subject, batches(), own))
    except ArgumentError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_processes_skip_together(two_ranks: Ranks, schedule: str) -> None:
    expected = torch_steps(dense(4), batches(), scaler())
    for losses, scales, skipped, _ in two_ranks.run(
        _in_process, schedule=schedule, scales=[2.0**10] * 2
    ):
        assert scales == expected.scales
        assert skipped == expected.skipped
        assert losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.slow
def test_processes_must_agree_on_the_scale(two_ranks: Ranks) -> None:
    for error in two_ranks.run(_in_process, schedule="1f1b", scales=[2.0, 4.0]):
        assert "grad_scaler" in error
