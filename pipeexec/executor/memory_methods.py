"""`MemoryMethods`: the methods of `pipeexec.Pipeline` that count the bytes of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeexec.executor import step_memory as probes
from pipeexec.executor.allocator_memory import Allocated
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step_memory import Bytes, StepMemory
from pipeexec.executor.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.stages.activations import ActivationMeter
from pipeexec.stages.stage import StageLike
from pipesim.graph.graph import TaskGraph


class MemoryMethods(ABC):
    """Methods of a pipeline that count bytes; each runs a step that leaves no trace."""

    graph: TaskGraph
    stages: list[StageLike]
    _model: PlacedModel
    _runner: StepRunner

    @abstractmethod
    def _checked(self, inputs: Any) -> Any:
        """Return inputs whose tensors are in the order in which the first stage takes them."""

    @abstractmethod
    def gather(self, result: StepResult) -> StepResult:
        """Return the result of the whole pipeline."""

    @abstractmethod
    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of the processes' values, element by element."""

    def held_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes of activations that each stage holds in a step.

        They are counted in a step that leaves parameters, buffers, gradients and optimizers as they
        were. Weights do not count. In a first step, stages also hold a copy of their input. All
        processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each stage, replica after replica; length ``n_replicas * n_stages``.

        Raises
        ------
        ArgumentError, ExecutionError, StageError, StallError, PeerError
            As `pipeexec.Pipeline.step`.

        Examples
        --------
        Stage 0 holds the inputs of two micro-batches, of 32 bytes each. Stage 1 holds input, output
        and targets of one:

        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     pipeline.held_bytes(x, x)
        [64, 96]
        """
        meters = self._count_activations(inputs, targets, range(len(self.stages)))
        return list(map(int, self.total([meter.peak for meter in meters])))

    def left_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes that each stage holds for W at the end of an I.

        They are counted like those of `held_bytes`. All processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each stage, replica after replica; length ``n_replicas * n_stages``. 0 without
            split backwards.

        Raises
        ------
        ArgumentError, ExecutionError, StageError, StallError, PeerError
            As `pipeexec.Pipeline.step`.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("zb_h1", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     pipeline.left_bytes(x, x)
        [96, 128]
        """
        meters = self._count_activations(inputs, targets, range(len(self.stages)))
        return list(map(int, self.total([meter.deferred_peak for meter in meters])))

    def device_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes of activations that each device holds in a step.

        They are counted like those of `held_bytes`. All processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each device; length ``n_devices``.

        Raises
        ------
        ArgumentError, ExecutionError, StageError, StallError, PeerError
            As `pipeexec.Pipeline.step`.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     pipeline.device_bytes(x, x)
        [64, 96]
        """
        meters = self._count_activations(inputs, targets, self.graph.homes.ravel().tolist())
        return list(map(int, self.total([meter.peak for meter in meters])))

    def _count_activations(
        self, inputs: Any, targets: Any, groups: Sequence[int]
    ) -> list[ActivationMeter]:
        with self._model.locked_open("held_bytes, left_bytes or device_bytes"):
            return probes.count_activations(self._runner, self._checked(inputs), targets, groups)

    def memory(self, inputs: Any, targets: Any) -> StepMemory:
        """Return the bytes of activations, gradients and gathered parameters over a step.

        They are counted task by task. The simulator's counterpart is ``timeline.memory()``.
        Counting delays the host, so this runs a step of its own, which leaves no trace. All
        processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        StepMemory
            Bytes that each task took and gave back, and the most of each device.

        Raises
        ------
        ArgumentError, ExecutionError, StageError, StallError, PeerError
            As `pipeexec.Pipeline.step`.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     memory = pipeline.memory(x, x)
        >>> memory.peak_activations.tolist(), memory.peak_gradients.tolist()
        ([64.0, 96.0], [80.0, 80.0])
        """
        with self._model.locked_open("memory"):
            nbytes, result = probes.count_task_bytes(self._runner, self._checked(inputs), targets)
        one_gradient = [
            float(sum(p.nbytes for p in stage.module.parameters() if p.requires_grad))
            if self._model.sharding[stage.index] != "parameters"
            else 0.0
            for stage in self.stages
        ]
        columns = np.array(self.total(nbytes.columns.ravel().tolist())).reshape(8, -1)
        return StepMemory(
            self.gather(result).timeline,
            Bytes(*columns[:2]),
            Bytes(*columns[2:4]),
            Bytes(*columns[4:6]),
            np.array(self.total(one_gradient)).reshape(self.graph.homes.shape),
            Bytes(*columns[6:]),
        )

    def allocated(self, inputs: Any, targets: Any) -> Allocated:
        """Return the bytes that torch's allocator holds on each GPU over a step, task by task.

        The simulator's counterpart is ``timeline.memory()``. Sampling delays the host, so this runs
        a step of its own, which leaves no trace. Freed blocks that other streams may still read
        count in ``most_active`` alone.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        Allocated
            Bytes of each GPU over time, and the timeline of the step.

        Raises
        ------
        ExecutionError, StageError, StallError
            As `pipeexec.Pipeline.step`.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> gpus = ["cuda:0", "cuda:1"]
        >>> with px.Pipeline(stages, graph, gpus, mse_loss) as pipeline:  # doctest: +SKIP
        ...     pipeline.allocated(x, x).plot()
        """
        with self._model.locked_open("allocated"):
            return probes.sample_allocator(self._runner, self._checked(inputs), targets)
