"""`EvaluationMethods`: the methods of `Pipeline` that run forwards alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pipeexec.executor.evaluation.evaluator import Evaluator
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.results.step_result import EvaluationResult


class EvaluationMethods(ABC):
    """Methods of `Pipeline` that evaluate batches and predict outputs."""

    _model: PlacedModel
    _evaluator: Evaluator

    @abstractmethod
    def _checked(self, inputs: Any) -> Any:
        """Return inputs whose tensors are in the order in which the first stage takes them."""

    def evaluate(self, inputs: Any, targets: Any) -> EvaluationResult:
        """Return the loss of a batch, from the forwards of the schedule alone.

        - Modules are in evaluation mode meanwhile. Afterwards each has its own mode again, and
          gradients, buffers, optimizers, random numbers and ``n_steps`` are as before.
        - The loss is combined as that of a step. Mini-batches count as one batch.
        - Batches may have different sizes. One with fewer samples than micro-batches runs with
          fewer micro-batches. Each replica, and each path, needs one sample. `Microbatches` may be
          fewer than those of the schedule, too.
        - `torch.autocast` around the call holds for all stages and the loss. A step that is
          captured as a CUDA graph stays as it is; this runs eagerly.

        Parameters
        ----------
        inputs, targets
            As those of `Pipeline.step`; all processes must call this.

        Returns
        -------
        EvaluationResult
            Loss, metrics, and the measured timeline of the forwards (s).

        Raises
        ------
        StageError, StallError, PeerError
            As `Pipeline.step`. After a `StageError` in one process, the pipeline can be used again.
            A process does not wait for the stages after its own: their errors may come with its
            next call.
        ExecutionError
            If the pipeline is closed, or called from another thread, a stage, or a forked process.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     result = pipeline.evaluate(x, x)
        >>> bool(torch.isclose(result.loss, mse_loss(stages[1](stages[0](x)), x)))
        True
        """
        with self._model.locked_open("evaluate"):
            return self._evaluator.evaluate(self._checked(inputs), targets)

    def predict(self, inputs: Any) -> Any:
        """Return the model's output for a batch, from the forwards of the schedule alone.

        It runs like `evaluate`, without targets and loss. The output is nested as that of the last
        stage: the model's own output if `pipeexec.split` made the stages. Micro-batches are joined
        in the order of the batch, on the device of the last stage:

        - Tensors whose first dimension is that of the samples are concatenated.
        - Other values, such as numbers, must be equal in all micro-batches.
        - Of `Microbatches`, the outputs are a list, one a micro-batch.

        Parameters
        ----------
        inputs
            Inputs of a batch, as for `step`.

        Returns
        -------
        object
            The output. With several processes: of the replicas whose last stage is in this process,
            None if there are none.

        Raises
        ------
        ExecutionError
            As `evaluate`; and if outputs of micro-batches cannot be joined, naming the value.
        StageError, StallError, PeerError
            As `evaluate`.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     y = pipeline.predict(x)
        >>> y.shape, torch.allclose(y, stages[1](stages[0](x)))
        (torch.Size([8, 4]), True)
        """
        with self._model.locked_open("predict"):
            return self._evaluator.predict(self._checked(inputs))
