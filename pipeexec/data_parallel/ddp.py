"""What DistributedDataParallel leaves to whoever calls its reducer by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesim.errors import ArgumentError

__all__ = ["ddp_of", "is_synchronizing", "synchronize"]


def ddp_of(module: nn.Module, name: str) -> DistributedDataParallel | None:
    """Return the module if it is replicated by DDP, None if nothing in it is.

    Raises
    ------
    ArgumentError
        If only a part of it is, or DDP was made with an option under which its reducer does not
        wait for a chosen backward. The message calls the module ``name``.
    """
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
    """Replace the gradients that have accumulated by their mean over the replicas.

    Goes through the reducer, with its buckets and communication hooks: a backward that adds
    nothing reaches every parameter, and the reducer, which watches for that, takes what lies
    there. A parameter without a gradient counts as zero; with ``find_unused_parameters``, one that
    has none in any replica keeps none.
    """
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    if ddp.find_unused_parameters:  # others are marked as unused; without any there is no backward
        parameters = [p for p in parameters if p.grad is not None] or parameters[:1]
    with torch.enable_grad():
        end: Tensor = _Nothing.apply(*parameters)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward([end])
    end.backward()


def is_synchronizing(tensors: object) -> bool:
    """Whether a backward from a tensor is that of `synchronize`, which makes no gradients."""
    node = getattr(tensors, "grad_fn", None)
    return isinstance(node, _Nothing._backward_cls)


class _Nothing(torch.autograd.Function):
    """Depends on parameters, and has no gradient for them."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.n = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.n)
