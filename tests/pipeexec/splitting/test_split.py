"""Models as stages: loss and gradients of the whole model, and where cuts are."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_choice import EVERY_CASE
from split_models import (
    WIDTH,
    WORDS,
    Deciding,
    Language,
    Repeating,
    Residual,
    Tied,
    Translation,
    VisionLanguage,
    Writing,
)
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, ExecutionError, PipeError


def words(n: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randint(WORDS, (n, length), generator=torch.Generator().manual_seed(length))


def masked(n: int = 4, length: int = 6) -> dict[str, Any]:
    mask = torch.ones(n, length)
    mask[1, length // 2 :] = 0
    return {"words": words(n, length), "mask": mask, "places": None}


MODELS: dict[str, tuple[Any, Any]] = {
    "language": (Language, masked()),
    "language without a mask": (partial(Language, 2), words()),
    "translation": (Translation, (words(), words(length=3))),
    "residual": (Residual, torch.ones(2, 3, 8, 8).cumsum(3)),
    "writing": (Writing, torch.ones(2, WIDTH)),
    "tied": (Tied, words()),
    "tied in a function": (lambda: Tied(has_head=False), words()),
    "sequential": (
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))), torch.ones(2, WIDTH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_computes(name):
    """Loss and gradients are equal, for every third cut into two and some into more.

    They are equal to the last bit, but for sums over copies of tied parameters.
    """
    make, sample = MODELS[name]
    torch.manual_seed(0)
    model = make()
    modules = [x for part in px.split(model, 1, sample=sample).modules for x in part]
    for first in modules[1 :: 1 if EVERY_CASE else 3]:
        difference = px.split(model, [first], sample=sample, check=False).check(sample)
        assert difference < 1e-6 if "tied" in name else difference == 0.0, first
    difference = px.split(model, modules[1::2], sample=sample, check=False).check(sample)
    assert difference < 1e-6 if "tied" in name else difference == 0.0


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


@pytest.mark.parametrize("has_head", [True, False])
def test_tied_parameters(has_head):
    """The first stage with a tied parameter has the model's, later ones have copies."""
    model = Tied(has_head)
    stages = px.split(model, 3, sample=words())
    assert stages.tied == (
        ((0, "model.words.weight"), (2, f"model.{'head' if has_head else 'words'}.weight")),
        ((1, "model.blocks.1.mlp.0.weight"), (2, "model.blocks.2.mlp.0.weight")),
    )
    assert stages.tied_stages == ((0, 2), (1, 2))
    for group, whole in zip(
        stages.tied, (model.words.weight, model.blocks[1].mlp[0].weight), strict=True
    ):
        first, copy = (stages[stage].get_parameter(name) for stage, name in group)
        assert first is whole
        assert copy is not whole
        assert torch.equal(copy, whole)
    assert model.blocks[2].mlp[0].weight is model.blocks[1].mlp[0].weight
    assert px.split(model, ["blocks.0"], sample=words()).tied_stages == ((0, 1),)
    model.requires_grad_(False)
    assert px.split(model, 3, sample=words()).tied == ()


class Planned(nn.Module):
    """One block, and a configuration as Hugging Face's models have it."""

    base_model_prefix = "body"

    def __init__(self, **plan: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_pp_plan=plan)
        self.body = nn.ModuleDict({
            "words": nn.Embedding(WORDS, WIDTH), "blocks": nn.ModuleList([nn.Linear(WIDTH, WIDTH)]),
            "norm": nn.LayerNorm(WIDTH), "unused": nn.Linear(1, 1),
        })  # fmt: skip

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.body["norm"](self.body["blocks"][0](self.body["words"](words)))


PLAN = {"words": (["words"], ["x"]), "blocks": (["x"], ["x"]), "norm": (["x"], ["x"])}


