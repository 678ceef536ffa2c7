"""Data-parallel replicas of a pipeline, and the shares of a batch that they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeexec.devices.device import Device
from pipeexec.devices.remote import RemoteDevice
from pipeexec.distributed.processes import Processes
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

__all__ = ["Shares"]


class Shares:
    """Which replica of a graph takes which part of a batch.

    A *share* is what one data-parallel replica takes of a batch: one graph replica, or as many as a
    bidirectional pipeline has paths. All micro-batches are numbered through, share after share.

    Attributes
    ----------
    n, n_microbatches
        Number of shares, and of micro-batches of each.
    replica
        The graph's replica that takes each micro-batch, shape ``(n, n_microbatches)``.
    batch_size
        Micro-batches of each in a mini-batch.
    n_paths
        Graph replicas of each share.
    here
        Shares of which this process has a stage.
    """

    def __init__(self, graph: TaskGraph, devices: Sequence[Device]) -> None:
        first = np.flatnonzero((graph.op == Op.F) & (graph.stage == 0))
        self.n_microbatches = graph.n_microbatches
        self.batch_size = graph.n_microbatches // graph.n_batches
        self.n = len(first) // graph.n_microbatches
        self.n_paths = graph.n_replicas // self.n
        self.replica = np.zeros((self.n, self.n_microbatches), dtype=np.int64)
        replica = graph.replica[first]
        self.replica[replica // self.n_paths, graph.microbatch[first]] = replica
        here = [not isinstance(device, RemoteDevice) for device in devices]
        of_replica = np.array(here)[graph.homes].any(axis=1)
        self.here = tuple(np.unique(np.flatnonzero(of_replica) // self.n_paths).tolist())
        self._agreed: list[int] | None = None

    def number(self, replica: int, microbatch: int) -> int:
        """Return the number of a micro-batch of a graph's replica, counted through all shares."""
        return replica // self.n_paths * self.n_microbatches + microbatch

    def numbers_here(self) -> list[int]:
        """Return the numbers of the micro-batches of which this process has a stage."""
        m = self.n_microbatches
        return [share * m + k for share in self.here for k in range(m)]

    def agree(
        self, inputs: Sequence[int], targets: Sequence[int], processes: Processes | None
    ) -> list[int]:
        """Return the samples of every micro-batch of all shares.

        Processes tell each other once, before the first step.

        Parameters
        ----------
        inputs, targets
            Samples of each micro-batch of this process's shares; empty where they are not given.

        Raises
        ------
        ArgumentError
            If processes with stages of one share give batches of other lengths, or a later step has
            other lengths than the first.
        """
        if processes is None:
            return list(inputs or targets)
        if self._agreed is None:
            said = processes.share([self.here, inputs, targets])
            self._agreed = self._joined(said)
        own = list(inputs or targets)
        if self.n == 1:
            return own or self._agreed
        agreed = [self._agreed[number] for number in self.numbers_here()]
        if own and own != agreed:
            raise ArgumentError(
                f"this process gives {sum(own)} samples, but {sum(agreed)} were agreed on before "
                "the first step, with which losses of replicas are weighted; give batches of one "
                "size (drop a smaller last one)"
            )
        return self._agreed

    def _joined(
        self, said: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> list[int]:
        """Return the samples of every micro-batch, which those who give them agree on."""
        m = self.n_microbatches
        found: dict[int, tuple[str, list[int]]] = {}
        for rank, (here, *given) in enumerate(said):
            for name, sizes in zip(("inputs", "targets"), given, strict=True):
                for k, share in enumerate(here if sizes else ()):
                    own = list(sizes[k * m : (k + 1) * m])
                    who, other = found.setdefault(share, (f"{name} of rank {rank}", own))
                    if own != other:
                        of = f" of replica {share}" if self.n > 1 else ""
                        raise ArgumentError(
                            f"{who} have {sum(other)} samples{of}, {name} of rank {rank} "
                            f"{sum(own)}; give every process of a replica the same batch, "
                            "or None where it is not needed"
                        )
        return [size for share in range(self.n) for size in found[share][1]]
