"""Ready-made demo models by name: layers, loss and data. A new model is one row of `MODELS`.

A model is an ``nn.Sequential`` of layers, and a stage is a contiguous run of layers
(`pipeexec.demo_models.split`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.demo_models.convnet import convnet
from pipeexec.demo_models.data import BatchMaker, image_batch, text_batch
from pipeexec.demo_models.gpt import gpt
from pipesim.errors import check_name
from pipesim.utils.files import check_path

#: Function of outputs and targets; its scalar is a mean over the samples.
MeanLoss = Callable[[Tensor, Tensor], Tensor]
ModelParts = tuple[nn.Sequential, MeanLoss, BatchMaker]
Option = int | float | str | Path | None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions, in nats: a scalar.

    ``logits`` are (batch, ..., classes), as (batch, sequence, vocabulary) or (batch, classes);
    ``targets`` are int64 (batch, ...).
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class DemoModel:
    """A model, its loss and its data: everything that a training step needs.

    Attributes
    ----------
    layers
        The whole model, for `split`.
    loss
        Function of the model's output and the targets; its scalar is a mean over the samples.
    make_batch
        ``make_batch(batch, seed)`` returns inputs and targets.
    options
        All options that the model was built with, for the run's record.
    """

    layers: nn.Sequential
    loss: MeanLoss
    make_batch: BatchMaker
    options: Mapping[str, Option]


@dataclass(frozen=True)
class ModelSpec:
    """A row of `MODELS`: a line for ``--help``, and the function from options to model parts."""

    summary: str
    make: Callable[..., ModelParts]

    @property
    def options(self) -> dict[str, Option]:
        """The options with their defaults, as ``make`` declares them."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


def _make_gpt(
    seed: int,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    sequence: int = 128,
    dropout: float = 0.0,
    text: str | Path | None = None,
) -> ModelParts:
    model = gpt(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        sequence=sequence,
        dropout=dropout,
        seed=seed,
    )
    path = None if text is None else check_path("text", text)
    text_batch(1, sequence, text=path)  # A text that cannot be read fails here, before any work.
    return model, cross_entropy, lambda b, s: text_batch(b, sequence, text=path, seed=s)


def _make_convnet(
    seed: int, *, layers: int = 4, width: int = 32, image_size: int = 32, classes: int = 10
) -> ModelParts:
    model = convnet(
        n_blocks=layers, channels=width, image_size=image_size, n_classes=classes, seed=seed
    )
    return model, cross_entropy, lambda b, s: image_batch(b, image_size, classes, s)


MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "gpt": ModelSpec("byte-level GPT on real text (Python's sources, or a file)", _make_gpt),
        "convnet": ModelSpec("residual network with batch norm on synthetic images", _make_convnet),
    }
)


def build_model(name: str, *, seed: int = 0, **options: Option) -> DemoModel:
    """Build a ready-made model of `MODELS` by name; options that are None take their defaults.

    The option ``layers`` counts blocks. The model has two more layers: the first and the last.
    """
    spec = MODELS[check_name("model", name, MODELS)]
    chosen = {option: value for option, value in options.items() if value is not None}
    for option in chosen:
        check_name(f"option of model {name!r}:", option, spec.options)
    options = {**spec.options, **chosen}
    layers, loss, make_batch = spec.make(seed, **options)
    return DemoModel(layers, loss, make_batch, options)
