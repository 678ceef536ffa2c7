"""Faults injected for real into pipelines of many processes, and how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forked import Forked
from places import HELPERS, ROOT
from ranks import environment, free_port

import pipesim as ps

#: Seconds beyond the timeout in which everyone must have ended, on a loaded machine too.
SLACK = 15.0
_RANK = str(Path(__file__).with_name("faulty_rank.py"))
_MARK = "PIPEEXEC_TEST_MARK"
#: Tasks in which a process that is lost, or hangs, can be seen to be.
_COMPUTE = re.compile(r"\d+(F|B|I|W|R)\d+|\d+STEP")
#: Faults after which the process that has them says nothing more.
_LOST = ("kill", "abort", "stop", "hold", "vanish")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in which rank, and where: a task, or between steps for ``""``.

    ``delay`` is seconds from there. ``devices`` is of each rank. Where stages are ``sharded``, so
    is the first. With ``launcher``, torchrun starts
    the ranks and holds the store; else rank 0 does.
    """

    kind: str
    rank: int = 1
    task: str = ""
    step: int = 1
    schedule: str = "1f1b"
    n_ranks: int = 2
    devices: int = 1
    microbatches: int = 4
    recompute: str = "never"
    rendezvous: bool = False
    timeout: float = 5.0
    launcher: bool = False
    delay: float = 0.0
    replicas: int = 1
    sharded: bool = False

    def __str__(self) -> str:
        after = f"{self.delay * 1e3:.0f} ms from the beginning" if self.delay else "before"
        place = f"{self.task or after} of step {self.step}"
        launcher = "torchrun" if self.launcher else "no launcher"
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.kind} in rank {self.rank} of {self.n_ranks}, {place}, {self.schedule} "
            f"{self.recompute}, {self.devices} devices each{replicas}, {launcher}"
        )


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    Attributes
    ----------
    statuses
        Of the processes that the test started: the ranks, or torchrun; None for one killed late.
    output
        All that was printed.
    seconds
        From the fault to the end of the last process.
    left
        Processes and files that outlived them, as text.
    timeline
        What was left of the step, if anything was.
    """

    statuses: list[int | None]
    output: str
    seconds: float
    left: list[str]
    timeline: ps.Timeline | None


def complaints(output: str) -> list[str]:
    """Return the lines in which a command says what is wrong."""
    return [line for line in output.splitlines() if line.startswith("pipeexec: error: ")]


def graph_of(fault: Fault) -> ps.TaskGraph:
    """Return the graph that the ranks run."""
    n_devices = fault.n_ranks * fault.devices // fault.replicas
    return ps.lower(
        ps.schedule(fault.schedule, n_devices, fault.microbatches),
        n_replicas=fault.replicas,
        sharded=[0] if fault.sharded else [],
        recompute=fault.recompute,  # type: ignore[arg-type]
        hosts="per_device",
        rendezvous=fault.rendezvous,
    )


def _alive(mark: str, sessions: Sequence[int]) -> list[int]:
    """Return the processes with a mark in their environment, or of sessions; but for zombies."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            is_ours = f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if state != "Z" and (is_ours or int(session) in sessions):
                pids.append(int(folder.name))
    return pids


