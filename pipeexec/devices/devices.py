"""What a device is: a CPU worker or a GPU, with its streams and its clock."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from pipeexec.devices.cuda_streams import CudaEvent, CudaStream
from pipeexec.devices.step_lock import StepLock
from pipeexec.devices.streams import (
    CallerStream,
    CpuEvent,
    CpuStream,
    Event,
    InlineStream,
    Stream,
    wait_for,
)
from pipesim.errors import ArgumentError, OversubscriptionWarning

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceLike",
    "RemoteDevice",
    "Values",
    "cores",
    "make_devices",
    "parse",
]

#: What stages exchange: the tensors of a message. A gradient may be missing.
Values = tuple[torch.Tensor | None, ...]


class Device(Protocol):
    """Where stages run."""

    name: str
    torch_device: torch.device
    closed: bool
    note: str
    step_lock: StepLock
    launch: float

    def host(self) -> CpuStream:
        """Return the thread that issues tasks of this device, where the caller does not."""
        ...

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Return the stream called ``name``, made on first use; one whose work may block, or not.

        Messages to other processes block.
        """
        ...

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return whether a thread runs work of this device's streams."""
        ...

    def mark(self) -> Event:
        """Return an event that passes now: the zero of this device's clock."""
        ...

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Let the caller go on after ``event``, of this device: its own stream there, or itself.

        Memory of ``values``, made on streams of this device, is kept until that has used it.
        """
        ...

    def wait_for_host(self, event: Event) -> None:
        """Block the caller until the host has done its part of all work before ``event``."""
        ...

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep memory of ``tensor``, made on another stream, until ``stream`` has used it."""
        ...

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message on the memory of ``target``; runs on a stream of this device."""
        ...

    def await_link(self, values: Values) -> None:
        """Let a message take the rest of its time; runs on the stream that receives it."""
        ...

    def synchronize(self) -> None:
        """Block until every stream has run all it was given."""
        ...

    def close(self) -> None:
        """End every stream."""
        ...

    def abandon(self) -> None:
        """Take no more work, and leave what is under way to itself: it may never end."""
        ...


class _Streams:
    """Streams by name, made on first use.

    Attributes
    ----------
    torch_device
        Whose memory it has.
    note
        What whoever reads its times should know; empty if nothing.
    step_lock
        Admits one caller at a time.
    launch
        Seconds that a host takes to issue a task, at least; imposed.
    """

    name: str
    note = ""
    launch = 0.0
    torch_device: torch.device

    def __init__(self) -> None:
        self._streams: dict[tuple[str, bool], Stream] = {}
        self._making = threading.Lock()
        self.closed = False
        self.step_lock = StepLock(self.has_thread)

    def _make(self, name: str, blocks: bool) -> Stream:
        raise NotImplementedError

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Return the stream called ``name``, made on first use; ``blocks`` as in `Device`."""
        key = name, blocks and name != "compute"
        if key not in self._streams:
            with self._making:  # several threads may be the first
                if key not in self._streams:
                    self._streams[key] = self._make(*key)
        return self._streams[key]

    def host(self) -> CpuStream:
        """Return the thread that issues tasks of this device, made on first use.

        It ends with the streams, and counts as one of them.
        """
        key = "host", True
        with self._making:
            if key not in self._streams:
                self._streams[key] = CpuStream(f"{self.name} host", self._prepare_host)
            found = self._streams[key]
        assert isinstance(found, CpuStream)
        return found

    def _prepare_host(self) -> None:
        """Prepare the calling thread, which is a host's, to issue tasks."""

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return whether a thread runs work of this device's streams."""
        return any(
            getattr(stream, "thread", None) is thread for stream in list(self._streams.values())
        )

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message on the memory of ``target``: the same tensors where it is the same."""
        if self.torch_device == target.torch_device:
            return values
        return tuple(
            None if value is None else value.to(target.torch_device, non_blocking=True)
            for value in values
        )

    def await_link(self, values: Values) -> None:
        """Do nothing: the copy has taken its time."""

    def synchronize(self) -> None:
        """Block until every stream has run all it was given."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """End every stream; the device takes no more work."""
        if self.closed:
            return
        self.closed = True
        for stream in self._streams.values():
            stream.close()

    def abandon(self) -> None:
        """Take no more work, and leave what is under way to itself: it may never end."""
        self.closed = True


class CpuDevice(_Streams):
    """A worker thread that computes on one core; its messages are handed over by reference.

    Its stream ``"caller"`` computes in the thread that gives it work.

    Parameters
    ----------
    index
        Number of the worker.
    core
        Core to pin the thread to, or None.
    """

    def __init__(self, index: int, core: int | None = None) -> None:
        super().__init__()
        self.name = f"cpu:{index}"
        self.core = core
        self.torch_device = torch.device("cpu")

    def _make(self, name: str, blocks: bool) -> Stream:
        if name == "compute":
            return CpuStream(f"{self.name} {name}", self._prepare)
        if name == "caller":
            return CallerStream()
        return CpuStream(f"{self.name} {name}") if blocks else InlineStream()

    def _prepare(self) -> None:
        """Give the calling thread one core and torch one thread in it."""
        torch.set_num_threads(1)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})

    def mark(self) -> Event:
        """Return an event that passes now; all CPU workers have one clock."""
        return CpuEvent.now()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Block the caller until ``event`` has passed."""
        wait_for(event)

    def wait_for_host(self, event: Event) -> None:
        """Block the caller until ``event`` has passed: the host does all the work."""
        wait_for(event)

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: Python's references keep memory."""


