"""Copies of a stage within one process, synchronized with the first one before each step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.compiled_modules import compile_copy
from pipeexec.nesting import leaves
from pipesim.errors import ArgumentError


class RemoteStage(nn.Module):
    """Placeholder of a stage of another process: it has no parameters, and does not run."""


def place_replicas(stages: Sequence[nn.Module | None], is_local: Sequence[bool]) -> list[nn.Module]:
    """Return the module of each stage of each replica.

    The first local replica of a stage is the given module, others are copies of it. Stages of other
    processes, None in ``stages``, are a `RemoteStage`. ``is_local`` tells for each stage of each
    replica whether this process has it: replica by replica, ``len(stages)`` entries each.
    """
    modules: list[nn.Module] = []
    placed_stages: set[int] = set()
    for slot, has_slot in enumerate(is_local):
        index = slot % len(stages)
        stage = stages[index] if has_slot else None
        if stage is None:
            modules.append(RemoteStage())
        elif index in placed_stages:
            modules.append(_copy_stage(stage, index))
        else:
            placed_stages.add(index)
            modules.append(stage)
    return modules


def _copy_stage(stage: nn.Module, index: int) -> nn.Module:
    _check_references(stage, index)
    try:
        replica = copy.deepcopy(stage)
    except Exception as error:  # a user's module may raise anything
        raise ArgumentError(
            f"stage {index} cannot be copied ({type(error).__name__}: {error}), as each path of a "
            "bidirectional placement needs, and each further replica in one process; keep locks "
            "and results out of its attributes"
        ) from error
    compile_copy(stage, replica, index)
    return replica


def _check_references(stage: nn.Module, index: int) -> None:
    """Raise if a stage refers to trained parameters that are not its own.

    A copy of the stage would have copies of them, which no step changes.
    """
    own = {id(p) for p in stage.parameters()}
    for name, module in stage.named_modules():
        for key, value in vars(module).items():
            parameters = _parameters_in(value)
            if any(p.requires_grad and not p.is_meta and id(p) not in own for p in parameters):
                raise ArgumentError(
                    f"stage {index} cannot be copied, as each path of a bidirectional placement "
                    f"needs, and each further replica in one process: {key!r} of "
                    f"{name or 'the stage'!r} refers to trained parameters that are not its own; "
                    "let it be a module or parameter of the stage, or let one stage have both"
                )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters in an attribute, and those of modules in it."""
    for leaf in leaves(value):
        if isinstance(leaf.value, nn.Module):
            yield from leaf.value.parameters()
        elif isinstance(leaf.value, nn.Parameter):
            yield leaf.value


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements have one address, as in stand-ins of parameters."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _copies(modules: Sequence[nn.Module], n_stages: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each stage that this process was given, with each of its copies."""
    first: dict[int, nn.Module] = {}
    for slot, module in enumerate(modules):
        if (
            not isinstance(module, RemoteStage)
            and first.setdefault(slot % n_stages, module) != module
        ):
            yield first[slot % n_stages], module


def check_hooks(modules: Sequence[nn.Module], n_stages: int, several: bool) -> None:
    """Raise `ArgumentError` for hooks on parameters, which neither copies nor versions have.

    With ``several`` mini-batches all stages have versions.
    """
    copied = {id(stage) for stage, _ in _copies(modules, n_stages)}
    for slot, module in enumerate(modules):
        for name, p in module.named_parameters() if several or id(module) in copied else ():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ArgumentError(
                    f"parameter {name!r} of stage {slot % n_stages} has hooks, which a "
                    "bidirectional placement, replicas in one process, or several mini-batches "
                    "would run for some micro-batches only; remove them, or run another schedule"
                )


@torch.no_grad()
def sync_from_first(modules: Sequence[nn.Module], n_stages: int) -> None:
    """Copy parameters, buffers and training modes of each stage to its copies.

    ``modules`` are as `place_replicas` returns them, ``n_stages`` is the stages of one replica.
    """
    for stage, replica in _copies(modules, n_stages):
        for module, first_module in zip(replica.modules(), stage.modules(), strict=True):
            module.training = first_module.training
        for buffer, first_buffer in zip(replica.buffers(), stage.buffers(), strict=True):
            if is_expanded(buffer):
                buffer.data = first_buffer.clone()  # no operation can write to it
            else:
                buffer.copy_(first_buffer)
        for parameter, first in zip(replica.parameters(), stage.parameters(), strict=True):
            parameter.copy_(first)
            parameter.requires_grad_(first.requires_grad)
