"""`PlacedModel`: the stages of a model on devices, with their optimizers.

Pipelines of several graphs share one: `Pipeline.with_graph` makes further pipelines of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.data_parallel.ddp import check_ddp
from pipeexec.data_parallel.stage_replicas import RemoteStage, place_replicas
from pipeexec.data_parallel.stage_shards import StageShards, WholeOptimizer
from pipeexec.devices.device import DeviceLike, RemoteDevice, device_ranks
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.stage import check_embedding
from pipeexec.executor.devices_and_stages import agree_on_pipeline, make_pipeline_devices
from pipeexec.executor.sharding import Sharding, make_shards, sharding_of
from pipeexec.executor.step_capture import StepCapture
from pipeexec.executor.step_part import StepPart
from pipeexec.experts.expert_shares import expert_groups
from pipeexec.splitting.split_facts import named_model_parameters
from pipeexec.stages.batches import BatchDims, check_batch_dims
from pipeexec.stages.optimizers import OptimizerFactory, make_optimizers
from pipeexec.stages.sequence_slices import check_slice_dim
from pipesim.errors import ArgumentError, ExecutionError, number
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify


def check_timeout(timeout: float | None) -> None:
    """Raise unless a timeout is a positive number of seconds, or None."""
    seconds = number(timeout)
    if timeout is not None and (seconds is None or not 0 < seconds < float("inf")):
        raise ArgumentError(
            "timeout must be a positive number of seconds, or None to wait for ever, got "
            f"{timeout!r}"
        )


def check_graph(graph: TaskGraph) -> None:
    """Raise unless a graph is a valid `TaskGraph`."""
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"Pipeline runs a TaskGraph, got {type(graph).__name__}; lower the schedule first"
        )
    verify(graph)


def check_stages(
    stages: Sequence[nn.Module | None], graph: TaskGraph, is_local: Sequence[bool]
) -> None:
    """Raise unless each stage has one module, and no two modules share parameters.

    ``is_local`` marks the copies of stages that run in this process, which need a module.
    """
    n = graph.n_stages
    if len(stages) != n or not all(
        isinstance(stage, nn.Module) or (stage is None and len(set(is_local)) > 1)
        for stage in stages
    ):
        raise ArgumentError(
            f"the graph has {graph.n_stages} stages, got {len(stages)} "
            f"({', '.join(type(s).__name__ for s in stages)}); give one nn.Module a stage"
        )
    for slot in np.flatnonzero(is_local).tolist():
        if stages[slot % n] is None:
            replica = f" of replica {slot // n}" if graph.n_replicas > 1 else ""
            device = graph.homes.ravel()[slot]
            raise ArgumentError(
                f"stage {slot % n}{replica} is on device {device} of this process, but its module "
                "is None; give its nn.Module"
            )
    owner: dict[nn.Parameter, int] = {}
    for index, module in enumerate(stages):
        for name, parameter in () if module is None else module.named_parameters():
            if owner.setdefault(parameter, index) != index:
                raise ArgumentError(
                    f"stages {owner[parameter]} and {index} share the parameter {name!r}; stages "
                    "run at the same time, so each needs separate parameters: give each stage a "
                    "copy, name the copies in Pipeline(..., tied=[[(0, 'name'), (3, 'name')]]), "
                    f"and lower with tied=[({owner[parameter]}, {index})]; pipeexec.split does so"
                )


PartType = TypeVar("PartType", bound=StepPart)

#: Seconds that `PlacedModel.close` waits for a step of another thread to end.
_SECONDS_TO_END = 5.0


class PlacedModel:
    """Stages on devices, and how steps train them; ``graph`` gives the placement of stages.

    Attributes
    ----------
    devices
        One a device of the graph, those of other processes included.
    modules
        Replica after replica: the given stages, then copies of them.
    homes
        Device of each stage; shape ``(n_replicas, n_stages)``.
    optimizers
        One a module, or None.
    zero_grad
        Whether each step begins without gradients.
    has_checked_squares, has_checked_gradients
        Whether a step has looked for masks as large as the batch, and for stages without gradients.
    is_split
        Whether the stages are those of `pipeexec.split`, which take tensors alone.
    expert_groups
        Processes with the same experts as this one, by stage; empty if all have all experts.
    parts
        Features of the steps.
    sharding, shards
        What the replicas of each stage share, and the shards of local stages by slot.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        graph: TaskGraph,
        devices: Sequence[DeviceLike],
        optimizer: OptimizerFactory | None,
        *,
        pin_threads: bool,
        timeout: float | None,
        processes: Processes | None,
        cuda_graph: bool,
        batch_dims: BatchDims | None = None,
        slice_dim: int = 1,
        is_split: bool = False,
        loss_reduction: str,
        parts: Sequence[StepPart],
    ) -> None:
        self.batch_dims = check_batch_dims(batch_dims)
        self.slice_dim = check_slice_dim(slice_dim)
        self.has_checked_squares = self.has_checked_gradients = False
        self.is_split = is_split
        self.timeout, self.processes, self.cuda_graph = timeout, processes, cuda_graph
        self.homes: list[list[int]] = graph.homes.tolist()
        self.devices = make_pipeline_devices(devices, graph, pin_threads, processes)
        is_local = [not isinstance(self.devices[d], RemoteDevice) for d in graph.homes.ravel()]
        check_stages(stages, graph, is_local)
        check_ddp(stages, graph.n_replicas)
        ranks = device_ranks(self.devices, 0 if processes is None else processes.rank)
        for stage in graph.sharded:
            if any(is_local[stage :: graph.n_stages]):
                check_embedding(stages[stage], stage, [ranks[d] for d in graph.homes[:, stage]])
        self.modules = place_replicas(stages, is_local)
        for module, device in zip(self.modules, graph.homes.ravel(), strict=True):
            if not isinstance(module, RemoteStage):
                module.to(self.devices[device].torch_device)
        self.optimizers = make_optimizers(
            optimizer, self.modules, graph.n_stages, named_model_parameters
        )
        self.zero_grad = optimizer is not None
        self.expert_groups = expert_groups(self.modules, graph.n_stages, processes)
        self.check_batch_norms = BatchNormCheck(
            (
                (f"{name} of stage {stage}".strip(), module)
                for stage, whole in enumerate(self.modules[: graph.n_stages])
                for name, module in whole.named_modules()
            ),
            "pipeexec.gpipe.batchnorm.DeferredBatchNorm makes the running statistics alone "
            "those of the mini-batch.",
        )
        self.captures: WeakSet[StepCapture] = WeakSet()
        self.sharding: Sharding = ("none",) * graph.n_stages
        self.shards: dict[int, StageShards] = {}
        self.parts = parts
        self.check(graph)
        if processes is not None:
            agree_on_pipeline(
                self.modules,
                graph,
                processes,
                loss_reduction=loss_reduction,
                has_optimizer=self.zero_grad,
            )
            for part in parts:
                part.agree(processes)
        for part in parts:
            part.place(self)

    def part(self, kind: type[PartType]) -> PartType:
        """Return the part of a class."""
        return next(part for part in self.parts if isinstance(part, kind))

    def check(self, graph: TaskGraph) -> None:
        """Raise `ArgumentError` unless a graph can be run with all parts."""
        for part in self.parts:
            part.check(graph, self)

    def shard(self, graph: TaskGraph) -> None:
        """Let the replicas of stages share what a graph says; all processes must call this."""
        self.shards = make_shards(
            graph,
            self.modules,
            self.optimizers,
            self.devices,
            self.processes,
            has_optimizer=self.zero_grad,
        )
        self.sharding = sharding_of(graph)

    @contextmanager
    def whole_parameters(self, *, changes: bool = False) -> Iterator[None]:
        """Give sharded parameters their values in a block; all processes must run it.

        With ``changes``, shares are taken from the parameters at its end.
        """
        with ExitStack() as stack:
            for shards in self.shards.values():
                stack.enter_context(shards.whole(changes=changes))
            yield

    def whole_optimizers(self) -> list[torch.optim.Optimizer | WholeOptimizer | None]:
        """Return the optimizers, sharded ones as ones of whole parameters.

        All processes must call this.
        """
        return [
            optimizer
            if slot not in self.shards or (sharded := self.shards[slot].optimizer) is None
            else sharded.whole()
            for slot, optimizer in enumerate(self.optimizers)
        ]

    @contextmanager
    def locked(self, call: str) -> Iterator[None]:
        """Hold the devices for a call; calls of other threads raise `ExecutionError` meanwhile."""
        for device in self.devices:
            device.step_lock.check_outside(call)
        with ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.step_lock.hold(call))
            yield

    @contextmanager
    def locked_open(self, call: str) -> Iterator[None]:
        """Hold the devices for a call; raise `ExecutionError` if they are closed."""
        with self.locked(call):
            if any(device.closed for device in self.devices):
                raise ExecutionError(
                    "the pipeline is closed, and its threads ended; make a new one"
                )
            yield

    def close(self) -> None:
        """End the devices' threads, and free captured steps; see `Pipeline.close`."""
        for device in self.devices:
            device.step_lock.check_outside("close", may_interrupt=True)
        timer, may_run = RunningTimer(_SECONDS_TO_END), False
        for device in self.devices:
            if isinstance(device, RemoteDevice):
                device.close()
            elif device.step_lock.is_forked:  # the threads are those of another process
                device.abandon()
                may_run = True  # and so are CUDA's objects
            elif device.step_lock.stop(timer):
                device.close()
            else:
                device.abandon()
                may_run = True
        if not may_run:
            for capture in self.captures:
                capture.drop()
