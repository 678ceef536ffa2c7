"""Models cut by torch.export: those of functions with parameters alone, and others by request."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_choice import covering
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError

pytestmark = pytest.mark.slow
WIDTH, WORDS = 8, 11


class Functions(nn.Module):
    """Layers of functions, with a mask that is passed on; the embedding is the head, if tied."""

    def __init__(self, n: int = 4, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(n))
        self.head = self.words if is_tied else nn.Parameter(torch.randn(WORDS, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        x = F.embedding(words, self.words)
        for layer in self.layers:
            x = x + F.relu(F.linear(x, layer)) * self.scale
            if mask is not None:
                x = x * mask[..., None]
        n, length, _ = x.shape
        flat = x.reshape(n * length, -1)
        return {"logits": F.linear(flat, self.head).reshape(n, length, -1), "mean": x.mean((1, 2))}


def batch(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(WORDS, (n, 5), generator=generator)
    return {"words": words, "mask": (torch.rand(n, 5, generator=generator) > 0.2).float()}


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_compute_what_the_model_computes(is_tied):
    """For all cuts, and for batches of other sizes; parameters are those of the model."""
    torch.manual_seed(0)
    model = Functions(is_tied=is_tied)
    for n in (2, 6):
        stages = px.split(model, n, sample=batch(2))
        assert stages.way == "torch.export"
        assert [name for name, _ in stages.ways_failed][-1] == "modules that the forward calls"
        assert stages.tied_stages == (((0, n - 1),) if is_tied else ())
        assert stages.check(batch(7)) <= (1e-6 if is_tied else 0.0)
    own = {id(p) for stage in stages for p in stage.parameters()}
    assert {id(p) for p in model.parameters()} <= own
    assert stages.modules[0] == ("parts.0",)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {"n_replicas": 2}), ("zbv", {})],
)
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_a_step_trains_as_the_model_does(schedule, options):
    """Loss, gradients, and the keys of the state."""
    torch.manual_seed(0)
    model, inputs = Functions(), batch(8)
    targets = inputs["words"]

    def loss_fn(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())

    loss = loss_fn(model(**inputs), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    graph = ps.lower(ps.schedule(schedule, 2, 2), **options)
    stages = px.split(model, graph.n_stages, sample=batch(2))
    with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, loss_fn) as pipeline:
        result = pipeline.step(inputs, targets)
        assert set(pipeline.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(result.loss, loss.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_shapes_that_the_graph_fixes():
    """The number of samples is free, the length is not."""
    stages = px.split(Functions(), 2, sample=batch(2))
    longer = {name: x.repeat(1, 2) for name, x in batch(3).items()}
    with pytest.raises(ArgumentError, match=r"shape \(3, 10\), but torch.export fixed .*any, 5"):
        stages(longer)


class Branching(Functions):
    """A forward that torch.export refuses."""

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        if mask is not None and mask.sum() > 3:
            words = words.flip(1)
        return super().forward(words, mask)


@pytest.mark.parametrize(
    ("model", "sample", "message"),
    [
        (Branching(), batch(2), r"torch.export does not help \(\w+: .*[Dd]ata"),
        (nn.ReLU(), torch.ones(2, 2), r"torch.export does not help \(fewer than two"),
        (Functions, batch(2), r"torch.export does not help \(no data\)"),
    ],
)
def test_models_that_cannot_be_exported(model, sample, message):
    """The error has the reason."""
    with pytest.raises(ArgumentError, match=f"calls no module that has parameters, and {message}"):
        px.split(model, 2, sample=sample)


class Counted(nn.Module):
    """Blocks with dropout, writes in place, numbers that are read, and a buffer of the model."""

    def __init__(self, *, is_tied: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(words) * mask[..., None]
        for block in self.blocks:
            y = block(x)
            y.mul_(2)
            x = x + y / x.shape[0]
        return self.head(x)


@pytest.mark.parametrize(
    ("cuts", "is_tied"),
    covering(product([2, [1, 1, 2], ["embed", "blocks.1", "head"]], [False, True])),
)
def test_the_graph_is_cut_where_the_modules_are(cuts, is_tied):
    """Both ways have equal stages: modules, parameters of the model, and outputs."""
    torch.manual_seed(0)
    model = Counted(is_tied=is_tied)
    ways = [px.split(model, cuts, sample=batch(2), way=way) for way in ("modules", "graph")]
    assert ways[0].modules == ways[1].modules
    assert ways[0].blocks == ways[1].blocks
    assert ways[1].way == f"torch.export, {ways[0].way}"
    assert ways[0].tied_stages == ways[1].tied_stages
    numbers = [[len(list(stage.parameters())) for stage in stages] for stages in ways]
    assert numbers[0] == numbers[1]
    for stages in ways:
        own = {id(p) for stage in stages for p in stage.parameters()}
        assert {id(p) for p in model.parameters()} <= own
    assert max(stages.check(batch(3)) for stages in ways) <= 1e-6


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_graph_trains_as_the_model_does(schedule):
    """Loss, gradients, the model's buffer, and the keys of the state."""
    torch.manual_seed(0)
    model, inputs = Counted(is_tied=True, dropout=0.0), batch(8)

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    whole = copy.deepcopy(model)
    parts = [{key: x[k : k + 2] for key, x in inputs.items()} for k in range(0, 8, 2)]
    losses = [loss_fn(whole(**part), part["words"]) for part in parts]
    (sum(losses) / 4).backward()
    stages = px.split(model, 2, sample=batch(2), way="graph")
    graph = ps.lower(ps.schedule(schedule, 2, 4), tied=stages.tied_stages)
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn) as pipeline:
        result = pipeline.step(inputs, inputs["words"])
        assert set(pipeline.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(result.loss, torch.stack(losses).mean().detach())
    assert model.calls == whole.calls == 4
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)


class Deciding(Counted):
    """Draws for two stages, and decides by numbers that it reads: neither way can cut it."""

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        drawn = F.dropout(torch.ones_like(mask))
        x = super().forward(words, mask * drawn)
        if sum(map(sum, (mask > 0).tolist())) > 3:
            x = 2 * x
        return x * drawn[..., None]


def test_a_refusal_prints_nothing(capfd):
    """Torch prints graphs that it cannot export."""
    for way, message in (("modules", "both need the result of"), ("graph", "makes no graph")):
        with pytest.raises(ArgumentError, match=message) as caught:
            px.split(Deciding(), 2, sample=batch(2), way=way)
        assert "give way='graph'" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_module_that_is_called_again():
    """Each call has its own part of the graph, with the name of the module and a number."""

    class Repeating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.block(x))
            return self.head(x)

    stages = px.split(Repeating(), ["block", "block@2"], sample=torch.ones(2, WIDTH), way="graph")
    assert stages.modules == (("block", "block@1"), ("block@2", "head"))
    assert stages.tied_stages == ((0, 1),)
