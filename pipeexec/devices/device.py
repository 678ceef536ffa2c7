"""`Device`: the interface of every device, and the named streams that real devices share."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from pipeexec.devices.cpu_streams import CpuStream
from pipeexec.devices.step_lock import StepLock
from pipeexec.devices.streams import Event, Stream

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


class NamedStreams:
    """A device's streams by name, made on first use.

    Attributes
    ----------
    torch_device
        Device of torch that has the memory.
    note
        Remark on the device's measured times; empty if there is none.
    step_lock
        Admits one caller at a time.
    launch
        Seconds that a host takes at least to issue a task; imposed.
    """

    name: str
    note = ""
    launch = 0.0
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

        Raises
        ------
        RuntimeError
            If a thread cannot be started, or CUDA cannot make a stream.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> stream = worker.stream("compute")
        >>> stream.submit(lambda: print("computed"))
        >>> stream.synchronize()
        computed
        >>> worker.close()
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

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.host().thread.name
        'cpu:0 host'
        >>> worker.close()
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

        Examples
        --------
        >>> import threading
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.has_thread(worker.host().thread), worker.has_thread(threading.main_thread())
        (True, False)
        >>> worker.close()
        """
        return any(
            getattr(stream, "thread", None) is thread for stream in list(self._streams.values())
        )

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message in the memory of another device.

        If it is the same memory, these are the same tensors. It runs on a stream of this device.

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

        Raises
        ------
        RuntimeError
            By torch, if a copy does not fit in memory.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> first, second = px.workers(2)
        >>> message = (torch.ones(2),)
        >>> first.carry(message, second) is message
        True
        """
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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> first, second = px.workers(2)
        >>> second.await_link(first.carry((torch.ones(2),), second))
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

        Raises
        ------
        RuntimeError
            By torch, if the copy does not fit in memory.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.to_host(torch.ones(2)).tolist()
        [1.0, 1.0]
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

        Raises
        ------
        RuntimeError
            By torch, if the copy does not fit in memory.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.from_host(torch.ones(2)).tolist()
        [1.0, 1.0]
        """
        return data.clone()

    def synchronize(self) -> None:
        """Block until every stream has run all its work.

        Raises
        ------
        Exception
            The first exception that the work of a stream has raised.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.stream("compute").submit(lambda: print("computed"))
        >>> worker.synchronize()
        computed
        >>> worker.close()
        """
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """End every stream; the device takes no more work.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.close()
        >>> worker.closed
        True
        """
        if self.closed:
            return
        self.closed = True
        for stream in self._streams.values():
            stream.close()

    def abandon(self) -> None:
        """Take no more work.

        It does not wait for work that runs, which may never end.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.abandon()
        >>> worker.closed
        True
        """
        self.closed = True
