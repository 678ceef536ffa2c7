"""Cut a sequential model into contiguous stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from pipesim.errors import ArgumentError, check_count


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
    before = [0.0, *accumulate(costs)]
    # best[end]: least sum of squares, and the layer counts, for cutting the first `end` layers
    # into the stages so far. Each stage leaves at least one layer to each later stage.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(n_stages):
        best = {
            end: min(
                (total + (before[end] - before[start]) ** 2, [*counts, end - start])
                for start, (total, counts) in best.items()
                if start < end
            )
            for end in range(stage + 1, n_layers - n_stages + stage + 2)
        }
    return best[n_layers][1]


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