@pytest.mark.parametrize(
    ("make", "sample", "way", "failed"),
    [
        (nn.Sequential, torch.ones(2, WIDTH), "nn.Sequential", []),
        (Language, words(), "blocks of blocks", ["nn.Sequential"]),
        (Translation, (words(), words()), "blocks of encoder and decoder", ["nn.Sequential"]),
        (Residual, torch.ones(2, 3, 8, 8), "blocks of groups", ["nn.Sequential"]),
        (lambda: Planned(**PLAN), words(), "base_model_pp_plan of the configuration",
         ["nn.Sequential", "blocks of a list"]),
        (Repeating, words(), "calls of block",
         ["nn.Sequential", "blocks of a list", "base_model_pp_plan"]),
        (lambda: Planned(unused=([], [])), words(), "modules that the forward calls",
         ["nn.Sequential", "blocks of a list", "base_model_pp_plan", "calls of one module"]),
    ],
)  # fmt: skip
def test_the_way_to_the_cuts(make, sample, way, failed):
    """The first of five ways that fits; why earlier ones do not is told."""
    model = make() if make is not nn.Sequential else make(*(nn.Linear(WIDTH, WIDTH),) * 2)
    stages = px.split(model, 2, sample=sample)
    assert stages.way == way
    assert f"by {way}" in repr(stages)
    assert [name for name, _ in stages.ways_failed] == failed
    assert all(reason for _, reason in stages.ways_failed)


def test_a_plan_that_does_not_fit():
    """The reason names its module that is not called."""
    stages = px.split(Planned(unused=([], [])), 2, sample=words())
    assert dict(stages.ways_failed)["base_model_pp_plan"] == (
        "it has 'body.unused', which the forward does not call"
    )


def test_a_block_that_several_stages_call():
    """Each stage has a copy, and runs its own calls of it alone."""
    torch.manual_seed(0)
    model, calls = Repeating(), []
    model.block.mlp.register_forward_hook(lambda *_: calls.append(0))
    stages = px.split(model, 4, sample=words())
    assert stages.modules == (("words", "block"), *[("block",)] * 3)
    assert set(stages.tied_stages) == {(0, 1, 2, 3)}
    stages(words())
    calls.clear()
    stages(words())
    assert len(calls) == 4
    assert stages.check(words()) < 1e-6


def test_a_batch_norm_that_several_stages_call():
    """Its running statistics would differ from stage to stage; in eval mode they do not change."""
    model = Repeating()
    model.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(6))
    with pytest.raises(ArgumentError, match=r"stages 0 and 1 call 'block', which changes"):
        px.split(model, 2, sample=words())
    assert px.split(model.eval(), 2, sample=words()).check(words()) < 1e-6


def test_copies_of_parameters_need_an_operation():
    """A graph that does not add their gradients would train other weights."""
    stages = px.split(Tied(), 2, sample=words())
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(ArgumentError, match="stages 0 and 1 have copies of one parameter"):
        px.Pipeline(stages, graph, ["cpu", "cpu"], lambda output, _: output.sum())


@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {"n_replicas": 2}), ("chimera", {}), ("gpipe", {"recompute": "always"})],
)
def test_copies_of_stages(schedule, options):
    """Replicas and paths of a bidirectional placement copy stages, and not the model."""
    torch.manual_seed(0)
    model, batch, targets = Language(), masked(8), words(8)

    def loss_fn(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())

    loss = loss_fn(model(**batch), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    graph = ps.lower(ps.schedule(schedule, 2, 4), **options)
    stages = px.split(model, graph.n_stages, sample=masked(2))
    with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, loss_fn) as pipeline:
        result = pipeline.step(batch, targets)
    torch.testing.assert_close(result.loss, loss.detach())
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


def test_blocks():
    """Stages tell the modules between which they may be cut; without a chain, all of them."""
    sample = torch.zeros(2, 3, dtype=torch.long)
    names = tuple(f"blocks.{k}" for k in range(4))
    assert px.split(Language(), 2, sample=sample).blocks == names
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert px.split(layers, 1, sample=torch.ones(1, 2)).blocks == ("0", "2")


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