class CudaDevice(_Streams):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.torch_device = torch.device(device.type, device.index or 0)
        self.name = str(self.torch_device)

    def _make(self, name: str, blocks: bool) -> Stream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def _prepare_host(self) -> None:
        """Make this GPU, and its compute stream, the current ones of the calling thread.

        Both are a thread's own in CUDA. A stream that is given work makes itself the current one
        meanwhile, which takes less time on the current GPU.
        """
        compute = self.stream("compute")
        assert isinstance(compute, CudaStream)
        torch.cuda.set_stream(compute.stream)

    def mark(self) -> Event:
        """Return an event on an idle compute stream; `pipeexec.devices.clocks` joins those of GPUs.

        What follows waits for the caller's own stream, on which batches are copied to the GPU and
        parameters may have been changed.
        """
        compute = self.stream("compute")
        assert isinstance(compute, CudaStream)
        compute.stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        return compute.record()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Let the caller's own stream on this GPU wait for ``event``; the caller does not."""
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self.torch_device)
        current.wait_event(event.order)
        for value in values:
            if value is not None:
                value.record_stream(current)

    def wait_for_host(self, event: Event) -> None:
        """Return at once: the host did its part, to launch kernels, when it gave the work."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the allocator wait for ``stream`` before it uses the memory again.

        The alternative, to hold references until the consumer's event, needs either a host that
        polls events, or a wait on the stream that owns the memory: an edge that the graph does not
        have. The allocator, too, polls, but only when it is asked for memory.
        """
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.stream)


class RemoteDevice:
    """A device of another process: has a name, and runs nothing here."""

    note = ""
    launch = 0.0

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.torch_device = torch.device("meta")
        self.closed = False
        self.step_lock = StepLock(self.has_thread)

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Raise: its streams are in another process."""
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def host(self) -> CpuStream:
        """Raise, as `stream` does."""
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return False: its streams are in another process."""
        return False

    def mark(self) -> Event:
        """Raise, as `stream` does."""
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Raise, as `stream` does."""
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def wait_for_host(self, event: Event) -> None:
        """Do nothing."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""

    def carry(self, values: Values, target: Device) -> Values:
        """Raise, as `stream` does."""
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def await_link(self, values: Values) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
        self.closed = True

    abandon = close


DeviceLike = str | torch.device | Device


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


def ranks_of(devices: Sequence[Device], own: int) -> list[int]:
    """Return the rank of the process that each device is of; ``own`` is this one's."""
    return [x.rank if isinstance(x, RemoteDevice) else own for x in devices]
