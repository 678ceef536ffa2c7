"""Compare the stages of a split model with the model, for the first batch of a training."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pipeexec.executor.pipeline import Pipeline
from pipeexec.nesting import with_tensors
from pipeexec.splitting.split_facts import split_facts
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.stages.batches import split_batches
from pipeexec.stages.microbatches import Microbatches
from pipesim.errors import ArgumentError


def check_first_batch(pipeline: Pipeline, inputs: Any) -> None:
    """Compare outputs, gradients and buffers of stages and model, for the first micro-batch.

    Nothing is compared without `pipeexec.split`, with stages in other processes, on GPUs or
    compiled, and where two forwards of the model differ.

    Raises
    ------
    ExecutionError
        If they differ.
    """
    graph, shares = pipeline.graph, pipeline.shares
    stages = [x for x in pipeline.modules[: graph.n_stages] if isinstance(x, SplitStage)]
    if pipeline.processes is not None or not len(stages) == graph.n_stages > 1:
        return
    facts = split_facts(stages)
    if facts is None:
        return
    devices = {p.device.type for stage in stages for p in stage.parameters()}
    if devices != {"cpu"} or any(stage.compile_options is not None for stage in stages):
        return
    if isinstance(inputs, Microbatches):
        batch = inputs[0]
    else:
        parts, _, _ = split_batches(
            inputs, None, shares.n_microbatches, shares.n_shares, pipeline.batch_dims
        )
        batch = with_tensors(inputs, parts[0])
    with suppress(ArgumentError):  # they cannot be compared
        facts.check(stages, batch, training=True)
