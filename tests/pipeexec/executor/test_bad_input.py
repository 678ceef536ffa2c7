"""Mistakes that people make with a model, a batch or a checkpoint, and the message of each.

A message says what is wrong, where, what was given, and what to do. Other files have more of each:
splits `test_split`, batches `test_batches`, checkpoints `test_checkpoint_files`, norms
`test_grad_norm`. Nothing has run when an `ArgumentError` is raised.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from split_models import Language, Tied
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, CheckpointError, PipeError, StageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.NanLossWarning"),
]

WORDS = torch.arange(48).reshape(8, 6) % 11
X = torch.linspace(-1, 1, 32).reshape(8, 4)
PASSES_ON = (
    "return the tensors in a tuple, or let pipeexec.split cut the model, whose stages pass on "
    "nested values"
)
GIVES_TENSOR = (
    "give a torch tensor whose first dimension is that of the samples, alone or nested in tuples, "
    "lists, mappings and dataclasses"
)


class Named(nn.Module):
    """A layer that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.linear(x)}


def linears(width: int = 4, *, bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(4, width, bias=bias), nn.Linear(width, 4)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


mse = nn.functional.mse_loss


def mse_of_x(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return mse(output["x"], targets)


def logits_loss(output: dict[str, Tensor], words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), words.flatten())


def pipeline(
    stages: Sequence[nn.Module | None],
    loss_fn: Any = mse,
    optimizer: Any = sgd,
    *,
    lowered: Any = None,
    **options: Any,
) -> px.Pipeline:
    """Two stages, four micro-batches."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), **(lowered or {}))
    return px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, optimizer, **options)


def step(stages: Sequence[nn.Module], inputs: Any, targets: Any, *args: Any, **options: Any) -> Any:
    with pipeline(stages, *args, **options) as subject:
        return subject.step(inputs, targets).loss


def of_language(sample: Any, inputs: Any) -> Any:
    return step(px.split(Language(), 2, sample=sample), inputs, WORDS, logits_loss)


NORM = {"lowered": {"grad_norm": True}, "max_grad_norm": 1.0}
SHARED = nn.Linear(4, 4)

Row = tuple[Callable[[], Any], type[PipeError], str]
ROWS: dict[str, Row] = {
    "a cut inside a block": (
        lambda: px.split(Language(), ["blocks.1.mlp"], sample=WORDS),
        ArgumentError,
        "'blocks.1.mlp' is inside 'blocks.1', which is not cut; begin a stage with 'blocks.1' or "
        "with the module after it",
    ),
    "a stage cut by hand that returns a dict": (
        lambda: step([Named(), nn.Linear(4, 4)], X, X),
        StageError,
        "0F0 failed (device 0, stage 0, micro-batch 0): ExecutionError: the output of stage 0 must "
        f"be a tensor or a tuple of tensors, got dict; {PASSES_ON}",
    ),
    "a loss of a dict, as if it was a tensor": (
        lambda: step([nn.Linear(4, 4), Named()], X, X),
        StageError,
        "1F0 failed (device 1, stage 1, micro-batch 0): AttributeError: 'dict' object has no "
        "attribute 'size' (loss_fn was called with output['x'] (2, 4), targets (2, 4))",
    ),
    "stages cut by hand that share a module": (
        lambda: step([nn.Sequential(SHARED), nn.Sequential(SHARED)], X, X),
        ArgumentError,
        "stages 0 and 1 share the parameter '0.weight'; stages run at the same time, so each needs "
        "separate parameters: give each stage a copy, name the copies in Pipeline(..., tied=[[(0, "
        "'name'), (3, 'name')]]), and lower with tied=[(0, 1)]; pipeexec.split does so",
    ),
    "a split model that shares a module, without the sum": (
        lambda: step(px.split(Tied(), 2, sample=WORDS), WORDS, WORDS),
        ArgumentError,
        "stages 0 and 1 have copies of one parameter (a tied embedding, for example), whose "
        "gradients the graph does not add; lower the schedule with tied=[(0, 1)]",
    ),
    "fewer samples than micro-batches": (
        lambda: step(linears(), X[:3], X[:3]),
        ArgumentError,
        "inputs have 3 samples, too few for 4 micro-batches; give a larger batch, or lower a "
        "schedule of fewer micro-batches",
    ),
    "fewer targets than inputs": (
        lambda: step(linears(), X, X[:7]),
        ArgumentError,
        "inputs have 8 samples, targets 7; give as many, or name tensors that are no samples in "
        "batch_dims of Pipeline, such as {'targets': None}",
    ),
    "an array of numpy": (
        lambda: step(linears(), X.numpy(), X),
        ArgumentError,
        f"inputs must be a tensor of samples or hold one, got ndarray; {GIVES_TENSOR}",
    ),
    "a mask of the sequence": (
        lambda: step(linears(), {"x": X, "mask": torch.ones(6, 6)}, X),
        ArgumentError,
        "inputs['mask'] has shape (6, 6), the batch 8 samples; give inputs with as many, or give "
        "Pipeline batch_dims={\"inputs['mask']\": None} if every micro-batch needs all of it, or "
        "the dimension of its samples in place of None",
    ),
    "an argument that the sample lacks": (
        lambda: of_language({"words": WORDS}, {"words": WORDS, "mask": WORDS}),
        ArgumentError,
        "the batch is nested as (words=Tensor, mask=Tensor), the sample was (words=Tensor); give "
        "it in the same form",
    ),
    "a mask that was None in the sample": (
        lambda: of_language({"words": WORDS, "mask": None}, {"words": WORDS, "mask": WORDS}),
        ArgumentError,
        "the batch differs from the sample of px.split: inputs['mask'] is a tensor, in the sample "
        "it was None; values that are no tensors are those of the sample: split again with a "
        "sample of these values",
    ),
    "clipping without a norm in the graph": (
        lambda: step(linears(), X, X, max_grad_norm=1.0),
        ArgumentError,
        "max_grad_norm=1, but graph '1f1b' computes no norm of its gradients; lower the schedule "
        "with grad_norm=True",
    ),
    "clipping without gradients: frozen": (
        lambda: step([x.requires_grad_(False) for x in linears()], X, X, **NORM),
        ArgumentError,
        "max_grad_norm=1, but no parameter of any stage is trained, so that there are no gradients "
        "to clip; leave it out, or set requires_grad of some",
    ),
    "clipping without gradients: detached": (
        lambda: step(linears(), X, X, lambda output, y: mse(output.detach(), y), **NORM),
        StageError,
        "1F0 failed (device 1, stage 1, micro-batch 0): ExecutionError: the loss does not depend "
        "on any parameter by operations that torch can differentiate",
    ),
    "NaN in the norm": (
        lambda: step(linears(), X.log(), X, **NORM),
        StageError,
        "the norm of the gradients is nan: gradients of stages 0, 1 are not finite; no optimizer "
        "has stepped. Look for the cause in loss, batch or learning rate, or give Pipeline "
        "error_if_nonfinite=False to step all the same",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_message(name: str) -> None:
    call, error, message = ROWS[name]
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_model_that_returns_a_dict() -> None:
    """It can be split, and so can stages of which the last one returns a dict."""
    model = Language()
    expected = logits_loss(model(WORDS), WORDS)
    stages = px.split(model, 2, sample=WORDS)
    torch.testing.assert_close(step(stages, WORDS, WORDS, logits_loss, None), expected.detach())
    by_hand = [nn.Linear(4, 4), Named()]
    expected = mse_of_x(nn.Sequential(*by_hand)(X), X)
    torch.testing.assert_close(step(by_hand, X, X, mse_of_x, None), expected.detach())


def test_a_model_that_shares_a_module() -> None:
    """Loss and gradients are those of the model; with the sum, a step trains it."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), shared)
    stages = px.split(model, 2, sample=X)
    assert stages.tied_stages == ((0, 1),)
    assert stages.check(X) < 1e-6
    expected = mse(model(X), X).detach()
    lowered = {"tied": stages.tied_stages}
    torch.testing.assert_close(step(stages, X, X, lowered=lowered), expected)


#: Damage or another model, and the message; PATH is the checkpoint.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], Callable[[], list[nn.Module]], str]] = {
    "another width": (
        lambda path: None,
        lambda: linears(5),
        "'0.weight' has shape (4, 4) in the checkpoint, and has shape (5, 4) in the model; give "
        "the checkpoint of this model",
    ),
    "a parameter less": (
        lambda path: None,
        lambda: linears(bias=False),
        "the checkpoint has '0.bias', which the model lacks; give the checkpoint of this model",
    ),
    "another type": (
        lambda path: None,
        lambda: [x.double() for x in linears()],
        "'0.weight' is torch.float32 in the checkpoint, and torch.float64 in the model; to convert "
        "it, use pipeline.load_state_dict(read_checkpoint(path)['model'])",
    ),
    "a file cut in half": (
        lambda path: (path / "model/model-00001-of-00002.safetensors").write_bytes(bytes(184)),
        linears,
        "PATH/model/model-00001-of-00002.safetensors does not match its checksum, with 184 bytes "
        "of 368: it was cut or edited; give another checkpoint",
    ),
    "a file that is gone": (
        lambda path: (path / "model/model-00001-of-00002.safetensors").unlink(),
        linears,
        "cannot read PATH/model/model-00001-of-00002.safetensors: No such file or directory; give "
        "another checkpoint",
    ),
    "no manifest": (
        lambda path: (path / "checkpoint.json").unlink(),
        linears,
        "PATH is no whole checkpoint: it has no checkpoint.json; give a folder that "
        "save_checkpoint has written",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    with pipeline(linears()) as subject:
        px.save_checkpoint(subject, path)
    return path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_message_of_a_checkpoint(name: str, saved: Path, tmp_path: Path) -> None:
    """The pipeline stays as it was."""
    damage, stages, message = CHECKPOINTS[name]
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    damage(path)
    with pipeline(stages()) as subject:
        before = {name: x.clone() for name, x in subject.state_dict().items()}
        with pytest.raises(CheckpointError, match=re.escape(message.replace("PATH", str(path)))):
            px.load_checkpoint(subject, path)
        assert all(torch.equal(x, before[name]) for name, x in subject.state_dict().items())


def _dict_case(processes: Processes) -> str:
    stages: list[nn.Module | None] = [Named(), nn.Linear(4, 4)]
    stages[1 - processes.rank] = None
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as subject:
        try:
            subject.step(X, X)
        except PipeError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_a_stage_of_another_process_returns_a_dict(two_ranks: Ranks) -> None:
    for text in two_ranks.run(_dict_case):
        assert f"got dict; {PASSES_ON}" in text
