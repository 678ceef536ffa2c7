"""Which GPUs of a mixed cluster a pipeline has: the slowest, the smallest, and their mean peak."""

from __future__ import annotations

import math
from functools import lru_cache

from pipesim.planning.cluster import Cluster
from pipesim.scheduling.placement import Layout, replica_devices


@lru_cache(maxsize=4096)
def kinds_of_devices(
    cluster: Cluster, tensor_parallel: int, p: int, dp: int, layout: Layout
) -> tuple[tuple[int, ...], ...]:
    """Return, for each device of a pipeline, its different GPUs in all replicas.

    They are indices into ``cluster.gpus``.
    """
    kinds = cluster.gpu_numbers(tensor_parallel)
    devices = replica_devices(dp, p, layout)
    return tuple(
        tuple(sorted({kind for device in column for kind in kinds[device]}))
        for column in devices.T.tolist()
    )


def slowest_kinds(
    kinds: tuple[tuple[int, ...], ...], seconds: tuple[float, ...]
) -> tuple[int, ...]:
    """Return the GPU of each device that takes the most seconds, of ``seconds`` for each GPU."""
    return tuple(max(own, key=seconds.__getitem__) for own in kinds)


def least_bytes(cluster: Cluster, kinds: tuple[tuple[int, ...], ...]) -> list[float]:
    """Return the usable bytes of the smallest GPU of each device."""
    usable = [cluster.usable_bytes(gpu) for gpu in cluster.gpus]
    return [min(usable[kind] for kind in own) for own in kinds]


def mean_peak(cluster: Cluster) -> float | None:
    """Return the mean peak of all GPUs (FLOP/s); None if that of one is unknown."""
    peaks = [group.gpu.peak for group in cluster.groups]
    if None in peaks:
        return None
    rows = zip(cluster.groups, peaks, strict=True)
    return math.fsum(group.n_gpus * (peak or 0.0) for group, peak in rows) / cluster.n_gpus
