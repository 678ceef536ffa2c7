"""Split models against the unsplit ones: model x way of splitting x schedule.

Models of the package transformers, with random weights, in two or four stages on two CPU workers.
Each row splits a model in one way, and runs one step of each schedule with four micro-batches, in
float32. Columns are

- blocks: how `px.split` found where to cut;
- check: `Stages.check`: largest difference of the loss and of gradients, each relative to the
  largest element, of all stages one after the other;
- a schedule: differences of the step's loss and of its gradients from those of the unsplit model
  for the whole batch, relative to the loss and to the largest element of all gradients. (Some
  gradients are zero but for rounding, such as those of the biases of keys.) "refused": `Pipeline`
  does not run the stages.

The second table has models and cuts that are refused, and the messages.

``python benchmarks/split_transformers.py`` prints the tables and writes them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _machine import ROOT, header, publish, table
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeError

sys.path.append(str(ROOT / "tests" / "helpers"))
from transformers_models import MODELS, Case, batch

OUT = ROOT / "results" / "benchmarks" / "split_transformers.txt"
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved_1f1b": {"n_chunks": 2}, "zb_h1": {}, "zbv": {},
}  # fmt: skip
N_MICROBATCHES, N_SAMPLES = 4, 8


class Way(NamedTuple):
    """A way of splitting: the second argument of `px.split`, from blocks and number of stages."""

    name: str
    stages: Callable[[Sequence[str], int], Any]
    options: dict[str, Any]
    from_function: bool = False


WAYS = (
    Way("a number", lambda _, n: n, {}),
    Way("blocks of each stage", lambda x, n: [len(x) - n + 1, *[1] * (n - 1)], {}),
    Way("names of modules", lambda x, n: list(x[1 - n :]), {}),
    *(Way(f'balance="{x}"', lambda _, n: n, {"balance": x}) for x in ("parameters", "memory")),
    Way('balance="time"', lambda _, n: n, {"balance": "time"}),
    Way("a function makes the model", lambda _, n: n, {}, from_function=True),
)


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all logits."""
    logits = output.logits.flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten()[: len(logits)])


class Reference(NamedTuple):
    """Loss and gradients of the unsplit model for the whole batch."""

    targets: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def reference(case: Case) -> Reference:
    """Return what the unsplit model computes."""
    model = case.make()
    output = model(**batch(case, N_SAMPLES))
    shape = output.logits.shape[:-1]
    targets = torch.arange(shape.numel()).reshape(shape) % output.logits.shape[-1]
    loss = loss_fn(output, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(targets, loss.detach(), gradients)


def stages_of(case: Case, way: Way, n: int) -> px.Stages:
    """Return the stages of a model."""
    sample = batch(case, N_SAMPLES // N_MICROBATCHES)
    (whole,) = finest = px.split(case.make(), 1, sample=sample)
    blocks = [name for name in whole.call_names if name in finest.blocks]
    model = case.make if way.from_function else case.make()
    return px.split(model, way.stages(blocks, n), sample=sample, **way.options)


def step_differences(case: Case, way: Way, schedule: str, expected: Reference) -> str:
    """Return the differences of loss and gradients of one step, or "refused"."""
    order = ps.schedule(schedule, 2, N_MICROBATCHES, **SCHEDULES[schedule])
    stages = stages_of(case, way, order.n_stages)
    options = {"tied": stages.tied_stages} if stages.tied else {}
    try:
        pipeline = px.Pipeline(stages, ps.lower(order, **options), ["cpu"] * 2, loss_fn)
    except PipeError:
        return "refused"
    with pipeline:
        result = pipeline.step(batch(case, N_SAMPLES), expected.targets)
    gradients = dict(stages.model.named_parameters())
    worst = max(float((gradients[k].grad - x).abs().max()) for k, x in expected.gradients.items())
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    loss = float((result.loss - expected.loss).abs() / expected.loss.abs())
    return f"{loss:.0e} {worst / largest:.0e}"


def rows() -> Iterator[list[str]]:
    """Yield a row for each model and way."""
    for name, case in MODELS.items():
        expected = reference(case)
        for way in WAYS:
            if name == "albert" and way.name == "names of modules":
                continue  # all its blocks are calls of one module
            stages = stages_of(case, way, 2)
            check = stages.check(batch(case, 3))
            steps = [step_differences(case, way, schedule, expected) for schedule in SCHEDULES]
            yield [name, way.name, stages.way, f"{check:.0e}", *steps]


class Cached(nn.Module):
    """Blocks of which a later one reads what an earlier one keeps."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.kept: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda _, args, out: self.kept.append(out * 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        for block in self.blocks:
            x = block(x)
        return x + self.kept.pop()


class Noisy(nn.Module):
    """Random numbers of the forward itself, for two blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        noise = torch.rand_like(x)
        for block in self.blocks:
            x = block(x + noise)
        return x


class Inside(nn.Module):
    """A parameter inside a block, which the forward reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.blocks[1](self.blocks[0](x) @ self.blocks[0][0].weight)


class Again(nn.Module):
    """A block with a batch norm, called twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.block(self.block(x))


class Branching(nn.Module):
    """Parameters that only functions use, and a branch that torch.export refuses."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.eye(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = F.linear(x, self.first)
        return F.linear(F.relu(x) if x.sum() > 0 else x, self.second)


def refused() -> Iterator[list[str]]:
    """Yield the cases that are refused, and their messages."""
    x, gpt2 = torch.ones(2, 8), MODELS["gpt2"]
    ones = batch(gpt2, 2)
    cases: list[tuple[str, Any, Any, Any]] = [
        ("more stages than blocks", gpt2.make(), 5, ones),
        ("a cut inside a block", gpt2.make(), ["transformer.h.1.mlp"], ones),
        ("a tensor that a block keeps", Cached(), 2, x),
        ("random numbers of the forward", Noisy(), 2, x),
        ("a parameter inside a block", Inside(), 2, x),
        ("a batch norm on two stages", Again(), 2, x),
        ("functions and a branch", Branching(), 2, x),
    ]
    for name, model, stages, sample in cases:
        try:
            px.split(model, stages, sample=sample)
        except PipeError as error:
            yield [name, str(error)]
        else:
            raise AssertionError(f"{name} is split")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    columns = ("model", "way of splitting", "blocks", "check", *SCHEDULES)
    lines = [
        *header(["torch", "transformers"]),
        "a schedule: relative difference of the loss, and of gradients",
        "",
        *table(columns, list(rows()), n_left=3),
        "",
        *table(("cannot be split", "message"), list(refused()), n_left=2),
    ]
    publish(lines, out)


if __name__ == "__main__":
    main()