class ReadKept(nn.Module):
    """A block that keeps a tensor, which the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.blocks[0].register_forward_hook(lambda m, args, out: setattr(m, "kept", out * 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[0].kept


class ReadInside(nn.Module):
    """A parameter of a module inside the first block, which the second one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x) @ self.blocks[0][0].weight)


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
        (Cache(), 2, torch.ones(2, WIDTH), "Cache changes kept outside of its blocks"),
        (ReadKept(), 2, torch.ones(2, WIDTH), "reads a tensor, .* 'blocks.0' .* does not return"),
        (nn.ReLU(), 1, torch.ones(2, WIDTH), "calls no module that has parameters"),
        (ReadInside(), 2, torch.ones(2, WIDTH), "reads 'blocks.0.0.weight', .* inside of"),
        (LateNoise(), 2, torch.ones(2, WIDTH), "stages 0 and 1 both need the result of rand_like"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_split(model, stages, sample, message):
    with pytest.raises(PipeError, match=message):
        px.split(model, stages, sample=sample)


def test_batches_of_another_form():
    """A missing key and another option are named."""
    stages = px.split(Language(dropout=0.5), 2, sample=masked())
    with pytest.raises(ArgumentError, match=r"nested as .*words=Tensor.* the sample was .*mask"):
        stages.arguments({"words": words()})
    with pytest.raises(ArgumentError, match="is 3, in the sample it was None"):
        stages.arguments(masked() | {"places": 3})


class Counter(nn.Module):
    """A layer that takes another number in each forward, of which no module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(WIDTH, WIDTH), count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * next(self.numbers)


def test_check_in_training_mode():
    """Dropout draws the same numbers for both, and batch norms keep their statistics."""
    stages = px.split(Language(dropout=0.5), 2, sample=masked())
    state = torch.get_rng_state()
    assert stages.check(masked()) < 1e-6
    assert torch.equal(torch.get_rng_state(), state)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    values = torch.rand(4, WIDTH)
    assert px.split(model, 2, sample=values).check(values) == 0.0
    assert model[1].num_batches_tracked == 0
    assert not model[1].running_mean.any()


class DropoutBetween(nn.Module):
    """Dropout in the forward itself: each one is needed by the block after it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(F.dropout(x, 0.5, self.training))
        return x


def test_dropout_in_the_forward():
    """Stages draw their own; they are compared with the model in evaluation mode."""
    values = torch.ones(4, WIDTH)
    stages = px.split(DropoutBetween(), 2, sample=values)
    assert stages(values).shape == values.shape
    with pytest.raises(ArgumentError, match=r"draw other random numbers .* call model.eval\(\)"):
        stages.check(values)
    assert px.split(DropoutBetween().eval(), 2, sample=values).check(values) == 0.0


def test_models_whose_forwards_differ():
    values = torch.ones(2, WIDTH)
    stages = px.split(nn.Sequential(Counter(), nn.Linear(WIDTH, 1)), 2, sample=values)
    with pytest.raises(ArgumentError, match=r"two forwards of Sequential differ"):
        stages.check(values)


def test_stages_and_reports_in_notebooks():
    stages = px.split(Tied(), 2, sample=words())
    assert "Tied: " in stages._repr_html_()
    html = stages.report()._repr_html_()
    assert "<table" in html
    assert "Predicted step" in html
    rest = px.split(Language, 2, sample=masked(), only=[1])
    assert "in another process" in rest._repr_html_()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_models_of_other_types():
    with pytest.raises(ArgumentError, match=r"must be an nn.Module, or a function .* got \[Lin"):
        px.split([nn.Linear(2, 2)], 1, sample=torch.ones(1, 2))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="the model is a ScriptModule"):
        px.split(scripted, 1, sample=torch.ones(1, 2))


