"""`Processes`: the processes of a pipeline, with their groups, channels, devices and failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipeexec.devices.device import Device, RemoteDevice
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.channels import Channel, ChannelRoute, LostConnection, NcclChannel
from pipeexec.distributed.control_messages import ControlMessages
from pipeexec.distributed.flight_recorder import FlightRecorder
from pipeexec.distributed.process_clock import ProcessClock
from pipeexec.distributed.store import gloo_on_loopback
from pipeexec.distributed.watchdog import Failure, StepReporter, Watchdog
from pipeexec.process_end import end_connections_with_process, end_threads
from pipesim.errors import ArgumentError, PeerError, check_count, check_type
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

#: Seconds that the process which holds the store waits until the others have left.
_CLOSE_SECONDS = 2.0


class Processes(ControlMessages):
    """The processes that share a pipeline, from the view of one of them; `join` returns it.

    Parameters
    ----------
    store
        Shared by all processes, and used by nothing else.
    rank, n_ranks
        Number of this process, and how many there are: torch.distributed's rank and world size.
    timeout
        Seconds without progress after which every process stops with an error.
    local_rank, n_local
        Number of this process on its machine, and how many run there.
    holder
        The rank whose process holds the store; None if it is the launcher.
    is_on_one_machine
        Whether all processes reach each other by loopback.

    Attributes
    ----------
    clock
        Relates this process's clock to rank 0's.
    watch
        The watchdog, which detects failures of other processes.
    reporter
        Takes the status of this process from the pipeline that runs a step.
    recorder
        The flight recorder, which keeps the last task of a process that was lost.
    measured
        Returns the timeline that this process measured in its latest step; None before the first.
    n_graphs
        Task graphs that all processes have agreed on.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from pipeexec.distributed import Processes
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with Processes(dist.HashStore(), rank=0, n_ranks=1) as processes:
    ...     processes.rank, processes.n_ranks, processes.total([1.5])
    (0, 1, [1.5])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        n_ranks: int,
        timeout: float = 60.0,
        *,
        local_rank: int = 0,
        n_local: int = 1,
        holder: int | None = None,
        is_on_one_machine: bool = False,
    ) -> None:
        self.reporter = StepReporter(rank)
        self.recorder = FlightRecorder(rank)
        store.set_timeout(torch_timeout(timeout))
        connection = store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs
        watch = Watchdog(
            connection,
            rank,
            n_ranks,
            timeout,
            self.reporter,
            self.recorder.exited_ranks,
            holder=holder,
        )
        super().__init__(store, rank, n_ranks, timeout, watch)
        self.local_rank, self.n_local = local_rank, n_local
        self.is_on_one_machine = is_on_one_machine
        self.n_graphs = 0
        self.measured: Callable[[], Timeline] | None = None
        self._groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._channels: dict[ChannelRoute, Channel] = {}
        self._gpus: dict[int, torch.device] = {}  # by number of the device in the graph
        end_connections_with_process(self)
        with self.guard():
            # An error names the ranks that are late; a process group would only wait for them.
            self.recorder.connect(self.share)
            self.clock = ProcessClock(rank, n_ranks, self.group(range(n_ranks)))
            self.clock.sample()

    def group(
        self, ranks: Iterable[int], backend: str = "gloo", key: object = None
    ) -> dist.ProcessGroup:
        """Return a process group of some ranks.

        The first call for ``key`` makes it. Every process must make the same calls, whether it is
        one of the ranks or not.

        Parameters
        ----------
        ranks
            Different ranks; torch orders them by number.
        backend
            Backend of torch.distributed, such as ``"gloo"`` or ``"nccl"``.
        key
            Distinguishes groups of the same ranks and backend.

        Returns
        -------
        torch.distributed.ProcessGroup
            The group; in a process that is none of the ranks, a value that marks this.
        """
        members = [check_count("a rank", rank, 0) for rank in ranks]
        if not members or len(set(members)) < len(members) or max(members) >= self.n_ranks:
            raise ArgumentError(
                f"ranks of a group must be different ones below {self.n_ranks}, got {members}"
            )
        name = (*members, backend, key)
        if name not in self._groups:
            if self.watch.others_may_end:
                raise ArgumentError("these processes were left by close(); join again")
            self._check_process()
            with gloo_on_loopback(self.is_on_one_machine):
                group = dist.new_group(
                    members, backend=backend, timeout=torch_timeout(self.timeout)
                )
            self._groups[name] = group
        return self._groups[name]

    def open(self, routes: Iterable[ChannelRoute], n_devices: int, own: Sequence[Device]) -> None:
        """Make the channels of all routes of a graph; all processes must call this with the same.

        Parameters
        ----------
        routes
            Routes between devices of different processes.
        n_devices
            Devices of the graph.
        own
            Devices of this process. Between GPUs tensors travel by NCCL, otherwise by gloo.
        """
        gpus = [device.torch_device for device in own if device.torch_device.type == "cuda"]
        for route in sorted(set(routes) - self._channels.keys()):
            tag = (route.source * n_devices + route.target) * 2 + (route.op is Op.SEND_B)
            everyone = self.group(range(self.n_ranks))
            if not gpus:
                self._channels[route] = Channel(route, tag, everyone)
                continue
            ends = sorted((route.source_rank, route.target_rank))
            pair = self.group(ends, "nccl", route)
            if self.rank in ends:
                device = route.source if self.rank == route.source_rank else route.target
                channel = NcclChannel(route, tag, everyone, pair, self._gpus[device])
                channel.warm_up(self.rank)
                self._channels[route] = channel

    def channel(self, route: ChannelRoute) -> Channel:
        """Return the open channel of a route.

        Parameters
        ----------
        route
            Ranks and devices at the ends of the channel, and the operation of its messages.

        Returns
        -------
        Channel
            The channel.
        """
        return self._channels[route]

    def spread(self, local: Sequence[Device]) -> list[Device]:
        """Return the devices of all processes, in order of ranks.

        Devices of other processes are a `RemoteDevice`.

        Parameters
        ----------
        local
            Devices of this process.

        Returns
        -------
        list of Device
            Those of rank 0 first.
        """
        own = [[x.name, x.torch_device.type, _uuid_of(x.torch_device)] for x in local]
        everyone = self.share(own)
        if len({kind for devices in everyone for _, kind, _ in devices}) > 1:
            kinds = [[device[:2] for device in devices] for devices in everyone]
            raise ArgumentError(
                f"processes have devices of several kinds: {kinds}; give devices of one kind"
            )
        _check_distinct(*([[device[k] for device in devices] for devices in everyone]
                         for k in (0, 2)))  # fmt: skip
        before = sum(len(devices) for devices in everyone[: self.rank])
        self._gpus = {before + k: device.torch_device for k, device in enumerate(local)}
        return [
            device
            for rank, names in enumerate(everyone)
            for device in (
                local if rank == self.rank
                else [RemoteDevice(f"rank {rank}: {name}", rank) for name, *_ in names]
            )
        ]  # fmt: skip

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Stop every process if the block raises an error.

        Returns
        -------
        contextmanager
            Its block calls `fail` with an error, and raises it again.
        """
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Stop every process with an error; a `PeerError` has stopped them already.

        Parameters
        ----------
        error
            Error whose type and message the other processes report.
        """
        if self._is_closed or os.getpid() != self._pid:
            return  # it does not concern the others
        if isinstance(error, LostConnection):
            self.watch.post(Failure("lost", *self.blame(error)))
        elif not isinstance(error, PeerError):
            message = f"rank {self.rank} stopped: {type(error).__name__}: {error}"
            self.watch.post(Failure("raised", self.rank, message))

    def blame(self, error: LostConnection) -> tuple[int, str]:
        """Return the rank that was lost when a connection broke, and its last task as text.

        Parameters
        ----------
        error
            Error of the connection.

        Returns
        -------
        tuple of (int, str)
            The rank, -1 if any may be lost, and a text for people.
        """
        exited = self.recorder.wait_for_exit()
        rank = error.rank if error.rank in exited or not exited else exited[0]
        if rank < 0:
            return rank, str(error)
        if rank in exited:
            return rank, self.watch.describe_loss(rank)
        return rank, f"{error}; {self.watch.board.describe_last_task(rank)}"

    def close(self) -> None:
        """Leave, together with all other processes; their pipelines can no longer be used.

        In a process that has left already, nothing happens. The end of a ``with`` block leaves the
        processes, too. It raises PeerError if a process does not leave within the timeout.
        """
        self._check_process()
        if self._is_closed:
            return
        is_well = self.watch.failure is None
        try:
            if is_well:
                self.watch.others_may_end = True
                self.has_stepped = False  # another process may still be writing results
                self.barrier()
        finally:
            self._is_closed = True
            self.watch.close()
        if is_well:
            self._leave()
        else:
            self.break_connections()

    def break_connections(self) -> None:
        """Let the threads of streams end that wait for messages of other processes.

        After a failure such messages may never come. The channels cannot be used again.
        """
        if os.getpid() != self._pid:
            return  # in a forked child, which shares the sockets but has no threads
        for group in self._groups.values():
            if isinstance(group, dist.ProcessGroup):
                _break_group(group, set(range(group.size())) - {group.rank()})

    def _leave(self) -> None:
        """Release the groups and the store; its holder stays until the others have left."""
        for group in self._groups.values():
            if isinstance(group, dist.ProcessGroup):  # not in groups of other ranks
                dist.destroy_process_group(group)
        self._groups.clear()  # their threads end with the last reference
        self._channels.clear()
        others = [f"left/{r}" for r in range(self.n_ranks) if r != self.rank]
        timer = RunningTimer(_CLOSE_SECONDS)
        with suppress(dist.DistError):
            self.store.set(f"left/{self.rank}", "")
            while self.watch.holder == self.rank and not timer.is_over:
                if self.store.check(others):
                    return
                time.sleep(1e-3)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._pid:
            return  # in a forked child: the processes belong to its parent
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.n_ranks} processes>"


