"""`BatchShares`: the share of a batch that each data-parallel replica of a pipeline takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeexec.devices.device import Device
from pipeexec.devices.remote import RemoteDevice
from pipeexec.distributed.processes import Processes
from pipeexec.stages.microbatches import BatchFacts
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op


class BatchShares:
    """Assigns the parts of a batch to the replicas of a graph.

    A *share* is the part of a batch that one data-parallel replica takes. It belongs to one graph
    replica, or in a bidirectional pipeline to one replica for each path. Micro-batches are numbered
    over all shares, share after share.

    Attributes
    ----------
    n_shares, n_microbatches
        Number of shares, and of micro-batches of each share.
    replica
        The graph's replica that takes each micro-batch, shape ``(n_shares, n_microbatches)``.
    batch_size
        Micro-batches of each share in a mini-batch.
    n_paths
        Graph replicas of each share.
    local
        Shares of which this process has a stage.
    shapes
        Those of the `Microbatches` of the last step, of all processes; None if there were none.
    """

    def __init__(self, graph: TaskGraph, devices: Sequence[Device]) -> None:
        is_first = (graph.op == Op.F) & (graph.stage == 0) & (graph.part <= 0)
        first = np.flatnonzero(is_first)
        self.n_microbatches = graph.n_microbatches
        self.batch_size = graph.n_microbatches // graph.n_batches
        self.n_shares = len(first) // graph.n_microbatches
        self.n_paths = graph.n_replicas // self.n_shares
        self.replica = np.zeros((self.n_shares, self.n_microbatches), dtype=np.int64)
        replica = graph.replica[first]
        self.replica[replica // self.n_paths, graph.microbatch[first]] = replica
        is_local = np.array([not isinstance(device, RemoteDevice) for device in devices])
        local_replicas = np.flatnonzero(is_local[graph.homes].any(axis=1))
        self.local = tuple(np.unique(local_replicas // self.n_paths).tolist())
        self._agreed: list[float] | None = None
        self.shapes: list[BatchFacts | None] | None = None
        self._varies = False

    def number(self, replica: int, microbatch: int) -> int:
        """Return the number, over all shares, of a micro-batch of a graph replica."""
        return replica // self.n_paths * self.n_microbatches + microbatch

    def local_numbers(self) -> list[int]:
        """Return the numbers of the micro-batches of which this process has a stage."""
        m = self.n_microbatches
        return [share * m + k for share in self.local for k in range(m)]

    def agree(
        self,
        inputs: Sequence[int],
        targets: Sequence[int],
        processes: Processes | None,
        facts: BatchFacts | None = None,
    ) -> list[float]:
        """Return the samples of every micro-batch of all shares, or their weights if it has any.

        Processes exchange them once, before the first step. If one of them gives `Microbatches`
        there, they exchange samples and shapes before every step.

        Parameters
        ----------
        inputs, targets
            Samples of each micro-batch of this process's shares; empty if it does not give them.
        facts
            Shapes and weights of `Microbatches`; None for another batch.
        """
        own: list[float] = [*(inputs or targets)]
        if processes is None:
            self.shapes = None if facts is None else [facts]
            if facts is not None and facts.weights is not None:
                return facts.weights
            return own
        if self._agreed is None or self._varies:
            rows = processes.share([self.local, inputs, targets, facts and [*facts]])
            by_rank = [None if row[3] is None else BatchFacts(*row[3]) for row in rows]
            self.shapes = by_rank if any(by_rank) else None
            self._varies = self._varies or self.shapes is not None
            weights = [] if self.shapes is None else self._merge_weights(rows)
            self._agreed = weights or self._merge_sizes([row[:3] for row in rows])
            if self._varies:
                return self._agreed
        if facts is not None:
            raise ArgumentError(
                "this step has Microbatches, but the first step split its batches evenly: other "
                "processes do not expect them; give Microbatches in every step, or make another "
                "pipeline with `with_graph` for these steps"
            )
        if self.n_shares == 1:
            return own or self._agreed
        agreed = [self._agreed[number] for number in self.local_numbers()]
        if own and own != agreed:
            raise ArgumentError(
                f"this process gives {sum(own)} samples, but {sum(agreed)} were agreed on before "
                "the first step, with which losses of replicas are weighted; give batches of one "
                "size (drop a smaller last one)"
            )
        return self._agreed

    def input_shapes(self) -> str | None:
        """Return the shapes of all inputs of the last step's `Microbatches`; None without any."""
        if self.shapes is None:
            return None
        return repr([x and x.inputs for x in self.shapes])

    def target_shapes(self) -> list[str]:
        """Return the different shapes of targets of the last step's `Microbatches`."""
        rows = [x.targets for x in self.shapes or () if x is not None]
        return list(dict.fromkeys(shape for row in rows for shape in row))

    @property
    def has_weights(self) -> bool:
        """Whether the last step's `Microbatches` have weights."""
        return any(x is not None and x.weights for x in self.shapes or ())

    def forget_sizes(self) -> None:
        """Let the next batch have other sizes than those that processes agreed on."""
        self._agreed, self._varies = None, False

    def _merge_weights(self, by_rank: Sequence[Sequence[Any]]) -> list[float]:
        """Return the weight of every micro-batch; empty if no process gives weights."""
        m = self.n_microbatches
        merged: dict[int, list[float]] = {}
        for local, _, _, words in by_rank:
            weights = None if words is None else BatchFacts(*words).weights
            for k, share in enumerate(local if weights else ()):
                row = list((weights or ())[k * m : (k + 1) * m])
                if merged.setdefault(share, row) != row:
                    raise ArgumentError(
                        "processes give Microbatches with different weights; give the same"
                    )
        if merged and len(merged) < self.n_shares:
            raise ArgumentError(
                "Microbatches of some replicas have weights, those of others none; give weights "
                "with the targets of all"
            )
        return [x for share in sorted(merged) for x in merged[share]]

    def _merge_sizes(
        self, by_rank: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> list[float]:
        """Return the samples of every micro-batch, from the shares and sizes of each rank."""
        merged: dict[int, tuple[str, list[int]]] = {}
        for share, name, sizes in self._sizes_by_name(by_rank):
            first_name, first = merged.setdefault(share, (name, sizes))
            if first != sizes:
                suffix = f" of replica {share}" if self.n_shares > 1 else ""
                raise ArgumentError(
                    f"{first_name} have {sum(first)} samples{suffix}, {name} {sum(sizes)}; give "
                    "every process of a replica the same batch, or None where it is not needed"
                )
        return [size for share in range(self.n_shares) for size in merged[share][1]]

    def _sizes_by_name(
        self, by_rank: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> Iterator[tuple[int, str, list[int]]]:
        """Yield each share that a rank gives, the name of its batch, and its samples."""
        m = self.n_microbatches
        for rank, (local, *lengths) in enumerate(by_rank):
            for name, sizes in zip(("inputs", "targets"), lengths, strict=True):
                for k, share in enumerate(local if sizes else ()):
                    yield share, f"{name} of rank {rank}", list(sizes[k * m : (k + 1) * m])
