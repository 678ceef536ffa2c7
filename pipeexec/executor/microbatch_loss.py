"""`MicrobatchLoss`: compute the loss of a micro-batch at the end of a last stage's forward.

A pipeline holds its stages. A stage holds a `MicrobatchLoss`, which holds the current step and
never the pipeline. A reference cycle would keep the memory of both until Python's cycle collector
runs. On a GPU, that may be too late.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeexec.executor.step import Step
from pipesim.errors import ExecutionError


class MicrobatchLoss:
    """Compute the losses of the current step.

    Attributes
    ----------
    step
        Current step; None between steps.
    """

    def __init__(self) -> None:
        self.step: Step | None = None

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the weighted loss of a micro-batch, and store it in the step.

        Raises
        ------
        ExecutionError
            If the loss depends on no parameter, and a stage has a parameter to train. Also in a
            task that goes on after its step was abandoned.
        """
        step = self.step
        if step is None:
            raise ExecutionError("the step of this task was abandoned, as an error says")
        loss = step.inputs.loss.microbatch_loss(
            step.inputs.shares.number(replica, microbatch), output
        )
        if torch.is_grad_enabled() and not loss.requires_grad:
            _check_all_frozen(step)
        return loss


def _check_all_frozen(step: Step) -> None:
    """Raise `ExecutionError` unless all parameters are frozen: the loss has no gradient."""
    parameters = (p for stage in step.gradients.stages for p in stage.module.parameters())
    if step.processes is not None or any(p.requires_grad for p in parameters):
        raise ExecutionError(
            "the loss does not depend on any parameter by operations that torch can "
            "differentiate, so a step would train nothing; look for detach(), no_grad(), "
            "item() or integers in the last stage and the loss, and for a loss that does not "
            "use the output"
        )
