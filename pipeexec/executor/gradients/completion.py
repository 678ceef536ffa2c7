"""Complete the gradients of a step whose tasks have all run."""

from __future__ import annotations

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.executor.gradients.gradient_sync import assign_reduced_gradients
from pipeexec.executor.optimizer_steps.accumulation import AccumulatedSteps
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step import Step
from pipesim.errors import ExecutionError


def complete_gradients(
    step: Step, model: PlacedModel, *, accumulates: bool, has_optimizer_steps: bool
) -> None:
    """Assign reduced gradients, divide by counts, add earlier gradients, and update the scale.

    Parameters
    ----------
    step
        Step whose tasks have all run.
    model
        The pipeline's model.
    accumulates
        Whether gradients are left for a later step.
    has_optimizer_steps
        Whether the graph has STEP, which divides gradients by counts itself.

    Raises
    ------
    ExecutionError
        If ``loss_fn`` returned ``(sum, count)`` in a graph that cannot divide by the count.
    """
    for slot in list(step.gradients.reduced):  # of graphs without STEP
        assign_reduced_gradients(step, slot)
    if accumulates:
        model.accumulated.add(step.inputs.loss)
    elif not has_optimizer_steps and step.inputs.loss.is_counted():
        _divide_by_counts(step, model)
    if model.accumulated.n_steps and not accumulates:
        model.accumulated = AccumulatedSteps()
    if step.gradients.earlier is not None:
        step.gradients.earlier.add()
    scaling, norm = model.gradient_options.scaling, step.gradients.norm
    if scaling is not None and norm is not None:
        scaling.update(float(norm.norm))


def _divide_by_counts(step: Step, model: PlacedModel) -> None:
    """Divide the gradients of all local stages by the count of the loss."""
    if model.cuda_graph or step.graph.n_batches > 1:
        raise ExecutionError(
            "loss_fn returned (sum, count), whose gradients are divided in STEP: the graph "
            "has none, but several mini-batches, or is captured as a CUDA graph; lower "
            "with step='flush'"
        )
    for slot in range(len(step.gradients.stages)):
        if not isinstance(model.modules[slot], RemoteStage):
            step.gradients.divide(slot, 0, step.inputs.loss)
