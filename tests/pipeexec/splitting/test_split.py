"""Models as stages: loss and gradients of the whole model, and where cuts are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from split_models import WIDTH, WORDS, Deciding, Language, Residual, Translation, Writing
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, PipeError


def words(n: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randint(WORDS, (n, length), generator=torch.Generator().manual_seed(length))


def masked(n: int = 4, length: int = 6) -> dict[str, Any]:
    mask = torch.ones(n, length)
    mask[1, length // 2 :] = 0
    return {"words": words(n, length), "mask": mask, "places": None}


MODELS: dict[str, tuple[Any, Any]] = {
    "language": (Language, masked()),
    "language without a mask": (Language, words()),
    "translation": (Translation, (words(), words(length=3))),
    "residual": (Residual, torch.ones(2, 3, 8, 8).cumsum(3)),
    "writing": (Writing, torch.ones(2, WIDTH)),
    "sequential": (
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))), torch.ones(2, WIDTH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_computes(name):
    """Loss and gradients are equal to the last bit, for every cut into two and some into more."""
    make, sample = MODELS[name]
    torch.manual_seed(0)
    model = make()
    modules = [x for part in px.split(model, 1, sample=sample).modules for x in part]
    for first in modules[1:]:
        assert px.split(model, [first], sample=sample).check(sample) == 0.0, first
    assert px.split(model, modules[1::2], sample=sample).check(sample) == 0.0


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("gpipe", {}), ("1f1b", {}), ("interleaved_1f1b", {"n_chunks": 2}), ("zb_h1", {}),
     ("zbv", {})],
)  # fmt: skip
def test_a_step_trains_as_the_model_does(schedule, options):
    """The loss and the gradients of a step are those of the whole batch."""
    torch.manual_seed(0)
    model, batch, targets = Language(), masked(8), words(8)

    def loss_fn(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())

    whole = loss_fn(model(**batch), targets)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    order = ps.schedule(schedule, 2, 4, **options)
    stages = px.split(model, order.n_stages, sample=masked(2))
    with px.Pipeline(stages, ps.lower(order), ["cpu", "cpu"], loss_fn) as pipeline:
        result = pipeline.step(batch, targets)
    torch.testing.assert_close(result.loss, whole.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_numbers_that_the_forward_reads():
    """Branches depend on an argument and on the first block, on the last stage, too."""
    torch.manual_seed(0)
    stages = px.split(Deciding(), 3, sample=(torch.ones(2, WIDTH), torch.zeros(2)))
    for x in (torch.ones(2, WIDTH), -torch.ones(2, WIDTH)):
        for flag in (torch.zeros(2), torch.ones(2)):
            assert stages.check((x, flag)) == 0.0


def test_batches_of_other_sizes():
    """The sample fixes neither the number of sequences nor their length."""
    stages = px.split(Language(), 3, sample=masked(2, 4))
    assert stages.check(masked(5, 9)) == 0.0


@pytest.mark.parametrize(
    ("stages", "options", "blocks"),
    [
        (2, {}, (3, 2)),
        ([1, 3, 1], {}, (1, 3, 1)),
        ([0, 5, 0], {}, (0, 5, 0)),
        ("Et*2|t|t*2L", {}, (2, 1, 2)),
        (["blocks.1", "blocks.4"], {}, (1, 3, 1)),
        (2, {"balance": "parameters"}, (2, 3)),
    ],
)
def test_cuts(stages, options, blocks):
    """A number of stages, blocks of each, a layout, or first modules."""
    parts = px.split(Language(5), stages, sample=words(), **options).modules
    counts = tuple(sum(x.startswith("blocks.") for x in part) for part in parts)
    assert counts == blocks
    assert parts[0][:2] == ("words", "places")
    assert parts[-1][-1] == "head"


def test_a_heavy_head_weighs():
    """With as many parameters as all blocks, the head is a stage of its own."""
    model = Language(4)
    model.head = nn.Linear(WIDTH, 1000)
    stages = px.split(model, 2, sample=words(), balance="parameters")
    assert [sum(x.startswith("blocks.") for x in part) for part in stages.modules] == [3, 1]


def test_parameters_are_those_of_the_model():
    """Each stage has its own ones, with the model's names; together they are all."""
    model = Translation()
    stages = px.split(model, 3, sample=(words(), words()))
    names = {id(p): name for name, p in model.named_parameters()}
    of_stages = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert names[id(parameter)] == name.removeprefix("model.")
            of_stages[id(parameter)] = name
    assert set(of_stages) == set(names)


