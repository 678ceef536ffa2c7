"""Batches of any nesting: micro-batches of a step are those of the unsplit model."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from small_pipelines import data, dense, mse, pipeline
from split_models import WIDTH, WORDS, Block
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.training.batch_source import as_inputs_and_targets
from pipesim.errors import ArgumentError, ArgumentTypeError, BatchWarning

WIDE = 16


class Named(NamedTuple):
    """Targets with names."""

    y: Tensor
    scale: Tensor


@dataclasses.dataclass
class Fields:
    """Values of a batch as fields."""

    x: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


class First(nn.Linear):
    """A first stage with arguments as people write them."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)

    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0, more: Any = ()) -> Tensor:
        if isinstance(x, Fields):
            x, mask, scale = x.x, x.mask, x.scale
        if isinstance(x, list):
            x, mask = x
        for value in more:
            x = x + value
        y = super().forward(x) * scale
        return y if mask is None else y * mask


class Matrix(nn.Linear):
    """A first stage that takes sequences, and a matrix by which it mixes their places."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("st,btc->bsc", mask, super().forward(x))


def words(n: int, length: int) -> Tensor:
    return torch.arange(n * length).reshape(n, length) % WORDS


def stages(first: nn.Module | None = None) -> list[nn.Module]:
    """Return a first stage and another one, always with the same parameters."""
    last = dense(1)
    torch.manual_seed(0)
    return [First() if first is None else first, last]


def graph(n_microbatches: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("1f1b", 2, n_microbatches), **options)


def trained(model: list[nn.Module], loss: Tensor) -> list[Tensor]:
    """Return a loss, and the gradients of a model."""
    parameters = [p for stage in model for p in stage.parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def assert_equal_steps(
    inputs: Any,
    targets: Any,
    whole: Callable[[nn.Module], Tensor],
    loss_fn: Any = mse,
    **options: Any,
) -> None:
    """Check loss and gradients of a step against ``whole``, the first stage's output at once."""
    model = options.pop("model", None) or stages()
    expected = trained(model, loss_fn(model[1](whole(model[0])), targets))
    with pipeline(model, graph(), loss_fn, **options) as subject:
        result = subject.step(inputs, targets)
    actual = [result.loss, *(p.grad for stage in model for p in stage.parameters())]
    for own, its in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-6)