def _fresh(
    arguments: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start an interpreter in a new session."""
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def run_commands(
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    port: int,
    seconds: float,
    fresh: bool = False,
) -> tuple[list[int | None], str, float, list[str]]:
    """Run commands to their end; return statuses, outputs, when they had ended, and what is left.

    Every process that they started, and that is still there a second later, is killed. They are
    forked, unless they are to be ``fresh`` interpreters.
    """
    mark, temporary = uuid.uuid4().hex, folder / "tmp"
    temporary.mkdir(exist_ok=True)
    path = [str(ROOT), str(HELPERS)]
    running: list[Any] = []
    for rank, command in enumerate(commands):
        variables = {
            **environment(rank, len(commands), port), _MARK: mark,
            "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(path),
        }  # fmt: skip
        start = _fresh if fresh else Forked
        running.append(start(command, variables, folder / f"{rank}.log"))
    sessions = [process.pid for process in running]
    end = time.time() + seconds
    began = folder / "begun"
    while time.time() < end:
        if all(process.poll() is not None for process in running) and not _alive(mark, sessions):
            break
        time.sleep(0.1)
        if began.exists() and time.time() > float(began.read_text() or time.time()) + seconds / 2:
            break
    ended = time.time()
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in running:  # those that end are gone from the list a little earlier
            process.wait(5.0)
    left = [f"process {pid}" for pid in _alive(mark, sessions)]
    statuses = [process.poll() for process in running]
    for pid in _alive(mark, sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in running:
        process.wait()
    left += [str(file) for file in temporary.glob("pipeexec-*")]
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", port))
        except OSError as error:
            left.append(f"port: {error}")
    output = "".join((folder / f"{rank}.log").read_text() for rank in range(len(commands)))
    return statuses, output, ended, left


def inject(fault: Fault, folder: Path) -> Outcome:
    """Run the pipeline with its fault; what is still there long after is killed."""
    command = [_RANK, str(folder), json.dumps(asdict(fault))]
    port = free_port()
    if fault.launcher:
        head = ["-m", "torch.distributed.run", "--nproc-per-node", str(fault.n_ranks)]
        commands = [[*head, "--master-port", str(port), *command]]
    else:
        commands = [command] * fault.n_ranks
    # The first half of this is for processes to start.
    seconds = 2 * (fault.timeout + 2 * SLACK)
    statuses, output, ended, left = run_commands(commands, folder, port=port, seconds=seconds)
    began = folder / "begun"
    partial = folder / "results/run-partial/timeline.csv"
    timeline = ps.Timeline.load(partial) if partial.is_file() else None
    start = float(began.read_text()) if began.is_file() else float("nan")
    return Outcome(statuses, output, ended - start, left, timeline)


def expected(fault: Fault) -> list[str]:
    """Return patterns of what the error of a fault must say: who, and in which task."""
    if fault.kind in ("kill launcher", "interrupt launcher"):
        return []
    if not fault.task:
        return [f"rank {fault.rank}"]
    graph = graph_of(fault)
    names = [str(graph.task(k)) for k in range(len(graph))]
    tasks = [k for k, name in enumerate(names)
             if name == fault.task and graph.device[k] // fault.devices == fault.rank]  # fmt: skip
    (index,) = tasks[:1]
    rank, task = fault.rank, graph.task(index)
    if fault.kind in ("interrupt", "terminate"):
        return [f"rank {rank}"]
    if fault.kind == "header":  # its receiver refuses it
        index = int(graph.pair[index])
        task = graph.task(index)
        rank = int(graph.device[index]) // fault.devices
    if fault.kind == "shape":  # its receiver refuses it
        return [f"stage {task.stage}"]
    if fault.kind == "hook":
        return [rf"{task.stage}[BI]{task.microbatch} failed", f"rank {rank}"]
    place = f"device {task.device}, stage {task.stage}"
    place += "" if task.microbatch is None else f", micro-batch {task.microbatch}"
    patterns = [f"rank {rank}", place]
    if _COMPUTE.fullmatch(str(task)) or fault.kind not in _LOST:
        patterns.append(rf"\b{task}\b")
    return patterns


def wrongs(fault: Fault, outcome: Outcome) -> list[str]:
    """Return what is wrong with how a fault ended; nothing where all is as it should be."""
    problems = []
    errors = complaints(outcome.output)
    if None in outcome.statuses or any("process" in text for text in outcome.left):
        problems.append("hung")
    allowed = {"vanish": fault.rank}.get(fault.kind)
    for rank, status in enumerate(outcome.statuses):
        if status == 0 and rank != allowed:
            problems.append(f"process {rank} ended with status 0")
    problems += [f"left {text}" for text in outcome.left if "process" not in text]
    if not outcome.seconds < fault.timeout + SLACK:
        problems.append(f"ended after {outcome.seconds:.1f} s")
    if len(errors) != 1:
        problems.append(f"{len(errors)} errors")
        return problems
    problems += [f"no {text!r} in it" for text in expected(fault) if not re.search(text, errors[0])]
    if "Traceback" in outcome.output and not fault.launcher:
        problems.append("a traceback")
    if outcome.timeline is None:
        problems += ["no timeline"] if fault.task or fault.step else []  # else nothing ran
    elif fault.task and not _ran(fault, outcome.timeline):
        problems.append("nothing in the timeline")
    return problems


def _ran(fault: Fault, timeline: ps.Timeline) -> bool:
    """Return whether the timeline has tasks, where any can have ended before the fault."""
    is_early = fault.task.endswith("F0") or fault.kind in _LOST  # which takes its tasks with it
    return bool(np.isfinite(timeline.end).any()) or is_early


def report(fault: Fault, outcome: Outcome) -> str:
    """Return all that is known, for a test that fails."""
    return f"{fault}\n{outcome.statuses} after {outcome.seconds:.1f} s\n{outcome.output}"
