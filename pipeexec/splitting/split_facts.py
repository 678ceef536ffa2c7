"""`SplitFacts`: facts about a split, read from its stages, also from wrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.splitting.tied import TiedGroup
from pipesim.errors import ArgumentError

__all__ = ["SplitFacts", "first_tied_stage", "split_facts", "tied_parameter"]


class SplitFacts:
    """Facts about a split that all its stages share.

    Parameters
    ----------
    n_stages
        Number of stages.
    ordered
        Returns a batch whose tensors are in the order in which the first stage takes them.
    tied
        Parameters that several stages have, and train; see `Stages`.
    """

    def __init__(
        self, n_stages: int, ordered: Callable[[Any], Any], tied: tuple[TiedGroup, ...]
    ) -> None:
        self.n_stages, self.ordered, self.tied = n_stages, ordered, tied

    def __deepcopy__(self, _: dict[int, Any]) -> SplitFacts:
        return self  # copies of stages do not copy the model


def split_facts(stages: Sequence[nn.Module | None]) -> SplitFacts | None:
    """Return the facts about a split whose stages these are; None for other modules.

    Stages may be compiled, or in DistributedDataParallel. Those of other processes are None.

    Raises
    ------
    ArgumentError
        If they are stages of several splits, or in another order.
    """
    parts = {k: unwrapped(x) for k, x in enumerate(stages) if isinstance(x, nn.Module)}
    split = [(k, x, x.facts) for k, x in parts.items() if isinstance(x, SplitStage) and x.facts]
    if not split or len(split) < len(parts):
        return None
    first = split[0][2]
    for index, stage, facts in split:
        if facts is not first or stage.number != index or len(stages) != facts.n_stages:
            raise ArgumentError(
                f"stage {index} of {len(stages)} is stage {stage.number} of {facts.n_stages} of "
                f"{'another' if facts is not first else 'a'} pipeexec.split; give all stages of "
                "one split in their order"
            )
    return first


def tied_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of a name in a module, or in the module that this one wraps."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return unwrapped(module).get_parameter(name)


def first_tied_stage(stages: Sequence[nn.Module | None]) -> int | None:
    """Return the number of the first stage with parts of a split model that has tied parameters."""
    return next(
        (
            index
            for index, stage in enumerate(stages)
            if isinstance(stage, nn.Module)
            for part in stage.modules()
            if isinstance(part, SplitStage) and part.facts is not None and part.facts.tied
        ),
        None,
    )
