"""`join`: connect the processes that a launcher has started.

First comes the roll call: each process waits in the store until all have started, before any other
wait. It writes its rank and settings into the store. The first process that sees all of them, or
whose time is over, writes a verdict, which counts for all. So no process continues with one that
has given up.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.processes import Processes, end_groups, torch_timeout
from pipeexec.distributed.store import (
    LaunchEnvironment,
    UnreachableError,
    gloo_on_loopback,
    machine,
    open_store,
)
from pipeexec.process_end import end_thread_with_process
from pipesim.errors import ArgumentError, ExecutionError, PipeError, number
from pipesim.utils.checks import checked_names

_N_CALLS = itertools.count()
_JOINING = threading.Lock()
#: Seconds beyond the timeout that the roll call may take.
_ROLL_CALL_GRACE = 3.0
#: Least seconds to connect process groups, once all processes have started.
_MIN_CONNECTING = 30.0


@checked_names
def join(timeout: float = 60.0) -> Processes:
    """Join the processes that torchrun has started; all of them must call this, equally often.

    It makes torch.distributed's default process group (gloo, and NCCL if there is a GPU) if there
    is none yet. If rank 0 holds the store, and all processes are on one machine, the store listens
    on loopback; the documentation lists all cases.

    Parameters
    ----------
    timeout
        Seconds without progress after which every process stops with an error; also the seconds
        within which all processes must start. The same in every process.

    Returns
    -------
    Processes
        The processes; a context manager, whose end leaves them. torch's default group stays.

    Raises
    ------
    ExecutionError
        If a process does not call this within ``timeout``, naming its rank; in a process that was
        forked from one that has joined; and while another thread joins.

    Examples
    --------
    torchrun sets the four variables in each process. Here this process is the only one:

    >>> import os, socket
    >>> from unittest.mock import patch
    >>> import pipeexec as px, torch.distributed as dist
    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     port = str(server.getsockname()[1])
    >>> own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    >>> with patch.dict(os.environ, own), px.join() as processes:
    ...     processes
    <rank 0 of 1 processes>
    >>> dist.destroy_process_group()
    """
    seconds = number(timeout)
    if seconds is None or not 0 < seconds < float("inf"):
        raise ArgumentError(f"timeout must be a positive number of seconds, got {timeout!r}")
    launch = LaunchEnvironment.read()
    if not _JOINING.acquire(blocking=False):
        raise ExecutionError("another thread of this process is in join; call it in one thread")
    try:
        _check_group(launch)
        store, everyone = _connect(launch, seconds)
    finally:
        _JOINING.release()
    return Processes(
        store,
        launch.rank,
        launch.n_ranks,
        seconds,
        local_rank=launch.rank if launch.local_rank is None else launch.local_rank,
        n_local=launch.n_ranks if launch.n_local is None else launch.n_local,
        holder=launch.holder,
        is_on_one_machine=_on_one_machine(everyone),
    )


def _check_group(launch: LaunchEnvironment) -> None:
    """Raise if the default group belongs to a parent process, or has other ranks."""
    if not dist.is_initialized():
        return
    if _DefaultGroup.pid not in (None, os.getpid()):
        raise ExecutionError(
            f"this process was forked from process {_DefaultGroup.pid}, which has joined; its "
            "connections cannot be shared: start processes before join, or with "
            "multiprocessing's 'spawn'"
        )
    if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.n_ranks):
        raise ArgumentError(
            f"the default process group has rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"RANK and WORLD_SIZE say {launch}; make the group with the same, or leave it to join"
        )


def _on_one_machine(everyone: list[Member]) -> bool:
    return len({member.machine for member in everyone}) == 1


class _Connection:
    """Connects to the other processes in a thread: another program at the port may never answer."""

    def __init__(self, launch: LaunchEnvironment, timeout: float) -> None:
        self.launch, self.timeout = launch, timeout
        self.end = time.monotonic() + timeout
        self.prefix = f"pipeexec/{launch.attempt}/{next(_N_CALLS)}"
        self.store: Store | None = None
        self.everyone: list[Member] = []  # empty until they are known
        self.error: Exception | None = None
        self.is_abandoned = False
        self.thread = threading.Thread(target=self._run, name="pipeexec join", daemon=True)
        end_thread_with_process(self.thread, lambda: None)
        self.thread.start()

    def _run(self) -> None:
        try:
            store = PrefixStore(self.prefix, open_store(self.launch, self.timeout, self.end))
            self.store = store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs
            everyone = roll_call(store, self.launch, self.timeout, self.end)
            self.everyone = everyone
            if self.is_abandoned:
                return
            if not dist.is_initialized():
                _make_default_group(store, self.launch, everyone, self.timeout)
            store.set(f"ready/{self.launch.rank}", "")
        except Exception as error:  # `join` raises it
            self.error = error


def _connect(launch: LaunchEnvironment, timeout: float) -> tuple[Store, list[Member]]:
    """Return the store and all processes, once they have started and are connected."""
    connection = _Connection(launch, timeout)
    connection.thread.join(timeout + _ROLL_CALL_GRACE)
    if connection.everyone:
        connection.thread.join(max(timeout, _MIN_CONNECTING))
    try:
        if connection.error is not None:
            raise connection.error
    except UnreachableError as error:
        raise _unreachable_error(launch, timeout, str(error)) from error
    except PipeError:
        raise
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ExecutionError(_store_error_text(launch, error)) from error
    if connection.thread.is_alive():
        connection.is_abandoned = True
        raise _stuck_error(launch, connection, timeout)
    assert connection.store is not None
    return connection.store, connection.everyone


class _DefaultGroup:
    """Process that has made the default group; None if `join` did not make it."""

    pid: int | None = None


def _make_default_group(
    store: Store, launch: LaunchEnvironment, everyone: list[Member], timeout: float
) -> None:
    with gloo_on_loopback(_on_one_machine(everyone)):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore("default", store),
            rank=launch.rank,
            world_size=launch.n_ranks,
            timeout=torch_timeout(timeout),
        )
    _DefaultGroup.pid = os.getpid()
    atexit.register(partial(end_groups, os.getpid()))


def _unreachable_error(launch: LaunchEnvironment, timeout: float, reason: str) -> ExecutionError:
    """Return the error if nothing listens at the store's address."""
    holder = "the launcher" if launch.holder is None else f"rank {launch.holder}"
    text = (
        f"rank {launch.rank} waited {timeout:g} s for {holder}, which holds the store: "
        f"nothing answers at {launch.address} ({reason}); check that every process is started, "
        "with the same MASTER_ADDR and MASTER_PORT, and that the address can be reached"
    )
    # On the machine of rank 0 the next rank reports the error.
    is_first = launch.holder == 0 and launch.n_local == launch.n_ranks
    local = launch.rank if launch.local_rank is None else launch.local_rank
    return AbsentError(text, launch.rank if local == int(is_first) else -1)