X, Y = data(10)
COLUMN, ROW = Y[:, :1], torch.arange(WIDE)[None] / 8
KEYWORDS = {"x": X, "mask": ROW, "scale": 0.5, "more": [COLUMN, torch.tensor(2.0)]}
INPUTS: dict[str, tuple[Any, Callable[[nn.Module], Tensor]]] = {
    "dict": (KEYWORDS, lambda first: first(**KEYWORDS)),
    "order of a dict": (dict(reversed(KEYWORDS.items())), lambda first: first(**KEYWORDS)),
    "ordered dict": (collections.OrderedDict(KEYWORDS), lambda first: first(**KEYWORDS)),
    "user dict": (collections.UserDict(KEYWORDS), lambda first: first(**KEYWORDS)),
    "dataclass": (Fields(X, COLUMN, 0.5), lambda first: first(X, COLUMN, scale=0.5)),
    "None in a tuple": ((X, None), lambda first: first(X)),
    "list": ([X, ROW], lambda first: first(X, ROW)),
    "named tuple": (Named(X, ROW), lambda first: first(X, ROW)),
    "mask of a number": ((X, torch.tensor(0.5)), lambda first: first(X, 0.5)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_nesting(name: str) -> None:
    """The first stage gets each micro-batch in the same form; masks that broadcast stay whole."""
    inputs, whole = INPUTS[name]
    assert_equal_steps(inputs, Y, whole)


TARGETS: dict[str, tuple[Any, Callable[[Tensor, Any], Tensor]]] = {
    "dict": ({"y": Y, "scale": torch.tensor(0.5)}, lambda o, t: mse(o, t["y"]) * t["scale"]),
    "named tuple": (Named(Y, COLUMN), lambda o, t: mse(o * t.scale, t.y)),
    "dataclass": (Fields(Y, None, 0.5), lambda o, t: mse(o, t.x) * t.scale),
    "nested": ([Y, {"more": (ROW, None)}], lambda o, t: mse(o * t[1]["more"][0], t[0])),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("error::pipesim.errors.LossWarning")
def test_targets_of_any_nesting(name: str) -> None:
    """The loss gets each micro-batch in the same form; the first step checks that losses add up."""
    targets, loss_fn = TARGETS[name]
    assert_equal_steps(X, targets, lambda first: first(X), loss_fn)


def test_the_first_step_checks_losses_of_nested_targets() -> None:
    """A mean over a mask is none over samples, which shows in a dict of targets, too."""
    mask = (torch.arange(10) > 4).float()[:, None]

    def masked(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return ((output - targets["y"]) ** 2 * targets["mask"]).sum() / targets["mask"].sum().clamp(
            1
        )

    with pipeline(stages(), graph(), masked) as subject, pytest.warns(ps.errors.LossWarning):
        subject.step(X, {"y": Y, "mask": mask})


@pytest.mark.parametrize("length", [3, 10])
def test_masks_of_the_sequence(length: int) -> None:
    """``batch_dims`` names a matrix that is whole, even if it has as many rows as the batch."""
    x, y, mask = (
        torch.randn(10, length, WIDE),
        torch.randn(10, length, WIDE),
        torch.rand(length, length),
    )
    assert_equal_steps(
        {"x": x, "mask": mask}, y, lambda first: first(x, mask),
        model=stages(Matrix(WIDE, WIDE)), batch_dims={"inputs['mask']": None},
    )  # fmt: skip


def test_samples_in_another_dimension() -> None:
    """``batch_dims`` names the dimension of the samples; outputs have them there, too."""
    x, y = torch.randn(3, 10, WIDE), torch.randn(3, 10, WIDE)
    assert_equal_steps((x, ROW), y, lambda first: first(x, ROW),
                       batch_dims={"inputs[0]": 1, "targets": 1})  # fmt: skip


def test_outputs_with_samples_in_another_dimension() -> None:
    """Outputs have samples where ``batch_dims`` says; it must say so if inputs have them inside."""
    x = torch.randn(4, 4, WIDE)  # as many samples as there are micro-batches, in dimension 1
    dims = {"inputs": 1}
    model = stages()
    expected = nn.Sequential(*model)(x)
    with pipeline(model, graph(), mse, batch_dims=dims | {"output": 1}) as subject:
        torch.testing.assert_close(subject.predict(x), expected)
    for more, message in (
        ({}, r"batch_dims=\{'output': 1\}"),
        ({"output.y": 1}, "'output.y', but output has output"),
    ):
        with (
            pipeline(model, graph(), mse, batch_dims=dims | more) as subject,
            pytest.raises(ArgumentError, match=message),
        ):
            subject.predict(x)


def test_square_masks_are_named() -> None:
    """A matrix as large as the batch is split, and the first step says so, once."""
    x, y = data(WIDE)
    with pipeline(stages(), graph(), mse) as subject:
        with pytest.warns(
            BatchWarning, match=r"inputs\[1\] has shape \(16, 16\), and the batch 16 s"
        ):
            subject.step((x, torch.ones(WIDE, WIDE)), y)
        subject.step((x, torch.ones(WIDE, WIDE)), y)


def language_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


class Masked(nn.Module):
    """A split model whose blocks take one mask as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, mask=mask)
        return {"logits": self.head(x)}


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (8, 5, 5)])
def test_masks_of_split_models(shape: tuple[int, ...]) -> None:
    """Causal masks, those that broadcast and those of samples train as the unsplit model does."""
    torch.manual_seed(0)
    model = Masked()
    inputs = {"mask": torch.rand(shape) > 0.3, "words": words(8, 5)}
    inputs["mask"] |= torch.eye(5, dtype=torch.bool)
    targets = words(8, 5)
    expected = trained([model], language_loss(model(**inputs), targets))
    cut = px.split(model, 2, sample={"words": words(2, 5), "mask": torch.ones(5, 5).bool()})
    dims = {"inputs['mask']": None} if shape == (5, 5) else None
    with pipeline(cut, graph(), language_loss, batch_dims=dims) as subject:
        result = subject.step(inputs, targets)
        subject.memory(inputs, targets)
    for own, its in zip(
        [result.loss, *(p.grad for p in model.parameters())], expected, strict=True
    ):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-6)


def test_split_models_of_dataclasses() -> None:
    """A sample may be a dataclass, and modules may pass them on."""

    class Add(nn.Linear):
        def forward(self, batch: Fields) -> Fields:
            return dataclasses.replace(batch, x=super().forward(batch.x) + batch.mask)

    torch.manual_seed(0)
    model = nn.Sequential(*(Add(WIDTH, WIDTH) for _ in range(4)))
    batch = Fields(torch.randn(8, WIDTH), torch.randn(1, WIDTH))
    cut = px.split(model, 2, sample=Fields(torch.randn(2, WIDTH), torch.randn(1, WIDTH)))
    assert cut.check(batch, lambda output: output.x.square().mean()) == 0.0
    target = torch.randn(8, WIDTH)
    expected = mse(model(batch).x, target)
    with pipeline(cut, graph(), lambda output, target: mse(output.x, target)) as subject:
        torch.testing.assert_close(subject.step(batch, target).loss, expected.detach())


@pytest.mark.slow
def test_everything_takes_nested_batches() -> None:
    """Measuring, counting and checking take what a step takes."""
    batch = {"x": X, "mask": ROW}, {"y": Y}

    def loss_fn(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return mse(output, targets["y"])

    with pipeline(stages(), graph(), loss_fn) as subject:
        subject.check_batch(*batch)
        assert len(subject.held_bytes(*batch)) == 2
        assert px.profile(subject, *batch, n_steps=1, warm_up=0).forward is not None


REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "rows": ({"x": X, "mask": torch.ones(3, 16)}, Y, None,
             r"inputs\['mask'\] has shape \(3, 16\), the batch 10 samples; .*batch_dims="
             r"\{\"inputs\['mask'\]\": None\}"),
    "array": ((X, np.ones(10)), Y, None, r"inputs\[1\] is a ndarray, which cannot be split"),
    "texts": ({"x": X, "names": ["a"] * 10}, Y, None, r"inputs\['names'\] has 10 values"),
    "path": (X, Y, {"inputs['maks']": None}, r"batch_dims has \"inputs\['maks'\]\", but inputs"),
    "dimension": (X, Y, {"inputs": 2}, r"dimension 2 for inputs, whose shape is \(10, 16\)"),
    "no targets": (X, {"y": [1.0, None]}, None, "targets must be a tensor of samples or hold one"),
    "targets": (X, Y[:1], None, "inputs have 10 samples, targets 1; give as many"),
    "targets of a dict": (X, {"w": Y[0], "y": Y}, None, r"targets 16; .*\['w'\]\": None"),
    "gradients": ({"x": X.clone().requires_grad_()}, Y, None, r"inputs\['x'\] require gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_are_refused(name: str) -> None:
    """Each message names the value by its path, before anything runs."""
    inputs, targets, dims, message = REFUSED[name]
    with pipeline(stages(), graph(), mse, batch_dims=dims) as subject:
        with pytest.raises(ArgumentError, match=message):
            subject.step(inputs, targets)
        with pytest.raises(ArgumentError, match=message):
            subject.check_batch(inputs, targets)


@pytest.mark.parametrize(
    ("dims", "error"),
    [
        ({"inputs": "0"}, ArgumentTypeError),
        ([0], ArgumentTypeError),
        ({"mask": None}, ArgumentError),
    ],
)
def test_batch_dims_that_are_refused(dims: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="batch_dims"):
        pipeline(stages(), graph(), mse, batch_dims=dims)


def nested_over_processes(processes: Processes) -> list[Tensor]:
    """Return the loss and the gradients of the stage of this process."""
    model: list[Any] = stages()
    model[1 - processes.rank] = None
    with px.Pipeline(
        model, graph(), ["cpu"], lambda o, t: mse(o, t["y"]), processes=processes
    ) as subject:
        batch = KEYWORDS if processes.rank == 0 else None, {"y": Y, "z": 1}
        result = subject.gather(subject.step(*batch))
        own = model[processes.rank]
        return [result.loss, *(p.grad for p in own.parameters())]


def test_nested_batches_over_processes(two_ranks: Ranks) -> None:
    model = stages()
    expected = trained(model, mse(model[1](model[0](**KEYWORDS)), Y))
    (loss, *first), (_, *second) = two_ranks.run(nested_over_processes)
    for own, its in zip([loss, *first, *second], expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-6)


def test_batches_of_loaders() -> None:
    """Pairs are inputs and targets; mappings have targets under ``"labels"``."""
    labels = {"words": X, "labels": Y}
    assert as_inputs_and_targets([X, Y]) == (X, Y)
    assert as_inputs_and_targets(labels) == (labels, Y)
    for batch, message in (
        ({"x": X}, "a dict with 'x', and neither a pair"),
        ((X, Y, X), "a tuple of 3"),
        (X, r"a Tensor of shape \(10, 16\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            as_inputs_and_targets(batch)
