"""Steps under `torch.autocast` against the unsplit model under autocast.

Casts of the unsplit model are not cached: a cached cast sums the gradients of its uses in 16 bits.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import lowered
from ranks import Ranks
from small_pipelines import assert_same, cut, data, mse, pipeline, unsplit
from split_models import Language
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipeexec.distributed import Processes

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

N_MICROBATCHES = 3
DTYPES = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    """A norm, which autocast runs in 32 bits, and two layers, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x))))


def blocks(n: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(n)))


def unsplit_under(
    dtype: torch.dtype, model: nn.Module, graph: ps.TaskGraph, *batch: Tensor, loss_fn: Any = mse
) -> Tensor:
    """Return the loss of the unsplit model, whose forward is under autocast; set its gradients."""

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype, cache_enabled=False)

    stages = [model, *[nn.Identity()] * (graph.n_stages - 1)]
    forward, loss = autocast()(model.forward), autocast()(loss_fn)
    return unsplit(stages, graph, *batch, loss, call=lambda _, __, module, x: (
        forward(*x) if module is model else x[0]))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_loss_and_gradients_are_those_of_the_unsplit_model(
    schedule: str, recompute: Any, dtype: torch.dtype
) -> None:
    """To the last bit, with recompute, and with split backwards, whose W casts the gradients."""
    model, (inputs, targets) = blocks(), data(12)
    whole, types = copy.deepcopy(model), set()

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        types.add(output.dtype)
        return mse(output, y)

    stages = cut(model, [2, 2])
    graph = lowered(schedule, 2, N_MICROBATCHES, recompute=recompute)
    with torch.autocast("cpu", dtype), pipeline(stages, graph, loss_fn) as subject:
        loss = subject.step(inputs, targets).loss
    assert torch.equal(loss, unsplit_under(dtype, whole, graph, inputs, targets))
    assert types == {dtype}
    assert_same(stages, cut(whole, [2, 2]))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_steps_with_and_without_autocast_may_follow_each_other() -> None:
    model, (inputs, targets) = blocks(), data(12)
    with pipeline(cut(model, [2, 2]), lowered("1f1b", 2, N_MICROBATCHES)) as subject:
        plain = subject.step(inputs, targets).loss
        with torch.autocast("cpu", torch.bfloat16):
            low = subject.step(inputs, targets).loss
        assert torch.equal(subject.step(inputs, targets).loss, plain)
    assert not torch.equal(low, plain)
    assert low.item() == pytest.approx(plain.item(), rel=0.05)


def test_evaluation_and_prediction() -> None:
    """Their forwards are under autocast too; the output has its type."""
    model, (inputs, targets) = blocks(), data(12)
    with pipeline(cut(model, [2, 2]), lowered("1f1b", 2, N_MICROBATCHES)) as subject:
        with torch.autocast("cpu", torch.bfloat16):
            result, output = subject.evaluate(inputs, targets), subject.predict(inputs)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), one_thread():
            expected = torch.cat([model(x) for x in inputs.chunk(N_MICROBATCHES)])
            loss = mse(expected, targets)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, expected)
        torch.testing.assert_close(result.loss, loss)
        assert subject.predict(inputs).dtype == torch.float32


WORDS = torch.arange(36).reshape(6, 6) % 11


def logits_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_split_model_under_autocast(schedule: str) -> None:
    torch.manual_seed(0)
    model = Language(4)
    whole = copy.deepcopy(model)
    stages = px.split(model, 2, sample=WORDS)
    graph = lowered(schedule, 2, N_MICROBATCHES)
    with torch.autocast("cpu", torch.bfloat16), pipeline(stages, graph, logits_loss) as subject:
        loss = subject.step(WORDS, WORDS).loss
    expected = unsplit_under(torch.bfloat16, whole, graph, WORDS, WORDS, loss_fn=logits_loss)
    assert torch.equal(loss, expected)
    own = dict(model.named_parameters())
    for name, p in whole.named_parameters():
        assert torch.equal(own[name].grad, p.grad), name


def _in_process(processes: Processes, schedule: str) -> tuple[Tensor, list[Tensor], float]:
    stages: list[nn.Module | None] = list(cut(blocks(), [2, 2]))
    stages[1 - processes.rank] = None
    graph = lowered(schedule, 2, N_MICROBATCHES)
    with (
        torch.autocast("cpu", torch.bfloat16),
        px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as subject,
    ):
        result = subject.gather(subject.step(*data(12)))
        module = stages[processes.rank]
        assert module is not None
        nbytes = result.timeline.nbytes.max()
        return result.loss, [p.grad for p in module.parameters()], float(nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_messages_between_processes_have_16_bits(two_ranks: Ranks, schedule: str) -> None:
    """Loss and gradients are those of the unsplit model, to the last bit."""
    whole, graph = blocks(), lowered(schedule, 2, N_MICROBATCHES)
    loss = unsplit_under(torch.bfloat16, whole, graph, *data(12))
    results = two_ranks.run(_in_process, schedule=schedule)
    for part, (actual, gradients, nbytes) in zip(cut(whole, [2, 2]), results, strict=True):
        assert torch.equal(actual, loss)
        for gradient, p in zip(gradients, part.parameters(), strict=True):
            assert torch.equal(gradient, p.grad)
        assert nbytes == 4 * 16 * 2  # samples, values, bytes
