"""Shapes of outputs and targets of `Microbatches`: where a mean over samples may be no mean of all.

A mean over samples is weighted by samples. A mean over tokens is not the mean over all tokens then,
if sequences of micro-batches have different lengths. Outputs of different lengths cannot be joined,
so that `pipeexec.stages.loss.loss_check` cannot compare.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeexec.stages.loss.loss_function import Count
from pipeexec.stages.microbatches import shapes_beyond_samples
from pipesim.errors import ExecutionError


class LossShapes:
    """Shapes of the outputs and targets of one step's `Microbatches`, without their samples.

    Parameters
    ----------
    targets
        Those of the targets, as text, of all processes.
    has_weights
        Whether the user gives the weights of micro-batches.
    """

    def __init__(self, targets: Iterable[str], *, has_weights: bool) -> None:
        self._has_weights = has_weights
        self._targets, self._outputs = dict.fromkeys(targets), dict[str, None]()

    def note(self, output: object, count: Count | None) -> None:
        """Note the shapes of an output.

        Raises
        ------
        ExecutionError
            If the loss of micro-batches with weights has a count.
        """
        if self._has_weights and count is not None:
            raise ExecutionError(
                "loss_fn returned (sum, count), and Microbatches have weights: both say how much a "
                "micro-batch counts; leave the weights out"
            )
        self._outputs[str(shapes_beyond_samples(output))] = None

    def unlike(self) -> tuple[str, list[str]] | None:
        """Return the name and shapes of values whose shapes differ; None if there are weights."""
        for name, shapes in (("outputs", self._outputs), ("targets", self._targets)):
            if len(shapes) > 1 and not self._has_weights:
                return name, list(shapes)
        return None
