"""The roll call of processes, one step at a time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from pipeexec.distributed.join import Member, roll_call
from pipeexec.distributed.store import LaunchEnvironment
from pipesim.errors import ArgumentError, ExecutionError

LAUNCH = LaunchEnvironment(1, 2, None, None, "localhost", 29500, False, 0)


class LateStore:
    """A store to which rank 0 comes between two looks of rank 1, and writes the verdict."""

    def __init__(self, timeout: float) -> None:
        self._store = HashStore()
        self._first = Member(0, 2, timeout, "host", 1, "machine")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, names: list[str]) -> bool:
        """Return whether names are there; rank 0 comes right before the verdict is looked for."""
        if names == ["verdict"]:
            self._store.set("here/0", json.dumps(self._first))
            self._store.set("verdict", "all")
        return bool(self._store.check(names))


def test_a_process_that_reads_a_verdict_knows_everyone() -> None:
    """Although it saw no other process in its first look."""
    store: Any = LateStore(5.0)
    everyone = roll_call(store, LAUNCH, 5.0, time.monotonic() + 5.0)
    assert [entry.rank for entry in everyone] == [0, 1]


def test_a_process_that_reads_a_verdict_compares_settings() -> None:
    """Otherwise it would continue, and wait for a process that has given up."""
    store: Any = LateStore(5.0)
    with pytest.raises(ArgumentError, match="timeout differs: 5 in rank 0, 6 in rank 1"):
        roll_call(store, LAUNCH, 6.0, time.monotonic() + 6.0)


def test_a_roll_call() -> None:
    """Who is missing, who comes too late, and what does not suit: each is named."""
    store, first = HashStore(), LaunchEnvironment(0, 3, 0, 3, "there", 5, True, 0)
    missing = r"rank 0 waited 2 s for rank 1, 2 of 3, which did not answer; there was rank 0 \(pro"
    with pytest.raises(ExecutionError, match=missing):
        roll_call(store, first, 2.0, time.monotonic())
    late = "for rank 1, 2 of 3, which did not answer; rank 1 came later; there was rank 0 "
    with pytest.raises(ExecutionError, match=late):
        roll_call(store, first._replace(rank=1), 2.0, time.monotonic() + 9)
    with pytest.raises(ArgumentError, match=r"two processes have RANK 0: process .* and rank 0 "):
        roll_call(store, first, 3.0, time.monotonic() + 9)
    other = "WORLD_SIZE differs: 3 in rank 0, 3 in rank 1, 4 in rank 2; give every process the same"
    with pytest.raises(ArgumentError, match=other):
        roll_call(store, first._replace(rank=2, n_ranks=4), 2.0, time.monotonic() + 9)
