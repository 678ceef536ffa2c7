"""The error that ends a step: what failed, where, and what everyone else was at."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeexec.distributed.channels import LostConnection
from pipeexec.distributed.failure import Failure
from pipeexec.distributed.message_headers import Mismatch
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.status import Status
from pipeexec.executor.process_results import ProcessResult, merge_results
from pipeexec.executor.step import Step, task_place
from pipesim.errors import ExecutionError, PeerError, StageError, StallError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

__all__ = ["describe_last_task", "raise_failure"]


def raise_failure(
    step: Step, processes: Processes | None, interrupt: BaseException | None = None
) -> NoReturn:
    """Raise what stopped a step, with what ran before; ``interrupt`` came from outside a task."""
    try:
        if processes is None:
            raise _of_one_process(step)
        raise _process_error(step, processes, interrupt)
    finally:
        del interrupt  # if it is what is raised, its traceback holds this frame


def _process_error(
    step: Step, processes: Processes, interrupt: BaseException | None
) -> BaseException:
    """Return the error of a step of several processes, which all of them raise.

    It is raised elsewhere: here it has a name, and a traceback holds the names of its frames.
    """
    if step.failure is not None and isinstance(step.failure[1], PeerError):
        processes.watch.wait_for_failure()  # of the process that this one has it from
    own = _own_failure(step, processes, interrupt)
    failure = own if own is None else processes.watch.post(own)
    failure = failure or processes.watch.failure
    assert failure is not None
    processes.watch.publish_last_words(step.process_result().pack())
    words = processes.watch.collect_last_words()
    parts = [ProcessResult.unpack(step.graph, text) for text in words.values() if text]
    text = processes.watch.explain()
    cause = step.failure[1] if step.failure is not None and failure.rank == processes.rank else None
    kinds = {
        "raised": PeerError if cause is None or isinstance(cause, Mismatch) else StageError,
        "stalled": StallError,
        "silent": StallError,
    }
    timeline = merge_results(step.graph, parts or [step.process_result()]).timeline
    error = kinds.get(failure.kind, PeerError)(text + _stepped(step, timeline.ran))
    error.timeline = timeline
    if interrupt is not None and not isinstance(interrupt, Exception):
        interrupt.timeline = error.timeline  # type: ignore[attr-defined]
        return interrupt
    error.__cause__ = cause
    return error


def _of_one_process(step: Step) -> ExecutionError:
    """Return the error of a step of one process."""
    error: ExecutionError
    if step.failure is None:
        assert step.stall is not None
        text = step.stall.message
        others = [str(h) for h in step.status().heads if not text.startswith(f"{h.task} hangs")]
        error = StallError(text + (f"; meanwhile {'; '.join(others)}" if others else ""))
    elif step.failure[0] < 0 and isinstance(step.failure[1], ExecutionError):
        error = step.failure[1]  # as of a pipeline that was closed
    else:
        index, cause = step.failure
        error = StageError(
            f"{_failed(step, index, cause)}; all other work was stopped, and .timeline holds what "
            f"ran before{_stepped(step, step.events.ran)}"
        )
        error.__cause__ = cause
    error.timeline = step.readings().timeline
    return error


def _stepped(step: Step, ran: NDArray[np.bool_]) -> str:
    """Return which optimizers have changed weights in a step that failed, as text."""
    stages = np.unique(step.graph.stage[ran & (step.graph.op == Op.STEP)]).tolist()
    if not stages or not any(step.gradients.optimizers):
        return ""
    one = len(stages) == 1
    return (
        f"; the optimizer{'' if one else 's'} of stage{'' if one else 's'} "
        f"{', '.join(map(str, stages))} {'has' if one else 'have'} stepped, others have not: load "
        "weights and optimizer state from before the step, or make the model anew"
    )


def _failed(step: Step, index: int, cause: BaseException) -> str:
    task, place = step.graph.task(index), task_place(step.graph, index)
    return f"{task} failed ({place}): {type(cause).__name__}: {cause}"


def _own_failure(
    step: Step, processes: Processes, interrupt: BaseException | None
) -> Failure | None:
    """Return what failed in this process, for everyone to know; None if nothing did."""
    rank, number = processes.rank, step.number
    if step.failure is None:
        return None
    index, cause = step.failure
    if isinstance(cause, Exception) and index < 0:
        text = f"rank {rank}, step {number}: {type(cause).__name__}: {cause}"
        return Failure("raised", rank, text)
    if interrupt is not None or index < 0:
        name = type(interrupt or cause).__name__
        heads = "; ".join(map(str, step.status().heads)) or "between tasks"
        text = f"rank {rank} was interrupted in step {number} ({name}): {heads}"
        return Failure("ended", rank, text)
    if isinstance(cause, LostConnection):
        return Failure("lost", *processes.blame(cause))
    text = f"rank {rank}, step {number}: {_failed(step, index, cause)}"
    return Failure("raised", rank, text)


def describe_last_task(graph: TaskGraph, number: int, processes: Processes, rank: int) -> str:
    """Return what is known of a process that does not answer; ``number`` is the graph's."""
    noted = processes.recorder.read(rank)
    if noted is None:
        return processes.watch.board.describe_last_status(rank)
    if noted.n_begun == noted.n_ended:
        return f"last seen {Status(rank, noted.n_ended, False, 0, [])}"
    step = noted.n_begun - 1
    if noted.graph != number:
        return f"rank {rank} was in step {step}"
    tasks = [f"in {graph.task(task)} ({task_place(graph, task)})" for task in noted.tasks]
    return f"rank {rank} was {' and '.join(tasks) or 'between tasks'} of step {step}"
