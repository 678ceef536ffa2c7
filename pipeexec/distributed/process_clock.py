"""One clock for all processes: offset and drift against rank 0's, from round trips.

A round trip of ``d`` seconds measures another clock to within ``d/2``, so only the shortest of each
burst counts. A line fitted to the samples gives offset and drift. Its residual is the distance of
the samples from the line.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipeexec.distributed.channels import LostConnection

_TAG = 1 << 28  # above the tags of channels
#: Seconds between first and last sample below which no drift is fitted: it would be noise.
_SPAN = 2.0
_MOST_SAMPLES = 4096


class Alignment(NamedTuple):
    """Offset and drift of this process's clock against rank 0's.

    Attributes
    ----------
    offset
        This clock minus rank 0's at the first sample, seconds.
    drift
        Seconds that it gains per second.
    residual
        Root mean square distance of the samples from the line, seconds.
    round_trip
        Median of the shortest round trips, seconds; half of it bounds a sample's error.
    n_samples
        Number of samples.
    """

    offset: float
    drift: float
    residual: float
    round_trip: float
    n_samples: int


class ProcessClock:
    """Relates `time.perf_counter` of this process to rank 0's.

    ``group`` is the process group of all processes, over gloo.
    """

    def __init__(self, rank: int, n_ranks: int, group: dist.ProcessGroup) -> None:
        self.rank, self.n_ranks, self.group = rank, n_ranks, group
        self._samples: list[tuple[float, float, float]] = []  # time, offset, round trip
        self._fitted: Alignment | None = None

    def sample(self, n_trips: int = 8) -> None:
        """Take one more sample in each process, then wait for all; every process must call this.

        The sample is the shortest of ``n_trips`` round trips.
        """
        peer = 0
        try:
            if self.rank == 0:
                for peer in range(1, self.n_ranks):
                    for _ in range(n_trips):
                        self._answer(peer)
            else:
                self._fitted = None
                self._samples.append(min((self._ask() for _ in range(n_trips)), key=lambda x: x[2]))
                del self._samples[:-_MOST_SAMPLES]
            peer = -1
            dist.barrier(group=self.group)
        except RuntimeError as error:
            raise LostConnection(peer, error) from error

    def _answer(self, peer: int) -> None:
        dist.recv(torch.empty(1, dtype=torch.float64), peer, group=self.group, tag=_TAG)
        now = torch.tensor([perf_counter()], dtype=torch.float64)
        dist.send(now, peer, group=self.group, tag=_TAG + 1)

    def _ask(self) -> tuple[float, float, float]:
        first = torch.empty(1, dtype=torch.float64)
        request_time = perf_counter()
        dist.send(first, 0, group=self.group, tag=_TAG)
        dist.recv(first, 0, group=self.group, tag=_TAG + 1)
        answer_time = perf_counter()
        middle = (request_time + answer_time) / 2
        return middle, middle - float(first), answer_time - request_time

    @property
    def alignment(self) -> Alignment:
        """Offset, drift and residual of the samples so far."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    @property
    def error(self) -> float:
        """Error of times on rank 0's clock: half a round trip plus the residual, seconds."""
        fit = self.alignment
        return fit.round_trip / 2 + fit.residual

    def _fit(self) -> Alignment:
        if not self._samples:
            return Alignment(0.0, 0.0, 0.0, 0.0, 0)
        time, offset, trip = np.array(self._samples).T
        time = time - time[0]
        drift, start = 0.0, float(np.median(offset))
        if len(time) > 2 and time[-1] > _SPAN:
            drift, start = map(float, np.polyfit(time, offset, 1))
        residual = offset - (start + drift * time)
        return Alignment(
            start, drift, float(np.sqrt((residual**2).mean())), float(np.median(trip)), len(time)
        )

    def to_first(self, time: float) -> float:
        """Convert a time of this process's clock to rank 0's clock."""
        if not self._samples:
            return time
        fit = self.alignment
        return time - (fit.offset + fit.drift * (time - self._samples[0][0]))
