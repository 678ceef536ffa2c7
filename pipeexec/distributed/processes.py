"""`Processes`: the processes that share a pipeline, and what they tell each other beside messages.

Everything here goes through torch's key-value store, as JSON or plain bytes: it answers while a
process group waits for a peer that will never come. Tensors go by
`pipeexec.distributed.message_headers`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipeexec.devices.device import Device
from pipeexec.devices.remote import RemoteDevice
from pipeexec.distributed.channels import Channel, Lost, Route
from pipeexec.distributed.distinct_gpus import check_distinct, uuid_of
from pipeexec.distributed.failure import Failure
from pipeexec.distributed.flight_recorder import FlightRecorder
from pipeexec.distributed.nccl_channel import NcclChannel
from pipeexec.distributed.process_clock import ProcessClock
from pipeexec.distributed.status import StepReporter
from pipeexec.distributed.store import gloo_on_loopback
from pipeexec.distributed.watchdog import Watchdog
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    PeerError,
    check_count,
    check_numbers,
)
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

__all__ = ["Processes", "guarded"]

#: Seconds that processes have to come to their first step, at least.
_START = 120.0
#: Seconds that who holds the store waits for the others to leave.
_GOODBYE = 2.0


class Processes:
    """The processes that share a pipeline, seen from one of them; `join` returns it.

    Parameters
    ----------
    store
        Shared by all of them; nobody else uses it.
    rank, n_ranks
        Number of this process, and how many there are: torch.distributed's.
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
        This process's clock against rank 0's.
    watch
        Notices failures of other processes.
    recorder
        Says what a process was in when it was lost.
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
        self.store, self.rank, self.n_ranks = store, rank, n_ranks
        self.timeout, self.local_rank, self.n_local = timeout, local_rank, n_local
        self.is_on_one_machine = is_on_one_machine
        self._n_gathers = self._n_published = 0
        self.n_graphs = 0  # that all processes have agreed on
        self._pid, self._is_closed = os.getpid(), False
        self._calling = threading.Lock()  # two calls at once would have no order
        self._published: dict[int, list[str]] = {}  # names, by number
        #: For other threads than the one that gathers.
        self._public = store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs
        #: Returns what this process measured in its latest step.
        self.measured: Callable[[], Timeline] | None = None
        self.has_stepped = False  # whether a pipeline of these processes has run a step
        self._groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._channels: dict[Route, Channel] = {}
        self._gpu_of: dict[int, torch.device] = {}  # by the device's number in the graph
        own = store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs
        self.reporter = StepReporter(rank)
        self.recorder = FlightRecorder(rank)
        self.watch = Watchdog(
            own, rank, n_ranks, timeout, self.reporter, self.recorder.exited_ranks, holder=holder
        )
        with self.guard():
            # An error names the ranks that are late; a process group would only wait for them.
            self.recorder.connect(self.share)
            self.clock = ProcessClock(rank, n_ranks, self.group(range(n_ranks)))
            self.clock.sample()

    def group(
        self, ranks: Iterable[int], backend: str = "gloo", key: object = None
    ) -> dist.ProcessGroup:
        """Return a process group of some ranks, made at the first call for ``key``.

        Every process must make the same calls, whether it is one of the ranks or not.

        Raises
        ------
        ArgumentError
            For ranks that are not there or occur twice, and after `close`.
        ExecutionError
            In a forked child.
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
            # Longer than our own timeout, which names who is waited for.
            patience = timedelta(seconds=2 * self.timeout + 30)
            with gloo_on_loopback(self.is_on_one_machine):
                made = dist.new_group(members, backend=backend, timeout=patience)
            self._groups[name] = made
        return self._groups[name]

    def open(self, routes: Iterable[Route], n_devices: int, own: Sequence[Device]) -> None:
        """Make the channels of all routes of a graph; every process must call this with the same.

        ``own`` are the devices of this process, by whose kind messages go: NCCL between GPUs.
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
                mine = route.source if self.rank == route.source_rank else route.target
                channel = NcclChannel(route, tag, everyone, pair, self._gpu_of[mine])
                channel.warm_up(self.rank)
                self._channels[route] = channel

    def channel(self, route: Route) -> Channel:
        """Return the channel of a route that is open."""
        return self._channels[route]

    def spread(self, local: Sequence[Device]) -> list[Device]:
        """Return the devices of all processes, rank after rank; those of others stand for them.

        Raises
        ------
        ArgumentError
            For devices of several kinds, and where two processes have one GPU.
        """
        own = [[x.name, x.torch_device.type, uuid_of(x.torch_device)] for x in local]
        everyone = self.share(own)
        if len({kind for devices in everyone for _, kind, _ in devices}) > 1:
            kinds = [[device[:2] for device in devices] for devices in everyone]
            raise ArgumentError(
                f"processes have devices of several kinds: {kinds}; give devices of one kind"
            )
        check_distinct(*([[device[k] for device in devices] for devices in everyone]
                         for k in (0, 2)))  # fmt: skip
        before = sum(len(devices) for devices in everyone[: self.rank])
        self._gpu_of = {before + k: device.torch_device for k, device in enumerate(local)}
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
        """Let an error in the block stop every process."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Let an error stop every process, unless it is already one that did."""
        if self._is_closed or os.getpid() != self._pid:
            return  # of no concern to the others
        if isinstance(error, Lost):
            self.watch.post(Failure("lost", *self.blame(error)))
        elif not isinstance(error, PeerError):
            message = f"rank {self.rank} stopped: {type(error).__name__}: {error}"
            self.watch.post(Failure("raised", self.rank, message))

    def blame(self, error: Lost) -> tuple[int, str]:
        """Return the process that was lost where a connection broke, and what is known of it."""
        exited = self.recorder.wait_for_exit()
        rank = error.rank if error.rank in exited or not exited else exited[0]
        if rank < 0:
            return rank, str(error)
        if rank in exited:
            return rank, self.watch.describe_loss(rank)
        return rank, f"{error}; {self.watch.board.describe_last_task(rank)}"

    def close(self) -> None:
        """Leave, together with all others; the pipelines of these processes are done.

        Nothing happens in a process that has left already.

        Raises
        ------
        PeerError
            If a process does not leave within the timeout.
        ExecutionError
            In a forked child, or while another thread waits for other processes.
        """
        self._check_process()
        if self._is_closed:
            return
        well = self.watch.failure is None
        try:
            if well:
                self.watch.others_may_end = True
                self.has_stepped = False  # another process may still be writing results
                self.barrier()
        finally:
            self._is_closed = True
            self.watch.close()
        if well:
            self._leave()

    def _leave(self) -> None:
        """Let go of the groups, and of the store, whose holder stays until the others have."""
        for group in self._groups.values():
            if isinstance(group, dist.ProcessGroup):  # those of others are not
                dist.destroy_process_group(group)
        self._groups.clear()  # with the last reference their threads end
        self._channels.clear()
        others = [f"left/{r}" for r in range(self.n_ranks) if r != self.rank]
        end = time.monotonic() + _GOODBYE
        with suppress(dist.DistError):
            self.store.set(f"left/{self.rank}", "")
            while self.watch.holder == self.rank and time.monotonic() < end:
                if self.store.check(others):
                    return
                time.sleep(1e-3)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._pid:
            return  # a forked child leaves nothing: the processes are its parent's
        if error is not None:
            self.fail(error)
        self.close()

    def check(self) -> None:
        """Raise unless this process can use these processes.

        Raises
        ------
        PeerError
            If something has failed anywhere.
        ExecutionError
            After `close`, and in a forked child.
        """
        self._check_process()
        if self._is_closed:
            raise ExecutionError("these processes were left by close(); join again")
        self.watch.check()

    def _check_process(self) -> None:
        """Raise in a forked child, whose connections are its parent's."""
        if os.getpid() != self._pid:
            raise ExecutionError(
                f"process {os.getpid()} was forked from process {self._pid}, which joined; its "
                "connections cannot be shared: use them in the process that joined"
            )

    def gather(self, value: bytes) -> list[bytes]:
        """Return what each process gave; every process must call this, in the same order.

        Raises
        ------
        PeerError
            If a process does not call it within the timeout.
        ArgumentTypeError
            For a value that is not bytes.
        ExecutionError
            After `close`, in a forked child, and while another thread makes such a call.
        """
        if not isinstance(value, bytes):
            raise ArgumentTypeError(f"processes exchange bytes, got {type(value).__name__}")
        self.check()
        if not self._calling.acquire(blocking=False):
            raise ExecutionError(
                "another thread waits for the other processes; make such calls in one thread, in "
                "the same order in every process"
            )
        try:
            return self._gathered(value)
        finally:
            self._calling.release()

    def _gathered(self, value: bytes) -> list[bytes]:
        """Do what `gather` does."""
        number = self._n_gathers
        self._n_gathers += 1
        names = [f"gather/{number}/{rank}" for rank in range(self.n_ranks)]
        try:
            self.store.set(names[self.rank], value)  # type: ignore[arg-type]
            # Some start, or load their libraries, later than others.
            patience = self.timeout if self.has_stepped else max(self.timeout, _START)
            self._wait_for(names, patience)
            found: list[bytes] = list(self.store.multi_get(names))
            if number >= 2:  # who is here has read the gather before the last
                self.store.delete_key(f"gather/{number - 2}/{self.rank}")
        except dist.DistError as error:
            raise self._without_store(error) from error
        return found

    def _wait_for(self, names: Sequence[str], timeout: float) -> None:
        """Block until the store has all of the names, which end with their process's rank."""
        end = time.monotonic() + timeout
        pause = 1e-4
        while not self.store.check(list(names)):
            if self.watch.board.others_in_step():  # whether they get on is for the watch to say
                end = time.monotonic() + timeout
            if time.monotonic() > end:
                late = [n.rpartition("/")[2] for n in names if not self.store.check([n])]
                text = (
                    f"rank {self.rank} waited {timeout:g} s in vain for rank {', '.join(late)}; "
                    "every process must make the same calls"
                )
                self.watch.post(Failure("late", self.rank, text))
            self.watch.check()
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def share(self, value: Any) -> list[Any]:
        """Return what each process gave, as JSON.

        Raises
        ------
        ArgumentError
            For what JSON cannot hold; else as `gather`.
        """
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"processes share what JSON can hold, got {type(value).__name__}: {error}"
            ) from error
        return [json.loads(text) for text in self.gather(text)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of each process's values, element by element, the same everywhere.

        Raises
        ------
        ArgumentError
            For values that are no numbers, or not as many in every process; else as `gather`.
        """
        row = np.array(check_numbers("values", values))
        found = [np.frombuffer(x) for x in self.gather(row.tobytes())]
        if len(sizes := {len(x) for x in found}) > 1:
            each = ", ".join(f"{len(x)} in rank {rank}" for rank, x in enumerate(found))
            raise ArgumentError(f"processes give {len(sizes)} different numbers of values: {each}")
        totals: list[float] = np.sum(found, axis=0).tolist()
        return totals

    def next_number(self) -> int:
        """Return a number that names what all processes publish in one step.

        Every process must call this, in the same order. What this process published two numbers ago
        is deleted: by then every process has read it.
        """
        self._n_published += 1
        with suppress(dist.DistError):
            for name in self._published.pop(self._n_published - 2, ()):
                self._public.delete_key(name)
        return self._n_published

    def publish(self, name: str, value: float) -> None:
        """Let other processes read a number, from any thread; see `published`."""
        try:
            self._public.set(name, repr(value))
            self._published.setdefault(self._n_published, []).append(name)
        except dist.DistError as error:
            raise self._without_store(error) from error

    def published(self, name: str) -> float:
        """Return a number that another process publishes; block until it has.

        Raises
        ------
        PeerError
            If something fails anywhere meanwhile.
        """
        pause = 1e-4
        try:
            while not self._public.check([name]):
                self.watch.check()
                time.sleep(pause)
                pause = min(2 * pause, 5e-3)
            return float(self._public.get(name))
        except dist.DistError as error:
            raise self._without_store(error) from error

    def _without_store(self, error: RuntimeError) -> PeerError:
        self.watch.report_lost_store(error)
        return PeerError(self.watch.explain())

    def barrier(self) -> None:
        """Block until every process is here."""
        self.gather(b"")

    def agree(self, what: str, value: object) -> None:
        """Check that every process gives the same.

        Raises
        ------
        ArgumentError
            Naming the first that differs from rank 0's, in every process; else as `share`.
        """
        everyone = self.share(value)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ArgumentError(
                    f"{what} of rank {rank} is {other!r}, that of rank 0 {everyone[0]!r}; give "
                    "every process the same"
                )

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.n_ranks} processes>"


def guarded(processes: Processes | None) -> AbstractContextManager[None]:
    """Let an error in the block stop every process, where there are several."""
    return nullcontext() if processes is None else processes.guard()
