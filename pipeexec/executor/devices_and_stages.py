"""Make the devices of a pipeline and the loss of its stages; check that its processes agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device, DeviceLike
from pipeexec.devices.make_devices import make_devices
from pipeexec.distributed.processes import Processes
from pipeexec.executor.remote_messages import agree_on_weights
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph


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


def agree_on_pipeline(
    modules: Sequence[nn.Module],
    graph: TaskGraph,
    processes: Processes,
    parts: Sequence[StepPart],
    *,
    loss_reduction: str,
    has_optimizer: bool,
) -> None:
    """Check that every process makes the same pipeline."""
    processes.agree("loss_reduction", loss_reduction)
    processes.agree("whether there is an optimizer", has_optimizer)
    processes.agree("the seed (call torch.manual_seed first)", torch.initial_seed())
    if graph.n_replicas > 1:
        agree_on_weights(modules, graph, processes, parts)
