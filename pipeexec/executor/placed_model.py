"""`PlacedModel`: the stages of a model on devices, with their optimizers.

Pipelines of several graphs share one: `Pipeline.with_graph` makes further pipelines of it.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.data_parallel.ddp import check_ddp
from pipeexec.data_parallel.stage_replicas import RemoteStage, place_replicas
from pipeexec.devices.device import Device, DeviceLike, RemoteDevice
from pipeexec.devices.make_devices import make_devices
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.processes import Processes
from pipeexec.executor.remote_messages import agree_on_weights
from pipeexec.executor.step_part import StepPart
from pipeexec.splitting.split_facts import named_model_parameters
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.stages.batches import BatchDims, check_batch_dims
from pipeexec.stages.optimizers import OptimizerFactory, make_optimizers
from pipeexec.stages.sequence_slices import (
    SequenceCut,
    check_slice_dim,
    check_slice_sizes,
    check_sliceable,
)
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.scheduling.placement import stage_pairs


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
        sources = [source for source, target in graph.edges if target == index]
        most = len(sources) if module is None else _most_arguments(module)
        if len(sources) > most:
            raise ArgumentError(
                f"stage {index} has edges from stages {', '.join(map(str, sources))}, so it takes "
                f"at least {len(sources)} tensors, but the forward of its "
                f"{type(module).__name__} takes {most}; let it take the outputs of these stages in "
                "this order, or leave an edge out"
            )
        if isinstance(module, SplitStage) and module.number == 0 and not module.returns_gradients:
            _check_untrained_before(index, stages, graph)
        for name, parameter in () if module is None else module.named_parameters():
            if owner.setdefault(parameter, index) != index:
                raise ArgumentError(
                    f"stages {owner[parameter]} and {index} share the parameter {name!r}; stages "
                    "run at the same time, so each needs separate parameters: give each stage a "
                    "copy, name the copies in Pipeline(..., tied=[[(0, 'name'), (3, 'name')]]), "
                    f"and lower with tied=[({owner[parameter]}, {index})]; pipeexec.split does so"
                )


def _check_untrained_before(
    index: int, stages: Sequence[nn.Module | None], graph: TaskGraph
) -> None:
    """Raise if a stage that lacks gradients of some inputs has stages to train before it."""
    before = {index}
    pairs = stage_pairs(graph.edges, graph.n_stages).tolist()
    for source, target in reversed(pairs):  # the last source first
        before |= {source} if target in before else set()
    for number in sorted(before - {index}):
        module = stages[number]
        if module is not None and any(p.requires_grad for p in module.parameters()):
            raise ArgumentError(
                f"stage {index} is the first of a model cut by pipeexec.split, which does "
                f"not return gradients of all its inputs, and stage {number} before it has "
                "parameters to train; split with a sample all of whose floating-point tensors "
                "require gradients, or set requires_grad of the parameters to False"
            )


def _most_arguments(module: nn.Module) -> float:
    """Return the number of positional arguments that a module's forward takes at most."""
    kinds = [x.kind for x in inspect.signature(module.forward).parameters.values()]
    if Parameter.VAR_POSITIONAL in kinds:
        return math.inf
    return sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
               for kind in kinds)  # fmt: skip


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
        Replica after replica: the given stages, then copies of them. A `RemoteStage` stands for
        those of other processes, and for a stage that a path shares with a lower one.
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
    parts
        Features of the steps.
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
        batch_dims: BatchDims | None = None,
        slice_dim: int = 1,
        slice_sizes: Sequence[int] | None = None,
        is_split: bool = False,
        loss_reduction: str,
        parts: Sequence[StepPart],
    ) -> None:
        self.batch_dims = check_batch_dims(batch_dims)
        self.slice_dim = check_slice_dim(slice_dim)
        self.slice_sizes = check_slice_sizes(slice_sizes)
        self.has_checked_squares = self.has_checked_gradients = False
        self.is_split = is_split
        self.timeout, self.processes = timeout, processes
        self.homes: list[list[int]] = graph.homes.tolist()
        self.devices = make_pipeline_devices(devices, graph, pin_threads, processes)
        is_local = [not isinstance(self.devices[d], RemoteDevice) for d in graph.homes.ravel()]
        check_stages(stages, graph, is_local)
        check_ddp(stages, graph.n_replicas)
        holds = graph.kinds.holds.ravel().tolist()
        self.modules = place_replicas(stages, [*map(operator.and_, is_local, holds)])
        for module, device in zip(self.modules, graph.homes.ravel(), strict=True):
            if not isinstance(module, RemoteStage):
                module.to(self.devices[device].torch_device)
        self.optimizers = make_optimizers(
            optimizer, self.modules, graph.n_stages, named_model_parameters
        )
        self.zero_grad = optimizer is not None
        self.check_batch_norms = BatchNormCheck(
            (
                (f"{name} of stage {stage}".strip(), module)
                for stage, whole in enumerate(self.modules[: graph.n_stages])
                for name, module in whole.named_modules()
            ),
            "pipeexec.gpipe.batchnorm.DeferredBatchNorm makes the running statistics alone "
            "those of the mini-batch.",
        )
        self.parts = parts
        self.check(graph)
        if processes is not None:
            for part in parts:
                part.agree(self, processes)
            processes.agree("loss_reduction", loss_reduction)
            processes.agree("whether there is an optimizer", self.zero_grad)
            processes.agree("the seed (call torch.manual_seed first)", torch.initial_seed())
            if graph.n_replicas > 1:
                agree_on_weights(self.modules, graph, processes, parts)
        for part in parts:
            part.place(graph, self)

    def part(self, kind: type[PartType]) -> PartType:
        """Return the part of a class."""
        return next(part for part in self.parts if isinstance(part, kind))

    def check(self, graph: TaskGraph) -> None:
        """Raise `ArgumentError` unless a graph can be run with all parts."""
        self.cut(graph)  # refuses other slices
        if graph.n_slices > 1:
            check_sliceable(self.modules, graph.n_stages, graph.n_slices)
        for part in self.parts:
            part.check(graph, self)

    def cut(self, graph: TaskGraph) -> SequenceCut:
        """Return how the sequences of a graph are cut."""
        return SequenceCut.of_graph(graph, self.slice_dim, self.slice_sizes)

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
        """End the devices' threads, and free memory; see `Pipeline.close`."""
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
        for part in self.parts if not may_run else ():
            part.close()
