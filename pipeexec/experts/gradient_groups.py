"""Processes that have the same experts of a stage: they sum the gradients of these among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.experts.layer import Experts
from pipeexec.experts.stage_parts import expert_layers
from pipesim.errors import ArgumentError


@dataclass(frozen=True)
class ExpertGroup:
    """The processes that have the same experts of a stage as this one.

    Attributes
    ----------
    group
        Process group; None if no other process has them.
    is_first
        Whether this process has the lowest rank of them.
    """

    group: ProcessGroup | None
    is_first: bool


def shared_out(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the experts of layers of which a module has a share, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, layer in module.named_modules()
        if isinstance(layer, Experts) and not layer.has_all
        for name, parameter in layer.experts.named_parameters(prefix="experts")
    }


def counted_parameters(
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    group: ExpertGroup | None,
    *,
    is_first: bool,
    is_first_here: bool,
) -> Iterator[nn.Parameter]:
    """Yield the parameters of a copy of a stage whose gradients no other copy counts.

    After a step every copy has the sums. A norm takes each of them from one copy, and so does a
    later step that adds to them.

    Parameters
    ----------
    module
        The copy.
    parameters
        Its parameters, or those that are trained.
    group
        Processes that have the same experts; None if the copy has all experts, or none.
    is_first
        Whether it is the first of all copies.
    is_first_here
        Whether it is the first copy of this process.
    """
    experts = set() if group is None else {id(p) for p in shared_out(module).values()}
    counts_experts = group is not None and group.is_first and is_first_here
    for parameter in parameters:
        if counts_experts if id(parameter) in experts else is_first:
            yield parameter


def part_of_experts(module: nn.Module) -> str:
    """Return the experts that a module has, as text; empty if it has all."""
    layers = expert_layers(module)
    if all(layer.has_all for layer in layers):
        return ""
    return ", ".join(f"{layer.held.start}-{layer.held.stop - 1}" for layer in layers)


def expert_groups(
    modules: Sequence[nn.Module], n_stages: int, processes: Processes | None
) -> Mapping[int, ExpertGroup]:
    """Return the group of each local stage of which processes have shares of the experts.

    All processes must call this.
    """
    own = {
        str(slot % n_stages): part_of_experts(module)
        for slot, module in enumerate(modules)
        if not isinstance(module, RemoteStage)
    }
    everyone = [own] if processes is None else processes.share(own)
    groups: dict[int, ExpertGroup] = {}
    for stage in range(n_stages):
        parts = {rank: row[str(stage)] for rank, row in enumerate(everyone) if str(stage) in row}
        if not any(parts.values()):
            continue
        if "" in parts.values() or processes is None:
            raise ArgumentError(
                f"stage {stage} has a share of its experts, but another process has all of them, "
                "or there is no other; give pipeexec.Experts share=(k, n) in every process, or in "
                "none"
            )
        for part in sorted(set(parts.values())):
            ranks = [rank for rank, other in parts.items() if other == part]
            group = processes.group(ranks, key=f"experts {stage}") if len(ranks) > 1 else None
            if processes.rank in ranks:
                groups[stage] = ExpertGroup(group, processes.rank == ranks[0])
    return groups
