"""`LayerStages`: the layers of a model as stages of one block each, made as they are needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeexec.splitting.split import split
from pipeexec.splitting.stages import Stages
from pipesim.errors import ArgumentError

#: Layers that have copies of a parameter, and its bytes.
Tied = tuple[tuple[int, ...], float]


class LayerStages(NamedTuple):
    """The layers of a model.

    Attributes
    ----------
    modules
        Names of the modules of each layer, in the order of their calls.
    n_blocks
        Blocks of each layer: 0 of the modules before the first and after the last one, else 1.
    arguments
        Tensors of the sample, as the first layer takes them.
    tied
        Parameters that several layers have.
    make
        Returns copies of layers; those of a model that a function makes have no other copy.
    """

    modules: tuple[tuple[str, ...], ...]
    n_blocks: tuple[int, ...]
    arguments: tuple[Tensor, ...]
    tied: tuple[Tied, ...]
    make: Callable[[range], list[nn.Module]]

    def __len__(self) -> int:
        return len(self.modules)


def layer_stages(model: nn.Module | Callable[[], nn.Module], sample: Any) -> LayerStages:
    """Return the layers of a model: its blocks, and the modules before and after them.

    Modules before the first block are a layer of their own, and so are those after the last one, if
    the values that they pass on allow it. Others belong to the block before.

    Raises
    ------
    ArgumentError, ExecutionError
        As `pipeexec.split`.
    """
    cut = partial(split, model, sample=sample)
    no_values: dict[str, Any] = {} if isinstance(model, nn.Module) else {"only": ()}
    try:
        whole = cut(2, check=False, **no_values)  # a model of functions alone is cut, too
    except ArgumentError:
        whole = cut(1, check=False, **no_values)
    counts = _counts(whole)
    try:
        stages = cut(counts, **no_values)
    except ArgumentError:
        counts = [1] * len(whole.blocks)
        stages = cut(counts, **no_values)

    def copied_layers(layers: range) -> list[nn.Module]:
        return [copy.deepcopy(stage) for stage in stages[layers.start : layers.stop] if stage]

    def new_layers(layers: range) -> list[nn.Module]:
        return [stage for stage in cut(counts, only=layers) if stage is not None]

    make = copied_layers if isinstance(model, nn.Module) else new_layers
    return LayerStages(stages.modules, tuple(counts), stages.arguments(sample), _tied(stages), make)


def _counts(whole: Stages) -> list[int]:
    """Return the blocks of each layer, for `pipeexec.split`."""
    names, blocks = [name for part in whole.modules for name in part], whole.blocks
    before, after = names[0] != blocks[0], names[-1] != blocks[-1]
    return [0] * before + [1] * len(blocks) + [0] * after


def _tied(stages: Stages) -> tuple[Tied, ...]:
    """Return the layers of each tied parameter, and its bytes."""
    return tuple(
        (tuple(stage for stage, _ in group), float(_parameter(stages, *group[0]).nbytes))
        for group in stages.tied
    )


def _parameter(stages: Stages, number: int, name: str) -> nn.Parameter:
    """Return a parameter of a stage; of a stage without data, that of the model."""
    stage = stages[number]
    if stage is None:
        return stages.model.get_parameter(name.removeprefix("model."))
    return stage.get_parameter(name)
