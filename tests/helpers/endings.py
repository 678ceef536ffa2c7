"""Endings of processes: a table of what fails in a pipeline, and how each script goes on.

Each ending is run for real, see `ending_rank.py`: every process ends with the exit status of its
own script, none aborts or hangs, and nothing is left. ``python tests/helpers/endings.py`` runs the
table some times and prints the statuses.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from faults import run_commands
from ranks import free_port

_SCRIPT = str(Path(__file__).with_name("ending_rank.py"))
#: Seconds within which all processes must have ended; on a loaded machine they take long to start.
_SECONDS = 240.0
#: Exit statuses of a script that Ctrl-C ends: a shell reports the signal as 130.
_INTERRUPTED = (130, -signal.SIGINT)

#: What fails, and the rank that ends by it: of several processes, and of one with two workers.
FAILURES = {
    "nothing": None,
    "stage": None,  # of the last rank raises
    "stage, while another computes": None,
    "script": None,  # of the last rank raises between steps
    "kill": -1,
    "kill the store": 0,
    "interrupt": None,
    "interrupt everyone": None,
    "stall": None,
}
_OF_ONE_PROCESS = ("nothing", "stage", "script", "interrupt", "interrupt while computing", "stall")
#: How each script goes on after its error.
WAYS = {
    "ends": "it catches the error and ends",
    "does not catch": "the error ends the script",
    "exits": "it catches the error and calls sys.exit(3)",
    "leaves all open": "without with blocks, it catches the error and ends",
    "goes on": "it catches the error, runs a pipeline in its own process, and ends",
    "joins again": "it catches the error, joins the others again, runs a pipeline, and ends",
}


@dataclass(frozen=True)
class Ending:
    """A row of the table."""

    failure: str
    way: str
    n_ranks: int = 2

    def __str__(self) -> str:
        return f"{self.failure}; {self.way}; {self.n_ranks} processes"


def _table() -> list[Ending]:
    """Return all endings."""
    endings = [
        Ending(failure, way, 1)
        for failure in _OF_ONE_PROCESS
        for way in WAYS
        if way != "joins again"
    ]
    endings += [
        Ending(failure, way)
        for failure in FAILURES
        for way in WAYS
        if way != "joins again" or failure in ("stage", "script", "interrupt")
    ]
    return endings + [
        Ending(failure, way, n)
        for n in (3, 4)
        for failure in ("stage", "kill", "interrupt", "stall")
        for way in ("ends", "does not catch")
    ]


TABLE = _table()
#: Endings that every run of the tests includes.
CORE = [
    Ending("stage", "ends"),
    Ending("kill", "leaves all open"),
    Ending("interrupt", "does not catch"),
    Ending("interrupt while computing", "ends", 1),
]
assert set(CORE) <= set(TABLE)


def run_ending(ending: Ending, folder: Path, *, fresh: bool) -> tuple[list[int | None], str, str]:
    """Run an ending; return exit statuses, output, and processes and files that are left.

    Processes are ``fresh`` interpreters, or forked ones that end as interpreters do.
    """
    command = [_SCRIPT, str(folder), json.dumps({**asdict(ending), "fresh": fresh})]
    statuses, output, _, left = run_commands(
        [command] * ending.n_ranks, folder, port=free_port(), seconds=_SECONDS, fresh=fresh
    )
    return statuses, output, ", ".join(left)


def wrong_with(ending: Ending, statuses: list[int | None], output: str, left: str) -> str:
    """Return what is wrong with an ending; an empty text if nothing is."""
    lost = FAILURES.get(ending.failure)
    for rank, status in enumerate(statuses):
        if lost is not None and rank == lost % ending.n_ranks:
            allowed: tuple[int, ...] = (-signal.SIGKILL,)
        elif ending.failure == "nothing" or ending.way not in ("does not catch", "exits"):
            allowed = (0,)
        elif ending.way == "exits":
            allowed = (3,)
        elif "interrupt" not in ending.failure:
            allowed = (1,)
        elif ending.failure == "interrupt" and rank < ending.n_ranks - 1:
            allowed = (1,)  # of the error that names the interrupted rank
        else:
            allowed = _INTERRUPTED
        if status not in allowed:
            return f"rank {rank} has status {status}, not {' or '.join(map(str, allowed))}"
    if left:
        return f"left: {left}"
    is_traceback = ending.way == "does not catch" and ending.failure != "nothing"
    if ("Traceback" in output) != is_traceback:
        return f"{'no' if is_traceback else 'a'} traceback"
    return ""


def _run_once(fresh: bool, ending: Ending) -> tuple[tuple[int | None, ...], str, str]:
    """Return exit statuses, the mistake and the output of an ending."""
    with tempfile.TemporaryDirectory(prefix="ending-") as folder:
        statuses, output, left = run_ending(ending, Path(folder), fresh=fresh)
    return tuple(statuses), wrong_with(ending, statuses, output, left), output


def main() -> int:
    """Run the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=1, help="runs of each ending (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--only", default="", help="text within the names of the endings to run")
    parser.add_argument("--core", action="store_true", help="only endings that every test run has")
    parser.add_argument("--fresh", action="store_true", help="in fresh interpreters, not forked")
    arguments = parser.parse_args()
    endings = [x for x in (CORE if arguments.core else TABLE) if arguments.only in str(x)]
    n_wrong = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for ending in endings:
            counts, wrongs = Counter[tuple[int | None, ...]](), Counter[str]()
            runs = [ending] * arguments.times
            for statuses, wrong, output in pool.map(partial(_run_once, arguments.fresh), runs):
                counts[statuses] += 1
                if wrong:
                    wrongs[wrong] += 1
                    n_wrong += 1
                    print(output, file=sys.stderr, flush=True)
            text = ", ".join(f"{list(x)} x {n}" for x, n in counts.items())
            print(f"{ending}: {text}{f'  WRONG: {dict(wrongs)}' if wrongs else ''}", flush=True)
    print(f"{len(endings)} endings, {arguments.times} times each: {n_wrong} wrong")
    return min(n_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
