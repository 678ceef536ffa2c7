"""Random faults in pipelines of many processes: none may hang, or name the wrong culprit.

``python tests/helpers/chaos.py`` draws what goes wrong, where and when from a seed, runs
each in new processes, and prints how it ended. Exit status 1 if any went wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from faults import Fault, Outcome, complaints, graph_of, inject, report, wrongs
from places import BENCHMARKS

from pipesim.graph.graph import TaskGraph
from pipesim.ops import SENDS, Op

sys.path.insert(0, str(BENCHMARKS))
from _machine import header, publish, table

_COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R, Op.STEP})
_ANY = frozenset(Op) - {Op.ALL_TO_ALL}
#: In which tasks a fault can be; none: between steps.
_TASKS: dict[str, frozenset[Op]] = {
    "kill": _COMPUTE | {Op.REDUCE_GRAD},
    "stop": _COMPUTE | {Op.REDUCE_GRAD},
    "abort": _COMPUTE,
    "sleep": _COMPUTE,
    "hold": _COMPUTE,
    "raise": _ANY,
    "memory": _ANY,
    "exit": _ANY,
    "interrupt": _COMPUTE,
    "terminate": _COMPUTE,
    "header": SENDS,
    "shape": frozenset({Op.F}),
    "hook": frozenset({Op.F}),
    "loss": frozenset({Op.F}),
    "optimizer": frozenset({Op.STEP}),
    "kill launcher": _COMPUTE,
    "interrupt launcher": _COMPUTE,
}
_BETWEEN = ("kill", "stop", "sleep", "hold", "raise", "exit", "vanish", "interrupt", "terminate")
_LATER = ("kill", "stop", "abort")
_SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv", "chimera", "dualpipe", "hanayo")
_EVEN = ("chimera", "dualpipe", "hanayo")


def draw(generator: random.Random, kind: str) -> Fault:
    """Return a random fault of a kind that can happen."""
    while True:
        schedule = generator.choice(_SCHEDULES)
        n_ranks = 2 if schedule in _EVEN else generator.choice((2, 2, 3))
        devices = 1 if n_ranks == 3 else generator.choice((1, 1, 2))
        fault = Fault(
            kind,
            rank=generator.randrange(n_ranks),
            step=generator.randrange(3),
            schedule=schedule,
            n_ranks=n_ranks,
            devices=devices,
            microbatches=2 * n_ranks * devices,
            recompute=generator.choice(("never", "never", "always", "except_last")),
            rendezvous=generator.random() < 0.3,
            launcher="launcher" in kind or generator.random() < 0.3,
        )
        where = generator.random()
        if kind in _LATER and where < 0.3:
            return _changed(fault, delay=generator.uniform(0.001, 0.1))
        if kind in _BETWEEN and (where < 0.5 or kind not in _TASKS):
            # Before the first step others are waited for longer: they may still load libraries.
            return _changed(fault, step=max(fault.step, 1)) if kind == "sleep" else fault
        if kind in _TASKS and (tasks := possible(fault, graph_of(fault))):
            return _changed(fault, task=generator.choice(tasks))


def _changed(fault: Fault, **options: object) -> Fault:
    return Fault(**{**vars(fault), **options})


def possible(fault: Fault, graph: TaskGraph) -> list[str]:
    """Return the tasks of a fault's rank in which it can happen."""
    rank_of = graph.device // fault.devices
    names = []
    for task in np.flatnonzero(graph.is_op(_TASKS[fault.kind])).tolist():
        is_last = graph.stage[task] == graph.n_stages - 1
        if rank_of[task] != fault.rank:
            continue
        if fault.kind in ("loss", "shape") and is_last != (fault.kind == "loss"):
            continue
        if fault.kind == "hook" and fault.recompute != "never":
            continue  # a forward without gradients has no hooks
        if fault.kind in ("header", "shape") and not _goes_away(graph, task, rank_of):
            continue
        names.append(str(graph.task(task)))
    return names


def _goes_away(graph: TaskGraph, task: int, rank_of: np.ndarray) -> bool:
    """Return whether another process gets what a task sends, or what the SEND of an F does."""
    if graph.op[task] != Op.F:
        return bool(rank_of[graph.pair[task]] != rank_of[task])
    return any(
        graph.op[other] == Op.SEND_F
        and graph.stage[other] == graph.stage[task]
        and graph.microbatch[other] == graph.microbatch[task]
        and rank_of[graph.pair[other]] != rank_of[other]
        for other in np.flatnonzero(graph.is_op(SENDS)).tolist()
    )


def draws(generator: random.Random, n: int) -> Iterator[Fault]:
    """Return faults, of each kind about as many."""
    kinds = [*_TASKS, "vanish"]
    for number in range(n):
        if number % len(kinds) == 0:
            generator.shuffle(kinds)
        yield draw(generator, kinds[number % len(kinds)])


def run(fault: Fault) -> tuple[Fault, Outcome, list[str]]:
    """Return how a fault ended, and what was wrong with that."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        outcome = inject(fault, Path(folder))
    return fault, outcome, wrongs(fault, outcome)


def _row(fault: Fault, outcome: Outcome, wrong: list[str]) -> list[str]:
    where = fault.task or (f"+{fault.delay * 1e3:.0f} ms" if fault.delay else "between steps")
    errors = complaints(outcome.output)
    return [
        fault.kind, str(fault.rank), where, str(fault.step), f"{fault.schedule} {fault.recompute}",
        f"{fault.n_ranks} x {fault.devices}", "torchrun" if fault.launcher else "rank 0",
        f"{outcome.seconds:.1f}", ", ".join(wrong) or "ok",
        errors[0].removeprefix("pipeexec: error: ")[:90] if errors else "-",
    ]  # fmt: skip


def main() -> int:
    """Run them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=50, help="how many faults (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    began, rows, n_wrong, latest = time.monotonic(), [], 0, 0.0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        faults = draws(random.Random(arguments.seed), arguments.runs)
        for fault, outcome, wrong in pool.map(run, faults):
            rows.append(_row(fault, outcome, wrong))
            print(f"{len(rows):3}  {outcome.seconds:5.1f} s  {fault}: {wrong or 'ok'}", flush=True)
            if wrong:
                n_wrong += 1
                print(report(fault, outcome), file=sys.stderr, flush=True)
            latest = max(latest, outcome.seconds - fault.timeout)
    columns = ["fault", "rank", "task", "step", "schedule", "ranks x devices", "store of", "s",
               "verdict", "error"]  # fmt: skip
    publish(
        [
            *header(["pipesim", "torch"]),
            "",
            f"{len(rows)} random faults, seed {arguments.seed}, {arguments.jobs} at a time: "
            f"{n_wrong} wrong, in {time.monotonic() - began:.0f} s",
            "s: from the fault until every process had ended; the timeout is "
            f"{Fault('kill').timeout:g} s, and nothing took more than {latest:.1f} s beyond it",
            "",
            *table(columns, rows, n_left=len(columns)),
        ],
        arguments.out,
    )
    return min(n_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
