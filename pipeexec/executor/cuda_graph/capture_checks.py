"""Checks of steps that become CUDA graphs, and the state of the host in which one is valid.

A graph repeats the numbers and addresses of its capture: it does not follow numbers that the host
changes, nor tensors that move between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device
from pipeexec.stages.stage_like import StageLike
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES

#: One a module, path after path.
Optimizers = Sequence[torch.optim.Optimizer | None]


def check_can_capture(graph: TaskGraph, devices: Sequence[Device], optimizers: Optimizers) -> None:
    """Check before the first step that steps can become CUDA graphs."""
    places = sorted({str(device.torch_device) for device in devices})
    if any(device.torch_device.type != "cuda" for device in devices):
        raise ArgumentError(
            f"cuda_graph=True needs CUDA devices, got {', '.join(places)}; leave it out"
        )
    if len(places) > 1:
        raise ArgumentError(
            f"cuda_graph=True runs on one GPU, got {', '.join(places)}: capturing several in one "
            "process may deadlock; use slices of one GPU, or leave it out"
        )
    if graph.host.any():
        raise ArgumentError(
            f"cuda_graph=True captures what one host issues, the graph has {graph.host.max() + 1}: "
            "a replay is one call of one host anyway; lower with hosts='one', or leave it out"
        )
    if graph.n_batches > 1:
        raise ArgumentError(
            f"cuda_graph=True runs one mini-batch a step, the graph has {graph.n_batches}: the "
            "host changes versions of weights between them; leave it out"
        )
    if graph.n_slices > 1:
        raise ArgumentError(
            f"cuda_graph=True runs whole micro-batches, the graph has {graph.n_slices} slices a "
            "sequence, whose keys and values a capture would not share; leave it out"
        )
    if graph.is_op(COPIES).any():
        raise ArgumentError(
            "cuda_graph=True repeats the addresses of its capture, and host memory of offloaded "
            "activations is new in each step; lower without offload, or leave it out"
        )
    for index, optimizer in enumerate(optimizers):
        groups = () if optimizer is None else optimizer.param_groups
        if not all(group.get("capturable", True) for group in groups):
            raise _not_capturable(index % graph.n_stages, optimizer)


def check_state(optimizers: Optimizers, n_stages: int) -> None:
    """Check after a step that no optimizer keeps numbers on the host; not all have an option."""
    for index, optimizer in enumerate(optimizers):
        states = () if optimizer is None else optimizer.state.values()
        for value in (value for state in states for value in state.values()):
            on_host = value.device.type == "cpu" if isinstance(value, Tensor) else True
            if on_host and isinstance(value, (Tensor, int, float)):
                raise _not_capturable(index % n_stages, optimizer)


def _not_capturable(stage: int, optimizer: torch.optim.Optimizer | None) -> ArgumentError:
    return ArgumentError(
        f"the optimizer of stage {stage} ({type(optimizer).__name__}) keeps numbers on the host, "
        "which a CUDA graph would not change; make it with capturable=True, take one that has "
        "this option, or leave out cuda_graph"
    )


class HostState(NamedTuple):
    """Values that the host reads while it issues a step, and that may change between steps."""

    addresses: tuple[int, ...]
    settings: tuple[object, ...]


def host_state(modules: Sequence[nn.Module], optimizers: Optimizers) -> HostState:
    """Return the present state of the host, without plain attributes of modules."""
    addresses: list[int] = []
    settings: list[object] = []
    settings.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            addresses.append(tensor.data_ptr())
            settings.append(tensor.requires_grad)
        settings.extend(part.training for part in module.modules())
    for optimizer in optimizers:
        if optimizer is None:
            continue
        for state in optimizer.state.values():
            addresses.extend(x.data_ptr() for x in state.values() if isinstance(x, Tensor))
        for group in optimizer.param_groups:
            settings.extend(_numbers(group))
            addresses.extend(x.data_ptr() for x in group.values() if isinstance(x, Tensor))
    return HostState(tuple(addresses), tuple(settings))


def _numbers(group: Mapping[str, Any]) -> list[object]:
    """Return an optimizer's options, such as its learning rate; tensors are left out.

    The graph reads tensors anew in each replay.
    """
    return [
        (name, value)
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    ]


def check_not_random(stages: Sequence[StageLike]) -> None:
    """Raise `ExecutionError` if a stage draws random numbers, or has not run in this mode yet."""
    for stage in stages:
        if stage.is_random.get(stage.module.training, True):
            raise ExecutionError(
                f"stage {stage.index} draws random numbers (dropout, say), whose seeds are the "
                "host's: a CUDA graph would draw the same ones in every step; call eval() on "
                "it, set its probability to 0, or leave out cuda_graph"
            )
