"""`log_row`: the numbers of one training step, as a row of the log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.results.step_result import StepResult
from pipeexec.stages.microbatches import Microbatches
from pipesim.timeline.timeline import Timeline


def log_row(
    pipeline: Pipeline,
    result: StepResult,
    counts: Mapping[str, float],
    *,
    step: int,
    epoch: int,
    seconds: float,
    predicted: Mapping[str, float],
) -> dict[str, float]:
    """Return the row of a step.

    Parameters
    ----------
    result
        Of the whole pipeline.
    counts
        Numbers of ``samples``, and of ``tokens`` if there are any, of the step.
    step, epoch
        Number of the step, from 1, and of its epoch, from 0.
    seconds
        Time since the step before, with that of loading the batch (s).
    predicted
        From `predicted_columns`; empty without costs.
    """
    timeline = result.timeline
    row = {"step": step, "epoch": epoch, "loss": float(result.loss)}
    row |= result.metrics
    row |= {"lr": learning_rate(pipeline), "skipped": int(result.skipped)}
    if result.grad_norm is not None:
        row["grad_norm"] = float(result.grad_norm)
    row["seconds"] = seconds
    row |= {f"{name}_per_s": count / seconds for name, count in counts.items()}
    return {
        **row,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        **predicted,
    }


def predicted_columns(predicted: Timeline) -> dict[str, float]:
    """Return the columns of a simulated step, which are the same in all rows."""
    return {
        "predicted_makespan": predicted.makespan,
        "predicted_bubble": predicted.bubble_fraction,
    }


def learning_rate(pipeline: Pipeline) -> float:
    """Return the learning rate of the first parameter group; NaN if there is none here."""
    for optimizer in pipeline.optimizers:
        if optimizer is not None:
            return float(optimizer.param_groups[0]["lr"])
    return math.nan


def batch_counts(pipeline: Pipeline, inputs: Any, targets: Any) -> dict[str, float]:
    """Return the numbers of samples and tokens of a step, of all processes.

    Samples are the length of the first tensor of the batch. Tokens are the elements of the first
    tensor of the inputs, if it has whole numbers and two dimensions: the ids of a language model.
    Each process has the samples of its replicas. Those of `Microbatches` are added up.
    """
    batch = inputs if isinstance(inputs, Microbatches) else targets
    if isinstance(batch, Microbatches):
        rows = [batch_counts(pipeline, x, None) for x in batch]
        return {name: sum(row.get(name, 0) for row in rows) for name in rows[0]}
    leaves = [x for x in pytree.tree_leaves((inputs, targets)) if isinstance(x, Tensor) and x.dim()]
    if not leaves:
        return {}
    first, shares = leaves[0], pipeline.shares
    times = shares.n_shares / max(1, len(shares.local))
    counts = {"samples": len(first) * times}
    if first.dim() == 2 and first.dtype in (torch.int64, torch.int32):
        counts["tokens"] = first.numel() * times
    return counts
