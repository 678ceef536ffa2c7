"""Decode steps against the unsplit model's own loop: tokens, logits, order; and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from small_pipelines import call_within, mse, pipeline
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

VOCABULARY, N_PROMPT, N_STEPS = 11, 3, 4


def decode_graph(devices: list[int], n_groups: int = 2, **options: Any) -> ps.TaskGraph:
    """Return a graph of stages on ``devices``, in which groups of requests take turns."""
    n_slices = N_PROMPT + N_STEPS
    order = np.arange(n_groups * n_slices).reshape(n_groups, n_slices).T.ravel().tolist()
    orders: list[list[str]] = [[] for _ in range(max(devices) + 1)]
    for m in order:
        for stage, device in enumerate(devices):
            orders[device].append(f"{stage}F{m}")
    for m in reversed(order):
        for stage, device in reversed([*enumerate(devices)]):
            orders[device].append(f"{stage}B{m}")
    schedule = ps.Schedule.from_orders(orders, placement=ps.Placement(devices))
    return ps.lower(
        schedule.with_slices(n_slices), forward_only=True, prompt_slices=N_PROMPT, **options
    )


def small_gpt(n_stages: int) -> tuple[nn.Sequential, list[nn.Sequential]]:
    """Return a GPT in double precision, and its stages."""
    model = gpt(n_layers=max(2 * n_stages - 2, 1), d_model=8, n_heads=2, sequence=16,
                vocabulary=VOCABULARY).double()  # fmt: skip
    ends = np.linspace(0, len(model), n_stages + 1).round().astype(int).tolist()
    return model, [model[a:b] for a, b in pairwise(ends)]


def prompts(n: int = 4, length: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (n, length), generator=generator)


@torch.no_grad()
def unsplit(model: Callable[[Tensor], Tensor], tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens that a model decodes, without a cache; and the logits of each step."""
    first, rows = tokens.shape[1], []
    for _ in range(N_STEPS + 1):
        rows.append(model(tokens)[:, -1:])
        tokens = torch.cat([tokens, rows[-1].argmax(-1)], dim=1)
    return tokens[:, first:], rows


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one device": ([0], {}),
    "two devices": ([0, 1], {}),
    "three devices": ([0, 1, 2], {}),
    "both ends on one device": ([0, 1, 1, 0], {}),
    "replicas": ([0, 1], {"n_replicas": 2}),
    "rendezvous": ([0, 1], {"rendezvous": True}),
    "a stream for each micro-batch": ([0, 1], {"streams": "per_microbatch"}),
    "hosts": ([0, 1], {"hosts": "per_device", "host_threads": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    """Tokens are equal, logits up to rounding; every task of the graph runs, and no other."""
    devices, options = CASES[name]
    graph = decode_graph(devices, **options)
    model, stages = small_gpt(graph.n_stages)
    tokens, logits = unsplit(copy.deepcopy(model), prompts())
    with pipeline(stages, graph) as subject:
        result = call_within(60, lambda: subject.generate(prompts()))
    assert torch.equal(result.tokens, tokens)
    for own, expected in zip(result.outputs, logits, strict=True):
        torch.testing.assert_close(own[:, -1:], expected)
    assert result.timeline.graph is graph
    assert result.timeline.ran.all()
    predicted = ps.simulate(graph, ps.Costs(1))
    assert ps.Comparison(predicted, result.timeline).matched.graph is graph


def test_prompts_of_other_lengths_and_fewer_requests() -> None:
    model, stages = small_gpt(2)
    whole = copy.deepcopy(model)
    rows = [prompts(2, 7), prompts(1, 4)]
    lengths = [[3, 3, 1], [1, 1, 2]]
    slices = px.Microbatches(
        [x for row, own in zip(rows, lengths, strict=True) for x in row.split(own, dim=1)]
    )
    with pipeline(stages, decode_graph([0, 1]), slice_sizes=[4, 3, 1]) as subject:
        result = subject.generate(slices, keep_outputs=False)
        assert result.outputs == ()
        for own, row in zip(result.tokens, rows, strict=True):
            assert torch.equal(own, unsplit(whole, row)[0])
        assert torch.equal(subject.generate(prompts()).tokens, unsplit(whole, prompts())[0])
        one = subject.generate(prompts(1))
        assert torch.equal(one.tokens, unsplit(whole, prompts(1))[0])
        assert one.timeline.graph.n_microbatches == N_PROMPT + N_STEPS


class Positions(nn.Module):
    """A first stage that takes tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, 8), nn.Embedding(16, 8)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.token(tokens) + self.position(positions), positions


class Head(nn.Module):
    """A last stage that returns logits, and the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(x), "positions": positions}


def test_inputs_of_several_tensors_and_drawn_tokens() -> None:
    """``next_inputs`` returns inputs as those of the prompt; its random numbers have a seed."""

    def draw(output: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = torch.multinomial(output["logits"][:, -1].softmax(-1), 1)
        return {"tokens": tokens, "positions": output["positions"][:, -1:] + 1}

    torch.manual_seed(0)
    positions = torch.arange(8).expand(4, -1)
    inputs = {"tokens": prompts(), "positions": positions}
    with pipeline([Positions(), Head()], decode_graph([0, 1])) as subject:
        first, again = (subject.generate(inputs, draw).tokens for _ in range(2))
        torch.manual_seed(1)
        other = subject.generate(inputs, draw).tokens
    assert first["positions"].tolist() == [list(range(8, 9 + N_STEPS))] * 4
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["tokens"], other["tokens"])


def test_a_training_pipeline_decodes() -> None:
    """Generation leaves no trace, and a step fails as that of every forward-only graph."""
    model, stages = small_gpt(2)
    tokens = unsplit(copy.deepcopy(model), prompts())[0]
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2)), mse) as training:
        subject = training.with_graph(decode_graph([0, 1]))
        assert torch.equal(subject.generate(prompts()).tokens, tokens)
        assert training.n_steps == 0
        assert all(part.training for part in model.modules())
        with pytest.raises(ExecutionError, match="'1f1b' does not have; lower with"):
            training.generate(prompts())
        for call in (subject.predict, lambda x: subject.evaluate(x, x)):
            with pytest.raises(ExecutionError, match="call generate, or lower without"):
                call(prompts())
        with pytest.raises(ExecutionError, match="forward_only=True; call generate"):
            subject.step(prompts(), prompts())


