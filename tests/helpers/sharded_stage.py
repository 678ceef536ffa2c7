"""A model with a sharded embedding as a stage, and its pipeline in one of several processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from small_pipelines import mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes

ROWS, DIM, DENSE, K, REPLICAS = (30, 7), 4, 5, 2, 2
#: Samples of each replica.
SIZES = [5, 4]


class Bottom(nn.Module):
    """Makes something of dense features, and passes on the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DENSE, len(ROWS) * DIM)

    def forward(self, dense: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(dense)), keys


class Top(nn.Module):
    """Puts dense features and vectors together; alone, it has no dense features but its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(len(ROWS) * DIM, 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.layer(torch.tanh(dense * vectors.flatten(1)))


class Rest(nn.Module):
    """Both, after an embedding that the dense features pass by."""

    def __init__(self, bottom: Bottom, top: Top) -> None:
        super().__init__()
        self.bottom, self.top = bottom, top

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.top(*self.bottom(dense, vectors))


def model() -> tuple[list[Tensor], Bottom, Top]:
    """Return tables and the rest, always the same."""
    torch.manual_seed(0)
    return [torch.randn(rows, DIM) for rows in ROWS], Bottom(), Top()


def batch(n: int, bag: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, keys (also repeated ones; some rows never occur), targets."""
    generator = torch.Generator().manual_seed(1)
    shape = (n, bag) if bag else (n,)
    keys = [torch.randint(rows // 2 + 1, shape, generator=generator) for rows in ROWS]
    dense = torch.randn(n, DENSE, generator=generator)
    return dense, torch.stack(keys, 1), torch.randn(n, 1, generator=generator)


def lowered(schedule: str, n_devices: int, n_stages: int, **options: Any) -> ps.TaskGraph:
    """Return a graph whose last stage but one is sharded."""
    n_chunks = {} if n_devices == n_stages else {"n_chunks": n_stages // n_devices}
    return ps.lower(
        ps.schedule(schedule, n_devices, K, **n_chunks),
        n_replicas=REPLICAS,
        sharded=[n_stages - 2],
        hosts="per_device",
        **options,
    )


def build_pipeline(
    processes: Processes, graph: ps.TaskGraph, optimizer: Any, **options: Any
) -> tuple[px.Pipeline, nn.ModuleDict]:
    """Return the pipeline of a rank, and its modules by name."""
    weights, bottom, top = model()
    n_own = graph.n_devices // processes.n_ranks
    ranks = graph.homes // n_own  # of each replica and stage
    is_own = (ranks == processes.rank).any(axis=0)
    index = graph.n_stages - 2
    group = processes.group(np.unique(ranks[:, index]).tolist(), key="embedding")
    rest = [Rest(bottom, top)] if index == 0 else [top]
    stages: list[nn.Module | None] = [*[bottom] * index, None, *rest]
    if is_own[index]:
        embedding = px.ShardedEmbedding.from_full(weights, group, **options)
        stages[index] = px.EmbeddingStage(embedding)
    own_stages = [stage if own else None for stage, own in zip(stages, is_own, strict=True)]
    pipeline = px.Pipeline(
        own_stages, graph, ["cpu"] * n_own, mse, optimizer, processes=processes
    )  # fmt: skip
    names = {"bottom": bottom} if is_own[0 if index else 1] else {}
    names |= {"top": top} if is_own[-1] else {}
    names |= {"embedding": embedding} if is_own[index] else {}
    return pipeline, nn.ModuleDict(names)


def share(processes: Processes, graph: ps.TaskGraph, bag: int = 0) -> tuple[Any, Any]:
    """Return the inputs and targets of a rank's replica."""
    replica = processes.rank * REPLICAS // processes.n_ranks
    dense, keys, y = (part.split(SIZES)[replica] for part in batch(sum(SIZES), bag))
    return (dense, keys), y
