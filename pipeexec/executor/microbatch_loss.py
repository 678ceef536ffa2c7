"""The end of a last stage's forward: the loss of a micro-batch, in the step under way.

Stages outlive steps, and are held by their pipeline. So they hold this, which holds a step while it
runs, and never the pipeline: of two objects that hold each other neither is freed before Python's
cycle collector runs, and on a GPU that may be too late.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeexec.executor.step import Step
from pipesim.errors import ExecutionError

__all__ = ["Finish"]


class Finish:
    """Computes the losses of the step under way.

    Attributes
    ----------
    run
        The step; None between steps.
    """

    def __init__(self) -> None:
        self.step: Step | None = None

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the weighted loss of a micro-batch, and note it.

        Raises
        ------
        ExecutionError
            If the loss depends on no parameter, though there are some.
        """
        step = self.step
        assert step is not None
        loss = step.inputs.loss.microbatch_loss(
            step.inputs.shares.number(replica, microbatch), output
        )
        if torch.is_grad_enabled() and not loss.requires_grad:
            _check_frozen(step)
        return loss


def _check_frozen(step: Step) -> None:
    """Raise unless all parameters are frozen, as a loss without gradients trains none."""
    parameters = (p for stage in step.gradients.stages for p in stage.module.parameters())
    if step.processes is not None or any(p.requires_grad for p in parameters):
        raise ExecutionError(
            "the loss does not depend on any parameter by operations that torch can "
            "differentiate, so that a step would train nothing; look for detach(), no_grad(), "
            "item() or integers in the last stage and the loss, and for a loss that does not "
            "use the output"
        )
