"""Use DistributedDataParallel's reducer by hand: check the module, and synchronize gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesim.errors import ArgumentError


def ddp_of(module: nn.Module, name: str) -> DistributedDataParallel | None:
    """Return the module if it is a DistributedDataParallel, None if no module in it is."""
    inside = [k for k, m in module.named_modules() if isinstance(m, DistributedDataParallel)]
    if not inside:
        return None
    if inside != [""] or not isinstance(module, DistributedDataParallel):
        raise ArgumentError(
            f"{name} has DistributedDataParallel around a part of it ({inside[-1]!r}), which would "
            "add up gradients at the wrong backward; put it around the whole"
        )
    unfit = {
        "static_graph=True": module.static_graph,
        "mixed_precision": module.mixed_precision is not None,
        "delay_all_reduce_named_params": module._delay_all_reduce_all_params,
        "torch's Python reducer": module._use_python_reducer,
    }
    for option in (option for option, is_set in unfit.items() if is_set):
        raise ArgumentError(
            f"{name} is DistributedDataParallel with {option}, which counts on one forward before "
            "each backward; leave that out"
        )
    return module


def synchronize(ddp: DistributedDataParallel) -> None:
    """Replace accumulated gradients by their mean over the replicas.

    The reducer does it, with its buckets and communication hooks. A backward that adds nothing
    reaches every parameter; the reducer watches for that, and takes the gradients that have
    accumulated. A parameter without a gradient counts as zero. With ``find_unused_parameters``, one
    that has no gradient in any replica keeps none.
    """
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    if ddp.find_unused_parameters:  # the others are marked as unused; a backward needs one
        parameters = [p for p in parameters if p.grad is not None] or parameters[:1]
    with torch.enable_grad():
        output: Tensor = _NoGradient.apply(*parameters)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward([output])
    output.backward()


def is_synchronizing(tensors: object) -> bool:
    """Return whether a backward from a tensor is that of `synchronize`, without gradients."""
    node = getattr(tensors, "grad_fn", None)
    return isinstance(node, _NoGradient._backward_cls)


class _NoGradient(torch.autograd.Function):
    """Zero that depends on parameters, and has no gradient for them."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.n = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.n)
