"""Make devices from names such as ``"cpu"`` and ``"cuda:0"``."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterable, Sequence

import torch

from pipeexec.devices.cpu import CpuDevice
from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.device import Device, DeviceLike
from pipesim.errors import ArgumentError, OversubscriptionWarning


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_devices(
    names: Sequence[DeviceLike],
    pin_threads: bool = True,
    *,
    local_rank: int = 0,
    n_local: int = 1,
    stacklevel: int = 2,
) -> list[Device]:
    """Make devices of names such as ``"cpu"`` and ``"cuda:0"``; each ``"cpu"`` is a new worker.

    ``n_local`` processes on this machine have as many workers each; this one is number
    ``local_rank``. Its ``"cuda"`` without an index is the GPU of that number. ``stacklevel`` counts
    from the caller, as in `warnings.warn`.

    Warns
    -----
    OversubscriptionWarning
        If there are more CPU workers than cores.
    """
    parsed = [
        name if isinstance(name, (CpuDevice, CudaDevice)) else parse_device(name) for name in names
    ]
    _check_one_kind(parsed)
    n_cpu = sum(isinstance(d, torch.device) and d.type == "cpu" for d in parsed)
    first = local_rank * n_cpu
    cores = _worker_cores(n_cpu * n_local, pin_threads, stacklevel + 2)[first : first + n_cpu]
    workers = (CpuDevice(index, core) for index, core in enumerate(cores))
    devices: list[Device] = []
    for device in parsed:
        if not isinstance(device, torch.device):
            if device.closed:
                raise ArgumentError(f"{device.name} was closed; make a new device")
            devices.append(device)
        elif device.type == "cpu":
            devices.append(next(workers))
        else:
            index = local_rank if device.index is None else device.index
            devices.append(CudaDevice(torch.device("cuda", index)))
    return devices


def _check_one_kind(devices: Iterable[torch.device | CpuDevice | CudaDevice]) -> None:
    kinds = {(d if isinstance(d, torch.device) else d.torch_device).type for d in devices}
    if len(kinds) > 1:
        raise ArgumentError(
            f"devices of several kinds ({', '.join(sorted(kinds))}) cannot run one pipeline yet: "
            "their streams cannot wait for each other; give devices of one kind"
        )


def _worker_cores(n_workers: int, pin_threads: bool, stacklevel: int) -> Sequence[int | None]:
    """Return the core of each CPU worker of this machine; None for workers that are not pinned."""
    available = available_cores()
    if n_workers:
        _keep_freed_memory()
    if n_workers > len(available):
        warnings.warn(
            f"{n_workers} CPU devices share {len(available)} cores: tasks will slow each other "
            "down, and measured times say little; use at most one device a core to measure",
            OversubscriptionWarning,
            stacklevel=stacklevel,
        )
        return [None] * n_workers
    if not pin_threads or not hasattr(os, "sched_setaffinity"):
        return [None] * n_workers
    return available[:n_workers]


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory, up to 1 GiB, instead of returning it to the kernel.

    Otherwise a step that holds many activations gets its memory page by page again, every time: 10
    to 20 % of a forward's time, which some schedules pay and others do not. With another C library
    nothing happens.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # numbers of malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 1 << 30)
    mallopt(top_pad, 64 << 20)  # as large as a thread's heap, which is then never unmapped
    mallopt(mmap_threshold, 32 << 20)


def parse_device(name: DeviceLike) -> torch.device:
    """Return the torch device, if it is one that can run here."""
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
