"""`StepPart`: a feature of training steps, in one place; the core of the executor calls its hooks.

A pipeline is made::

    check           may the graph be run?
    agree           have all processes the same options?
    weight_shares   which weights differ between processes?
    place           take modules and optimizers

A graph is planned::

    make_stages     stages that run otherwise
    handlers        functions that run tasks; stage_handler
    group_backend   of collectives of several processes
    prepare         stages and planned tasks

A step runs. After a failure, ``restore`` takes the place of ``after`` and ``result``::

    shape_module    shapes of messages between processes, in a first step
    sync            values of parameters and of the batch; evaluations run this hook alone
    before          gradients from before the step, options of stages
    tasks           before_optimizer in each STEP
    after           complete gradients; the last part first
    result          fields of `StepResult`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pipeexec.distributed.processes import Processes
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.module_call import LossCall
from pipeexec.stages.stage import StageLike
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import Op

if TYPE_CHECKING:  # they hold parts
    from pipeexec.executor.placed_model import PlacedModel
    from pipeexec.executor.planned_task import Handler, PlannedTask
    from pipeexec.executor.step import Step


class StageArguments(NamedTuple):
    """Arguments with which each stage is made; see `pipeexec.stages.stage.Stage`."""

    module: nn.Module
    stage: int
    device: torch.device
    counter: ActivationCounter
    loss_fn: LossCall | None


class StepPart:
    """A feature of steps; each hook does nothing unless a part overrides it.

    One object serves the steps of all graphs of a placed model. It must not hold the model, which
    holds it: threads and tensors would wait for Python's cycle collector. Values of one step are in
    ``step.state[part]``, as tasks of an abandoned step may still run in the next one.
    """

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless a graph can be run with this part."""

    def agree(self, model: PlacedModel, processes: Processes) -> None:
        """Check that every process has the same options."""

    def weight_shares(
        self, graph: TaskGraph, stage: int, module: nn.Module
    ) -> Mapping[nn.Parameter, str]:
        """Return the share of each weight of which processes have different ones, as text."""
        return {}

    def place(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Take the modules and optimizers of a model; all processes call this."""

    def make_stages(
        self, graph: TaskGraph, arguments: Sequence[StageArguments], *, trains: bool
    ) -> Mapping[int, StageLike]:
        """Return the stages that are of another class, by slot; they train, or evaluate."""
        return {}

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of the operations of this part."""
        return {}

    def stage_handler(self, task: Task, stage: StageLike) -> Handler | None:
        """Return the handler of a task that this stage runs otherwise; None for others."""
        return None

    def group_backend(self, task: Task, ranks: Sequence[int]) -> str | None:
        """Return the backend of a collective whose members have these ranks; None for gloo."""
        return None

    def prepare(
        self, graph: TaskGraph, stages: Sequence[StageLike], tasks: Sequence[PlannedTask]
    ) -> None:
        """Take the stages and planned tasks of a graph."""

    def shape_module(self, module: nn.Module) -> nn.Module:
        """Return a module that runs alone, and has outputs of the shapes of a stage."""
        return module

    def sync(self, step: Step) -> None:
        """Prepare values for a step or an evaluation, before replicas take those of the first."""

    def before(self, step: Step) -> None:
        """Prepare a step that trains."""

    def before_optimizer(self, step: Step, task: PlannedTask) -> bool:
        """Change the complete gradients of a stage in its STEP; return whether to step."""
        return True

    def after(self, step: Step) -> None:
        """Complete a step whose tasks have all run."""

    def restore(self, step: Step) -> None:
        """Restore what a failed step changed."""

    def result(self, step: Step) -> Mapping[str, Any]:
        """Return fields of `StepResult`."""
        return {}

    def preserved(self) -> AbstractContextManager[None]:
        """Restore all that steps change in this part at the end of a block."""
        return nullcontext()

    def close(self) -> None:
        """Free memory, as no step follows."""
