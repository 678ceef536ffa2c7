"""Make devices from names such as ``"cpu"`` and ``"cuda:0"``."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence

import torch

from pipeexec.devices.cpu import CpuDevice
from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.device import Device, DeviceLike
from pipesim.errors import ArgumentError, OversubscriptionWarning

__all__ = ["cores", "make_devices", "parse"]


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_devices(
    names: Sequence[DeviceLike], pin_threads: bool = True, *, part: int = 0, n_parts: int = 1
) -> list[Device]:
    """Make devices of names such as ``"cpu"`` and ``"cuda:0"``; each ``"cpu"`` is a new worker.

    Of ``n_parts`` processes on this machine, each with as many workers, this is number ``part``.

    Raises
    ------
    ArgumentError
        For a name that torch does not know, hardware that is not there, CPU and GPU together, or
        a device that was closed.

    Warns
    -----
    OversubscriptionWarning
        If there are more CPU workers than cores.
    """
    parsed = [name if isinstance(name, (CpuDevice, CudaDevice)) else parse(name) for name in names]
    kinds = {(d if isinstance(d, torch.device) else d.torch_device).type for d in parsed}
    if len(kinds) > 1:
        raise ArgumentError(
            f"devices of several kinds ({', '.join(sorted(kinds))}) cannot run one pipeline yet: "
            "their streams cannot wait for each other; give devices of one kind"
        )
    n_cpu = sum(isinstance(d, torch.device) and d.type == "cpu" for d in parsed)
    available = cores()
    n_workers = n_cpu * n_parts
    if n_workers > len(available):
        warnings.warn(
            f"{n_workers} CPU devices share {len(available)} cores: tasks will slow each other "
            "down, and measured times say little; use at most one device a core to measure",
            OversubscriptionWarning,
            stacklevel=3,
        )
    if n_cpu:
        _keep_freed_memory()
    pin = pin_threads and n_workers <= len(available) and hasattr(os, "sched_setaffinity")
    devices: list[Device] = []
    workers = 0
    for device in parsed:
        if not isinstance(device, torch.device):
            if device.closed:
                raise ArgumentError(f"{device.name} was closed; make a new device")
            devices.append(device)
        elif device.type == "cpu":
            core = available[part * n_cpu + workers] if pin else None
            devices.append(CpuDevice(workers, core))
            workers += 1
        else:  # "cuda" alone is the process's own
            devices.append(
                CudaDevice(torch.device("cuda", part if device.index is None else device.index))
            )
    return devices


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 1 GiB, instead of giving it back to the kernel.

    A step that holds many activations would otherwise get its memory page by page again, every
    time: 10 to 20 % of a forward's time, paid by some schedules and not by others. Nothing happens
    where the C library is another.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # numbers of malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 1 << 30)
    mallopt(top_pad, 64 << 20)  # as large as a thread's heap, which is then never unmapped
    mallopt(mmap_threshold, 32 << 20)


def parse(name: DeviceLike) -> torch.device:
    """Return the torch device, if it is one that can run here.

    Raises
    ------
    ArgumentError
        For a name that torch does not know, or hardware that is not there.
    """
    try:
        device = torch.device(name)  # type: ignore[arg-type]  # raises for other types
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name!r} is no device; write 'cpu' or 'cuda:0', one name a device"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ArgumentError(f"{name!r} is not there: torch sees {count} CUDA devices")
    elif device.type != "cpu":
        raise ArgumentError(f"{name!r} cannot run stages yet; use 'cpu' or 'cuda:0'")
    return device
