"""`measure` and `profile`: the costs of a pipeline, from steps on its own devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.profile import Profile
from pipeexec.stages.batches import Batch
from pipesim.costs.costs import Costs
from pipesim.errors import check_count, check_type
from pipesim.graph.graph import TaskGraph

__all__ = ["measure", "profile"]


def profile(
    pipeline: Pipeline, inputs: Batch, targets: Any, *, n_steps: int = 7, warm_up: int = 2
) -> Costs:
    """Return the costs of a pipeline's stages on its devices; `measure` returns tables too.

    Parameters
    ----------
    inputs, targets
        A batch as for ``pipeline.step``. Parameters, buffers and optimizers are unchanged after. Of
        `Microbatches`, costs have a value a stage and micro-batch; equal shapes are measured once.
    n_steps, warm_up
        Number of measured steps, and of steps before them that are not measured.

    Warns
    -----
    AccuracyWarning
        If tasks are shorter than 1 ms, or their mean varies by more than 20 % between steps.
    """
    return measure(pipeline, inputs, targets, n_steps=n_steps, warm_up=warm_up).costs


def measure(
    pipeline: Pipeline,
    inputs: Batch,
    targets: Any,
    *,
    n_steps: int = 7,
    warm_up: int = 2,
    graphs: Iterable[TaskGraph] | None = None,
) -> Profile:
    """Measure every cost of a pipeline's stages; see `profile` for the arguments.

    The costs are for ``graphs``: if one of them has a split backward, I and W are measured. None
    stands for the pipeline's own graph.

    Raises
    ------
    ArgumentError
        For arguments of a wrong type, and batches that ``pipeline.step`` does not accept.
    """
    check_type("pipeline", pipeline, Pipeline)
    n_steps, warm_up = check_count("n_steps", n_steps), check_count("warm_up", warm_up, 0)
    with guard_processes(pipeline.processes):
        check_results([pipeline.graph], n_steps=n_steps)
    calibration = Calibration(pipeline, inputs, targets, graphs)
    calibration.warm_up(warm_up)
    for _ in range(n_steps):
        calibration.step()
    return calibration.result()
