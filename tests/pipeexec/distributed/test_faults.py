"""Faults injected for real: every process ends, one names the culprit, nothing stays behind.

More of them, drawn at random, in `chaos.py`.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from case_choice import EVERY_CASE
from faults import (
    Fault,
    Outcome,
    complaints,
    inject,
    report,
    run_commands,
    wrongs,
)
from process_errors import make
from ranks import Ranks, free_port, running
from small_pipelines import data

import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.distributed.flight_recorder import FlightRecorder
from pipesim.errors import ArgumentError, ExecutionError

pytestmark = pytest.mark.slow

#: What goes wrong, and what the error says beside the rank, the device, the stage and the task.
CASES: dict[Fault, str] = {
    Fault("kill", 1, "1F2", launcher=True): "rank 1 was lost; rank 1 was in 1F2 .*meanwhile rank 0 "
    r"in step 1: device 0 (in 0F\d |before 0B\d )",
    Fault("kill", 0, "0B1", n_ranks=3): "rank 0.* was lost; rank 0 was in 0B1",
    Fault("kill", 2, "2F1", n_ranks=3): "rank 2 was lost; .*meanwhile rank 0 .*; rank 1 ",
    Fault("kill", 1, "1REDUCE_GRAD", schedule="chimera"): "rank 1 was in .*1REDUCE_GRAD",
    Fault("kill", 1, "1REDUCE_GRAD", devices=2, replicas=2): "rank 1 was in .*1REDUCE_GRAD .*; me",
    Fault("kill", 1, "0ALL_TO_ALL2.keys", devices=2, replicas=2, sharded=True): "rank 1 was in .*0"
    r"ALL_TO_ALL2\.keys \(.*meanwhile rank 0 in step 1: device 0 (in|before) ",
    Fault(
        "sleep", 0, "0ALL_TO_ALL2.vectors", devices=2, replicas=2, sharded=True, timeout=3.0
    ): "0ALL_TO_ALL2.vectors hangs .*rank 0, .* no task has ended for 3 s; meanwhile rank 1 .* in "
    "0ALL_TO_ALL2.vec",
    Fault("raise", 1, "0B1", devices=2, replicas=2): "0B1 failed .*on purpose; meanwhile rank 0",
    Fault("kill", 1): r"rank 1 was lost; last seen rank 1 between steps \(1 ended\)",
    Fault("stop", 1, "1F2", launcher=True): "rank 1 has not updated its status for 5 s; rank 1 was",
    Fault("stop", 0, "0F2", timeout=3.0): "rank 0, which held the store, was lost; rank 0 was in "
    "0F2",
    Fault("hold", 1, "1B2", timeout=3.0): "rank 1 has not updated its status for 3 s; rank 1 was "
    "in 1B2",
    Fault("sleep", 1, "1B2", timeout=3.0): r"1B2 hangs \(rank 1, device 1, stage 1, micro-batch 2, "
    r"step 1\): no task has ended for 3 s; meanwhile rank 0 .*waiting for 0RECV_B2 from device 1",
    Fault("sleep", 1, launcher=True): "rank 0 waited 5 s for rank 1, which did not answer; every "
    "process must make the same calls; meanwhile rank 1 between steps",
    Fault("raise", 0, "0B3"): "rank 0, step 1: 0B3 failed .*ValueError: on purpose",
    Fault("raise", 0, "0I2", schedule="zb_h1"): "0I2 failed .*ValueError: on purpose",
    Fault("raise", 1, "1W2", schedule="zb_h1"): "1W2 failed .*ValueError: on purpose",
    Fault("raise", 1, "1R2", recompute="always"): "1R2 failed .*ValueError: on purpose",
    Fault("hook", 0, "0F2"): "0B2 failed .*ValueError: on purpose",
    Fault("loss", 1, "1F2"): "1F2 failed .*ValueError: on purpose .*; meanwhile rank 0",
    Fault("optimizer", 0, "0STEP"): r"0STEP failed \(device 0, stage 0\): ValueError: on purpose",
    Fault("memory", 0, "0F2"): "0F2 failed .*allocate",
    Fault("shape", 0, "0F2"): r"0SEND_F2 failed .*is float32 \[4, 3\], but float32 \[4, 4\] was",
    Fault("header", 0, "0SEND_F2"): "1RECV_F2 failed .*expected 0SEND_F2 of step 1 .*got 0SEND_F3",
    Fault("interrupt", 1, "1B1"): r"interrupted in step 1 \(KeyboardInterrupt\): device 1 in 1B1",
    Fault("interrupt launcher", 1, "1F2", launcher=True): "was interrupted in step 1",
    Fault("terminate", 1, "1B1"): "rank 1 received SIGTERM: rank 1 in step 1: device 1",
    Fault("exit", 1): "rank 1 stopped: SystemExit: 3",
    Fault("exit", 1, launcher=True): "rank 1 stopped: SystemExit: 3",
    Fault("kill launcher", 1, "1F2", launcher=True): "the launcher, which held the store, was lost",
}  # fmt: skip
#: Torchrun and its ranks take seconds to start: the suite runs one of these, and an exit without a
#: launcher too. With FAULTS in the environment, as in `make chaos`, all run.
_SLOW = {
    Fault("stop", 1, "1F2", launcher=True),
    Fault("sleep", 1, launcher=True),
    Fault("exit", 1, launcher=True),
    Fault("interrupt launcher", 1, "1F2", launcher=True),
    Fault("kill launcher", 1, "1F2", launcher=True),
    # These are as others, in another rank, task or schedule.
    Fault("kill", 2, "2F1", n_ranks=3),
    Fault("kill", 1, "1REDUCE_GRAD", schedule="chimera"),
    Fault("raise", 0, "0I2", schedule="zb_h1"),
    Fault("kill", 0, "0B1", n_ranks=3),
    Fault("kill", 1, "1REDUCE_GRAD", devices=2, replicas=2),
    Fault("raise", 1, "0B1", devices=2, replicas=2),
    Fault("raise", 1, "1R2", recompute="always"),
    Fault("raise", 1, "1W2", schedule="zb_h1"),
}
assert CASES.keys() >= _SLOW
RUN = [fault for fault in CASES if EVERY_CASE or fault not in _SLOW]


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Fault], Outcome]]:
    """Give the outcome of a fault: those of all tests run two at a time, as starting takes longest.

    A worker of pytest-xdist runs some of the tests, which it does not know before, one at a time.
    """
    faults = [
        item.callspec.params["fault"]
        for item in request.session.items
        if item.path == request.path and "fault" in getattr(item, "fixturenames", ())
        and not hasattr(request.config, "workerinput")
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        futures = {
            fault: pool.submit(inject, fault, tmp_path_factory.mktemp("fault")) for fault in faults
        }
        yield lambda fault: (
            futures[fault].result() if fault in futures
            else inject(fault, tmp_path_factory.mktemp("fault"))
        )  # fmt: skip
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", RUN, ids=str)
def test_every_process_ends_and_one_names_the_culprit(
    fault: Fault, ended: Callable[[Fault], Outcome]
) -> None:
    """In time, with a status that is not 0, one error, what ran before, and nothing left."""
    outcome = ended(fault)
    assert not wrongs(fault, outcome), report(fault, outcome)
    (message,) = complaints(outcome.output)
    assert re.search(CASES[fault], message), message


def test_a_run_without_a_fault_ends_well(tmp_path: Path) -> None:
    """Else the tests above say nothing."""
    outcome = inject(Fault("nothing", 1, "1F2"), tmp_path)
    assert outcome.statuses == [0, 0], outcome.output
    assert complaints(outcome.output) == []
    assert outcome.left == []


# The command


def command(folder: Path, results: Path | str, timeout: int = 8) -> list[str]:
    """Return the arguments of a short run."""
    sizes = "--layers 2 --width 16 --heads 2 --sequence 8 --microbatches 2 --batch 4"
    rest = f"--steps 1 --warm-up 1 --timeout {timeout} --results {results}"
    return ["-m", "pipeexec", "run", *f"{sizes} {rest}".split()]


def refused(commands: Sequence[Sequence[str]], folder: Path, port: int = 0, **options: Any) -> str:
    """Return the one error of commands that must all fail and leave nothing."""
    statuses, output, _, left = run_commands(
        commands, folder, port=port or free_port(), seconds=60, **options
    )
    assert all(status not in (0, None) for status in statuses), (statuses, output)
    assert len(complaints(output)) == 1, output
    (message,) = complaints(output)
    assert "Traceback" not in output, output
    assert [text for text in left if "port" not in text] == []
    return message


def test_no_room_for_the_results(tmp_path: Path) -> None:
    """A limit of the size of a file stands for a disk that fills up: the figure does not fit."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource as r, runpy, sys; r.setrlimit(r.RLIMIT_FSIZE, (16384, 16384))\n"
        "sys.dont_write_bytecode = True  # cut off, it would stay\n"
        "runpy.run_module('pipeexec', run_name='__main__')\n"
    )
    _, _, *arguments = command(tmp_path, tmp_path / "results")
    message = refused([[str(script), *arguments]] * 2, tmp_path)
    assert re.search(f"cannot write .*{tmp_path}/results/.*too large", message), message
    assert not (tmp_path / "results/run").exists()
    assert ps.Timeline.load(tmp_path / "results/run-partial/timeline.csv").makespan > 0
    assert os.listdir(tmp_path / "results") == ["run-partial"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 16384


def test_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be written: the error says that too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        (disk / "most").write_bytes(bytes(12288))
        message = refused([command(tmp_path, disk)] * 2, tmp_path)
        assert re.search(f"cannot write .*{disk}/.*No space left", message), message
        assert re.search("what ran before is lost: cannot write .*No space left", message), message
        assert os.listdir(disk) == ["most"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    """Training does not start where results cannot be written."""
    (tmp_path / "file").touch()
    message = refused([command(tmp_path, tmp_path / "file")] * 2, tmp_path)
    assert f"cannot write results in {tmp_path}/file: " in message, message


def test_a_port_in_use(tmp_path: Path) -> None:
    """The process that would hold the store says so; the other ends too."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        message = refused([command(tmp_path, tmp_path, timeout=2)] * 2, tmp_path, port=port)
    assert f"port 127.0.0.1:{port} is in use on " in message, message
    assert "choose another --master-port" in message


def test_no_room_for_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mapped file on a full disk would end the process without a word."""
    honest = os.write

    def full(handle: int, content: bytes) -> int:
        if len(content) < 100:  # a few bytes always find room
            return honest(handle, content)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ExecutionError, match=r"cannot be written to .*No space left.*TMPDIR"):
        FlightRecorder(0).connect(lambda value: [value])
    assert os.listdir(tmp_path) == []


# Batches that differ


def batches_of_several_lengths(processes: Processes) -> str:
    with make(processes) as subject:
        try:
            subject.step(*data([8, 12][processes.rank]))
        except ArgumentError as error:
            return str(error)
    return ""


def test_batches_of_other_length_in_another_process(two_ranks: Ranks) -> None:
    """Micro-batches would be of different samples."""
    for message in two_ranks.run(batches_of_several_lengths):
        assert message.startswith("inputs of rank 0 have 8 samples, inputs of rank 1 12; give")


# One process

HANGING = """
import time, traceback, torch, pipeexec as px, pipesim as ps
from forked import finalize
from pipesim.errors import StallError
from torch import nn
class Hang(nn.Module):
    def forward(self, x):
        print("hangs", flush=True)
        time.sleep(1000)
graph = ps.lower(ps.schedule("gpipe", 2, 2))
batch = torch.randn(4, 4)
def step(timeout):
    stages = [nn.Linear(4, 4), Hang()]
    with px.Pipeline(stages, graph, ["cpu"] * 2, nn.functional.mse_loss, timeout=timeout) as p:
        p.step(batch, batch)
def main():
    try:
        step(1.0)
    except StallError as error:
        print(error, flush=True)
    step(None)
finalize(main, traceback.print_exc)
"""


def test_stages_that_hang_in_one_process(tmp_path: Path) -> None:
    """A step is given up in time, or by an interrupt; the interpreter ends in spite of both."""
    script, log = tmp_path / "hanging.py", tmp_path / "0.log"
    script.write_text(HANGING)
    log.touch()
    with running([[str(script)]], tmp_path) as (process,):
        end = time.monotonic() + 60
        while log.read_text().count("hangs\n") < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
    first, error, second, *_, last = log.read_text().splitlines()
    assert first == second == "hangs"
    assert error.startswith("1F0 hangs (rank 0, device 1, stage 1, micro-batch 0, step 0)")
    assert last == "KeyboardInterrupt"
