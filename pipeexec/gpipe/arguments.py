"""What `pipeexec.GPipe` is given, checked: as torchgpipe's own errors do, and better."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipeexec.devices.cpu import CpuDevice
from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.make_devices import parse_device
from pipeexec.stages.batches import check_dense
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    TooFewDevicesError,
    check_list,
    check_type,
)
from pipesim.graph.verify import verify
from pipesim.ops import Op
from pipesim.scheduling.placement import linear
from pipesim.scheduling.schedule import Schedule

__all__ = [
    "Place",
    "check_microbatches",
    "check_module",
    "checked_balance",
    "checked_input",
    "checked_order",
    "chosen",
]

_Made = CpuDevice | CudaDevice
Place = torch.device | int | str | _Made

_ADVICE = """{problem}

If the model still changes, let its balance be found each time:

    from pipeexec import GPipe
    from pipeexec.gpipe.balance import balance_by_time

    partitions = torch.cuda.device_count()
    sample = torch.empty(...)
    balance = balance_by_time(partitions, model, sample)
    model = GPipe(model, balance, ...)
"""


def check_module(module: object) -> None:
    """Raise for a module that cannot be cut."""
    if not isinstance(module, nn.Sequential):
        raise ArgumentTypeError(
            f"module must be nn.Sequential to be partitioned, got {type(module).__name__}"
        )
    if len(list(module.named_children())) != len(module):
        raise ArgumentError("module with duplicate children is not supported")
    n_of_children = sum(len(list(child.parameters())) for child in module.children())
    if len(list(module.parameters())) != n_of_children:
        raise ArgumentError(
            "module with duplicate parameters in distinct children is not supported"
        )


def checked_order(order: Schedule | None, n_partitions: int) -> Schedule | None:
    """Return a schedule whose backwards partitions can follow.

    Raises
    ------
    ArgumentError
        For a schedule of other stages, or with split or overlapped backwards.
    ScheduleError
        For one that cannot run.
    """
    if order is None:
        return None
    check_type("backward_order", order, Schedule)
    if order.placement != linear(n_partitions):
        raise ArgumentError(
            f"backward_order is a schedule of {order.n_stages} stages on {order.n_devices} "
            f"devices, but there are {n_partitions} partitions; give one of a stage a partition"
        )
    if order.overlapped is not None or set(order.op.tolist()) & {Op.I, Op.W}:
        raise ArgumentError(
            f"backward_order is schedule {order.name!r}, whose backwards are split or overlap "
            "forwards; give one of F, B and R, such as 'gpipe'"
        )
    verify(order)
    return order


def check_microbatches(order: Schedule | None, n_microbatches: int) -> None:
    """Raise `ArgumentError` if an order is of another number of micro-batches."""
    if order is not None and order.n_microbatches != n_microbatches:
        raise ArgumentError(
            f"backward_order is of {order.n_microbatches} micro-batches, but the mini-batch makes "
            f"{n_microbatches}; give a schedule of as many, or a mini-batch of more samples"
        )


def checked_balance(balance: Iterable[int] | None, n_layers: int) -> list[int]:
    """Return a balance of so many layers."""
    if balance is None:
        raise ArgumentError(_ADVICE.format(problem="balance is required"))
    found = check_list("balance", balance, "the layers of each partition, such as [2, 2]")
    if any(isinstance(x, bool) or not isinstance(x, int) or x <= 0 for x in found):
        raise ArgumentError(
            _ADVICE.format(
                problem=f"all balance numbers must be positive integer (balance: {found})"
            )
        )
    if sum(found) != n_layers:
        problem = "module and sum of balance have different length"
        sizes = f"(module: {n_layers}, sum of balance: {sum(found)})"
        raise ArgumentError(_ADVICE.format(problem=f"{problem} {sizes}"))
    return found


def chosen(devices: Iterable[Place] | None, n: int) -> list[torch.device | _Made]:
    """Return the devices of ``n`` partitions."""
    if devices is None:
        count = torch.cuda.device_count()
        devices = range(count) if count else ["cpu"] * n
    devices = check_list("devices", devices, "one device a partition")
    given = [
        x
        if isinstance(x, (CpuDevice, CudaDevice))
        else torch.device("cuda", x)
        if isinstance(x, int)
        else parse_device(x)
        for x in devices
    ]
    if len(given) < n:
        raise TooFewDevicesError(
            f"too few devices to hold given partitions (devices: {len(given)}, partitions: {n})"
        )
    if any(isinstance(x, (CpuDevice, CudaDevice)) and x.launch for x in given[:n]):
        raise ArgumentError(
            "devices of px.workers(launch=...) impose launches on the hosts of a Pipeline; GPipe's "
            "host is the caller's own thread, whose time is not told apart from that of the "
            "devices: make the workers without launch"
        )
    return given[:n]


def checked_input(given: object) -> tuple[Tensor, ...]:
    """Return the tensors of an input."""
    tensors = given if isinstance(given, tuple) else (given,)
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(
                f"expected Tensor, but got {type(x).__name__}; GPipe takes a tensor or a tuple"
            )
        check_dense("tensors of the input", x)
    if not tensors:
        raise ArgumentTypeError("expected Tensor, but got an empty tuple")
    return tensors
