"""Make the shards of a pipeline's stages, and check that a graph and its processes allow them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.data_parallel.stage_shards import StageShards, check_shardable
from pipeexec.devices.device import Device, device_ranks
from pipeexec.distributed.processes import Processes
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

#: For each stage, whether its replicas share "none", the "optimizer", or all "parameters".
Sharding = tuple[str, ...]
_ARGUMENTS = {"optimizer": "shard_optimizer=True", "parameters": "shard_parameters"}


def sharding_of(graph: TaskGraph) -> Sharding:
    """Return what the replicas of each stage of a graph share, as its UNSHARDs tell."""
    of_stage = ["none"] * graph.n_stages
    for task in np.flatnonzero(graph.op == Op.UNSHARD):
        is_part = graph.part[task] >= 0
        of_stage[int(graph.stage[task])] = "parameters" if is_part else "optimizer"
    return tuple(of_stage)


def sharding_argument(graph: TaskGraph) -> str | None:
    """Return the argument of `pipesim.lower` that lets replicas share something; None if none."""
    sharding = sharding_of(graph)
    kinds = [kind for kind in ("parameters", "optimizer") if kind in sharding]
    return _ARGUMENTS[kinds[0]] if kinds else None


def check_sharding(graph: TaskGraph, sharding: Sharding, *, trains: bool) -> None:
    """Raise `ArgumentError` if a graph shares other things than the pipeline, or in buckets.

    A graph that does not train needs the gathers of sharded parameters alone.
    """
    own = sharding_of(graph)
    for task in np.flatnonzero((graph.op == Op.REDUCE_GRAD) & (graph.part >= 0)):
        if own[int(graph.stage[task])] != "none":
            raise ArgumentError(
                f"stage {graph.stage[task]} of {graph!r} reduces its gradients in buckets, and its "
                "replicas share the optimizer, whose shares are of the whole stage: this is "
                'simulated, not run; take grad_sync="last", "every" or a number'
            )
    if not trains:
        own, sharding = (
            tuple("none" if x == "optimizer" else x for x in row) for row in (own, sharding)
        )
    for stage, (what, wanted) in enumerate(zip(own, sharding, strict=True)):
        if what != wanted:
            raise ArgumentError(
                f"{graph!r} shards {_words(what)} of stage {stage}, the pipeline {_words(wanted)}; "
                "lower the graph with the same shard_optimizer and shard_parameters, or make "
                "another pipeline"
            )


def _words(what: str) -> str:
    return "nothing" if what == "none" else f"the {what}"


def make_shards(
    graph: TaskGraph,
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer | None],
    devices: Sequence[Device],
    processes: Processes | None,
    *,
    has_optimizer: bool,
) -> dict[int, StageShards]:
    """Return the shards of each local stage whose replicas share something, by slot.

    The parameters of these stages become views of flat tensors. All processes must call this.
    """
    sharding, what = sharding_of(graph), sharding_argument(graph)
    if what is None:
        return {}
    ranks = device_ranks(devices, 0 if processes is None else processes.rank)
    _check_pipeline(graph, sharding, what, ranks, has_optimizer=has_optimizer)
    assert processes is not None  # one process has several replicas
    local = [
        slot
        for slot, module in enumerate(modules)
        if sharding[slot % graph.n_stages] != "none" and not isinstance(module, RemoteStage)
    ]
    for slot in local:
        check_shardable(modules[slot], slot % graph.n_stages, optimizers[slot], what)
    shards: dict[int, StageShards] = {}
    for stage, kind in enumerate(sharding):
        members = [ranks[device] for device in graph.homes[:, stage]]
        if kind == "none":
            continue
        group = processes.group(sorted(members), key=f"shards {stage}")
        for slot in local:
            if slot % graph.n_stages == stage and any(True for _ in modules[slot].parameters()):
                shards[slot] = StageShards(
                    modules[slot],
                    optimizers[slot],
                    sorted(members).index(processes.rank),
                    len(members),
                    group,
                    frees=kind == "parameters",
                )
    return shards


def _check_pipeline(
    graph: TaskGraph,
    sharding: Sharding,
    what: str,
    ranks: Sequence[int],
    *,
    has_optimizer: bool,
) -> None:
    for stage in range(graph.n_stages):
        members = [ranks[device] for device in graph.homes[:, stage]]
        if sharding[stage] != "none" and len(set(members)) < len(members):
            raise ArgumentError(
                f"{what}, but replicas of stage {stage} are in one process, where they have one "
                "set of parameters; give each replica a process of its own, or lower without it"
            )
    if not graph.forward_only and (not has_optimizer or not (graph.op == Op.STEP).any()):
        missing = "the graph has no STEP" if has_optimizer else "the pipeline has no optimizer"
        raise ArgumentError(
            f"{what}, but {missing}; replicas share the steps: give an optimizer, and lower with "
            'step="flush", or lower without it'
        )