def _store_error_text(launch: LaunchEnvironment, error: Exception) -> str:
    """Return the message for an error of the store."""
    first = str(error).splitlines()[0]
    if "EADDRINUSE" in first or "address already in use" in first.lower():
        return (
            f"port {launch.address} is in use on {socket.gethostname()}; choose another "
            "--master-port"
        )
    return (
        f"{launch} lost the store at {launch.address} while it waited for the others: {first}; "
        "check that every process is started, with the same master address and port"
    )


def _stuck_error(
    launch: LaunchEnvironment, connection: _Connection, timeout: float
) -> ExecutionError:
    """Return the error of a process that is not connected in time."""
    if not connection.everyone or connection.store is None:
        return ExecutionError(
            f"{launch} found no store at {launch.address}: the program that listens there has not "
            f"answered for {timeout:g} s; choose another --master-port"
        )
    late = [r for r in range(launch.n_ranks) if not connection.store.check([f"ready/{r}"])]
    names = ", ".join(str(rank) for rank in late if rank != launch.rank) or "another process"
    return ExecutionError(
        f"{launch} has no connection to rank {names}, though all came; check that it still runs, "
        "and that GLOO_SOCKET_IFNAME names an interface by which all machines reach each other"
    )


# The roll call

_ALL = "all"
#: Seconds that the holder of the store waits until the others have read the verdict.
_VERDICT_SECONDS = 2.0
_PAUSES = 1e-3, 5e-2  # s between two looks into the store: the first, and the longest


class AbsentError(ExecutionError):
    """Some processes did not start; ``reporting_rank`` is the rank that prints the error."""

    def __init__(self, message: str, reporting_rank: int) -> None:
        super().__init__(message)
        self.reporting_rank = reporting_rank


