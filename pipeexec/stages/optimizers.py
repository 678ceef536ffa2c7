"""Make the optimizers of a pipeline's stages with the user's factory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from pipesim.errors import ArgumentError, check_function

__all__ = ["OptimizerFactory", "make_optimizers"]

#: Makes the optimizer of some parameters.
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_optimizers(
    factory: OptimizerFactory | None, modules: Sequence[nn.Module], n_stages: int
) -> list[torch.optim.Optimizer | None]:
    """Return the optimizer of each module; None for those without parameters, or without factory.

    Raises
    ------
    ArgumentError
        If the factory is not callable, returns no optimizer, or one of other parameters.
    """
    if factory is None:
        return [None] * len(modules)
    check_function("optimizer", factory, "torch.optim.AdamW(parameters)")
    return [
        _make_optimizer(factory, module, slot % n_stages) for slot, module in enumerate(modules)
    ]


def _make_optimizer(
    factory: OptimizerFactory, module: nn.Module, stage: int
) -> torch.optim.Optimizer | None:
    own_ids = set(map(id, module.parameters()))
    if not own_ids:
        return None
    optimizer = factory(module.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer returned {optimizer!r:.60} for the parameters of stage {stage}; it must "
            "return a torch.optim.Optimizer"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    n_others = sum(id(p) not in own_ids for p in parameters)
    if n_others or not parameters:
        raise ArgumentError(
            f"the optimizer of stage {stage} has {len(parameters)} parameters, {n_others} of which "
            "are not the stage's; make it from the parameters that it is called with"
        )
    return optimizer
