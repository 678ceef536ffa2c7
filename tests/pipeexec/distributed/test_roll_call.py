"""The roll call of processes, one step at a time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from pipeexec.distributed.launch_environment import LaunchEnvironment
from pipeexec.distributed.roll_call import Member, roll_call
from pipesim.errors import ArgumentError

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
    """Though nobody else was there when it looked before."""
    store: Any = LateStore(5.0)
    everyone = roll_call(store, LAUNCH, 5.0, time.monotonic() + 5.0)
    assert [each.rank for each in everyone] == [0, 1]


def test_a_process_that_reads_a_verdict_compares_settings() -> None:
    """Else it would go on, and wait for a process that has given up."""
    store: Any = LateStore(5.0)
    with pytest.raises(ArgumentError, match="timeout differs: 5 in rank 0, 6 in rank 1"):
        roll_call(store, LAUNCH, 6.0, time.monotonic() + 6.0)
