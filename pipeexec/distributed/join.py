"""How the processes that a launcher started find each other."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipeexec.distributed.launch_environment import Launch
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.roll_call import AbsentError, Present, roll_call
from pipeexec.distributed.store import UnreachableError, gloo_on_loopback, open_store
from pipesim.errors import ArgumentError, ExecutionError, PipeError, number

__all__ = ["join"]

_N_CALLS = itertools.count()
_JOINING = threading.Lock()
#: Seconds beyond the timeout that the search for the others may take.
_PATIENCE = 3.0
#: Seconds that process groups have at least, once everybody has come.
_CONNECTING = 30.0


def join(timeout: float = 60.0) -> Processes:
    """Join the processes that torchrun started; every one of them must call this, equally often.

    Makes torch.distributed's default process group (gloo, and NCCL where there is a GPU) if it is
    not there yet. Where rank 0 holds the store, and all processes are on one machine, the store
    listens on loopback; the documentation says what listens where otherwise.

    Parameters
    ----------
    timeout
        Seconds without progress after which every process stops with an error; also the seconds
        that the processes have to come. The same in every process.

    Raises
    ------
    ArgumentError
        If torchrun's environment variables are missing or wrong, and where ``timeout`` or
        ``WORLD_SIZE`` differ between processes.
    ExecutionError
        If not all processes come within ``timeout``, naming those that did not; in a process that
        was forked from one that has joined; and while another thread joins.
    """
    seconds = number(timeout)
    if seconds is None or not 0 < seconds < float("inf"):
        raise ArgumentError(f"timeout must be a positive number of seconds, got {timeout!r}")
    launch = Launch.from_environment()
    if not _JOINING.acquire(blocking=False):
        raise ExecutionError("another thread of this process is in join; call it in one thread")
    try:
        _check_group(launch)
        store, everyone = _meet(launch, seconds)
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


def _check_group(launch: Launch) -> None:
    """Raise if the default group is that of a parent, or numbers processes otherwise."""
    if not dist.is_initialized():
        return
    if _Made.pid not in (None, os.getpid()):
        raise ExecutionError(
            f"this process was forked from process {_Made.pid}, which has joined; connections "
            "cannot be shared: start processes before join, or with multiprocessing's 'spawn'"
        )
    if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.n_ranks):
        raise ArgumentError(
            f"the default process group has rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"RANK and WORLD_SIZE say {launch}; make the group with the same, or leave it to join"
        )


def _on_one_machine(everyone: list[Present]) -> bool:
    return len({each.machine for each in everyone}) == 1


class _Meeting:
    """The search for the others, in a thread: another program at the port may never answer.

    Attributes
    ----------
    store, everyone
        What was found so far.
    error
        What ended it.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self.launch, self.timeout = launch, timeout
        self.end = time.monotonic() + timeout
        self.prefix = f"pipeexec/{launch.attempt}/{next(_N_CALLS)}"
        self.store: Store | None = None
        self.everyone: list[Present] = []
        self.error: Exception | None = None
        self.is_abandoned = False
        self.thread = threading.Thread(target=self._run, name="pipeexec join", daemon=True)
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
        except Exception as error:  # is raised in the caller's thread
            self.error = error


def _meet(launch: Launch, timeout: float) -> tuple[Store, list[Present]]:
    """Return the store and all processes, once they have come and are connected."""
    meeting = _Meeting(launch, timeout)
    meeting.thread.join(timeout + _PATIENCE)
    if meeting.everyone:
        meeting.thread.join(max(timeout, _CONNECTING))
    try:
        if meeting.error is not None:
            raise meeting.error
    except PipeError as error:
        if isinstance(error, UnreachableError):
            raise _unreachable(launch, timeout, str(error)) from error
        raise
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ExecutionError(_broken(launch, error)) from error
    if meeting.thread.is_alive():
        meeting.is_abandoned = True
        raise _stuck(launch, meeting, timeout)
    assert meeting.store is not None
    return meeting.store, meeting.everyone


class _Made:
    """Which process has made the default group; None if it was not made here."""

    pid: int | None = None


def _make_default_group(
    store: Store, launch: Launch, everyone: list[Present], timeout: float
) -> None:
    with gloo_on_loopback(_on_one_machine(everyone)):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore("default", store),
            rank=launch.rank,
            world_size=launch.n_ranks,
            # Longer than ours, which names who is waited for.
            timeout=timedelta(seconds=2 * timeout + 30),
        )
    _Made.pid = os.getpid()
    atexit.register(partial(_end_groups, os.getpid()))


def _end_groups(pid: int) -> None:
    """End the threads of process groups while Python still runs.

    One of gloo's that frees a tensor only after that aborts the process (pytorch/pytorch, issue
    190489). A forked child does not have the threads.
    """
    if dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()


def _unreachable(launch: Launch, timeout: float, reason: str) -> ExecutionError:
    """Return the error where nothing listened at the store's address."""
    holder = "the launcher" if launch.holder is None else f"rank {launch.holder}"
    text = (
        f"rank {launch.rank} waited {timeout:g} s in vain for {holder}, which holds the store: "
        f"nothing answers at {launch.address} ({reason}); check that every process is started, "
        "with the same MASTER_ADDR and MASTER_PORT, and that the address can be reached"
    )
    # On the machine of rank 0 the next rank reports the error.
    is_first = launch.holder == 0 and launch.n_local == launch.n_ranks
    local = launch.rank if launch.local_rank is None else launch.local_rank
    return AbsentError(text, launch.rank if local == int(is_first) else -1)


def _broken(launch: Launch, error: Exception) -> str:
    """Return what a store's error means to the user."""
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


def _stuck(launch: Launch, meeting: _Meeting, timeout: float) -> ExecutionError:
    """Return the error of a process whose search has not ended."""
    if not meeting.everyone or meeting.store is None:
        return ExecutionError(
            f"{launch} found no store at {launch.address}: the program that listens there has not "
            f"answered for {timeout:g} s; choose another --master-port"
        )
    late = [r for r in range(launch.n_ranks) if not meeting.store.check([f"ready/{r}"])]
    names = ", ".join(str(rank) for rank in late if rank != launch.rank) or "another process"
    return ExecutionError(
        f"{launch} has no connection to rank {names}, though all came; check that it still runs, "
        "and that GLOO_SOCKET_IFNAME names an interface by which all machines reach each other"
    )
