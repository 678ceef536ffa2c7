"""Replicas of stages in one process: copies of them, which follow them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pipesim.errors import ArgumentError

__all__ = [
    "Elsewhere",
    "check_hooks",
    "follow",
    "placed",
]


class Elsewhere(nn.Module):
    """Stands for a stage of another process: it has no parameters, and does not run."""


def placed(stages: Sequence[nn.Module | None], here: Sequence[bool]) -> list[nn.Module]:
    """Return the module of each stage of each replica, given which of them are in this process.

    The first of a stage that is here is the one given, others are copies of it.

    Raises
    ------
    ArgumentError
        If a stage cannot be copied.
    """
    found: list[nn.Module] = []
    given: set[int] = set()
    for slot, is_here in enumerate(here):
        index = slot % len(stages)
        stage = stages[index] if is_here else None
        if stage is None:
            found.append(Elsewhere())
        elif index in given:
            found.append(_copied(stage, index))
        else:
            given.add(index)
            found.append(stage)
    return found


def _copied(stage: nn.Module, index: int) -> nn.Module:
    try:
        return copy.deepcopy(stage)
    except Exception as error:  # whatever a module of the user's may raise
        raise ArgumentError(
            f"stage {index} cannot be copied ({type(error).__name__}: {error}), as each path of a "
            "bidirectional placement needs, and each further replica in one process; keep locks "
            "and results out of its attributes"
        ) from error


def _pairs(modules: Sequence[nn.Module], n_stages: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each stage that this process was given, with each of its copies."""
    first: dict[int, nn.Module] = {}
    for slot, module in enumerate(modules):
        if (
            not isinstance(module, Elsewhere)
            and first.setdefault(slot % n_stages, module) != module
        ):
            yield first[slot % n_stages], module


def check_hooks(modules: Sequence[nn.Module], n_stages: int, several: bool) -> None:
    """Raise `ArgumentError` for hooks on parameters, which neither copies nor versions have.

    With ``several`` mini-batches all stages have versions.
    """
    copied = {id(stage) for stage, _ in _pairs(modules, n_stages)}
    for slot, module in enumerate(modules):
        for name, p in module.named_parameters() if several or id(module) in copied else ():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ArgumentError(
                    f"parameter {name!r} of stage {slot % n_stages} has hooks, which a "
                    "bidirectional placement, replicas in one process, or several mini-batches "
                    "would run for some micro-batches only; remove them, or run another schedule"
                )


@torch.no_grad()
def follow(modules: Sequence[nn.Module], n_stages: int) -> None:
    """Give copies of stages the parameters, buffers and modes that the stages have now."""
    for stage, copied in _pairs(modules, n_stages):
        for mine, its in zip(copied.modules(), stage.modules(), strict=True):
            mine.training = its.training
        for buffer, its_buffer in zip(copied.buffers(), stage.buffers(), strict=True):
            buffer.copy_(its_buffer)
        for parameter, its_parameter in zip(copied.parameters(), stage.parameters(), strict=True):
            parameter.copy_(its_parameter)
            parameter.requires_grad_(its_parameter.requires_grad)
