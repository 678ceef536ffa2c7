"""One process of an ending: a script with a pipeline that fails, and what it does then.

``python ending_rank.py FOLDER ENDING`` runs in the environment that torchrun gives; the ending is
JSON, see `endings.Ending`. A process that is not ``fresh`` was forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import finalize
from ranks import meet
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes

_WIDTH, _MICROBATCHES = 4, 4


def _raise() -> None:
    raise ValueError("on purpose")


def _signal(pid: int, number: signal.Signals) -> Callable[[], None]:
    """Return a function that sends a signal, and takes a while, so that the task is interrupted."""

    def act() -> None:
        os.kill(pid, number)
        time.sleep(0.5)

    return act


def _interrupt_everyone() -> None:
    """Send SIGINT to all ranks, as a terminal does, and take a while."""
    for file in Path(sys.argv[1]).glob("*.pid"):
        os.kill(int(file.read_text()), signal.SIGINT)
    time.sleep(0.5)


def _compute() -> None:
    """Take two seconds in torch's code, which has released the interpreter's lock."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with suppress(dist.DistError):
        store.wait(["never"], timedelta(seconds=2))


class _Stage(nn.Module):
    """A layer that acts in its second micro-batch after it was armed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.act: Callable[[], None] | None = None
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += self.act is not None
        if self.act is not None and self.n_calls == 2:
            self.act()
        y: Tensor = self.layer(x)
        return y


def _act(failure: str, rank: int, n_ranks: int) -> Callable[[], None] | None:
    """Return what the last stage of a rank does in its second step."""
    is_last, pid = rank == n_ranks - 1, os.getpid()

    def interrupt_and_compute() -> None:
        os.kill(pid, signal.SIGINT)
        _compute()

    acts = {
        "stage": _raise,
        "stage, while another computes": _raise,
        "kill": _signal(pid, signal.SIGKILL),
        "interrupt": _signal(pid, signal.SIGINT),
        "interrupt while computing": interrupt_and_compute,
        "stall": lambda: time.sleep(1000),
    }
    if failure == "interrupt everyone":
        return _interrupt_everyone if is_last else None
    if failure == "kill the store":
        return _signal(pid, signal.SIGKILL) if rank == 0 else None
    if failure == "stage, while another computes" and not is_last:
        return _compute
    return acts.get(failure) if is_last else None


def _steps(
    case: dict[str, Any], rank: int, processes: Processes | None, stack: ExitStack | None
) -> None:
    """Run two steps, of which the second fails; without ``stack`` the pipeline stays open."""
    n, failure = case["n_ranks"], case["failure"]
    torch.manual_seed(0)
    stages = [_Stage() for _ in range(max(n, 2))]
    graph = ps.lower(ps.schedule("1f1b", len(stages), _MICROBATCHES))
    devices = ["cpu"] * (len(stages) // n)
    pipeline = px.Pipeline(
        list(stages), graph, devices, nn.functional.mse_loss, processes=processes,
        timeout=5.0 if n == 1 and failure == "stall" else None,
    )  # fmt: skip
    if stack is not None:
        stack.enter_context(pipeline)
    batch = torch.randn(2 * _MICROBATCHES, _WIDTH)
    pipeline.step(batch, batch)
    if failure == "script" and rank == n - 1:
        _raise()
    stages[-1 if n == 1 else rank].act = _act(failure, rank, n)
    pipeline.step(batch, batch)


def _run(case: dict[str, Any], rank: int) -> None:
    """Join, and run the steps."""
    # A stall is to be found soon; nothing else may be taken for one on a loaded machine.
    timeout = 5.0 if case["failure"] == "stall" else 100.0
    processes = None if case["n_ranks"] == 1 else px.join(timeout)
    if case["way"] == "leaves all open":
        _OPEN.append(processes)
        _steps(case, rank, processes, None)
        return
    with ExitStack() as stack:
        if processes is not None:
            stack.enter_context(processes)
        _steps(case, rank, processes, stack)


class _SlowEnd:
    """Delays the end of the interpreter until threads that compute need its lock again."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(2.5)


_OPEN: list[object] = []


def main(case: dict[str, Any]) -> int:
    """Run the script; return its exit status."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if "comput" in case["failure"]:
        sys.slow_end = _SlowEnd()  # type: ignore[attr-defined]  # freed last
    (Path(sys.argv[1]) / f"{rank}.pid").write_text(str(os.getpid()))
    meet(Path(sys.argv[1]))
    try:
        _run(case, rank)
    except BaseException as error:
        if case["way"] == "does not catch":
            raise
        sys.stdout.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        if case["way"] == "leaves all open":
            _OPEN.append(error)  # with all frames of the step
    if case["way"] == "exits" and case["failure"] != "nothing":
        sys.exit(3)
    if case["way"] in ("goes on", "joins again"):
        again = {**case, "failure": "nothing", "way": "ends"}
        _run(again if case["way"] == "joins again" else {**again, "n_ranks": 1}, rank)
        torch.ones(100, 100) @ torch.ones(100, 100)
    return 0


if __name__ == "__main__":
    _case = json.loads(sys.argv[2])
    if _case["fresh"]:
        sys.exit(main(_case))
    finalize(lambda: main(_case), traceback.print_exc)
