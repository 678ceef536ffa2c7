"""Models whose forward calls functions with parameters, and no modules: cut by torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
    [("gpipe", {}), ("1f1b", {"n_replicas": 2}), ("zb_h1", {}), ("zbv", {})],
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