def test_memory_limits_with_units():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sample = torch.ones(1, WIDTH)
    assert len(px.split(model, 2, sample=sample, memory_limit="1GiB")) == 2
    with pytest.raises(ArgumentError, match="memory_limit must be bytes such as 80e9 or 80GiB"):
        px.split(model, 2, sample=sample, memory_limit="much")


@pytest.mark.parametrize("name", ["translation", "tied"] if EVERY_CASE else ["tied"])
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
    assert px.split(make, 2, sample=sample).check(sample) < 1e-6


class Grouped(nn.Module):
    """Two experts, each for half of the samples, by an operation that groups their products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([torch.eye(16), 2 * torch.eye(16)]))

    def forward(self, x):
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.weight, offs=ends)


def test_operations_that_are_stricter_without_data():
    """Without data, `grouped_mm` refuses 32 bits; later stages receive one tensor all the same."""
    model = nn.Sequential(Grouped(), Grouped(), Grouped(), Grouped())
    stages = px.split(model, 4, sample=torch.ones(4, 16))
    values, n_sent = (torch.ones(6, 16),), []
    for stage in stages[:-1]:
        values = stage(*values)
        n_sent.append(len([x for x in values if x.numel()]))
    assert n_sent == [1, 1, 1]
    assert stages.check(torch.ones(6, 16)) == 0


def test_activations_of_the_sample_are_freed():
    """Records of calls without data keep no graph of autograd, which would keep activations."""
    kept: list[weakref.ref[torch.Tensor]] = []

    class Square(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            kept.append(weakref.ref(y))
            return y * y  # autograd saves y

    stages = px.split(nn.Sequential(Square(8, 8), Square(8, 8)), 2, sample=torch.ones(4, 8))
    gc.collect()
    assert kept
    assert not [x for x in kept if x() is not None], stages


class LayerDrop(nn.Module):
    """Skips blocks at random in training; the random numbers are drawn in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            probability = torch.rand([])
            scale = 0.0 if self.training and probability < 0.5 else 1.0
            x = x + scale * block(x)
        return x


def test_random_numbers_that_only_another_mode_reads():
    """A model in evaluation mode is split; its stages refuse the training mode."""
    with pytest.raises(ArgumentError, match="both need the result of rand"):
        px.split(LayerDrop(), 3, sample=torch.ones(4, 8))
    stages = px.split(LayerDrop().eval(), 3, sample=torch.ones(4, 8))
    assert torch.equal(stages(torch.ones(2, 8)), stages.model(torch.ones(2, 8)))
    with pytest.raises(ExecutionError, match=r"cannot run in training mode.*result of rand"):
        stages[0].train()(torch.ones(4, 8))


class Biased(nn.Module):
    """Blocks that pass on a bias of zeros, and note whether it needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(3))

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class BiasedBlock(nn.Module):
    """A block of `Biased`: its second output needs a gradient for large inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.needed = nn.Linear(8, 8), []

    def forward(self, x, bias):
        bias = torch.zeros(1, 8) if bias is None else bias
        self.needed.append(bias.requires_grad)
        return self.linear(x) + bias, bias if x.sum() < 1e3 else bias + self.linear.bias


def test_values_that_need_no_gradient():
    """A later stage receives them as the model has them: torch chooses kernels by that."""
    model = Biased()
    stages = px.split(model, 3, sample=torch.ones(4, 8))
    graph = ps.lower(ps.schedule("1f1b", 3, 2))
    with px.Pipeline(stages, graph, ["cpu"] * 3, lambda x, y: (x - y).square().mean()) as pipeline:
        pipeline.step(torch.ones(4, 8), torch.zeros(4, 8))
    assert not any(x for stage in stages for block in stage.model.blocks
                   for x in getattr(block, "needed", ()))  # fmt: skip
    with pytest.raises(ExecutionError, match="needs a gradient, which the sample's did not"):
        stages[0](torch.full((4, 8), 1e3))


