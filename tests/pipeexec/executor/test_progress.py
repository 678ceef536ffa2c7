"""Steps that get nowhere: who holds them up, and who waits for whom."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from small_pipelines import (
    call_within,
    cut,
    data,
    dense,
    mse,
    nap_stages,
    orders,
    pipeline,
    unsplit,
)
from torch import Tensor, nn

import pipesim as ps
from pipeexec.devices.streams import CpuEvent
from pipeexec.distributed.watchdog import Failure, Head, Status, stall_failure
from pipeexec.executor import step_runner
from pipeexec.executor.step import StallDetector, Step, StepHeads
from pipesim.errors import ExecutionError, StallError
from pipesim.timeline.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

GRAPH = ps.lower(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


def passed(names: str) -> list[Any]:
    """Return one event a task; those of the named tasks have passed."""
    events = []
    for k in range(len(GRAPH)):
        event = CpuEvent()
        if str(GRAPH.task(k)) in names.split():
            event.set()
        events.append(event)
    return events


def heads(began: str, ended: str) -> list[str]:
    status = StepHeads(GRAPH, passed(f"{began} {ended}"), passed(ended)).status(0, 7)
    assert (status.rank, status.step, status.in_step) == (0, 7, True)
    assert status.n_ended == len(ended.split())
    return list(map(str, status.heads))


def test_at_first_all_wait_for_the_first_stage() -> None:
    assert heads("", "") == [
        "device 0 before 0F0 (stage 0, micro-batch 0)",
        "device 1 before 1F0 (stage 1, micro-batch 0), waiting for 1RECV_F0 from device 0",
    ]


def test_a_task_that_runs_is_what_its_device_is_in() -> None:
    assert heads("1F0", "0F0 0SEND_F0 1RECV_F0 0F1") == [
        "device 0 before 0B0 (stage 0, micro-batch 0), waiting for 0RECV_B0 from device 1",
        "device 1 in 1F0 (stage 1, micro-batch 0)",
    ]


def test_a_device_whose_tasks_have_ended_is_at_its_messages() -> None:
    everything = {str(GRAPH.task(k)) for k in range(len(GRAPH))}
    ended = everything - {"0RECV_B1", "0B1", "1SEND_B1", "0STEP"}
    assert heads("1SEND_B1", " ".join(sorted(ended))) == [
        "device 0 before 0B1 (stage 0, micro-batch 1), waiting for 0RECV_B1 from device 1",
        "device 1 in 1SEND_B1 (stage 1, micro-batch 1)",
    ]


def test_devices_of_other_processes_and_what_is_not_issued_are_left_out() -> None:
    began: list[Any] = passed("")
    for k in np.flatnonzero(GRAPH.device == 1).tolist():
        began[k] = None
    status = StepHeads(GRAPH, began, began).status(3, 0)
    assert [head.device for head in status.heads] == [0]
    nothing: list[Any] = [None] * len(GRAPH)
    assert StepHeads(GRAPH, nothing, nothing).status(0, 0) == Status(0, 0, True, 0, [])


def test_a_status_is_written_and_read() -> None:
    import json

    status = Status(1, 4, True, 9, [Head(0, "0F0", "stage 0, micro-batch 0", True, "")])
    assert Status.from_json(json.dumps(status).encode()) == status


def test_progress_is_told_from_its_lack() -> None:
    progress = StallDetector(0.05)
    status = Status(0, 0, True, 1, [])
    assert not progress.is_stalled(status)
    time.sleep(0.06)
    assert not progress.is_stalled(status._replace(n_ended=2))
    time.sleep(0.06)
    assert progress.is_stalled(status._replace(n_ended=2))
    assert progress.failure is not None
    assert "nothing has moved for 0.05 s in step 0" in progress.failure.message
    assert progress.is_stalled(status._replace(n_ended=3)), "once is for ever"


# Whose fault it is, from what processes say


def status(rank: int, task: str, running: bool, waits_for: str = "", step: int = 2) -> Status:
    head = Head(rank, task, f"stage {rank}, micro-batch 0", running, waits_for)
    return Status(rank, step, True, 5, [head])


def test_a_task_that_runs_is_the_culprit() -> None:
    """Even where messages run, which wait, and other processes are not in the step."""
    everyone = [
        status(0, "0SEND_F0", True), status(1, "1B0", False, "1RECV_B0 from device 2"),
        Status(2, 1, False, 0, []), status(3, "3F1", True),
    ]  # fmt: skip
    assert stall_failure(everyone, 5.0) == Failure(
        "stalled",
        3,
        "3F1 hangs (rank 3, device 3, stage 3, micro-batch 0, step 2): no task has ended for 5 s",
    )


def test_else_a_process_that_does_not_come() -> None:
    everyone = [status(0, "0B0", False, "0RECV_B0 from device 1"), Status(1, 2, False, 0, [])]
    failure = stall_failure(everyone, 1.5)
    assert (failure.kind, failure.rank) == ("stalled", 1)
    assert failure.message == (
        "rank 1 does not come to step 2: it is still rank 1 between steps (2 ended), for 1.5 s"
    )


def test_else_nobody() -> None:
    everyone = [status(0, "0RECV_B0", True), status(1, "1RECV_F0", True)]
    assert stall_failure(everyone, 1.0) == Failure(
        "stalled", -1, "nothing has moved for 1 s in step 2"
    )


# In one process


class Hangs(nn.Module):
    """Passes its input on; its n-th call (from 0) waits until it is released."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0
        self.gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call + 1:
            self.gate.wait(20)
        return x


