"""Steps that count memory, and leave no trace in the model.

Each probe runs a step eagerly, since a replayed CUDA graph takes no memory. The caller holds the
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pipeexec.executor.memory.allocator_memory import Allocated, sample_tasks
from pipeexec.executor.memory.byte_counter import ByteCounter
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.results.step_result import StepResult
from pipeexec.executor.step import Step
from pipeexec.executor.step_runner import StepRunner
from pipeexec.nesting import tensors_in
from pipeexec.stages.activation_bytes import ActivationMeter
from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.stage import attach_meters


def count_activations(
    runner: StepRunner, inputs: Batch, targets: Any, groups: Sequence[int]
) -> list[ActivationMeter]:
    """Count the activations of a step; return a meter for each group of stages.

    ``groups`` has the number of each stage's group.
    """
    meters = _activation_meters(runner, inputs, targets, max(groups) + 1)
    with runner.preserved(), attach_meters(runner.stages, [meters[group] for group in groups]):
        runner.run(inputs, targets, Step.walk)
    return meters


def count_task_bytes(
    runner: StepRunner, inputs: Batch, targets: Any
) -> tuple[ByteCounter, StepResult]:
    """Count the activations, gradients and buffers of a step, task by task."""
    meters = _activation_meters(runner, inputs, targets, runner.graph.n_devices)
    nbytes = ByteCounter(len(runner.graph), meters)
    tasks = [nbytes.wrap(task) for task in runner.tasks]
    homes = runner.graph.homes.ravel().tolist()
    with runner.preserved(), attach_meters(runner.stages, [meters[device] for device in homes]):
        step = runner.run(inputs, targets, partial(_walk_alone, tasks))
        return nbytes, runner.result(step)


def sample_allocator(runner: StepRunner, inputs: Batch, targets: Any) -> Allocated:
    """Sample torch's allocator after each task of a step."""
    tasks, samples = sample_tasks(runner.tasks, runner.model.devices)
    with runner.preserved():
        step = runner.run(inputs, targets, partial(_walk_alone, tasks))
    return samples.at_task_times(step.readings().timeline)


def _activation_meters(
    runner: StepRunner, inputs: Batch, targets: Any, n: int
) -> list[ActivationMeter]:
    """Return ``n`` meters; weights and the batch, which no step allocates, do not count."""
    check_batch(inputs, targets)
    modules = [stage.module for stage in runner.stages]
    weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    batch = tensors_in((inputs, targets))
    return [ActivationMeter(weights, batch) for _ in range(n)]


def _walk_alone(tasks: Sequence[PlannedTask], step: Step, _: Sequence[PlannedTask]) -> None:
    """Issue ``tasks`` from this thread, in place of the planned tasks that host threads issue."""
    step.hosts = None
    step.walk(tasks)
