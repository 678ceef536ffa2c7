"""The roll call: wait in the store until all processes have started, before any other wait.

Each process writes its rank and settings into the store. The first process that sees all of them,
or whose time is over, writes a verdict, which counts for all. So no process continues with one that
has given up.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.launch_environment import LaunchEnvironment
from pipeexec.distributed.store import machine
from pipesim.errors import ArgumentError, ExecutionError

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

    Parameters
    ----------
    store
        Shared by all processes, and used by nothing else.
    launch
        Environment of this process.
    timeout
        Timeout given to `join`.
    end
        Time of `time.monotonic` until which to wait.

    Raises
    ------
    AbsentError
        If processes are missing, naming their ranks.
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
        verdict = _wait(store, own, end)
        # Read again: the process that wrote the verdict may have seen more processes.
        everyone = _read_members(store, own.n_ranks)
        if verdict != _ALL:
            raise _absent_error(own, everyone, verdict, launch)
        _check_same(everyone)
    except (AbsentError, ArgumentError):
        _confirm_verdict(store, own.rank, everyone, launch.holder)
        raise
    return everyone


def _wait(store: Store, own: Member, end: float) -> str:
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
