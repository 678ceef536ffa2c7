"""`Device`: the interface of all devices; named streams, locks, and devices of other processes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import NoReturn, Protocol

import torch

from pipeexec.devices.emulated_links import EmulatedLinks
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.devices.streams import CpuStream, Event, Stream
from pipesim.errors import ExecutionError
from pipesim.ops import Op

#: The tensors of a message between stages. A gradient may be missing.
Values = tuple[torch.Tensor | None, ...]


class Device(Protocol):
    """A processor that runs stages, with its streams, its clock and its memory."""

    name: str
    torch_device: torch.device
    closed: bool
    note: str
    step_lock: StepLock
    launch: float
    launch_by_op: Mapping[Op, float]

    def host(self) -> CpuStream:
        """Return the thread that issues tasks of this device, if the caller's thread does not."""
        ...

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Return the stream called ``name``, made on first use.

        ``blocks`` allows its work to block, as messages to other processes do.
        """
        ...

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return whether a thread runs work of this device's streams."""
        ...

    def mark(self) -> Event:
        """Return an event that is set now: the zero of this device's clock."""
        ...

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Make the caller's own stream on this device, or the caller, wait for ``event``.

        Memory of ``values``, made on streams of this device, is kept until that stream has used it.
        """
        ...

    def wait_for_host(self, event: Event) -> None:
        """Block the caller until the host has done its part of all work before ``event``."""
        ...

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep memory of ``tensor``, made on another stream, until ``stream`` has used it."""
        ...

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message in the memory of ``target``; runs on a stream of this device."""
        ...

    def await_link(self, values: Values) -> None:
        """Wait for the rest of a message's time; runs on the stream that receives it."""
        ...

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory; runs on a stream of this device, which it may outlast."""
        ...

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of host memory on this device; likewise."""
        ...

    def to_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies in memory of another device of this process; likewise."""
        ...

    def from_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies of memory of another device on this device; likewise."""
        ...

    def synchronize(self) -> None:
        """Block until every stream has run all its work."""
        ...

    def close(self) -> None:
        """End every stream."""
        ...

    def abandon(self) -> None:
        """Take no more work, and do not wait for work that runs: it may never end."""
        ...


DeviceLike = str | torch.device | Device


#: No operation has launches of its own.
NONE_BY_OP: Mapping[Op, float] = MappingProxyType({})


def has_launches(device: Device) -> bool:
    """Return whether launches are imposed on a device's tasks, or on those of some operations."""
    return bool(device.launch or any(device.launch_by_op.values()))


def launch_seconds(device: Device, op: Op) -> float:
    """Return the seconds that a host takes at least to issue a task of an operation."""
    return device.launch_by_op.get(op, device.launch)


