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


def profile(
    pipeline: Pipeline, inputs: Batch, targets: Any, *, n_steps: int = 7, warm_up: int = 2
) -> Costs:
    """Return the costs of a pipeline's stages on its devices; `measure` returns tables too.

    Parameters
    ----------
    pipeline
        Pipeline whose stages and devices are measured; it stays open.
    inputs, targets
        A batch as for ``pipeline.step``. Parameters, buffers and optimizers are unchanged after. Of
        `Microbatches`, costs have a value a stage and micro-batch; equal shapes are measured once.
    n_steps, warm_up
        Number of measured steps, and of steps before them that are not measured.

    Returns
    -------
    Costs
        Seconds and bytes of each operation and stage, with measured links between the devices.

    Raises
    ------
    CapacityError
        If the results of ``n_steps`` steps do not fit in memory.
    ExecutionError
        If the pipeline is closed, or a step runs in another thread.
    StageError, StallError, PeerError
        As ``pipeline.step``.

    Warns
    -----
    AccuracyWarning
        If tasks are shorter than 1 ms, or their mean varies by more than 20 % between steps.

    See Also
    --------
    pipeexec.measure : The same, with the tables of the measurement.
    pipeexec.validate : Compare predictions from such costs with measured steps.
    pipeexec.project : Profile layers on one device, to predict steps on many.
    pipesim.simulate : Predict a timeline from costs.

    Examples
    --------
    One worker, which sends no messages, takes some milliseconds. Tasks this short cause an
    `AccuracyWarning`:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 1, 4))
    >>> x = torch.ones(8, 4)
    >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
    ...     costs = px.profile(pipeline, x, x, n_steps=1)
    >>> len(costs.forward), ps.simulate(graph, costs).makespan > 0
    (1, True)
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
    """Measure every cost of a pipeline's stages, and return the tables of the measurement, too.

    Parameters
    ----------
    pipeline, inputs, targets, n_steps, warm_up
        As for `profile`.
    graphs
        Graphs that the costs are for. If one of them has a split backward, I and W are measured.
        None stands for the pipeline's own graph.

    Returns
    -------
    Profile
        Costs, and tables of durations (s), messages (s, bytes) and fitted links.

    Raises
    ------
    CapacityError
        If the results of ``n_steps`` steps do not fit in memory.
    ExecutionError, StageError, StallError, PeerError
        As `profile`.

    Warns
    -----
    AccuracyWarning
        As `profile`.

    See Also
    --------
    pipeexec.profile : Return the costs alone.
    pipeexec.Profile : Tables of the result.
    pipeexec.validate : Compare predictions from such costs with measured steps.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 1, 4))
    >>> x = torch.ones(8, 4)
    >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
    ...     profile = px.measure(pipeline, x, x, n_steps=1)
    >>> profile.table.index.tolist()
    [('F', 0), ('B', 0), ('R', 0), ('STEP', 0)]
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
