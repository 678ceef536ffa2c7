"""Check the arguments of `pipeexec.GPipe`.

Errors that torchgpipe has too begin with torchgpipe's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.make_devices import CpuDevice, parse_device
from pipeexec.stages.batches import check_dense
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    TooFewDevicesError,
    check_count,
    check_flag,
    check_list,
    check_name,
    check_type,
)
from pipesim.graph.verify import verify
from pipesim.lowering.lower import Streams
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

_OwnDevice = CpuDevice | CudaDevice
GPipeDevice = torch.device | int | str | _OwnDevice

_ADVICE = """{problem}

If the model still changes, let its balance be found each time:

    from pipeexec import GPipe
    from pipeexec.gpipe.balance import balance_by_time

    partitions = torch.cuda.device_count()
    sample = torch.empty(...)
    balance = balance_by_time(partitions, model, sample)
    model = GPipe(model, balance, ...)
"""


class Switches(NamedTuple):
    """Switches of a `pipeexec.GPipe` for experiments; its docstring explains them."""

    dependencies: bool = True
    copy_streams: bool = True
    portals: bool = True
    recompute_waits: bool = False
    streams: Streams = "per_peer"
    hosts: Literal["one", "per_device"] = "one"
    backward_seed: int | None = None
    backward_order: Schedule | None = None


def check_switches(switches: Switches) -> None:
    """Raise `ArgumentError` for a switch of a wrong type, and for switches that exclude each other.

    `check_order` checks the order itself.
    """
    for name in ("dependencies", "copy_streams", "portals", "recompute_waits"):
        check_flag(name, getattr(switches, name))
    check_name("streams", switches.streams, get_args(Streams))
    check_name("hosts", switches.hosts, ("one", "per_device"))
    if switches.streams != "per_peer" and not switches.copy_streams:
        raise ArgumentError(
            f"streams={switches.streams!r}, but messages have no copy streams; leave out streams, "
            "or copy_streams=False"
        )
    if switches.recompute_waits and switches.copy_streams:
        raise ArgumentError(
            "recompute_waits=True, but messages have copy streams: a gradient is received on its "
            "own stream, and a recompute never waits for it; add copy_streams=False, or leave "
            "recompute_waits out"
        )
    if switches.backward_seed is not None:
        check_count("backward_seed", switches.backward_seed, 0)
    if switches.backward_order is not None and (
        switches.dependencies or switches.backward_seed is not None
    ):
        raise ArgumentError(
            "backward_order is for a backward that has no other order; give dependencies=False "
            "with it, and no backward_seed"
        )


def check_module(module: object) -> None:
    """Raise `ArgumentError` for a module that cannot be split into partitions."""
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


def check_order(order: Schedule | None, n_partitions: int) -> None:
    """Check a schedule whose backwards the partitions are to follow."""
    if order is None:
        return
    check_type("backward_order", order, Schedule)
    if order.placement != Placement.linear(n_partitions):
        raise ArgumentError(
            f"backward_order is a schedule of {order.n_stages} stages on {order.n_devices} "
            f"devices, but there are {n_partitions} partitions; give a schedule of one "
            "stage a partition"
        )
    if order.overlapped is not None or set(order.op.tolist()) & {Op.I, Op.W}:
        raise ArgumentError(
            f"backward_order is schedule {order.name!r}, whose backwards are split or overlap "
            "forwards; give a schedule of F, B and R, such as 'gpipe'"
        )
    verify(order)


def check_microbatches(order: Schedule | None, n_microbatches: int) -> None:
    """Raise `ArgumentError` if an order has another number of micro-batches."""
    if order is not None and order.n_microbatches != n_microbatches:
        raise ArgumentError(
            f"backward_order has {order.n_microbatches} micro-batches, but the mini-batch makes "
            f"{n_microbatches}; give a schedule of as many, or a mini-batch of more samples"
        )


def checked_balance(balance: Iterable[int] | None, n_layers: int) -> list[int]:
    """Return a balance whose sum is ``n_layers``."""
    if balance is None:
        raise ArgumentError(_ADVICE.format(problem="balance is required"))
    numbers = check_list("balance", balance, "the layers of each partition, such as [2, 2]")
    if any(isinstance(x, bool) or not isinstance(x, int) or x <= 0 for x in numbers):
        raise ArgumentError(
            _ADVICE.format(
                problem=f"all balance numbers must be positive integer (balance: {numbers})"
            )
        )
    if sum(numbers) != n_layers:
        problem = "module and sum of balance have different length"
        sizes = f"(module: {n_layers}, sum of balance: {sum(numbers)})"
        raise ArgumentError(_ADVICE.format(problem=f"{problem} {sizes}"))
    return numbers


def checked_devices(
    devices: Iterable[GPipeDevice] | None, n: int
) -> list[torch.device | _OwnDevice]:
    """Return the devices of ``n`` partitions; by default all GPUs, or the CPU for each."""
    if devices is None:
        count = torch.cuda.device_count()
        devices = range(count) if count else ["cpu"] * n
    devices = check_list("devices", devices, "one device a partition")
    places = [
        x
        if isinstance(x, (CpuDevice, CudaDevice))
        else torch.device("cuda", x)
        if isinstance(x, int)
        else parse_device(x)
        for x in devices
    ]
    if len(places) < n:
        raise TooFewDevicesError(
            f"too few devices to hold given partitions (devices: {len(places)}, partitions: {n})"
        )
    return places[:n]


def checked_input(batch: object) -> tuple[Tensor, ...]:
    """Return the tensors of an input."""
    tensors = batch if isinstance(batch, tuple) else (batch,)
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(
                f"expected Tensor, but got {type(x).__name__}; GPipe takes a tensor or a tuple"
            )
        check_dense("tensors of the input", x)
    if not tensors:
        raise ArgumentTypeError("expected Tensor, but got an empty tuple")
    return tensors
