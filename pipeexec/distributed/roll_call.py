"""The roll call: processes meet in the store before anything waits for all of them.

Each process writes down its name and its settings. The first that sees all of them, or whose time
is over, writes a verdict, which counts for all: so no process goes on with one that has given up.
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

from pipeexec.distributed.launch_environment import Launch
from pipeexec.distributed.store import machine
from pipesim.errors import ArgumentError, ExecutionError

__all__ = ["AbsentError", "Present", "roll_call"]

_ALL = "all"
#: Seconds that the holder of the store waits until the others have read why it ends.
_GOODBYE = 2.0
_PAUSES = 1e-3, 5e-2  # s between two looks: the first, and the longest


class AbsentError(ExecutionError):
    """Processes did not come; ``speaker`` is the rank that tells the user on the command line."""

    def __init__(self, message: str, speaker: int) -> None:
        super().__init__(message)
        self.speaker = speaker


class Present(NamedTuple):
    """A process that has come: its place, its settings, and where it runs."""

    rank: int
    n_ranks: int
    timeout: float
    host: str
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def roll_call(store: Store, launch: Launch, timeout: float, end: float) -> list[Present]:
    """Return all processes, once all have come with the same settings.

    Parameters
    ----------
    store
        Shared by all of them; nobody else uses it.
    launch
        Place of this process.
    timeout
        That of `join`.
    end
        Time of `time.monotonic` until which to wait.

    Raises
    ------
    AbsentError
        Naming the ranks that have not come.
    ArgumentError
        If settings differ, or two processes have one rank.
    """
    own = Present(
        launch.rank, launch.n_ranks, timeout, socket.gethostname(), os.getpid(), machine()
    )
    text = json.dumps(own)
    first = bytes(store.compare_set(f"here/{own.rank}", "", text))
    if first.decode() != text:
        raise ArgumentError(
            f"two processes have RANK {own.rank}: process {own.pid} on {own.host} and "
            f"{Present(*json.loads(first))}; give each process a rank of its own"
        )
    everyone: list[Present] = []
    try:
        verdict = _wait(store, own, end)
        # Once more: the process that wrote the verdict may have seen others since.
        everyone = _present(store, own.n_ranks)
        if verdict != _ALL:
            raise _absent(own, everyone, verdict, launch)
        _check_same(everyone)
    except (AbsentError, ArgumentError):
        _leave(store, own.rank, everyone, launch.holder)
        raise
    return everyone


def _wait(store: Store, own: Present, end: float) -> str:
    """Return the verdict, once there is one."""
    pause, longest = _PAUSES
    while True:
        everyone = _present(store, own.n_ranks)
        verdict = ""
        if len({each.n_ranks for each in everyone}) > 1:
            return _ALL  # the check of settings says what differs
        if len(everyone) == own.n_ranks:
            verdict = _ALL
        elif time.monotonic() > end:
            missing = sorted(set(range(own.n_ranks)) - {each.rank for each in everyone})
            verdict = json.dumps([own.rank, own.timeout, missing])
        if verdict:
            return bytes(store.compare_set("verdict", "", verdict)).decode()
        if store.check(["verdict"]):
            return bytes(store.get("verdict")).decode()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _present(store: Store, n_ranks: int) -> list[Present]:
    """Return the processes that have come."""
    names = [f"here/{rank}" for rank in range(n_ranks)]
    if not store.check(names):
        names = [name for name in names if store.check([name])]
    return [Present(*json.loads(bytes(text))) for text in store.multi_get(names)]


def _absent(own: Present, everyone: Sequence[Present], verdict: str, launch: Launch) -> AbsentError:
    """Return the error of a roll call at which some were missing."""
    rank, timeout, missing = json.loads(verdict)
    names = ", ".join(map(str, missing))
    late = f"; rank {own.rank} came later" if own.rank in missing else ""
    there = ", ".join(str(each) for each in everyone if each.rank not in missing)
    text = (
        f"rank {rank} waited {timeout:g} s in vain for rank {names} of {own.n_ranks}{late}; there "
        f"was {there}; check that every process is started, with the same MASTER_ADDR and "
        f"MASTER_PORT ({launch.address}), and calls join equally often"
    )
    return AbsentError(text, min(each.rank for each in everyone if each.rank not in missing))


def _check_same(everyone: Sequence[Present]) -> None:
    """Raise if settings differ, naming each rank's."""
    for name, values in (
        ("WORLD_SIZE", [each.n_ranks for each in everyone]),
        ("timeout", [each.timeout for each in everyone]),
    ):
        if len(set(values)) > 1:
            each = ", ".join(
                f"{value:g} in rank {present.rank}"
                for value, present in zip(values, everyone, strict=True)
            )
            raise ArgumentError(f"{name} differs: {each}; give every process the same")


def _leave(store: Store, rank: int, everyone: Sequence[Present], holder: int | None) -> None:
    """Note that this process knows; who holds the store waits for the others a little."""
    end = time.monotonic() + _GOODBYE
    names = [f"told/{each.rank}" for each in everyone if each.rank != rank]
    with suppress(RuntimeError):
        store.set(f"told/{rank}", "")
        while holder == rank and time.monotonic() < end and not store.check(names):
            time.sleep(_PAUSES[1])
