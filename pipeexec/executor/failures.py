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
from pipeexec.executor.process_results import Part, whole
from pipeexec.executor.step import Run, place
from pipesim.errors import ExecutionError, PeerError, StageError, StallError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

__all__ = ["describe_last_task", "raise_failure"]


def raise_failure(
    run: Run, processes: Processes | None, interrupt: BaseException | None = None
) -> NoReturn:
    """Raise what stopped a step, with what ran before; ``interrupt`` came from outside a task."""
    try:
        if processes is None:
            raise _of_one_process(run)
        raise _process_error(run, processes, interrupt)
    finally:
        del interrupt  # if it is what is raised, its traceback holds this frame


def _process_error(
    run: Run, processes: Processes, interrupt: BaseException | None
) -> BaseException:
    """Return the error of a step of several processes, which all of them raise.

    It is raised elsewhere: here it has a name, and a traceback holds the names of its frames.
    """
    if run.failure is not None and isinstance(run.failure[1], PeerError):
        processes.watch.wait_for_failure()  # of the process that this one has it from
    own = _own_failure(run, processes, interrupt)
    failure = own if own is None else processes.watch.post(own)
    failure = failure or processes.watch.failure
    assert failure is not None
    processes.watch.publish_last_words(run.part().pack())
    words = processes.watch.collect_last_words()
    parts = [Part.unpack(run.graph, text) for text in words.values() if text]
    text = processes.watch.explain()
    cause = run.failure[1] if run.failure is not None and failure.rank == processes.rank else None
    kinds = {
        "raised": PeerError if cause is None or isinstance(cause, Mismatch) else StageError,
        "stalled": StallError,
        "silent": StallError,
    }
    timeline = whole(run.graph, parts or [run.part()]).timeline
    error = kinds.get(failure.kind, PeerError)(text + _stepped(run, timeline.ran))
    error.timeline = timeline
    if interrupt is not None and not isinstance(interrupt, Exception):
        interrupt.timeline = error.timeline  # type: ignore[attr-defined]
        return interrupt
    error.__cause__ = cause
    return error


def _of_one_process(run: Run) -> ExecutionError:
    """Return the error of a step of one process."""
    error: ExecutionError
    if run.failure is None:
        assert run.stall is not None
        text = run.stall.message
        others = [str(h) for h in run.status().heads if not text.startswith(f"{h.task} hangs")]
        error = StallError(text + (f"; meanwhile {'; '.join(others)}" if others else ""))
    elif run.failure[0] < 0 and isinstance(run.failure[1], ExecutionError):
        error = run.failure[1]  # as of a pipeline that was closed
    else:
        index, cause = run.failure
        error = StageError(
            f"{_failed(run, index, cause)}; all other work was stopped, and .timeline holds what "
            f"ran before{_stepped(run, run.ran)}"
        )
        error.__cause__ = cause
    error.timeline = run.readings().timeline
    return error


def _stepped(run: Run, ran: NDArray[np.bool_]) -> str:
    """Return which optimizers have changed weights in a step that failed, as text."""
    stages = np.unique(run.graph.stage[ran & (run.graph.op == Op.STEP)]).tolist()
    if not stages or not any(run.optimizers):
        return ""
    one = len(stages) == 1
    return (
        f"; the optimizer{'' if one else 's'} of stage{'' if one else 's'} "
        f"{', '.join(map(str, stages))} {'has' if one else 'have'} stepped, others have not: load "
        "weights and optimizer state from before the step, or make the model anew"
    )


def _failed(run: Run, index: int, cause: BaseException) -> str:
    return f"{run.graph.task(index)} failed ({run.where(index)}): {type(cause).__name__}: {cause}"


def _own_failure(run: Run, processes: Processes, interrupt: BaseException | None) -> Failure | None:
    """Return what failed in this process, for everyone to know; None if nothing did."""
    rank, step = processes.rank, run.number
    if run.failure is None:
        return None
    index, cause = run.failure
    if isinstance(cause, Exception) and index < 0:
        text = f"rank {rank}, step {step}: {type(cause).__name__}: {cause}"
        return Failure("raised", rank, text)
    if interrupt is not None or index < 0:
        name = type(interrupt or cause).__name__
        heads = "; ".join(map(str, run.status().heads)) or "between tasks"
        text = f"rank {rank} was interrupted in step {step} ({name}): {heads}"
        return Failure("ended", rank, text)
    if isinstance(cause, LostConnection):
        return Failure("lost", *processes.blame(cause))
    text = f"rank {rank}, step {step}: {_failed(run, index, cause)}"
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
    tasks = [f"in {graph.task(task)} ({place(graph, task)})" for task in noted.tasks]
    return f"rank {rank} was {' and '.join(tasks) or 'between tasks'} of step {step}"