class NamedStreams:
    """A device's streams by name, made on first use.

    Attributes
    ----------
    note
        Remark on the device's measured times; empty if there is none.
    step_lock
        Admits one caller at a time.
    launch, launch_by_op
        Seconds that a host takes at least to issue a task, and those for some operations in place
        of it; imposed.
    links, index
        Imposed links between devices with the same object, and this device's number there. Without
        links messages take their real time.
    """

    name: str
    note = ""
    launch = 0.0
    launch_by_op: Mapping[Op, float] = NONE_BY_OP
    links: EmulatedLinks | None = None
    index = 0
    torch_device: torch.device

    def __init__(self) -> None:
        self._streams: dict[tuple[str, bool], Stream] = {}
        self._lock = threading.Lock()
        self.closed = False
        self.step_lock = StepLock(self.has_thread)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        raise NotImplementedError

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Return the stream called ``name``, made on first use.

        Parameters
        ----------
        name
            Name such as ``"compute"``, whose stream runs the stages, or ``"send"``.
        blocks
            Whether its work may block, as messages to other processes do. It then has a thread on a
            CPU worker. ``"compute"`` always has one.

        Returns
        -------
        Stream
            The stream; the same object for the same arguments.
        """
        key = name, blocks and name != "compute"
        if key not in self._streams:
            with self._lock:  # several threads may be the first
                if key not in self._streams:
                    self._streams[key] = self._make_stream(*key)
        return self._streams[key]

    def host(self) -> CpuStream:
        """Return the thread that issues tasks of this device, made on first use.

        It ends with the streams, and counts as one of them.

        Returns
        -------
        CpuStream
            A thread with a queue of work, which is no stream of the GPU.
        """
        key = "host", True
        with self._lock:
            if key not in self._streams:
                self._streams[key] = CpuStream(f"{self.name} host", self._prepare_host)
            stream = self._streams[key]
        assert isinstance(stream, CpuStream)
        return stream

    def _prepare_host(self) -> None:
        """Prepare the calling thread, which is a host's, to issue tasks."""

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return whether a thread runs work of this device's streams.

        Parameters
        ----------
        thread
            Any thread of this process.

        Returns
        -------
        bool
            True also for the thread of `host`.
        """
        return any(
            getattr(stream, "thread", None) is thread for stream in list(self._streams.values())
        )

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message in the memory of another device.

        If it is the same memory, these are the same tensors; with imposed links, copies at the end
        of the SEND. It runs on a stream of this device.

        Parameters
        ----------
        values
            Tensors of the message; None for a gradient that is missing.
        target
            Device that receives the message.

        Returns
        -------
        tuple of torch.Tensor or None
            The tensors there.
        """
        if (link := _imposed_link(self, target)) is not None:
            links, ends = link
            return links.carry(values, *ends)
        if self.torch_device == target.torch_device:
            return values
        return tuple(
            None if value is None else value.to(target.torch_device, non_blocking=True)
            for value in values
        )

    def await_link(self, values: Values) -> None:
        """Do nothing: the copy has taken its time.

        Parameters
        ----------
        values
            Message from `carry`.
        """

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory.

        It runs on a stream of this device. This device has the memory of the host.

        Parameters
        ----------
        data
            Tensor of this device.

        Returns
        -------
        torch.Tensor
            Tensor of the same shape and type, on the CPU.
        """
        return data.clone()

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of host memory on this device.

        It runs on a stream of this device.

        Parameters
        ----------
        data
            Tensor on the CPU.

        Returns
        -------
        torch.Tensor
            Tensor of the same shape and type, on this device.
        """
        return data.clone()

    def to_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies in the memory of another device of this process, over its link.

        It runs on a stream of this device.

        Parameters
        ----------
        data
            Tensors of this device.
        peer
            Device that holds the copies.

        Returns
        -------
        list of torch.Tensor
            Tensors of the same shapes and types.
        """
        with hold_link(self, peer, data):
            return [x.clone() for x in data]

    def from_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies of memory of another device on this device, over its link.

        It runs on a stream of this device. The caller drops ``data`` then.

        Parameters
        ----------
        data
            Copies from `to_peer`.
        peer
            Device that holds them.

        Returns
        -------
        list of torch.Tensor
            Tensors of the same shapes and types.
        """
        with hold_link(peer, self, data):
            return [self.from_host(x) for x in data]

    def synchronize(self) -> None:
        """Block until every stream has run all its work.

        The first exception that the work of a stream has raised is raised again.
        """
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
        """Take no more work.

        It does not wait for work that runs, which may never end.
        """
        self.closed = True


def _imposed_link(
    source: Device | NamedStreams, target: Device | NamedStreams
) -> tuple[EmulatedLinks, tuple[int, int]] | None:
    """Return the imposed links of two devices and their numbers there; None without links."""
    if not isinstance(source, NamedStreams) or not isinstance(target, NamedStreams):
        return None
    if source.links is None or source.links is not target.links:
        return None
    return source.links, (source.index, target.index)


def hold_link(
    source: Device | NamedStreams, target: Device | NamedStreams, data: Sequence[torch.Tensor]
) -> AbstractContextManager[None]:
    """Return a context in which data are copied between devices: with imposed links, in their time.

    It is entered on the stream that copies.
    """
    if (link := _imposed_link(source, target)) is None:
        return nullcontext()
    links, ends = link
    return links.hold(*ends, sum(x.nbytes for x in data))


#: Seconds between two looks of a wait at its limit.
_PAUSE = 0.05


class Stoppable(Protocol):
    """A step that runs."""

    def stop(self, error: ExecutionError) -> None:
        """Fail with ``error``, without waiting for tasks that do not end soon."""
        ...


