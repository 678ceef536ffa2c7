"""Sharded embeddings as stages of a pipeline: exchanges of keys, vectors and gradients.

ALL_TO_ALL runs the exchanges; DISPATCH and REORDER are tasks of the device around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices.device import Values, device_ranks
from pipeexec.embedding.stage import (
    EmbeddingStage,
    ForwardShardedStage,
    ShardedStage,
    check_embedding,
    check_keys,
)
from pipeexec.executor.op_handlers import convert_collective_errors, task_input
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StageArguments, StepPart
from pipeexec.stages.stage import StageLike
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op


class ShardedEmbeddings(StepPart):
    """Stages whose rows are spread over their replicas; each replica has separate gradients."""

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless each sharded stage is an embedding over its replicas."""
        rank = 0 if model.processes is None else model.processes.rank
        for stage in graph.sharded:
            ranks = device_ranks([model.devices[d] for d in graph.homes[:, stage]], rank)
            copies = model.modules[stage :: graph.n_stages]
            for module in [x for x in copies if not isinstance(x, RemoteStage)][:1]:
                check_embedding(module, stage, ranks)

    def weight_shares(
        self, graph: TaskGraph, stage: int, module: nn.Module
    ) -> Mapping[nn.Parameter, str]:
        """Return that each rank has different rows."""
        if stage not in graph.sharded or not isinstance(module, EmbeddingStage):
            return {}
        return dict.fromkeys(module.parameters(), f"rows of rank {module.embedding.rank}")

    def make_stages(
        self, graph: TaskGraph, arguments: Sequence[StageArguments], *, trains: bool
    ) -> Mapping[int, StageLike]:
        """Return the stages that are embeddings."""
        kind = ShardedStage if trains else ForwardShardedStage
        parts = graph.part[graph.op == Op.ALL_TO_ALL]
        options = {
            "reorders": bool((graph.op == Op.DISPATCH).any()),
            "accumulates": bool((parts == EXCHANGES.index("accumulated")).any()),
        }
        return {
            slot: kind(x.module, x.stage, x.counter, **options)
            for slot, x in enumerate(arguments)
            if x.stage in graph.sharded and isinstance(x.module, EmbeddingStage)
        }

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of the exchanges, and of the tasks around them."""
        return {Op.ALL_TO_ALL: _exchange, Op.DISPATCH: _dispatch, Op.REORDER: _reorder}

    def sync(self, step: Step) -> None:
        """Check the keys of the batch before any is sent."""
        if 0 not in step.graph.sharded:  # others get their keys from the stage before
            return
        if step.inputs.arguments[0] is not None:
            raise ArgumentError(
                "the first stage is sharded, and takes tensors of which the last one has the keys, "
                "but the inputs have other values, or names; give a tuple of tensors"
            )
        first = [stage.module for stage in step.gradients.stages[:: step.graph.n_stages]]
        check_keys(first, step.inputs.microbatches[0])

    def before(self, step: Step) -> None:
        """Let the rows of each replica count."""
        n = step.graph.n_stages
        slots = range(len(step.gradients.stages))
        step.gradients.separate.update(x for x in slots if x % n in step.graph.sharded)


def _sharded(task: PlannedTask) -> ShardedStage:
    assert isinstance(task.stage, ShardedStage)
    return task.stage


def _exchange(step: Step, task: PlannedTask) -> None:
    stage, name = _sharded(task), EXCHANGES[task.part]
    values = () if name == "accumulated" else task_input(step, task)
    _keep_for_both_streams(task, (*values, *stage.held_tensors(task.microbatch)))
    with convert_collective_errors(task.group):
        outputs = step.results[task.id] = stage.exchange(name, task.microbatch, values)
    _keep_for_both_streams(task, (*outputs, *stage.held_tensors(task.microbatch)))
    step.events.nbytes[task.id] = stage.sent


def _dispatch(step: Step, task: PlannedTask) -> None:
    step.results[task.id] = _sharded(task).dispatch(task.microbatch, task_input(step, task))


def _reorder(step: Step, task: PlannedTask) -> None:
    values, name = step.pop_result(task.source), EXCHANGES[task.part]
    step.results[task.id] = _sharded(task).reorder(name, task.microbatch, values)


def _keep_for_both_streams(task: PlannedTask, values: Values) -> None:
    """Keep the memory of tensors until an exchange's stream and the compute stream have used it.

    Lookups read tensors that exchanges received. Exchanges send results of lookups.
    """
    for value in values:
        if value is not None:
            for stream in (task.stream, task.device.stream("compute")):
                task.device.adopt(value, stream)
