"""Make the optimizers of a pipeline's stages with the user's factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pipesim.errors import ArgumentError, check_function

#: Makes the optimizer of some parameters, or of pairs of name and parameter.
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
#: Returns the pairs of name and parameter of a stage.
NamedParameters = Callable[[nn.Module], Iterable[tuple[str, nn.Parameter]]]


def make_optimizers(
    factory: OptimizerFactory | None,
    modules: Sequence[nn.Module],
    n_stages: int,
    named_parameters: NamedParameters,
) -> list[torch.optim.Optimizer | None]:
    """Return the optimizer of each module; None for those that have nothing to train.

    These are all without a factory, those without parameters, and those whose parameters are all
    frozen and left out by the factory.
    """
    if factory is None:
        return [None] * len(modules)
    check_function("optimizer", factory, "torch.optim.AdamW(parameters)")
    first = next((x.name for x in _parameters(factory)), "")
    names = named_parameters if first == "named_parameters" else None
    return [
        _make_optimizer(factory, module, slot % n_stages, names)
        for slot, module in enumerate(modules)
    ]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; none for functions of C without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _make_optimizer(
    factory: OptimizerFactory, module: nn.Module, stage: int, names: NamedParameters | None
) -> torch.optim.Optimizer | None:
    own = {id(p): p for p in module.parameters()}
    if not own:
        return None
    is_frozen = not any(p.requires_grad for p in own.values())
    try:
        optimizer = factory(module.parameters() if names is None else names(module))
    except Exception as error:  # of the user's code, or of torch
        if is_frozen and "empty parameter list" in str(error):
            return None
        raise ArgumentError(
            f"optimizer fails for the parameters of stage {stage}: {type(error).__name__}: "
            f"{error!s:.300}; it is called with the parameters of each stage, of which some may "
            "have none for a group: put parameters, not pairs, in groups that may be empty"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer returned {optimizer!r:.60} for the parameters of stage {stage}; it must "
            "return a torch.optim.Optimizer"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    n_others = sum(id(p) not in own for p in parameters)
    if n_others or (not parameters and not is_frozen):
        raise ArgumentError(
            f"the optimizer of stage {stage} has {len(parameters)} parameters, {n_others} of which "
            "are not the stage's; make it from the parameters that it is called with"
        )
    _check_needs_no_closure(optimizer, stage)
    return optimizer


def _check_needs_no_closure(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Raise `ArgumentError` for an optimizer such as LBFGS, whose steps call the whole model."""
    # That of the class: a torch scheduler replaces the method of the object by a plain function.
    for parameter in _parameters(type(optimizer).step)[1:]:
        needs_value = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needs_value:
            raise ArgumentError(
                f"the optimizer of stage {stage} ({type(optimizer).__name__}) needs a "
                f"{parameter.name} in step(), which computes the loss of the whole model again; a "
                "stage steps alone: take an optimizer that uses gradients, such as "
                "torch.optim.AdamW"
            )
