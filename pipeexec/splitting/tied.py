"""Parameters that several stages have: copies in all but the first, and which they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from pipeexec.splitting.tracing.data_flow import DataFlow
from pipesim.errors import ArgumentError

__all__ = ["Shared", "TiedGroup", "copies", "shared_parameters", "tied_groups"]

#: Copies of one parameter: stage, and name of the parameter in the stage's module.
TiedGroup = tuple[tuple[int, str], ...]
#: A parameter of several stages, and its first name in the model's modules of each of them.
Shared = tuple[nn.Parameter, dict[int, str]]


def shared_parameters(
    model: nn.Module,
    flow: DataFlow,
    calls: Sequence[range],
    outer: Sequence[frozenset[str]],
) -> list[Shared]:
    """Return the parameters that several stages have.

    Parameters
    ----------
    model
        The model.
    flow
        Its data flow.
    calls
        Calls of each stage.
    outer
        Parameters that each stage needs outside of calls.

    Raises
    ------
    ArgumentError
        If several stages call a module that changes its buffers, such as a batch norm.
    """
    stages: dict[int, dict[int, str]] = defaultdict(dict)
    users: dict[str, int] = {}
    for stage, own in enumerate(calls):
        modules = {flow.calls[k].name for k in own}
        for name in modules:
            _check_buffers(model.get_submodule(name), name, users.setdefault(name, stage), stage)
        needed = {id(model.get_parameter(name)) for name in outer[stage]}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in needed or any(name.startswith(f"{x}.") for x in modules):
                stages[id(parameter)].setdefault(stage, name)
    return [(p, stages[id(p)]) for p in model.parameters() if len(stages[id(p)]) > 1]


def _check_buffers(module: nn.Module, name: str, first: int, stage: int) -> None:
    """Raise if a module of two stages changes its buffers."""
    for inner, part in module.named_modules():
        if first != stage and part.training and getattr(part, "track_running_stats", False):
            raise ArgumentError(
                f"stages {first} and {stage} both call {name!r}, whose "
                f"{f'{name}.{inner}'.rstrip('.')!r} keeps running statistics; each stage would "
                "have others. Cut so that one stage has all its calls, or give each call a module"
            )


def copies(shared: Iterable[Shared], stage: int) -> dict[int, nn.Parameter]:
    """Return the copies that a stage has of parameters of earlier stages, by the ids of these."""
    return {
        id(p): nn.Parameter(p.detach().clone(), p.requires_grad)
        for p, names in shared
        if stage in names and stage != min(names)
    }


def tied_groups(shared: Iterable[Shared]) -> Iterator[TiedGroup]:
    """Yield the copies of each shared parameter that is trained."""
    for parameter, names in shared:
        if parameter.requires_grad:
            yield tuple((stage, f"model.{names[stage]}") for stage in sorted(names))
