"""Parameters that several stages have: copies in all but the first, and which they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from pipeexec.splitting.tracing.data_flow import DataFlow
from pipesim.errors import ArgumentError

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
    """
    stages: dict[int, dict[int, str]] = defaultdict(dict)
    for stage, own in enumerate(calls):
        modules = {flow.calls[k].name for k in own}
        needed = {id(model.get_parameter(name)) for name in outer[stage]}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in needed or any(name.startswith(f"{x}.") for x in modules):
                stages[id(parameter)].setdefault(stage, name)
    result = [(p, stages[id(p)]) for p in model.parameters() if len(stages[id(p)]) > 1]
    for parameter, names in result:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ArgumentError(
                f"stages {sorted(names)} have copies of {next(iter(names.values()))!r}, whose "
                "hooks would run for one of them; remove its hooks, or cut so that one stage has it"
            )
    return result


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
