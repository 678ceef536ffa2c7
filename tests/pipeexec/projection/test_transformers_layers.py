"""Projections of models of the package transformers: layers, tied parameters, bytes of stages."""

from __future__ import annotations

import pytest
import torch
from case_choice import EVERY_CASE
from transformers_models import MODELS, batch

import pipeexec as px
import pipesim as ps
from pipeexec.projection.layer_seconds import square_sum


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "albert", "vit", "resnet"] if EVERY_CASE else ["t5", "resnet"]
)
def test_layers_of_transformers(name):
    """Bytes are those of a pipeline of two stages, within 1 % for what runs between blocks."""
    case, n = MODELS[name], 2
    model, sample = case.make(), batch(case, n)
    gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
    cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
    projection = px.project(model, sample, cluster, n_steps=1, warm_up=0)
    assert projection.n_blocks == (0, 1, 1, 1, 1, 0)
    stages = px.split(model, projection.blocks([3, 3]), sample=sample)
    assert projection.tied_stages([3, 3]) == stages.tied_stages
    assert bool(projection.tied) == case.is_tied
    graph = ps.lower(ps.schedule("gpipe", 2, 1), step="none", tied=stages.tied_stages)
    targets = torch.zeros(n, 1)
    with px.Pipeline(
        stages, graph, ["cpu"] * 2, lambda output, _: square_sum(output),
        loss_reduction="sum", pin_threads=False,
    ) as pipeline:  # fmt: skip
        pipeline.step(sample, targets)
        held = pipeline.held_bytes(sample, targets)
    assert projection.costs([3, 3]).activation_bytes == pytest.approx(held, rel=0.01)
