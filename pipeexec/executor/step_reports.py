"""Report a step: its error, if it failed, to the caller, and its end to the other processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeexec.distributed.channels import ExpectedMessage, LostConnection, Mismatch, set_step
from pipeexec.distributed.flight_recorder import GRAPH, N_ENDED
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.watchdog import Failure, Status
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.remote_messages import agree_on_graph, agree_on_messages
from pipeexec.executor.step import Step, task_place
from pipeexec.executor.step_result import ProcessResult, merge_results
from pipeexec.stages.module_call import OutputAlone
from pipesim.errors import ExecutionError, PeerError, StageError, StallError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

# The error of a failed step: task, place, and tasks of the other processes


def raise_failure(
    step: Step, processes: Processes | None, interrupt: BaseException | None = None
) -> NoReturn:
    """Raise the error that stopped a step; its ``timeline`` holds the tasks that ran before.

    ``interrupt`` is an exception from outside a task, such as KeyboardInterrupt.
    """
    try:
        if processes is None:
            raise _single_process_error(step)
        raise _multi_process_error(step, processes, interrupt)
    finally:
        del interrupt  # if it is raised, its traceback holds this frame


def _multi_process_error(
    step: Step, processes: Processes, interrupt: BaseException | None
) -> BaseException:
    """Return the error of a step of several processes, which every process raises.

    The caller raises it. A traceback holds the local variables of its frames, and the error is
    such a variable here.
    """
    if step.failure is not None and isinstance(step.failure[1], PeerError):
        processes.watch.wait_for_failure()  # of the process in which the error began
    local_failure = _local_failure(step, processes, interrupt)
    failure = None if local_failure is None else processes.watch.post(local_failure)
    failure = failure or processes.watch.failure
    assert failure is not None
    processes.watch.publish_final_status(step.process_result().pack())
    timelines = processes.watch.collect_final_statuses()
    parts = [ProcessResult.unpack(step.graph, text) for text in timelines.values() if text]
    text = processes.watch.explain()
    cause = step.failure[1] if step.failure is not None and failure.rank == processes.rank else None
    error_types = {
        "raised": PeerError if cause is None or isinstance(cause, Mismatch) else StageError,
        "stalled": StallError,
        "silent": StallError,
    }
    timeline = merge_results(step.graph, parts or [step.process_result()]).timeline
    error = error_types.get(failure.kind, PeerError)(text + _optimizer_note(step, timeline.ran))
    error.timeline = timeline
    if interrupt is not None and not isinstance(interrupt, Exception):
        interrupt.timeline = error.timeline  # type: ignore[attr-defined]
        return interrupt
    error.__cause__ = cause
    return error


def _single_process_error(step: Step) -> ExecutionError:
    error: ExecutionError
    if step.failure is None:
        assert step.stall is not None
        text = step.stall.message
        others = [str(h) for h in step.status().heads if not text.startswith(f"{h.task} hangs")]
        error = StallError(text + (f"; meanwhile {'; '.join(others)}" if others else ""))
    elif step.failure[0] < 0 and isinstance(step.failure[1], ExecutionError):
        error = step.failure[1]  # for example, the pipeline was closed
    else:
        index, cause = step.failure
        error = StageError(
            f"{_task_error_text(step, index, cause)}; all other work was stopped, and .timeline "
            f"holds the tasks that ran before{_optimizer_note(step, step.events.ran)}"
        )
        error.__cause__ = cause
    error.timeline = step.readings().timeline
    return error


def _optimizer_note(step: Step, ran: NDArray[np.bool_]) -> str:
    """Name the stages whose optimizers changed weights in a failed step; empty if none did."""
    stages = np.unique(step.graph.stage[ran & (step.graph.op == Op.STEP)]).tolist()
    if not stages or not any(step.gradients.optimizers):
        return ""
    one = len(stages) == 1
    return (
        f"; the optimizer{'' if one else 's'} of stage{'' if one else 's'} "
        f"{', '.join(map(str, stages))} {'has' if one else 'have'} stepped, others have not: load "
        "weights and optimizer state from before the step, or create the model again"
    )


def _task_error_text(step: Step, index: int, cause: BaseException) -> str:
    task, place = step.graph.task(index), task_place(step.graph, index)
    notes = "".join(f" ({note!s:.300})" for note in getattr(cause, "__notes__", ()))
    return f"{task} failed ({place}): {type(cause).__name__}: {cause}{notes}"


def _local_failure(
    step: Step, processes: Processes, interrupt: BaseException | None
) -> Failure | None:
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
    text = f"rank {rank}, step {number}: {_task_error_text(step, index, cause)}"
    return Failure("raised", rank, text)


def describe_last_task(graph: TaskGraph, number: int, processes: Processes, rank: int) -> str:
    """Return the last recorded step and tasks of a process that does not answer, as text.

    ``number`` is the number of ``graph`` in the flight recorder.
    """
    record = processes.recorder.read(rank)
    if record is None:
        return processes.watch.board.describe_last_status(rank)
    if record.n_begun == record.n_ended:
        return f"last seen {Status(rank, record.n_ended, False, 0, [])}"
    step = record.n_begun - 1
    if record.graph != number:
        return f"rank {rank} was in step {step}"
    tasks = [f"in {graph.task(task)} ({task_place(graph, task)})" for task in record.tasks]
    return f"rank {rank} was {' and '.join(tasks) or 'between tasks'} of step {step}"


# Reports to other processes

#: Shapes of batches whose messages are kept; others are agreed on anew.
_MOST_SHAPES = 32


class ProcessReports:
    """Reports the steps of one graph to the other processes, which describe failures with them.

    Every process must make it, with the same graph.

    Attributes
    ----------
    shapes
        Those of `Microbatches`, or of the batch of a forward-only graph, as text that is equal in
        all processes; None for other steps, whose batches have one shape.
    """

    def __init__(self, graph: TaskGraph, model: PlacedModel, processes: Processes) -> None:
        self.graph, self.model, self.processes = graph, model, processes
        self._graph_number = agree_on_graph(graph, processes)
        self.shapes: object = None
        self._messages: dict[object, dict[int, ExpectedMessage]] = {}

    def start(self, step: Step, tasks: Sequence[PlannedTask]) -> None:
        """Agree on the messages of the first step of `shapes`, and report that a step starts."""
        processes = self.processes
        if self.shapes not in self._messages:
            modules = list(self.model.modules)
            for part in self.model.parts:
                modules = [part.shape_module(module) for module in modules]
            for slot, module in enumerate(modules):
                stage = slot % self.graph.n_stages
                if stage in step.inputs.loss.function.of_stages:
                    modules[slot] = OutputAlone(stage, module)
            if len(self._messages) >= _MOST_SHAPES:
                del self._messages[next(iter(self._messages))]
            self._messages[self.shapes] = agree_on_messages(
                self.graph, tasks, modules, self.model.devices, step.inputs, processes
            )
        step.expected_messages = self._messages[self.shapes]
        set_step((message.head for message in step.expected_messages.values()), step.number)
        number = processes.recorder.own[GRAPH] = self._graph_number
        describe = partial(describe_last_task, self.graph, number, processes)
        processes.reporter.start_step(step.status, describe)
        processes.measured = lambda: step.readings(is_over=False).timeline

    def end(self, n_steps: int) -> None:
        """Report that a step has ended without a failure; ``n_steps`` have now."""
        processes = self.processes
        processes.has_stepped = True
        processes.reporter.end_step(Status(processes.rank, n_steps, False, 0, []))
        processes.recorder.own[N_ENDED] = n_steps

    def keep_readings(self, step: Step) -> None:
        """Keep the status and the events of a step that has ended, but none of its tensors."""
        if step.failure is not None or step.abandoned:
            self.processes.reporter.end_step(step.status())
        readings = step.readings()
        self.processes.measured = lambda: readings.timeline

    def keep_timeline(self, timeline: Timeline) -> None:
        """Keep a measured timeline, which an error between steps carries."""
        self.processes.measured = lambda: timeline
