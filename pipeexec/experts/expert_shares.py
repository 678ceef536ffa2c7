"""Layers with experts of a stage, and the processes that have shares of these experts.

A stage is cut at its layers with experts. A graph was lowered with a number of these layers.
Processes that have the same experts of a stage sum the gradients of these among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.experts.layer import Experts
from pipesim.errors import ArgumentError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, SEGMENTED, Op


class StageParts(NamedTuple):
    """A stage with n layers of experts, cut at them, in the order in which they run."""

    layers: list[Experts]
    between: list[list[nn.Module]]  # before the first, between two, after the last: n + 1


def expert_layers(module: nn.Module) -> list[Experts]:
    """Return the layers with experts anywhere in a module."""
    return [m for m in module.modules() if isinstance(m, Experts)]


def stage_parts(module: nn.Module, stage: int) -> StageParts:
    """Return the parts of a stage."""
    layers: list[Experts] = []
    between: list[list[nn.Module]] = [[]]
    for child in _children(module):
        if isinstance(child, Experts):
            layers.append(child)
            between.append([])
        else:
            between[-1].append(child)
    _check_reached(layers, module, between, stage)
    return StageParts(layers, between)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that nested ``nn.Sequential`` call, in order."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        yield module
        return
    for child in module:
        yield from _children(child)


def _check_reached(
    layers: Sequence[Experts], module: nn.Module, between: list[list[nn.Module]], stage: int
) -> None:
    """Raise `ArgumentError` for layers with experts that are not among the parts, or twice."""
    inside = [
        (inner, part) for row in between for part in row for inner in part.modules()
        if isinstance(inner, Experts)
    ]  # fmt: skip
    if inside:
        name = next(n for n, m in module.named_modules() if m is inside[0][0])
        raise ArgumentError(
            f"layer {name!r} of stage {stage} has experts, and is called by a "
            f"{type(inside[0][1]).__name__}, which cannot be cut there; let the stage be an "
            "nn.Sequential with pipeexec.Experts as a child, also nested, without hooks (norm, "
            "residual and shared are its arguments)"
        )
    if len({id(layer) for layer in layers}) < len(layers):
        raise ArgumentError(
            f"stage {stage} calls a layer with experts twice; give each call a layer of its own"
        )


class ShapeModule(nn.Module):
    """Runs a stage with one of its experts in place of all, and without exchanges of tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> object:
        """Return outputs of the shapes of the stage."""
        output: object = values if len(values) > 1 else values[0]
        for child in _children(self.module):
            if isinstance(child, Experts):
                assert isinstance(output, Tensor)
                output = child.like_output(output)
            else:
                output = child(*output) if output is values else child(output)
        return output


