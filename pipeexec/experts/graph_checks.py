"""Check that stages have the layers with experts that a graph was lowered with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.experts.stage_parts import expert_layers, stage_parts
from pipesim.errors import ArgumentError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, SEGMENTED, Op


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


def check_experts(modules: Sequence[nn.Module], graph: TaskGraph, *, cuda_graph: bool) -> None:
    """Raise unless the stages have the layers that a graph was lowered with, and can run them.

    Parameters
    ----------
    modules
        Modules of all replicas; stages of other processes are a `RemoteStage`.
    graph
        Graph to run.
    cuda_graph
        Whether steps are captured.
    """
    lowered, g = layers_of_graph(graph), n_members(graph)
    members = member_of_replica(graph)
    for slot, module in enumerate(modules):
        if isinstance(module, RemoteStage):
            continue
        stage = slot % graph.n_stages
        _check_layers(module, stage, lowered[stage])
        if lowered[stage]:
            _check_stage(module, stage, members[slot // graph.n_stages], g)
    if any(lowered):
        _check_options(graph, lowered, cuda_graph)


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


def _check_options(graph: TaskGraph, layers: Sequence[int], cuda_graph: bool) -> None:
    """Raise `ArgumentError` for options that stages with experts do not have."""
    stages = np.flatnonzero(layers)
    if cuda_graph:
        raise ArgumentError(
            "cuda_graph=True does not capture layers with experts, whose numbers of rows change; "
            "leave cuda_graph out"
        )
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