def test_a_stage_that_hangs_is_named() -> None:
    """With what others wait for, and what ran before; what was to follow never runs."""
    hang = Hangs(call=2)
    first, last = cut(dense(2), [1, 1])
    stages = [first, nn.Sequential(nn.Linear(16, 16), hang), last]
    graph = ps.lower(ps.schedule("gpipe", 3, 4))
    weights = [p.detach().clone() for stage in stages for p in stage.parameters()]
    subject = pipeline(stages, graph, mse, lambda p: torch.optim.SGD(p, lr=0.1), timeout=0.4)
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        call_within(30, lambda: subject.step(*data(8)))
    assert 0.4 < time.monotonic() - began < 10
    assert str(caught.value).startswith(
        "1F2 hangs (rank 0, device 1, stage 1, micro-batch 2, step 0): no task has ended for 0.4 s"
    ), caught.value
    timeline = caught.value.timeline
    assert isinstance(timeline, Timeline)
    ran = {str(graph.task(k)) for k in np.flatnonzero(timeline.ran).tolist()}
    assert {"0F0", "0F3", "1F0", "1F1", "2F0", "2F1"} <= ran
    assert not {"1F2", "2F2", "2B0", "0STEP"} & ran
    hang.gate.set()
    with pytest.raises(ExecutionError, match="the pipeline is closed"):
        subject.step(*data(8))
    time.sleep(0.2)
    assert hang.calls == 3, "tasks went on after the error"
    after = [p for stage in stages for p in stage.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(after, weights, strict=True))
    assert all(p.grad is None for p in after)
    subject.close()


def test_a_task_that_goes_on_after_a_stall_is_not_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step is over, so that the loss of its micro-batch fails."""
    hang = Hangs(call=0)
    subject = pipeline(
        [nn.Linear(4, 4), hang], ps.lower(ps.schedule("gpipe", 2, 1)), mse, timeout=0.3
    )
    original = step_runner.raise_failure

    def late(step: Step, *rest: Any) -> NoReturn:
        hang.gate.set()
        time.sleep(0.3)
        original(step, *rest)

    monkeypatch.setattr(step_runner, "raise_failure", late)
    with pytest.raises(StallError, match="1F0 hangs"):
        call_within(30, lambda: subject.step(*data(4, width=4)))


def test_who_waits_for_whom_is_named() -> None:
    """Nothing of the pipeline's runs: the loss of one micro-batch waits for a lock."""
    gate = threading.Event()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        gate.wait(20)
        return mse(output, target)

    stages = cut(dense(2), [1, 1])
    subject = pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 3)), loss)
    subject.timeout = 0.3
    with pytest.raises(StallError) as caught:
        call_within(30, lambda: subject.step(*data(6)))
    gate.set()
    message = str(caught.value)
    assert message.startswith("1F0 hangs (rank 0, device 1, stage 1, micro-batch 0, step 0)")
    assert "device 0 before 0B0 (stage 0, micro-batch 0), waiting for 0RECV_B0 from device 1" in (
        message
    )


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 0.5])
def test_slow_stages_are_waited_for(timeout: float | None) -> None:
    """Without a timeout for ever; with one, as long as tasks end in time."""
    stages = nap_stages(2, 0.1, 0.1)
    graph = ps.lower(ps.schedule("gpipe", 2, 4))
    batch = data(8, width=4)
    with pipeline(stages, graph, timeout=timeout) as subject:
        result = call_within(30, lambda: subject.step(*batch))
    assert result.timeline.makespan > 0.5
    assert torch.equal(result.loss, unsplit(stages, graph, *batch))
