"""CPU workers between which messages take the time of a link.

Within one memory a message takes no time, so that nothing shows what streams, portals or another
order do to messages. Here each is copied and then waits as its link says, on a stream that is a
thread of its own; see `pipeexec.imposed`.
"""

from __future__ import annotations

from pipeexec.devices import CpuDevice, Device, Values, make_devices
from pipeexec.imposed import Links, Message, SleepWaits, check_links
from pipeexec.streams import Stream
from pipesim.capacity import check_memory
from pipesim.errors import check_count
from pipesim.network import Network

__all__ = ["Worker", "workers"]

#: Bytes that Python needs for a worker, at least.
_BYTES_PER_WORKER = 2000


class Worker(CpuDevice):
    """A CPU worker whose messages take the time of an imposed link; `workers` makes them.

    Parameters
    ----------
    index, core
        As of `pipeexec.devices.CpuDevice`.
    links
        Between workers that have the same.
    """

    def __init__(self, index: int, core: int | None, links: Links) -> None:
        super().__init__(index, core)
        self.index, self.links = index, links
        self.note = f"link times are imposed: {links.waits.says}"

    def _make(self, name: str, blocks: bool) -> Stream:
        sleeps = name.startswith(("send", "recv", "copy"))
        return super()._make(name, blocks or sleeps)

    def carry(self, values: Values, target: Device) -> Values:
        """Return a copy of a message, once its link is done with it."""
        if not isinstance(target, Worker) or target.links is not self.links:
            return super().carry(values, target)
        return self.links.carry(values, self.index, target.index)

    def await_link(self, values: Values) -> None:
        """Sleep until the imposed latency of a message is over."""
        if isinstance(values, Message):
            self.links.arrive(values)


def workers(n: int, *, link: Network) -> list[Worker]:
    """Return ``n`` CPU workers, one a core if there are as many, linked by a network.

    Parameters
    ----------
    n
        How many.
    link
        Messages between workers take the time that they would take on this network, each pair
        having links of its own, and some 0.1 ms until a thread wakes up.

    Raises
    ------
    ArgumentError
        For ``n`` below 1, or a network of shared links.
    CapacityError
        For more than the machine has memory for.

    Warns
    -----
    OversubscriptionWarning
        If there are more workers than cores.

    Examples
    --------
    >>> import pipeexec as px, pipesim as ps
    >>> devices = px.workers(2, link=ps.Network(latency=1e-3, bandwidth=1e9))
    >>> [device.name for device in devices]
    ['cpu:0', 'cpu:1']
    """
    n = check_count("n", n)
    check_memory(f"n={n} workers", n * _BYTES_PER_WORKER, "take fewer")
    check_links(link)
    links = Links(link, n, SleepWaits(), takes_turns=True)
    plain = make_devices(["cpu"] * n)
    return [
        Worker(index, device.core, links)
        for index, device in enumerate(plain)
        if isinstance(device, CpuDevice)
    ]