class Member(NamedTuple):
    """A process at the roll call: its rank, its settings, and where it runs."""

    rank: int
    n_ranks: int
    timeout: float
    host: str
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def roll_call(store: Store, launch: LaunchEnvironment, timeout: float, end: float) -> list[Member]:
    """Return all processes, once all have started with the same settings.

    ``end`` is the time of `time.monotonic` until which to wait. It raises `AbsentError` if
    processes are missing, naming their ranks.
    """
    own = Member(launch.rank, launch.n_ranks, timeout, socket.gethostname(), os.getpid(), machine())
    text = json.dumps(own)
    first = bytes(store.compare_set(f"here/{own.rank}", "", text))
    if first.decode() != text:
        raise ArgumentError(
            f"two processes have RANK {own.rank}: process {own.pid} on {own.host} and "
            f"{Member(*json.loads(first))}; give each process its own rank"
        )
    everyone: list[Member] = []
    try:
        verdict = _wait_for_verdict(store, own, end)
        # Read again: the process that wrote the verdict may have seen more processes.
        everyone = _read_members(store, own.n_ranks)
        if verdict != _ALL:
            raise _absent_error(own, everyone, verdict, launch)
        _check_same(everyone)
    except (AbsentError, ArgumentError):
        _confirm_verdict(store, own.rank, everyone, launch.holder)
        raise
    return everyone


def _wait_for_verdict(store: Store, own: Member, end: float) -> str:
    """Block until there is a verdict; return it."""
    timer, (pause, longest) = RunningTimer(end - time.monotonic()), _PAUSES
    while True:
        everyone = _read_members(store, own.n_ranks)
        verdict = ""
        if len({member.n_ranks for member in everyone}) > 1:
            return _ALL  # the check of settings raises
        if len(everyone) == own.n_ranks:
            verdict = _ALL
        elif timer.is_over:
            missing = sorted(set(range(own.n_ranks)) - {member.rank for member in everyone})
            verdict = json.dumps([own.rank, own.timeout, missing])
        if verdict:
            return bytes(store.compare_set("verdict", "", verdict)).decode()
        if store.check(["verdict"]):
            return bytes(store.get("verdict")).decode()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _read_members(store: Store, n_ranks: int) -> list[Member]:
    """Return the processes that have started."""
    names = [f"here/{rank}" for rank in range(n_ranks)]
    if not store.check(names):
        names = [name for name in names if store.check([name])]
    return [Member(*json.loads(bytes(text))) for text in store.multi_get(names)]


def _absent_error(
    own: Member, everyone: Sequence[Member], verdict: str, launch: LaunchEnvironment
) -> AbsentError:
    """Return the error of a roll call with missing processes."""
    rank, timeout, missing = json.loads(verdict)
    names = ", ".join(map(str, missing))
    late = f"; rank {own.rank} came later" if own.rank in missing else ""
    started = [member for member in everyone if member.rank not in missing]
    text = (
        f"rank {rank} waited {timeout:g} s for rank {names} of {own.n_ranks}, which did not answer"
        f"{late}; there was {', '.join(map(str, started))}; check that every process is started, "
        f"with the same MASTER_ADDR and MASTER_PORT ({launch.address}), and calls join equally "
        "often"
    )
    return AbsentError(text, min(member.rank for member in started))


def _check_same(everyone: Sequence[Member]) -> None:
    """Raise `ArgumentError` if settings differ, naming those of each rank."""
    for name, values in (
        ("WORLD_SIZE", [member.n_ranks for member in everyone]),
        ("timeout", [member.timeout for member in everyone]),
    ):
        if len(set(values)) > 1:
            listed = ", ".join(
                f"{value:g} in rank {member.rank}"
                for value, member in zip(values, everyone, strict=True)
            )
            raise ArgumentError(f"{name} differs: {listed}; give every process the same")


def _confirm_verdict(
    store: Store, rank: int, everyone: Sequence[Member], holder: int | None
) -> None:
    """Confirm the verdict; the holder of the store waits two seconds until all others have."""
    timer = RunningTimer(_VERDICT_SECONDS)
    names = [f"verdict_read/{member.rank}" for member in everyone if member.rank != rank]
    with suppress(RuntimeError):
        store.set(f"verdict_read/{rank}", "")
        while holder == rank and not timer.is_over and not store.check(names):
            time.sleep(_PAUSES[1])
