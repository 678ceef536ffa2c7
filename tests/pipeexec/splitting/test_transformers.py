"""Models of the package transformers: their stages compute and train as the model does."""

from __future__ import annotations

import socket
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_choice import EVERY_CASE, covering
from transformers_models import MODELS, batch

import pipeexec as px
import pipesim as ps

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved_1f1b": {"n_chunks": 2}, "zb_h1": {}, "zbv": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Models are made from configurations; nothing is loaded."""

    def refused(*args):
        raise AssertionError(f"a test connects to {args[1:]}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refused)


def loss_fn(output, targets):
    """Mean over all logits of the cross entropy with the targets."""
    logits = output.logits.flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten()[: len(logits)])


@pytest.mark.parametrize(
    ("name", "n"), covering(product(MODELS, (2, 3)))[:: 1 if EVERY_CASE else 2]
)
def test_stages_compute_what_the_model_computes(name, n):
    """Gradients of tied parameters are sums over copies, in another order."""
    case = MODELS[name]
    stages = px.split(case.make(), n, sample=batch(case, 2), check=False)
    assert bool(stages.tied) == case.is_tied
    assert stages.check(batch(case, 3)) <= (1e-6 if case.is_tied else 0.0)


def test_a_vision_tower_is_beside_words():
    """That of LLaVA is a stage of its own, whose output the language model takes."""
    case = MODELS["llava"]
    cuts = ["model.vision_tower.embeddings", "model.language_model.layers.0"]
    stages = px.split(case.make(), cuts, sample=batch(case, 2), chain=False, check=False)
    assert stages.edges == ((0, 2), (1, 2))
    assert stages.check(batch(case, 3)) == 0.0


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"] if EVERY_CASE else ["t5"])
def test_a_stage_alone_has_the_weights_of_the_model(name):
    """From a function that makes the model; copies of tied parameters, too."""
    case = MODELS[name]
    expected, state = case.make().state_dict(), {}
    for k in range(2):
        stage = px.split(case.make, 2, sample=batch(case, 2), only=[k])[k]
        state |= {stage.model_name(key): x for key, x in stage.state_dict().items()}
    assert all(torch.equal(x, expected[key]) for key, x in state.items())
    assert set(expected) - set(state) <= {"encoder.embed_tokens.weight", "shared.weight"}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, schedule) for k, name in enumerate(MODELS) for schedule in SCHEDULES
     if (schedule == "interleaved_1f1b" and (EVERY_CASE or k % 2))
     or (name == "gpt2" and (EVERY_CASE or schedule == "zb_h1"))
     ] + [("t5", "zbv")],
)  # fmt: skip
def test_a_step_trains_as_the_model_does(name, schedule):
    """The loss and the gradients of a step are those of the whole batch.

    Tied parameters meet split backwards. All models are cut into the most stages.
    """
    case = MODELS[name]
    model, inputs = case.make(), batch(case, 8)
    whole = model(**inputs)
    shape = whole.logits.shape[:-1]
    targets = torch.arange(shape.numel()).reshape(shape) % whole.logits.shape[-1]
    loss = loss_fn(whole, targets)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    order = ps.schedule(schedule, 2, 4, **SCHEDULES[schedule])
    stages = px.split(model, order.n_stages, sample=batch(case, 2))
    graph = ps.lower(order, tied=stages.tied_stages)
    with px.Pipeline(stages, graph, ["cpu", "cpu"], loss_fn) as pipeline:
        result = pipeline.step(inputs, targets)
    for group in stages.tied:
        first, *others = (stages[stage].get_parameter(name).grad for stage, name in group)
        assert all(torch.equal(first, x) for x in others)
    torch.testing.assert_close(result.loss, loss.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


class Positions(torch.nn.Module):
    """Rotary embeddings of positions that begin behind the slices before."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary, self.cache = rotary, px.KeyValueCache()

    def forward(self, x, position_ids):
        return self.rotary(x, position_ids + self.cache.offset(x.shape[1]))


def test_a_llama_decodes_as_without_a_pipeline():
    """Greedy tokens of the model's own loop: two groups, a prompt in three slices, four steps."""
    import transformers

    def attend(module, query, key, value, mask, scaling=None, **_):
        output = module.cache.attend(query, key, value, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("key_value_cache", attend)
    case = MODELS["llama"]
    case = case._replace(options={**case.options, "attn_implementation": "key_value_cache"})
    model = case.make().double()
    for layer in model.model.layers:
        layer.self_attn.cache = px.KeyValueCache()
    model.model.rotary_emb = Positions(model.model.rotary_emb)
    prompts = tokens = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(5):
            logits = model(tokens, use_cache=False).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    assert tokens[:, 7:].unique().numel() > 2
    turns = [k * 7 + j for j in range(7) for k in range(2)]
    for n in (2, 3):
        schedule = ps.schedule("gpipe", n, 14).with_microbatch_order(turns).with_slices(7)
        graph = ps.lower(schedule, forward_only=True, prompt_slices=3)
        stages = px.split(model, n, sample=prompts[:1], check=False)
        with px.Pipeline(stages, graph, ["cpu"] * n) as pipeline:
            result = pipeline.generate(prompts)
        assert torch.equal(result.tokens, tokens[:, 7:])
        torch.testing.assert_close(result.outputs[-1].logits, logits[:, -1:])