class Cache(nn.Module):
    """Blocks that write to a list, which the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.kept: list[torch.Tensor] = []
        self.blocks[0].register_forward_hook(lambda _, args, out: self.kept.append(out * 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
        return x + self.kept[0]


class LateNoise(nn.Module):
    """Random numbers in the forward itself, which two blocks take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        for block in self.blocks:
            x = block(x + noise)
        return x


@pytest.mark.parametrize(
    ("model", "stages", "sample", "message"),
    [
        (Language(), 5, words(), "stages=5, but the model has 4 blocks .*: 'blocks.0' to"),
        (Language(), [1, 2], words(), r"stages have 3 blocks \(1, 2\), but the model has 4"),
        (Language(), [1, 0, 3], words(), "stage 1 of 3 has no module"),
        (Language(), ["blocks.1.mlp"], words(), "'blocks.1.mlp' is inside 'blocks.1'"),
        (Language(), ["block.1"], words(), "unknown module of stages 'block.1'; did you"),
        (Language(), ["blocks.2", "blocks.1"], words(), "'blocks.1' runs before 'blocks.2'"),
        (Language(), "Et*4", words(), "must end with L"),
        (Language(), 2, {"words": 3}, "sample has no tensor"),
        (Language(), 2.5, words(), "stages must be"),
        ("gpt", 2, words(), "model must be"),
        (Cache(), 2, torch.ones(2, WIDTH), "reads a tensor that 'blocks.0' .* does not return"),
        (nn.ReLU(), 1, torch.ones(2, WIDTH), "calls no module that has parameters"),
        (LateNoise(), 2, torch.ones(2, WIDTH), "stages 0 and 1 both need the result of rand_like"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_split(model, stages, sample, message):
    with pytest.raises(PipeError, match=message):
        px.split(model, stages, sample=sample)


def test_batches_of_another_form():
    """A missing key and another option are named; so is a model that is random."""
    stages = px.split(Language(dropout=0.5), 2, sample=masked())
    with pytest.raises(ArgumentError, match=r"nested as .*words=Tensor.* the sample was .*mask"):
        stages.arguments({"words": words()})
    with pytest.raises(ArgumentError, match="has 3 where the sample had None"):
        stages.arguments(masked() | {"places": 3})
    with pytest.raises(ArgumentError, match=r"two forwards of the model differ.*model.eval\(\)"):
        stages.check(masked())


@pytest.mark.parametrize("name", ["language", "translation", "residual"])
def test_a_stage_alone_has_the_weights_of_the_model(name):
    """From a function that makes the model; random numbers end where they end after the model."""
    make, sample = MODELS[name]
    torch.manual_seed(1)
    expected = make().state_dict()
    end = torch.get_rng_state()
    of_stages = {}
    for k in range(2):
        torch.manual_seed(1)
        stages = px.split(make, 2, sample=sample, only=[k])
        assert torch.equal(torch.get_rng_state(), end)
        assert [stage is None for stage in stages] == [k != j for j in range(2)]
        of_stages |= stages[k].model.state_dict()
    assert expected.keys() <= of_stages.keys()
    assert all(torch.equal(expected[name], of_stages[name]) for name in expected)
    torch.manual_seed(1)
    assert px.split(make, 2, sample=sample).check(sample) == 0.0
