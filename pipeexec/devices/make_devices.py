"""CPU workers, with imposed times of links and launches, and devices of names such as ``"cpu"``.

Within one memory a message takes no time, so the effect of streams, portals or another order on
messages does not show. With an imposed link each message is copied and then waits for its link, on
a stream that is a separate thread; see `pipeexec.devices.emulated_links`.

To give a task to a worker takes the host about 0.01 ms. To launch its kernels on a GPU often takes
more than ten times as long. With an imposed launch the host sleeps before each task; see
`pipeexec.executor.host_threads`.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.device import (
    NONE_BY_OP,
    Device,
    DeviceLike,
    NamedStreams,
    Values,
    has_launches,
)
from pipeexec.devices.emulated_links import EmulatedLinks, SleepTimer, TimedMessage, check_links
from pipeexec.devices.streams import (
    CallerStream,
    CpuEvent,
    CpuStream,
    Event,
    InlineStream,
    Stream,
    wait_for,
)
from pipesim.costs.cost_fields import checked_launch_by_op
from pipesim.errors import ArgumentError, OversubscriptionWarning, check_count, number
from pipesim.network.network import Network
from pipesim.ops import Op
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.host_memory import check_memory


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
) -> list[Device]:
    """Make devices of names such as ``"cpu"`` and ``"cuda:0"``; each ``"cpu"`` is a new worker.

    ``n_local`` processes on this machine have as many workers each; this one is number
    ``local_rank``. Its ``"cuda"`` without an index is the GPU of that number. More CPU workers
    than cores cause an `OversubscriptionWarning`.
    """
    parsed = [
        name if isinstance(name, (CpuDevice, CudaDevice)) else parse_device(name) for name in names
    ]
    kinds = {(d if isinstance(d, torch.device) else d.torch_device).type for d in parsed}
    if len(kinds) > 1:
        raise ArgumentError(
            f"devices of several kinds ({', '.join(sorted(kinds))}) cannot run one pipeline yet: "
            "their streams cannot wait for each other; give devices of one kind"
        )
    n_cpu = sum(isinstance(d, torch.device) and d.type == "cpu" for d in parsed)
    if n_cpu:
        _keep_freed_memory()
    first = local_rank * n_cpu
    cores = _worker_cores(n_cpu * n_local, pin_threads, warns=not local_rank)[first : first + n_cpu]
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


def _worker_cores(n_workers: int, pin_threads: bool, *, warns: bool) -> Sequence[int | None]:
    """Return the core of each CPU worker of this machine; None for workers that are not pinned."""
    available = available_cores()
    if n_workers > len(available):
        if warns:  # one process of the machine, since all know the same
            warn_caller(
                f"{n_workers} CPU devices share {len(available)} cores: tasks will slow each other "
                "down, and measured times say little; use at most one device a core to measure",
                OversubscriptionWarning,
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


# CPU workers


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
        """
        wait_for(event)

    def wait_for_host(self, event: Event) -> None:
        """Block the caller until ``event`` is set: the host does all the work.

        Parameters
        ----------
        event
            Event of a stream of this device.
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
        """


#: Bytes that Python needs for a worker, at least.
_BYTES_PER_WORKER = 2000


class Worker(CpuDevice):
    """A CPU worker with imposed links and launches; `workers` makes them.

    Parameters
    ----------
    index, core
        As of `pipeexec.devices.make_devices.CpuDevice`.
    links
        Imposed links between workers with the same object; None if messages pass by reference.
    launch, launch_by_op
        Seconds that a host takes to issue a task, and those for some operations in place of it.

    Examples
    --------
    >>> import pipeexec as px
    >>> (worker,) = px.workers(1)
    >>> worker.name, worker.torch_device
    ('cpu:0', device(type='cpu'))
    """

    def __init__(
        self,
        index: int,
        core: int | None,
        links: EmulatedLinks | None,
        launch: float = 0.0,
        launch_by_op: Mapping[Op, float] = NONE_BY_OP,
    ) -> None:
        super().__init__(index, core)
        self.index, self.links = index, links
        self.launch, self.launch_by_op = launch, launch_by_op
        notes = [] if links is None else [f"link times are imposed: {links.timer.description}"]
        if has_launches(self):
            own = "".join(f", {op} {seconds:g} s" for op, seconds in launch_by_op.items())
            notes += [f"launches are imposed: {launch:g} s of the host a task{own}"]
        self.note = "; ".join(notes)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        sleeps = self.links is not None and name.startswith(("send", "recv", "copy"))
        return super()._make_stream(name, blocks or sleeps)

    def await_link(self, values: Values) -> None:
        """Sleep until the imposed latency of a message is over.

        Parameters
        ----------
        values
            Message from `carry`. Others pass at once.
        """
        if self.links is not None and isinstance(values, TimedMessage):
            self.links.await_arrival(values)


@checked_names
def workers(
    n: int,
    *,
    link: Network | None = None,
    launch: float = 0.0,
    launch_by_op: Mapping[str, float] | None = None,
) -> list[Worker]:
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
        add up.
    launch_by_op
        Seconds for tasks of some operations, in place of ``launch``, as of `pipesim.Costs`:
        ``{"messages": 0}`` for messages that need no launch.

    Returns
    -------
    list of Worker
        ``n`` workers, with a core each if there are as many.

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
    seconds, by_op = number(launch), dict(checked_launch_by_op(launch_by_op) or ())
    if seconds is None or not 0 <= seconds < math.inf:
        raise ArgumentError(f"launch must be finite seconds >= 0 a task, got {launch!r}")
    if link is not None:
        check_links(link)
    links = None if link is None else EmulatedLinks(link, n, SleepTimer(), has_threads=True)
    devices = make_devices(["cpu"] * n)
    return [
        Worker(index, device.core, links, seconds, {Op[k]: own for k, own in by_op.items()})
        for index, device in enumerate(devices)
        if isinstance(device, CpuDevice)
    ]
