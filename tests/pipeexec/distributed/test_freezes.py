"""Frozen processes go on: by SIGSTOP in every phase of a step, in one, two and four processes.

The suite freezes for 2.5 s, longer than the timeout of 2 s. With ``FAULTS=all``, as in `make
chaos`, it freezes for 7 s with a timeout of 5 s, for 60 s with one of 60 s, and one process alone
for less than the timeout, too.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import frozen_rank
import pytest
from case_choice import EVERY_CASE
from ranks import running

pytestmark = pytest.mark.slow

_PAUSE = 0.01


class Freeze(NamedTuple):
    """Freezes of a run: of how many processes, for how long, and the limit that the user gave."""

    n_ranks: int
    seconds: float
    timeout: float
    phases: tuple[str, ...]
    alone: bool = False

    def __str__(self) -> str:
        who = "one of " if self.alone else ""
        return f"{who}{self.n_ranks} for {self.seconds:g} s, timeout {self.timeout:g} s"


_SHORT = "forward", "loss", "backward", "optimizer"
#: Each phase of a step once.
CASES = [
    Freeze(1, 2.5, 2.0, ("forward", "optimizer")),
    Freeze(2, 2.5, 2.0, ("loss", "backward", "between")),
    Freeze(4, 2.5, 2.0, ("forward",)),
]
if EVERY_CASE:
    CASES = [
        Freeze(1, 2.5, 2.0, _SHORT),
        Freeze(2, 2.5, 2.0, (*_SHORT, "between")),
        Freeze(4, 2.5, 2.0, ("forward", "between")),
    ]
    CASES += [
        *(Freeze(n, 7.0, 5.0, frozen_rank.PHASES) for n in (1, 2, 4)),
        *(Freeze(n, 7.0, 60.0, frozen_rank.PHASES, alone=True) for n in (2, 4)),
        *(Freeze(n, 60.0, 60.0, ("backward", "between")) for n in (1, 2, 4)),
        Freeze(2, 60.0, 90.0, ("forward", "result"), alone=True),
    ]


def state(pid: int) -> str:
    """Return the state of a process, "T" if it is stopped; empty after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until_frozen(pids: Sequence[int], seconds: float) -> None:
    """Block until a process is stopped; return after ``seconds`` anyway."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(state(pid) in ("T", "") for pid in pids):
        time.sleep(_PAUSE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frozen_processes_go_on(case: Freeze, tmp_path: Path) -> None:
    """Every step ends, with the losses of the unsplit model."""
    command = [frozen_rank.__file__, ",".join(case.phases), str(case.timeout)]
    with running([command] * case.n_ranks, tmp_path) as ranks:
        pids = [rank.pid for rank in ranks]
        for _ in case.phases:
            wait_until_frozen(pids, 60)
            frozen = [p for p in pids if not case.alone or state(p) == "T"]
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(case.seconds)
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + 60
        while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
            time.sleep(_PAUSE)
        statuses = [rank.poll() for rank in ranks]
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(case.n_ranks)]
    assert statuses == [0] * case.n_ranks, "\n".join(logs)
    losses = [float(x) for x in re.findall(r"^loss (\S+)$", logs[0], re.MULTILINE)]
    expected = frozen_rank.plain_losses(max(2, case.n_ranks), len(case.phases))
    assert losses == pytest.approx(expected, abs=2e-6)
