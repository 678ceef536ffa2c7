"""`PlacedModel`: the stages of a model on devices, with their optimizers.

Pipelines of several graphs share one: `Pipeline.with_graph` makes further pipelines of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from weakref import WeakSet

from torch import nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.data_parallel.ddp_stage import check_ddp
from pipeexec.data_parallel.stage_replicas import RemoteStage, place_replicas
from pipeexec.devices.device import DeviceLike
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.stage import check_embedding
from pipeexec.executor.cuda_graph.step_capture import StepCapture
from pipeexec.executor.setup.argument_checks import check_stages
from pipeexec.executor.setup.devices_and_stages import make_pipeline_devices
from pipeexec.stages.optimizers import OptimizerFactory, make_optimizers
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph

__all__ = ["PlacedModel"]

#: Seconds that `PlacedModel.close` waits for a step of another thread to end.
_SECONDS_TO_END = 5.0


class PlacedModel:
    """Stages on devices, and how steps train them.

    Parameters
    ----------
    stages, devices, optimizer, pin_threads, timeout, processes, cuda_graph
        See `Pipeline`.
    graph
        Gives the placement of stages.

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
    timeout, processes, cuda_graph
        As given.
    captures
        Captured steps of all pipelines that share this model.
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
    ) -> None:
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
        self.optimizers = make_optimizers(optimizer, self.modules, graph.n_stages)
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
        self.captures: WeakSet[StepCapture] = WeakSet()

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
        deadline, may_run = perf_counter() + _SECONDS_TO_END, False
        for device in self.devices:
            if isinstance(device, RemoteDevice):
                device.close()
            elif device.step_lock.is_forked:  # the threads are those of another process
                device.abandon()
                may_run = True  # and so are CUDA's objects
            elif device.step_lock.stop(deadline):
                device.close()
            else:
                device.abandon()
                may_run = True
        if not may_run:
            for capture in self.captures:
                capture.drop()
