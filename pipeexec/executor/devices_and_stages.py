"""Make the devices and stages of a pipeline and its loss, and check that its processes agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices.device import Device, DeviceLike
from pipeexec.devices.make_devices import make_devices
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.stage import EmbeddingStage, ShardedStage, exchange_options
from pipeexec.executor.remote_messages import agree_on_weights
from pipeexec.executor.step import Step
from pipeexec.experts.expert_shares import layers_of_graph, member_of_replica, n_members
from pipeexec.experts.stage import ExpertStage
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.module_call import WeightVersions
from pipeexec.stages.stage import Stage, StageLike
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op


class MicrobatchLoss:
    """Compute the losses of the current step.

    A pipeline holds its stages. A last stage holds this, which holds the current step and never the
    pipeline. A reference cycle would keep the memory of both until Python's cycle collector runs.
    On a GPU, that may be too late.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # None between steps

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the weighted loss of a micro-batch, and store it in the step."""
        step = self.step
        if step is None:
            raise ExecutionError("the step of this task was abandoned, as an error says")
        loss = step.inputs.loss.microbatch_loss(
            step.inputs.shares.number(replica, microbatch), output
        )
        if torch.is_grad_enabled() and not loss.requires_grad:
            _check_all_frozen(step)
        return loss


def _check_all_frozen(step: Step) -> None:
    parameters = (p for stage in step.gradients.stages for p in stage.module.parameters())
    if step.processes is not None or any(p.requires_grad for p in parameters):
        raise ExecutionError(
            "the loss does not depend on any parameter by operations that torch can "
            "differentiate, so a step would train nothing; look for detach(), no_grad(), "
            "item() or integers in the last stage and the loss, and for a loss that does not "
            "use the output"
        )


def make_pipeline_devices(
    names: Sequence[DeviceLike], graph: TaskGraph, pin_threads: bool, processes: Processes | None
) -> list[Device]:
    """Return the devices of all processes, one a device of the graph."""
    local_rank, n_local = (0, 1) if processes is None else (processes.local_rank, processes.n_local)
    own = names if processes is not None or len(names) == graph.n_devices else ()
    devices = make_devices(  # warnings name the line that calls `Pipeline`
        own, pin_threads, local_rank=local_rank, n_local=n_local
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

    ``counters`` count the held activations of each device. ``sharded_type`` is the class of sharded
    embeddings, ``expert_type`` that of stages with experts.
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
) -> None:
    """Check that every process makes the same pipeline."""
    processes.agree("loss_reduction", loss_reduction)
    processes.agree("whether there is an optimizer", has_optimizer)
    processes.agree("the seed (call torch.manual_seed first)", torch.initial_seed())
    if graph.n_replicas > 1:
        agree_on_weights(modules, graph.n_stages, graph.sharded, processes)