class StepLock:
    """Lets one thread at a time use a device, also one that several pipelines share.

    A second caller gets an error: it neither waits nor disturbs the step of the first. A thread may
    enter again, but not while its own step runs tasks. ``has_thread`` is a method of the device
    that returns whether a thread runs its tasks. It is held weakly, as the device holds this lock.
    """

    def __init__(self, has_thread: Callable[[threading.Thread], bool]) -> None:
        self._has_thread = weakref.WeakMethod(has_thread)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._closing = False
        self.step: Stoppable | None = None  # the step that runs

    @property
    def is_forked(self) -> bool:
        """Whether the calling process was forked from the one that made the pipeline."""
        return os.getpid() != self._process

    @contextmanager
    def hold(self, call: str) -> Iterator[None]:
        """Hold the device for a call, named in errors.

        It raises ExecutionError from a forked process, or while another thread holds the device.
        """
        if self.is_forked:
            raise ExecutionError(
                f"{call} was called in a process that was forked from the one that made the "
                f"pipeline (process {self._process}), whose threads it does not have; make the "
                "pipeline after the fork"
            )
        if not self._lock.acquire(blocking=False):
            owner = self._owner
            raise ExecutionError(
                f"{call} was called while thread {'' if owner is None else owner.name!r} uses this "
                "pipeline, or one with its devices; call one method at a time, or make a pipeline "
                "for each thread"
            )
        self._owner, self._depth = threading.current_thread(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._owner = None
            self._lock.release()

    @contextmanager
    def run_step(self, step: Stoppable) -> Iterator[None]:
        """Run the tasks of a step in a block; `stop` ends them."""
        self.step = step
        if self._closing:
            step.stop(_closed_error())
        try:
            yield
        finally:
            self.step = None

    def stop(self, timer: RunningTimer) -> bool:
        """Stop the step that runs, if any, and wait for its end; return whether it has ended.

        ``timer`` limits the wait. In the thread of the step itself, such as in a signal handler,
        the step ends later.
        """
        self._closing = True
        if (step := self.step) is not None:
            step.stop(_closed_error())
        if self._owner is threading.current_thread():
            return self.step is None
        while not self._lock.acquire(timeout=_PAUSE):
            if timer.is_over:
                return False
        self._lock.release()
        return True

    def check_outside(self, call: str, *, may_interrupt: bool = False) -> None:
        """Raise ExecutionError if a stage or the loss calls, which would wait for itself.

        A signal handler runs in the thread of the step. It may make only those calls that
        ``may_interrupt`` the step.
        """
        thread = threading.current_thread()
        is_own = self._owner is thread and self.step is not None and not may_interrupt
        has_thread = self._has_thread()
        if is_own or (has_thread is not None and has_thread(thread)):
            raise ExecutionError(
                f"{call} was called from within a stage or the loss of the same pipeline, or from "
                "a handler of a signal during its step; call it after the step"
            )


def _closed_error() -> ExecutionError:
    return ExecutionError(
        "the pipeline was closed while a step was running, which is not complete; gradients and "
        "weights may hold a part of it"
    )


class RemoteDevice:
    """A device of another process: it has a name, and runs nothing in this process."""

    note = ""
    launch = 0.0
    launch_by_op: Mapping[Op, float] = NONE_BY_OP

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.torch_device = torch.device("meta")
        self.closed = False
        self.step_lock = StepLock(self.has_thread)

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Raise: its streams are in another process."""
        self._refuse()

    def host(self) -> CpuStream:
        """Raise, as `stream` does."""
        self._refuse()

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return False: its streams are in another process."""
        return False

    def mark(self) -> Event:
        """Raise, as `stream` does."""
        self._refuse()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Raise, as `stream` does."""
        self._refuse()

    def wait_for_host(self, event: Event) -> None:
        """Do nothing."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""

    def carry(self, values: Values, target: Device) -> Values:
        """Raise, as `stream` does."""
        self._refuse()

    def await_link(self, values: Values) -> None:
        """Do nothing."""

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Raise, as `stream` does."""
        self._refuse()

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Raise, as `stream` does."""
        self._refuse()

    def to_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Raise, as `stream` does."""
        self._refuse()

    def from_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Raise, as `stream` does."""
        self._refuse()

    def synchronize(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing but note it."""
        self.closed = True

    abandon = close


def device_ranks(devices: Sequence[Device], own_rank: int) -> list[int]:
    """Return the rank of each device's process; ``own_rank`` is that of this process."""
    return [x.rank if isinstance(x, RemoteDevice) else own_rank for x in devices]
