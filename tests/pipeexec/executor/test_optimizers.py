"""Optimizers of stages: groups by name, frozen stages, kinds of optimizers; against torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from parity import lowered
from ranks import Ranks
from small_pipelines import cut, data, dense, mse, pipeline
from split_models import Language
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

BATCHES = [data(12, seed=k) for k in range(4)]
WORDS = torch.arange(24).reshape(4, 6) % 11


def trained(subject: px.Pipeline, batches: Iterable[Any] = BATCHES) -> list[float]:
    return [subject.gather(subject.step(*batch)).loss.item() for batch in batches]


def trained_whole(
    model: nn.Module, optimizer: Optimizer, loss_fn: Any = mse, batches: Iterable[Any] = BATCHES
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_parameters(stages: Iterable[nn.Module | None], model: nn.Module) -> None:
    own = [p for stage in stages if stage is not None for p in stage.parameters()]
    for p, whole in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(p, whole, rtol=1e-4, atol=1e-6)


# Groups by name


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return SGD with weight decay for the matrices of blocks, and a low rate for embeddings."""
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "embedding": [], "rest": []}
    for name, parameter in named_parameters:
        is_matrix = name.startswith("blocks.") and parameter.dim() == 2
        is_embedding = name in ("words.weight", "places.weight")
        kind = "decay" if is_matrix else "embedding" if is_embedding else "rest"
        groups[kind].append(parameter)
    return SGD(
        [
            {"params": groups["decay"], "weight_decay": 0.5},
            {"params": groups["embedding"], "lr": 0.01},
            {"params": groups["rest"]},
        ],
        lr=0.1,
        momentum=0.9,
    )


def logits_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("n_stages", [2, 3])
def test_groups_by_name_are_those_of_the_unsplit_model(n_stages: int) -> None:
    """Names are those in the model; a group may be empty in a stage."""
    torch.manual_seed(0)
    model = Language(3)
    whole, batches = copy.deepcopy(model), [(WORDS, WORDS.roll(1, 1))] * 3
    expected = trained_whole(whole, by_name(whole.named_parameters()), logits_loss, batches)
    stages = px.split(model, n_stages, sample=WORDS)
    with pipeline(stages, lowered("1f1b", n_stages, 2), logits_loss, by_name) as subject:
        losses = trained(subject, batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    groups = [[len(g["params"]) for g in x.param_groups] for x in subject.optimizers if x]
    assert [sum(row) for row in zip(*groups, strict=True)] == [3 * 4, 2, 3 * 8 + 4]
    assert groups[-1][1] == 0  # the last stage has no embedding
    own = dict(model.named_parameters())
    for name, p in whole.named_parameters():
        torch.testing.assert_close(own[name], p, rtol=1e-4, atol=1e-6)


def test_optimizers_may_take_the_pairs_themselves() -> None:
    """Then torch keeps the names with the state."""
    torch.manual_seed(0)
    stages = px.split(Language(2), 2, sample=WORDS)
    with pipeline(
        stages,
        lowered("gpipe", 2, 2),
        logits_loss,
        lambda named_parameters: AdamW(named_parameters, lr=0.01),
    ) as subject:
        names = [x.param_groups[0]["param_names"] for x in subject.optimizers if x]
    assert [name for row in names for name in row] == [x for x, _ in Language(2).named_parameters()]


def test_names_of_hand_cut_stages_are_those_in_the_stage() -> None:
    names: list[list[str]] = []

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        pairs = list(named_parameters)
        names.append([name for name, _ in pairs])
        return SGD(pairs, lr=0.1)

    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, factory):
        assert names == [["0.0.weight", "0.0.bias"], ["1.0.weight", "1.0.bias"]]


def _named_in_process(processes: Processes) -> list[float]:
    torch.manual_seed(0)
    stages = px.split(Language(2), 2, sample=WORDS, only=[processes.rank])
    graph = lowered("1f1b", 2, 2)
    with px.Pipeline(stages, graph, ["cpu"], logits_loss, by_name, processes=processes) as subject:
        return trained(subject, [(WORDS, WORDS.roll(1, 1))] * 3)


