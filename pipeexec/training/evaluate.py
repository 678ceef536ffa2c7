"""`evaluate`: mean loss and metrics over batches."""

from __future__ import annotations

from typing import Any

from pipeexec.executor.pipeline import Pipeline
from pipeexec.training.batch_source import Batches, BatchSource
from pipeexec.training.log_row import batch_counts
from pipeexec.training.random_states import preserved_random_states


def evaluate(pipeline: Pipeline, batches: Batches) -> dict[str, float]:
    """Return means over batches, weighted by their samples, and the numbers of both.

    With ``loss_reduction="sum"``, they are means over batches of equal weight.

    Random states stay as they are, so that a training does not depend on its evaluations.
    """
    sums: dict[str, float] = {}
    n_samples = total = n_batches = 0.0
    with preserved_random_states(batches):
        source = BatchSource(batches, 1, "evaluation")
        while (batch := source.next()) is not None:
            inputs, targets = batch
            result = pipeline.gather(pipeline.evaluate(inputs, targets))
            counts = batch_counts(pipeline, inputs, targets)
            # Losses that are sums over samples are those of batches, as in the log.
            weight = 1.0 if pipeline.loss_reduction == "sum" else counts.get("samples", 1.0)
            values: dict[str, Any] = {"loss": result.loss, **result.metrics}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + weight * float(value)
            total, n_batches = total + weight, n_batches + 1
            n_samples += counts.get("samples", 0.0)
    means = {name: value / total for name, value in sums.items()}
    return {**means, "samples": n_samples, "batches": n_batches}