def test_what_cannot_be_generated_says_so() -> None:
    _, stages = small_gpt(2)
    graph = decode_graph([0, 1])
    with pytest.raises(ArgumentError, match="2 slices, but graph 'custom' has prompt_slices=3"):
        pipeline(stages, graph, slice_sizes=[4, 4])
    with pipeline(stages, graph) as subject:
        with pytest.raises(ArgumentTypeError, match="next_inputs must be a function"):
            subject.generate(prompts(), 3)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="cannot be cut into 3 slices"):
            subject.generate(prompts(4, 2))
        with pytest.raises(ArgumentError, match="multiple of 3 slices, between 3 and 6"):
            subject.generate(px.Microbatches(list(prompts().split(1))))
        for wrong, message in (
            (lambda x: x[:, -1].argmax(-1), r"int64 \[2\], but a decode step takes int64 \[2, 1\]"),
            (lambda x: None, "no tensor, but"),
        ):
            with pytest.raises(StageError, match=f"next_inputs returned {message}"):
                subject.generate(prompts(), wrong)
        assert subject.generate(prompts()).tokens.shape == (4, 1 + N_STEPS)
    with (
        pipeline([nn.Embedding(8, 8), nn.Flatten(1)], graph) as subject,
        pytest.raises(StageError, match=r"logits of shape .* got shape \(2, 24\); give generate"),
    ):
        subject.generate(prompts(4, 9) % 8)


def tokens_of_rank(processes: Processes, devices: list[int]) -> tuple[Any, list[Tensor], int]:
    """Return tokens, logits and the number of measured tasks of stages on these devices."""
    torch.manual_seed(0)
    _, stages = small_gpt(len(devices))
    inputs = None if processes.rank else prompts()
    with px.Pipeline(stages, decode_graph(devices), ["cpu"], processes=processes) as subject:
        result = subject.generate(inputs)
    return result.tokens, [*result.outputs], int(result.timeline.ran.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "last"), [([0, 1], 1), ([0, 1, 1, 0], 0)])
def test_parity_in_two_processes(two_ranks: Ranks, devices: list[int], last: int) -> None:
    """The process of the first stage alone has prompts, that of the last one gets the tokens."""
    model, _ = small_gpt(len(devices))
    tokens, logits = unsplit(model, prompts())
    outcomes = two_ranks.run(tokens_of_rank, devices=devices)
    n_tasks = len(decode_graph(devices))
    assert outcomes[1 - last] == (None, [], n_tasks)
    assert torch.equal(outcomes[last][0], tokens)
    for own, expected in zip(outcomes[last][1], logits, strict=True):
        torch.testing.assert_close(own[:, -1:], expected)
    assert outcomes[last][2] == n_tasks