@pytest.mark.slow
def test_groups_by_name_in_two_processes(two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Language(2)
    batches = [(WORDS, WORDS.roll(1, 1))] * 3
    expected = trained_whole(model, by_name(model.named_parameters()), logits_loss, batches)
    for losses in two_ranks.run(_named_in_process):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_pairs_beside_an_empty_group_are_refused_with_advice() -> None:
    """Torch takes names for all groups or none, and an empty group has none."""

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return AdamW([{"params": []}, {"params": list(named_parameters)}])

    with pytest.raises(ArgumentError, match=r"stage 0: ValueError.*put parameters, not pairs"):
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, factory)


# Frozen parameters


class LoRA(nn.Module):
    """A frozen layer, and a product of two small matrices that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + x @ self.down.T @ self.up.T)


def lora_model(*, frozen_first: bool) -> nn.Sequential:
    """Return four layers with LoRA; the first two have none if they are frozen whole."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [LoRA(nn.Linear(16, 16)) for _ in range(4)]
    if frozen_first:
        layers[:2] = [nn.Linear(16, 16).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(*layers)


def trainable(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer of what is trained, as people write it."""
    return AdamW([p for p in parameters if p.requires_grad], lr=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("factory", [trainable, partial(AdamW, lr=0.05)])
def test_frozen_stages_train_as_the_unsplit_model(
    schedule: str, recompute: Any, frozen_first: bool, factory: Callable[..., Optimizer]
) -> None:
    """The first stage may be frozen whole: it has no optimizer if the factory leaves it out."""
    model = lora_model(frozen_first=frozen_first)
    whole = copy.deepcopy(model)
    expected = trained_whole(whole, factory(whole.parameters()))
    stages = cut(model, [2, 2])
    graph = lowered(schedule, 2, 3, recompute=recompute)
    with pipeline(stages, graph, mse, factory) as subject:
        assert trained(subject) == pytest.approx(expected, rel=1e-4)
        assert (subject.optimizers[0] is None) == (frozen_first and factory is trainable)
    assert_same_parameters(stages, whole)
    if frozen_first:
        assert all(p.grad is None for p in stages[0].parameters())


def test_a_frozen_stage_and_a_loss_with_a_count() -> None:
    """Its gradients, of which there are none, need no division by the count."""
    model = lora_model(frozen_first=True)
    whole = copy.deepcopy(model)
    expected = trained_whole(whole, trainable(whole.parameters()))

    def loss_fn(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (output - y).square().sum(), y.numel()

    with pipeline(cut(model, [2, 2]), lowered("1f1b", 2, 3), loss_fn, trainable) as subject:
        assert trained(subject) == pytest.approx(expected, rel=1e-4)


# Kinds of optimizers

KINDS: dict[str, Callable[..., Optimizer]] = {
    "foreach": partial(AdamW, lr=0.02, foreach=True),
    "fused": partial(AdamW, lr=0.02, fused=True),
    "fused SGD": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "state on tensors": partial(Adam, lr=torch.tensor(0.02), amsgrad=True, foreach=False),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_step_as_on_the_unsplit_model(kind: str) -> None:
    model = dense(3)
    whole = copy.deepcopy(model)
    expected = trained_whole(whole, KINDS[kind](whole.parameters()))
    with pipeline(cut(model, [1, 2]), lowered("1f1b", 2, 3), mse, KINDS[kind]) as subject:
        assert trained(subject) == pytest.approx(expected, rel=1e-4)
    assert_same_parameters(model, whole)


def test_a_factory_may_attach_a_scheduler() -> None:
    """Torch's schedulers wrap the method ``step`` of their optimizer."""

    def factory(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = AdamW(parameters, lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    model = dense(2)
    whole = copy.deepcopy(model)
    expected = trained_whole(whole, factory(whole.parameters()))
    with pipeline(cut(model, [1, 1]), lowered("1f1b", 2, 3), mse, factory) as subject:
        assert trained(subject) == pytest.approx(expected, rel=1e-4)
    assert_same_parameters(model, whole)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"stage 0 \(LBFGS\) needs a closure in step\(\)"):
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, torch.optim.LBFGS)


def test_a_failing_factory_names_the_stage() -> None:
    def factory(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=-1)

    with pytest.raises(ArgumentError, match="stage 0: ValueError: Invalid learning rate: -1"):
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, factory)
