"""One rank of a pipeline of naps in which something goes wrong on purpose.

``python faulty_rank.py FOLDER FAULT`` runs under torchrun, or in the environment that it gives;
the fault is JSON, as `faults.Fault` writes it. The run directory is ``FOLDER/results/run``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from faults import Fault, graph_of
from ranks import meet
from small_pipelines import Nap
from torch import Tensor, nn

import pipeexec as px
from pipeexec.cli import launch
from pipeexec.cli.commands import print_error_here, save_partial_timeline
from pipeexec.distributed import Processes, channels
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step


def trick_here(trick: str) -> tuple[str, int]:
    """Return a trick that this thread is to do."""
    return trick, threading.get_ident()


#: What a stage, the loss or the optimizer does wrong from now on, in which thread.
TRICKS: set[tuple[str, int]] = set()
FORWARD, BACKWARD = 2e-3, 2e-3  # s


def on_purpose(*_: object) -> NoReturn:
    raise ValueError("on purpose")


class Trickster(nn.Module):
    """A layer and a nap; fails as `TRICKS` demands."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nap = nn.Linear(4, 4), Nap(FORWARD, BACKWARD)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.nap(self.layer(x))
        if trick_here("hook") in TRICKS:
            y.register_hook(on_purpose)
            TRICKS.discard(trick_here("hook"))
        return y[:, :3] if trick_here("shape") in TRICKS else y


class Optimizer(torch.optim.SGD):
    """Raises as `TRICKS` demands."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)

    def step(self, closure: Any = None) -> Any:
        if trick_here("optimizer") in TRICKS:
            on_purpose()
        return super().step(closure)


def loss(output: Tensor, target: Tensor) -> Tensor:
    if trick_here("loss") in TRICKS:
        on_purpose()
    return nn.functional.mse_loss(output, target)


def _hold_the_interpreter() -> None:
    """Sleep in C without releasing the interpreter's lock."""
    ctypes.PyDLL(None).sleep(1000)


def _trick(name: str) -> None:
    TRICKS.add(trick_here(name))


def _garble_headers() -> None:
    """Let this thread say that it sends another micro-batch."""
    honest, thread = channels.mark_absent, threading.get_ident()

    def wrong(head: Tensor, *rest: Any) -> Tensor:
        head = honest(head, *rest)
        if threading.get_ident() == thread:
            head = head.clone()
            head[2 + channels.Content._fields.index("microbatch")] += 1
        return head

    channels.mark_absent = wrong  # type: ignore[attr-defined]


#: What can go wrong in a task, just before what it does, or between steps.
ACTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # After `os.kill`, this thread would run on until another thread takes the signal.
    "stop": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
    "abort": os.abort,
    "sleep": lambda: time.sleep(1000),
    "hold": _hold_the_interpreter,
    "raise": on_purpose,
    "memory": lambda: torch.empty(1 << 60),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: sys.exit(3),
    "vanish": lambda: os._exit(0),
    "kill launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "interrupt launcher": lambda: os.kill(os.getppid(), signal.SIGINT),
    "header": _garble_headers,
    "nothing": lambda: None,
    **{name: partial(_trick, name) for name in ("shape", "hook", "loss", "optimizer")},
}  # fmt: skip


class Trap:
    """Does what a fault says where it says, and notes when in ``FOLDER/begun``."""

    def __init__(self, fault: dict[str, Any], folder: Path, rank: int) -> None:
        self.fault, self.folder = fault, folder
        self.is_here = rank == fault["rank"]

    def spring(self) -> None:
        (self.folder / "begun").write_text(str(time.time()))
        ACTS[self.fault["kind"]]()
        if self.fault["kind"] in ("interrupt", "terminate", "kill launcher", "interrupt launcher"):
            time.sleep(1.5)  # so that the task is still there when the signal comes

    def arm(self, planned: Sequence[PlannedTask]) -> list[PlannedTask]:
        """Return the tasks, of which the one that the fault names springs the trap."""

        def work(original: Any, task_run: Step, task: PlannedTask) -> None:
            if task_run.number == self.fault["step"]:
                self.spring()
            original(task_run, task)
            TRICKS.discard(trick_here("shape"))

        def armed(task: PlannedTask) -> PlannedTask:
            """Return the task with the trap: with a rendezvous, its header is sent before it."""
            remote = task.remote
            if self.fault["kind"] == "header" and remote is not None and remote.before_start:
                trap = partial(work, remote.before_start)
                return task._replace(remote=remote._replace(before_start=trap))
            return task._replace(handler=partial(work, task.handler))

        name, graph = self.fault["task"], self.graph
        return [armed(task) if str(graph.task(task.id)) == name else task for task in planned]

    def set(self, pipeline: px.Pipeline) -> None:
        self.graph = pipeline.graph
        if self.is_here and self.fault["task"]:
            pipeline._runner.tasks = self.arm(pipeline._runner.tasks)

    def between(self, step: int) -> None:
        if not self.is_here or self.fault["task"] or self.fault["step"] != step:
            return
        if self.fault["delay"]:
            threading.Timer(self.fault["delay"], self.spring).start()
        else:
            self.spring()


def train(trap: Trap, arguments: argparse.Namespace, processes: Processes) -> int:
    fault = trap.fault
    torch.manual_seed(0)
    graph = graph_of(Fault(**fault))
    stages: list[nn.Module] = [Trickster() for _ in range(graph.n_stages)]
    inputs = batch = torch.randn(4 * fault["microbatches"], 4)
    if fault["sharded"]:
        stages[0] = px.EmbeddingStage(px.ShardedEmbedding(16, 4, processes))
        inputs = torch.arange(len(batch)) % 16
    with px.Pipeline(
        stages, graph, ["cpu"] * fault["devices"], loss, Optimizer, processes=processes
    ) as pipeline:
        trap.set(pipeline)
        for step in range(3):
            trap.between(step)
            pipeline.align()
            result = pipeline.gather(pipeline.step(inputs, batch))
    if processes.rank == 0 and fault["kind"] == "nothing":
        from pipeexec.run_directory import write_directory

        with write_directory(arguments.results / "run", {}) as to:
            result.timeline.save(to / "timeline.csv")
    return 0


def main(folder: Path, fault: dict[str, Any]) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    arguments = argparse.Namespace(results=folder / "results", name="run")
    trap = Trap(fault, folder, int(os.environ["RANK"]))
    meet(folder)
    status = launch.run_together(
        partial(train, trap, arguments),
        print_error_here,
        partial(save_partial_timeline, arguments),
        fault["timeout"],
    )
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