def torch_timeout(timeout: float) -> timedelta:
    """Return the timeout of waits in torch, which count the time of a freeze.

    It is longer than the watchdog's, whose error names the rank that is late.
    """
    return timedelta(seconds=2 * timeout + 30)


def guard_processes(processes: Processes | None) -> AbstractContextManager[None]:
    """Stop every process if the block raises an error; None is one process alone."""
    if processes is None:
        return nullcontext()
    return check_type("processes", processes, Processes, "give the result of pipeexec.join").guard()


def _uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU, unique over all machines; empty if it has none."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _check_distinct(names: Sequence[Sequence[str]], uuids: Sequence[Sequence[str]]) -> None:
    """Raise if devices of two processes are one GPU, by UUID; NCCL would refuse them later."""
    owners: dict[str, tuple[int, str]] = {}
    for rank, devices in enumerate(zip(names, uuids, strict=True)):
        for name, uuid in zip(*devices, strict=True):
            first, first_name = owners.setdefault(uuid, (rank, name))
            if uuid and first != rank:
                raise ArgumentError(
                    f"{first_name} of rank {first} and {name} of rank {rank} are the same GPU "
                    f"(UUID {uuid}), and NCCL refuses two processes on one GPU; give each "
                    "process its own GPU (devices=['cuda'] is that of its LOCAL_RANK), or run one "
                    "process with devices=pipeexec.slices('cuda:0', n)"
                )


# End of process groups: waits for messages that will not come, and gloo's own threads

#: Tag of a message that nobody sends; those of channels count from 0.
_NEVER_SENT = (1 << 31) - 1


def _break_group(group: dist.ProcessGroup, ranks: Iterable[int]) -> None:
    """Let all waits of this process for messages of a gloo group end with an error.

    ``ranks`` are those of the group without this process, numbered within the group. The group
    cannot be used again. gloo neither aborts a wait nor ends it with the group: it does so if
    another wait of the group exceeds its timeout, as then it closes all sockets of the group.
    """
    for rank in ranks:
        with suppress(RuntimeError):  # this connection is broken already
            work = group.recv([torch.empty(1)], rank, _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))


def end_groups(pid: int) -> None:
    """End the threads of process groups while Python still runs.

    A thread of gloo that frees a tensor later aborts the process (pytorch/pytorch, issue 190489). A
    forked child does not have the threads. Threads of streams wait for messages of the groups, so
    they end first.
    """
    if dist.is_initialized() and os.getpid() == pid:
        end_threads()
        dist.destroy_process_group()
