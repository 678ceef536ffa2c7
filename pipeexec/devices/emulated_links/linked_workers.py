"""CPU workers with imposed times of links and of launches.

Within one memory a message takes no time, so the effect of streams, portals or another order on
messages does not show. Here each message is copied and then waits for its link, on a stream that is
a separate thread; see `pipeexec.devices.emulated_links.links`.

To give a task to a worker takes the host about 0.01 ms. To launch its kernels on a GPU often takes
more than ten times as long. With an imposed launch the host sleeps before each task; see
`pipeexec.executor.host_threads`.
"""

from __future__ import annotations

import math

from pipeexec.devices.cpu import CpuDevice
from pipeexec.devices.device import Device, Values
from pipeexec.devices.emulated_links.links import EmulatedLinks, TimedMessage, check_links
from pipeexec.devices.emulated_links.timers import SleepTimer
from pipeexec.devices.make_devices import make_devices
from pipeexec.devices.streams import Stream
from pipesim.errors import ArgumentError, check_count, number
from pipesim.network.network import Network
from pipesim.utils.host_memory import check_memory

#: Bytes that Python needs for a worker, at least.
_BYTES_PER_WORKER = 2000


class Worker(CpuDevice):
    """A CPU worker with imposed links and launches; `workers` makes them.

    Parameters
    ----------
    index, core
        As of `pipeexec.devices.cpu.CpuDevice`.
    links
        Imposed links between workers with the same object; None if messages pass by reference.
    launch
        Seconds that a host takes to issue a task.

    See Also
    --------
    pipeexec.workers : Make workers.
    pipeexec.Pipeline : Its ``devices`` takes them.
    pipeexec.GPipe : Its ``devices`` takes them.

    Examples
    --------
    >>> import pipeexec as px
    >>> (worker,) = px.workers(1)
    >>> worker.name, worker.torch_device
    ('cpu:0', device(type='cpu'))
    """

    def __init__(
        self, index: int, core: int | None, links: EmulatedLinks | None, launch: float = 0.0
    ) -> None:
        super().__init__(index, core)
        self.index, self.links, self.launch = index, links, launch
        notes = [] if links is None else [f"link times are imposed: {links.timer.description}"]
        notes += [f"launches are imposed: {launch:g} s of the host a task"] if launch else []
        self.note = "; ".join(notes)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        sleeps = self.links is not None and name.startswith(("send", "recv", "copy"))
        return super()._make_stream(name, blocks or sleeps)

    def carry(self, values: Values, target: Device) -> Values:
        """Return a copy of a message at the end of its SEND.

        Without imposed links, the message itself is returned at once.

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
        >>> import pipeexec as px, pipesim as ps
        >>> first, second = px.workers(2, link=ps.Network(latency=1e-4, bandwidth=1e9))
        >>> message = (torch.ones(2),)
        >>> copy = first.carry(message, second)
        >>> copy[0] is message[0], copy[0].tolist()
        (False, [1.0, 1.0])
        """
        if self.links is None or not isinstance(target, Worker) or target.links is not self.links:
            return super().carry(values, target)
        return self.links.carry(values, self.index, target.index)

    def await_link(self, values: Values) -> None:
        """Sleep until the imposed latency of a message is over.

        Parameters
        ----------
        values
            Message from `carry`. Others pass at once.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> first, second = px.workers(2, link=ps.Network(latency=1e-4, bandwidth=1e9))
        >>> second.await_link(first.carry((torch.ones(2),), second))
        """
        if self.links is not None and isinstance(values, TimedMessage):
            self.links.await_arrival(values)


def workers(n: int, *, link: Network | None = None, launch: float = 0.0) -> list[Worker]:
    """Return ``n`` CPU workers, one a core if there are as many, linked by a network.

    Parameters
    ----------
    n
        Number of workers.
    link
        Network on which each pair of workers has separate links. Messages take the time that they
        would take there, and about 0.1 ms until a thread wakes up. None: messages pass by
        reference, which takes no time.
    launch
        Seconds that the host takes to issue each task, messages included; 0: its real time. The
        host sleeps before a task until its launches so far are over, so delays of waking up do not
        add up. For `Pipeline`; `GPipe` refuses it.

    Returns
    -------
    list of Worker
        ``n`` workers, with a core each if there are as many.

    Raises
    ------
    CapacityError
        If the workers do not fit the machine's memory.

    Warns
    -----
    OversubscriptionWarning
        If there are more workers than cores.

    See Also
    --------
    pipeexec.slices : Parts of one GPU as devices.
    pipeexec.Pipeline : Its ``devices`` takes them.
    pipesim.Network : Latency and bandwidth of links.

    Examples
    --------
    >>> import pipeexec as px, pipesim as ps
    >>> devices = px.workers(2, link=ps.Network(latency=1e-3, bandwidth=1e9))
    >>> [device.name for device in devices]
    ['cpu:0', 'cpu:1']
    """
    n = check_count("n", n)
    check_memory(f"n={n} workers", n * _BYTES_PER_WORKER, "take fewer")
    seconds = number(launch)
    if seconds is None or not 0 <= seconds < math.inf:
        raise ArgumentError(f"launch must be finite seconds >= 0 a task, got {launch!r}")
    if link is not None:
        check_links(link)
    links = None if link is None else EmulatedLinks(link, n, SleepTimer(), has_threads=True)
    devices = make_devices(["cpu"] * n)
    return [
        Worker(index, device.core, links, seconds)
        for index, device in enumerate(devices)
        if isinstance(device, CpuDevice)
    ]
