"""`CpuDevice`: a worker thread that computes on one core."""

from __future__ import annotations

import os
from functools import partial

import torch

from pipeexec.devices.cpu_streams import CallerStream, CpuEvent, CpuStream, InlineStream
from pipeexec.devices.device import NamedStreams, Values
from pipeexec.devices.streams import Event, Stream, wait_for


class CpuDevice(NamedStreams):
    """A worker thread that computes on one core; its messages are passed by reference.

    Its stream ``"caller"`` computes in the thread that submits the work.

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

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        if name == "compute":
            return CpuStream(f"{self.name} {name}", self._prepare)
        if name in ("offload", "reload"):  # whose copies take time, beside compute tasks
            return CpuStream(f"{self.name} {name}", partial(torch.set_num_threads, 1))
        if name == "caller":
            return CallerStream()
        return CpuStream(f"{self.name} {name}") if blocks else InlineStream()

    def _prepare(self) -> None:
        """Give the calling thread one core and torch one thread in it."""
        torch.set_num_threads(1)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})

    def mark(self) -> Event:
        """Return an event that is set now.

        All CPU workers have one clock.

        Returns
        -------
        Event
            The zero of this device's clock.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.mark().is_set()
        True
        """
        return CpuEvent.now()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Block the caller until ``event`` is set.

        Parameters
        ----------
        event
            Event of a stream of this device.
        values
            Ignored: references keep their memory.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> event = worker.stream("compute").record()
        >>> worker.rejoin(event)
        >>> event.is_set()
        True
        >>> worker.close()
        """
        wait_for(event)

    def wait_for_host(self, event: Event) -> None:
        """Block the caller until ``event`` is set: the host does all the work.

        Parameters
        ----------
        event
            Event of a stream of this device.

        Examples
        --------
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> event = worker.stream("compute").record()
        >>> worker.wait_for_host(event)
        >>> event.is_set()
        True
        >>> worker.close()
        """
        wait_for(event)

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: references keep the memory.

        Parameters
        ----------
        tensor
            Tensor from another stream.
        stream
            Stream of this device that will use it.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> (worker,) = px.workers(1)
        >>> worker.adopt(torch.ones(2), worker.stream("compute"))
        >>> worker.close()
        """
