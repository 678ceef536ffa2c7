"""Errors that name a remedy: it is done to the letter, and the call goes on.

A row has a call with wrong options, the error, and a function that takes what the message says and
returns other options.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import BatchWarning, PipeError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

mse = nn.functional.mse_loss
Options = dict[str, Any]


class Mask:
    """A value of a batch that is no tensor."""

    factor = 2.0


class First(nn.Linear):
    """Takes all kinds of values behind its input."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return super().forward(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def step(
    inputs: Any,
    targets: Any = None,
    *,
    n_microbatches: int = 4,
    calls: Callable[[px.Pipeline], object] | None = None,
    frozen: bool = False,
    lowering: Options | None = None,
    **options: Any,
) -> None:
    """Run two steps, or other calls, of a pipeline of two stages."""
    schedule = ps.schedule("gpipe", 2, n_microbatches)
    graph = ps.lower(schedule, **(lowering or {}))
    stages = [First(4, 4), nn.Linear(4, 4)]
    for stage in stages:
        stage.requires_grad_(not frozen)
    loss = options.pop("loss", mse)
    with (
        warnings.catch_warnings(),
        px.Pipeline(stages, graph, ["cpu"] * 2, loss, **options) as pipeline,
    ):
        warnings.simplefilter("error", BatchWarning)
        for _ in range(2):
            if calls is not None:
                calls(pipeline)
            else:
                pipeline.step(inputs, torch.zeros(8, 4) if targets is None else targets)


def split(**options: Any) -> None:
    """Split a model of three layers."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    arguments = {"sample": torch.randn(8, 4), **options}
    px.split(model, arguments.pop("stages", 2), **arguments)


def profile(**options: Any) -> None:
    """Profile a model of two stages."""
    arguments = {"stages": [nn.Linear(4, 4), nn.Linear(4, 4)], **options}
    graph = ps.lower(ps.schedule("gpipe", 2, 4))
    with px.Pipeline(arguments.pop("stages"), graph, ["cpu"] * 2, mse) as pipeline:
        px.profile(pipeline, arguments.pop("inputs"), torch.zeros(8, 4), **arguments)


def train(batches: Any, **options: Any) -> None:
    """Train a pipeline of two stages."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4))
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd) as pipeline:
        px.train(pipeline, batches, progress=False, **options)


def batch_dims_of(message: str) -> Options:
    """Return the dict that a message names, such as ``{'inputs[1]': None}``."""
    match = re.search(r"(?:batch_dims=|such as )(\{[^}]*\})", message)
    assert match is not None, message
    return {"batch_dims": ast.literal_eval(match[1])}


class Case(NamedTuple):
    """An error, its message, and the options that the message asks for."""

    call: Callable[..., object]
    wrong: Options
    message: str
    mended: Callable[[str], Options]


X = torch.randn(8, 4)
PAIR = (X, torch.zeros(8, 4))

CASES = {
    "value that is no tensor": Case(
        step, {"inputs": (X, Mask())}, "which cannot be split .* give Pipeline batch_dims=",
        batch_dims_of,
    ),
    "list of texts": Case(
        step, {"inputs": (X, ["a"] * 8)}, "8 values that are no tensors.* batch_dims=",
        batch_dims_of,
    ),
    "texts in a dict": Case(
        step, {"inputs": (X, {"mask": Mask()})}, "which cannot be split", batch_dims_of,
    ),
    "tensor of other samples": Case(
        step, {"inputs": (X, torch.randn(6, 4))}, "the batch 8 samples; .* batch_dims=",
        batch_dims_of,
    ),
    "square mask, whole": Case(
        step, {"inputs": (X, torch.ones(8, 8))}, "give Pipeline batch_dims=", batch_dims_of,
    ),
    "square mask, rows": Case(
        step, {"inputs": (X, torch.ones(8, 8))}, "if its rows are samples",
        lambda message: {"batch_dims": ast.literal_eval(message.rpartition("samples, ")[2])},
    ),
    "unlike targets": Case(
        step, {"inputs": X, "targets": torch.zeros(6, 4)}, "give as many",
        lambda _: {"targets": torch.zeros(8, 4)},
    ),
    "unlike second target": Case(
        step,
        {
            "inputs": X, "targets": (torch.zeros(4), torch.zeros(8, 4)),
            "loss": lambda output, target: mse(output, target[1]),
        },
        "batch_dims", batch_dims_of,
    ),
    "too small a batch": Case(
        step, {"inputs": X, "n_microbatches": 16}, "lower a schedule of fewer micro-batches",
        lambda _: {"n_microbatches": 8},
    ),
    "path of no value": Case(
        step, {"inputs": X, "batch_dims": {"input": None}}, "paths begin with inputs",
        lambda _: {"batch_dims": {"inputs": 0}},
    ),
    "misspelled path": Case(
        step, {"inputs": (X, Mask()), "batch_dims": {"inputs[11]": None}}, "did you mean",
        lambda message: {
            "batch_dims": {re.search("did you mean '(.*)'", message)[1]: None}  # type: ignore[index]
        },
    ),
    "clipping without parameters": Case(
        step,
        {"inputs": X, "max_grad_norm": 1.0, "frozen": True, "optimizer": sgd,
         "calls": lambda p: p.evaluate(*PAIR), "lowering": {"grad_norm": True}},
        "leave it out", lambda _: {"max_grad_norm": None},
    ),
    "state without an optimizer": Case(
        step,
        {"inputs": X,
         "calls": lambda p: p.load_optimizer_state_dict(p.optimizer_state_dict())},
        "give Pipeline an optimizer", lambda _: {"optimizer": sgd},
    ),
    "forward only": Case(
        step, {"inputs": X, "lowering": {"forward_only": True}}, "call evaluate or predict",
        lambda _: {"calls": lambda p: p.evaluate(*PAIR)},
    ),
    "forward only, lowered without it": Case(
        step, {"inputs": X, "lowering": {"forward_only": True}}, "or lower the schedule without it",
        lambda _: {"lowering": {}},
    ),
    "too many stages": Case(
        split, {"stages": 7}, "give at most [0-9]+ stages",
        lambda message: {"stages": int(re.search("at most ([0-9]+)", message)[1])},  # type: ignore[index]
    ),
    "sample without a tensor": Case(
        split, {"sample": 3}, "give a batch as the model takes it: a tensor",
        lambda _: {"sample": X},
    ),
    "profile of values that are no tensors": Case(
        profile, {"inputs": (X, ["a"] * 8), "stages": [First(4, 4), nn.Linear(4, 4)]},
        "give a tensor of them", lambda _: {"inputs": (X, X)},
    ),
    "epochs of an iterator": Case(
        train, {"batches": iter([PAIR]), "epochs": 2}, "give a DataLoader, a list",
        lambda _: {"batches": [PAIR]},
    ),
    "evaluation of an iterator": Case(
        train, {"batches": [PAIR], "evaluation": iter([PAIR])}, "give a DataLoader, a list",
        lambda _: {"evaluation": [PAIR]},
    ),
    "objects that are no mapping": Case(
        train, {"batches": [PAIR], "objects": [1]}, r"such as \{'average'",
        lambda _: {"objects": {"average": nn.Linear(1, 1)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_an_error_advises_is_done(name: str) -> None:
    case = CASES[name]
    with pytest.raises((PipeError, BatchWarning), match=case.message) as caught:
        case.call(**case.wrong)
    case.call(**{**case.wrong, **case.mended(str(caught.value))})