def layers_of_graph(graph: TaskGraph) -> list[int]:
    """Return the number of layers with experts that each stage of a graph was lowered with."""
    kinds, most = graph.kinds, np.zeros(graph.n_stages, dtype=np.int64)
    own = kinds.is_op(SEGMENTED) & (kinds.part >= 0)
    np.maximum.at(most, kinds.stage[own], kinds.part[own])
    layers: list[int] = (most // 2).tolist()
    return layers


def n_members(graph: TaskGraph) -> int:
    """Return the number of replicas that together have all experts."""
    copies: int = int(copy_of_replicas(graph.homes).max()) + 1
    return graph.expert_replicas or copies


def member_of_replica(graph: TaskGraph) -> list[int]:
    """Return which member of its group each replica is, paths of a pipeline included."""
    members: list[int] = (copy_of_replicas(graph.homes) % n_members(graph)).tolist()
    return members


def check_experts(modules: Sequence[nn.Module], graph: TaskGraph) -> None:
    """Raise unless the stages have the layers that a graph was lowered with, and can run them.

    Modules are those of all replicas; stages of other processes are a `RemoteStage`.
    """
    lowered = layers_of_graph(graph)
    for slot, module in enumerate(modules):
        if not isinstance(module, RemoteStage):
            _check_layers(module, slot % graph.n_stages, lowered[slot % graph.n_stages])
    if not any(lowered):
        return
    g, members = n_members(graph), member_of_replica(graph)
    for slot, module in enumerate(modules):
        replica, stage = divmod(slot, graph.n_stages)
        if lowered[stage] and not isinstance(module, RemoteStage):
            _check_stage(module, stage, members[replica], g)
    _check_options(graph, lowered)


def _check_layers(module: nn.Module, stage: int, n_lowered: int) -> None:
    """Raise `ArgumentError` if a graph has another number of layers with experts of a stage."""
    n = len(expert_layers(module))
    if n == n_lowered:
        return
    if not n:
        raise ArgumentError(
            f"the graph was lowered with {n_lowered} layers with experts in stage {stage} "
            f"(expert_layers), but its module, a {type(module).__name__}, has none; give layers of "
            "pipeexec.Experts, or lower with 0 there"
        )
    raise ArgumentError(
        f"stage {stage} has {n} layers of pipeexec.Experts, but the graph was lowered with "
        f"{n_lowered} (expert_layers); give lower(..., expert_layers=...) the number of each stage"
    )


def _check_stage(module: nn.Module, stage: int, member: int, g: int) -> None:
    """Raise `ArgumentError` unless a stage can be cut, and has the experts of its replica."""
    if unwrapped(module) is not module:
        raise ArgumentError(
            f"stage {stage} has layers with experts inside a {type(module).__name__}, which cannot "
            "be cut at them; give the module itself: the graph reduces gradients over replicas"
        )
    for layer in stage_parts(module, stage).layers:
        if layer.n_experts % g:
            raise ArgumentError(
                f"n_experts={layer.n_experts} of a layer of stage {stage} is not divisible by the "
                f"{g} replicas that share them (expert_replicas); give a multiple"
            )
        size = layer.n_experts // g
        own = range(member * size, (member + 1) * size)
        if not set(own) <= set(layer.held):
            raise ArgumentError(
                f"the replica of stage {stage} in this process is number {member} of {g} that "
                f"share the experts, and computes experts {own.start} to {own.stop - 1}, but its "
                f"module has {layer.held.start} to {layer.held.stop - 1}; give "
                f"pipeexec.Experts(share=({member}, {g})), or all experts"
            )


def _check_options(graph: TaskGraph, layers: Sequence[int]) -> None:
    """Raise `ArgumentError` for options that stages with experts do not have."""
    stages = np.flatnonzero(layers)
    recomputed = stages[np.isin(stages, graph.stage[graph.op == Op.R])]
    if len(recomputed):
        raise ArgumentError(
            f"the graph recomputes stage {recomputed[0]}, which has layers with experts: R would "
            "exchange tokens again in the middle of a task; lower with recompute='never', or give "
            "a schedule that lists no R of that stage"
        )
    others = {
        "offloads activations; lower without offload": graph.is_op(COPIES).any(),
        "shares the optimizer or parameters over replicas; lower without shard_optimizer and "
        "shard_parameters": graph.is_op(frozenset({Op.UNSHARD})).any(),
        "has slices of sequences; give a schedule of whole sequences": graph.n_slices > 1,
    }
    for text in (text for text, has in others.items() if has):
        raise ArgumentError(
            f"stage {stages[0]} has layers with experts, whose segments run without it, but the "
            f"graph {text}"
        )
    if graph.n_batches > 1:
        raise ArgumentError(
            f"the graph has {graph.n_batches} mini-batches, and stage {stages[0]} has layers with "
            "experts, which have no versions of their weights; lower a schedule of one mini-batch"
        )


@dataclass(frozen=True)
class ExpertGroup:
    """The processes that have the same experts of a stage as this one."""

    group: ProcessGroup | None  # None if no other process has them
    is_first: bool  # whether this process has the lowest rank of them


def shared_out(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the experts of layers of which a module has a share, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, layer in module.named_modules()
        if isinstance(layer, Experts) and not layer.has_all
        for name, parameter in layer.experts.named_parameters(prefix="experts")
    }


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
