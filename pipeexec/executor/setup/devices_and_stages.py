"""Make the devices and stages of a pipeline, and check that its processes agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices.device import Device, DeviceLike
from pipeexec.devices.make_devices import make_devices
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.stage import EmbeddingStage, ShardedStage, exchange_options
from pipeexec.executor.microbatch_loss import MicrobatchLoss
from pipeexec.executor.setup.agreement import agree_on_weights
from pipeexec.executor.setup.gradient_options import GradientOptions
from pipeexec.experts.graph_checks import layers_of_graph, member_of_replica, n_members
from pipeexec.experts.stage import ExpertStage
from pipeexec.stages.activation_bytes import ActivationCounter
from pipeexec.stages.stage import Stage
from pipeexec.stages.stage_like import StageLike
from pipeexec.stages.weight_versions import WeightVersions
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op


def make_pipeline_devices(
    names: Sequence[DeviceLike], graph: TaskGraph, pin_threads: bool, processes: Processes | None
) -> list[Device]:
    """Return the devices of all processes, one a device of the graph."""
    if processes is None:
        local_rank, n_local = 0, 1
    else:
        local_rank, n_local = processes.local_rank, processes.n_local
    own = names if processes is not None or len(names) == graph.n_devices else ()
    devices = make_devices(  # warnings name the line that calls `Pipeline`
        own, pin_threads, local_rank=local_rank, n_local=n_local, stacklevel=4
    )
    if processes is not None:
        devices = processes.spread(devices)
    if len(devices) != graph.n_devices:
        local_devices = names if processes is None else [device.name for device in devices]
        raise ArgumentError(
            f"the graph has {graph.n_devices} devices, got {len(local_devices)}: "
            f"{list(local_devices)!r}; "
            "give one device a device of the graph"
        )
    return devices


def make_stages(
    modules: Sequence[nn.Module],
    graph: TaskGraph,
    devices: Sequence[Device],
    counters: Sequence[ActivationCounter],
    loss: MicrobatchLoss,
    stage_type: type[Stage] = Stage,
    sharded_type: type[ShardedStage] = ShardedStage,
    expert_type: type[ExpertStage] = ExpertStage,
) -> list[StageLike]:
    """Return the stages of all replicas, replica after replica.

    Parameters
    ----------
    modules, graph, devices
        Those of the pipeline; one module a stage of each replica.
    counters
        Counter of held activations of each device.
    loss
        Computes the losses of micro-batches.
    stage_type, sharded_type, expert_type
        Classes of stages, of sharded embeddings, and of stages with experts.
    """
    n = graph.n_stages
    layers, members = layers_of_graph(graph), member_of_replica(graph)
    several = graph.n_batches > 1
    size = graph.n_microbatches // graph.n_batches
    delayed = graph.weight_versions == "double_buffered"
    stages: list[StageLike] = [
        sharded_type(
            module,
            index % n,
            counters[device],
            **exchange_options(graph),
        )
        if index % n in graph.sharded and isinstance(module, EmbeddingStage)
        else expert_type(
            module,
            index % n,
            devices[device].torch_device,
            counters[device],
            partial(loss, index // n) if index % n == n - 1 else None,
            member=members[index // n],
            n_members=n_members(graph),
        )
        if layers[index % n] and not isinstance(module, RemoteStage)
        else stage_type(
            module,
            index % n,
            devices[device].torch_device,
            counters[device],
            partial(loss, index // n) if index % n == n - 1 else None,
            WeightVersions(module, size, delayed) if several else None,
            size,
            graph.n_slices,
        )
        for index, (module, device) in enumerate(
            zip(modules, graph.homes.ravel().tolist(), strict=False)
        )
    ]
    _mark_offloaded(graph, stages)
    return stages


def _mark_offloaded(graph: TaskGraph, stages: Sequence[StageLike]) -> None:
    """Tell each stage which of its micro-batches have an OFFLOAD."""
    tasks = np.flatnonzero(graph.op == Op.OFFLOAD)
    slots = graph.replica[tasks] * graph.n_stages + graph.stage[tasks]
    for slot in np.unique(slots[slots < len(stages)]).tolist():
        stage = stages[slot]
        if not isinstance(stage, Stage):
            raise ArgumentError(
                f"graph {graph.name!r} offloads activations of stage {stage.index}, which is "
                "sharded and keeps none; lower without offload for it"
            )
        stage.offloaded = frozenset(graph.microbatch[tasks[slots == slot]].tolist())


def agree_on_pipeline(
    modules: Sequence[nn.Module],
    graph: TaskGraph,
    processes: Processes,
    *,
    loss_reduction: str,
    has_optimizer: bool,
    gradient_options: GradientOptions,
) -> None:
    """Check that every process makes the same pipeline."""
    processes.agree("max_grad_norm and error_if_nonfinite", repr(gradient_options.clipping))
    scaling = gradient_options.scaling
    state = None if scaling is None else repr(scaling.scaler.state_dict())
    processes.agree("the state of grad_scaler", state)
    processes.agree("tied", repr(gradient_options.tied))
    processes.agree("loss_reduction", loss_reduction)
    processes.agree("whether there is an optimizer", has_optimizer)
    processes.agree("the seed (call torch.manual_seed first)", torch.initial_seed())
    if graph.n_replicas > 1:
        agree_on_weights(modules, graph.n_stages, graph.sharded, processes)
