"""Ready-made demo models by name: layers, loss and data; and `split`, to cut them into stages.

A model is an ``nn.Sequential`` of layers, and a stage is a contiguous run of layers. A new model is
one row of `MODELS`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.demo_models.data import BatchMaker, image_batch, text_batch
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.image_models import convnet
from pipesim.costs.layer_split import most_even_split, whole_sums
from pipesim.errors import ArgumentError, check_count, check_name
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

    ``make_batch(batch, seed)`` returns inputs and targets. ``options`` are all those that the model
    was built with, for the run's record.
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


def split(
    model: nn.Sequential, n_stages: int | None = None, *, balance: Sequence[int] | None = None
) -> list[nn.Sequential]:
    """Cut a model into contiguous stages, which share its modules and keep their names.

    Without ``balance`` the stages are as even as possible: the cut has the least sum of squared
    stage costs. Of equal cuts it is the one with more layers in the later stages, which hold fewer
    activations. A stage costs the sum of its layers' ``relative_cost``. Layers of the demo models
    have one in units of a block, as measured on a CPU at small sizes. Any other layer counts 1, so
    that other models are split by their number of layers.

    Parameters
    ----------
    n_stages
        Number of stages; optional if ``balance`` is given.
    balance
        Number of layers of each stage, in order.
    """
    if not isinstance(model, nn.Sequential):
        raise ArgumentError(
            f"only an nn.Sequential can be split, got {type(model).__name__}; "
            "wrap its layers in nn.Sequential"
        )
    if balance is not None:
        counts = _check_balance(balance, n_stages, len(model))
    elif n_stages is not None:
        costs = [float(getattr(layer, "relative_cost", 1.0)) for layer in model]
        counts = _even_counts(costs, check_count("n_stages", n_stages))
    else:
        raise ArgumentError("split got neither n_stages nor balance; give one, as n_stages=2")
    # named_children() would skip the second use of a layer, such as one nn.ReLU() object.
    named = list(zip(model._modules, model, strict=True))
    ends = [0, *accumulate(counts)]
    stages = [nn.Sequential(OrderedDict(named[start:end])) for start, end in pairwise(ends)]
    _check_unshared(stages)
    return stages


def _even_counts(costs: list[float], n_stages: int) -> list[int]:
    """Return the layer counts of the contiguous split with the least sum of squared costs."""
    n_layers = len(costs)
    if n_stages > n_layers:
        raise ArgumentError(
            f"more stages than layers: got n_stages={n_stages} for a model of {n_layers} layers, "
            f"and each stage needs one; take at most {n_layers} stages or build a deeper model"
        )
    sums = whole_sums(costs)
    return list(most_even_split(sums, n_stages, [(sums, sums[-1])]))


def _check_balance(balance: Sequence[int], n_stages: int | None, n_layers: int) -> list[int]:
    if not isinstance(balance, Iterable):
        raise ArgumentError(
            f"balance must list the layer count of each stage, got {balance!r}; "
            f"give counts of at least 1 that sum to {n_layers}"
        )
    counts = [check_count(f"balance[{stage}]", count) for stage, count in enumerate(balance)]
    if n_stages is not None and check_count("n_stages", n_stages) != len(counts):
        raise ArgumentError(
            f"balance {counts} is for {len(counts)} stages, and n_stages is {n_stages}; "
            "make them agree, or leave out n_stages"
        )
    if sum(counts) != n_layers:
        raise ArgumentError(
            f"balance {counts} sums to {sum(counts)} layers, but the model has {n_layers}; "
            f"give counts of at least 1 that sum to {n_layers}"
        )
    return counts


def _check_unshared(stages: list[nn.Sequential]) -> None:
    owner: dict[int, int] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            first = owner.setdefault(id(parameter), stage)
            if first != stage:
                raise ArgumentError(
                    f"stages {first} and {stage} would share the parameter {name!r}; give each "
                    "its own copy, or put the layers that share it into one stage with balance="
                )