#: Cuts of `VisionLanguage`, devices of the stages, and edges.
TOWERS: dict[str, tuple[list[str], list[int], tuple[tuple[int, int], ...]]] = {
    "chain": (["vision.blocks.1", "blocks.1"], [0, 1, 2], ()),
    "graph": (
        ["vision.patches", "vision.blocks.1", "blocks.0", "blocks.1"], [0, 1, 2, 0, 1],
        ((0, 3), (1, 2), (2, 3), (3, 4)),
    ),
}  # fmt: skip


def tower_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("form", TOWERS)
def test_a_vision_tower_beside_words_trains_as_the_model_does(form):
    """Words wait for the tower, or have a stage of their own; gradients return to both."""
    (cuts, devices, edges), batch = TOWERS[form], VisionLanguage.batch(4)
    model, targets = VisionLanguage(), batch["words"]
    loss = tower_loss(model(**batch), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    stages = px.split(model, cuts, sample=VisionLanguage.batch(2), chain=form == "chain")
    assert stages.edges == edges
    order = ps.order_by(ps.Placement(devices, edges=edges), 2)
    with px.Pipeline(
        stages, ps.lower(order, recompute="always"), ["cpu"] * 3, tower_loss
    ) as pipeline:
        reverse = dict(reversed(batch.items()))
        torch.testing.assert_close(pipeline.step(reverse, targets).loss, loss.detach())
        torch.testing.assert_close(pipeline.evaluate(batch, targets).loss, loss.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_stages_with_edges():
    """Their report predicts steps of the graph; other graphs and other modules are refused."""
    cuts, sample = ["vision.patches", "blocks.0"], VisionLanguage.batch(2)
    stages = px.split(VisionLanguage(), cuts, sample=sample, chain=False, check=False)
    report = stages.report(n_microbatches=2)
    assert len(report.rows) == 3
    assert list(report.makespans) == ["order_by"]
    assert report.makespans["order_by"] > 0
    with pytest.raises(ArgumentError, match="stages of way='graph' are a chain; give way='modul"):
        px.split(VisionLanguage(), cuts, sample=sample, chain=False, way="graph")
    with pytest.raises(ArgumentError, match=r"'gpipe' has the edges \[\], .* have \[\(0, 2\)"):
        stages.report(schedules=["gpipe"])
    chain = ps.lower(ps.schedule("gpipe", 3, 2))
    with pytest.raises(ArgumentError, match=r"edges \[\], those of pipeexec.split have \[\(0, 2\)"):
        px.Pipeline(stages, chain, ["cpu"] * 3, tower_loss)
    with pytest.raises(ArgumentError, match=r"stage 0 is one of .*chain=False.*, and other mod"):
        px.Pipeline([stages[0], stages[1], nn.Linear(1, 1)], chain, ["cpu"] * 3, tower_loss)


def test_parameters_that_are_trained_later():
    """Values of frozen blocks need gradients after the blocks are trained."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].requires_grad_(False)
    stages = px.split(model, 3, sample=torch.ones(4, 8))
    model[0].requires_grad_(True)
    assert stages.check(torch.ones(2, 8)) == 0


class Doubled(nn.Linear):
    """A layer whose output the model doubles."""


class ByClass(nn.Module):
    """Asks for the class of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Doubled(8, 8), nn.Linear(8, 8), Doubled(8, 8)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if isinstance(block, Doubled):
                x = 2 * x
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_forward_asks_for_the_class_of_a_block(schedule):
    """Blocks of other stages answer as the block itself; so hooks by class are on all blocks."""
    x, model = torch.ones(4, 8), ByClass()
    stages = px.split(model, 3, sample=x)
    assert stages.check(x) == 0
    assert [sum(isinstance(block, Doubled) for block in y.model.blocks) for y in stages] == [
        1,
        0,
        1,
    ]
    loss = model(x).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    graph = ps.lower(ps.schedule(schedule, 3, 2))
    with px.Pipeline(stages, graph, ["cpu"] * 3, lambda x, _: x.square().mean()) as pipeline:
        pipeline.step(x, x)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
