"""Batches of data-parallel replicas: each has samples of its own, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipeexec.demo_models.registry import Batch, BatchMaker, batches

__all__ = ["replica_batches", "replicas_of"]


def replicas_of(rank: int, n_ranks: int, n_replicas: int) -> range:
    """Return the replicas of which a process has a stage, where ranks have them one by one."""
    return range(rank * n_replicas // n_ranks, -(-(rank + 1) * n_replicas // n_ranks))


def replica_batches(
    make_batch: BatchMaker, batch: int, seed: int, replicas: Sequence[int]
) -> Iterator[Batch]:
    """Yield what some replicas take, one behind the other, for ever.

    ``batch`` samples of each, the same ones for the same ``seed`` in whatever process.
    """
    sources = [batches(make_batch, batch, seed + replica) for replica in replicas]
    for parts in zip(*sources, strict=True):
        inputs, targets = zip(*parts, strict=True)
        yield torch.cat(inputs), torch.cat(targets)
