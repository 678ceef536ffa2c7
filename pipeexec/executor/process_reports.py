"""`ProcessReports`: agree with the other processes on a graph, and report the steps of this one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipeexec.distributed.channels import ExpectedMessage
from pipeexec.distributed.flight_recorder import GRAPH, N_ENDED
from pipeexec.distributed.message_headers import set_step
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.status import Status
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.setup.agreement import agree_on_graph, agree_on_messages
from pipeexec.executor.step import Step
from pipeexec.executor.step_errors import describe_last_task
from pipeexec.experts.stage_parts import shape_module
from pipesim.graph.graph import TaskGraph
from pipesim.timeline.timeline import Timeline

#: Shapes of batches whose messages are kept; others are agreed on anew.
_MOST_SHAPES = 32


class ProcessReports:
    """Reports the steps of one graph to the other processes, which describe failures with them.

    Every process must make it, with the same graph.

    Parameters
    ----------
    graph, model
        Graph and model of the steps.
    processes
        Processes of the pipeline.

    Attributes
    ----------
    shapes
        Those of `Microbatches`, or of the batch of a forward-only graph, as text that is equal in
        all processes; None for other steps, whose batches have one shape.

    Raises
    ------
    DeadlockError
        If messages between processes would deadlock.
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
            modules = [shape_module(module) for module in self.model.modules]
            devices = self.model.devices
            if len(self._messages) >= _MOST_SHAPES:
                del self._messages[next(iter(self._messages))]
            self._messages[self.shapes] = agree_on_messages(
                self.graph, tasks, modules, devices, step.inputs, processes
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
