"""Bytes of the parameters and of the optimizer state of each stage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeexec.executor.pipeline import Pipeline
from pipesim.costs.costs import Costs


def with_stage_bytes(costs: Costs, pipeline: Pipeline) -> Costs:
    """Return costs with the current bytes of a pipeline's parameters and optimizers."""
    stages = pipeline.modules[: pipeline.graph.n_stages]
    parameters = [float(sum(p.nbytes for p in module.parameters())) for module in stages]
    return replace(
        costs,
        parameter_bytes=tuple(pipeline.total(parameters)),
        optimizer_bytes=optimizer_bytes(pipeline),
    )


def optimizer_bytes(pipeline: Pipeline) -> tuple[float, ...]:
    """Return the bytes of the optimizer state of each stage; shares of replicas are added up."""
    n = pipeline.graph.n_stages
    own = [float(_state_bytes(o)) for o in pipeline.optimizers]
    sharding = pipeline._model.sharding
    sums = [sum(own[s::n]) if sharding[s] != "none" else own[s] for s in range(n)]
    return tuple(pipeline.total(sums))


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = () if optimizer is None else optimizer.state.values()
    tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors)
