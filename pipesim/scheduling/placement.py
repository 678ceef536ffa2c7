"""Placements: which device holds which stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count
from pipesim.scheduling.memory_checks import check_microbatches, check_stages

Layout = Literal["replica_major", "stage_major"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Placement:
    """Which device holds which stage; every device holds at least one.

    In a bidirectional placement micro-batches take several paths through the devices, and each
    path has a copy of the stages.

    Parameters
    ----------
    device_of
        Number of the device of each stage, from 0 without gaps; shape ``(n_stages,)``.
    *others
        The same for each further path; `device_of` is the first one.

    Attributes
    ----------
    paths
        ``paths[k][s]`` is the device of stage ``s`` on path ``k``.

    Examples
    --------
    Stages 0 and 3 on device 0, stages 1 and 2 on device 1:

    >>> import pipesim as ps
    >>> placement = ps.Placement([0, 1, 1, 0])
    >>> placement.n_devices, placement.n_stages, placement.stages_of(0)
    (2, 4, (0, 3))
    """

    paths: tuple[tuple[int, ...], ...]

    def __init__(self, device_of: Sequence[int], *others: Sequence[int]) -> None:
        user_paths = {"": device_of, **{f"others[{k}] of ": path for k, path in enumerate(others)}}
        for which, path in user_paths.items():
            if not isinstance(path, (Sequence, np.ndarray)) or isinstance(path, (str, bytes)):
                raise ArgumentError(
                    f"{which}a placement must be a sequence of device numbers, one a stage, such "
                    f"as [0, 1, 1, 0], got {path!r:.60} ({type(path).__name__})"
                )
        check_stages(sum(map(len, user_paths.values())))
        paths = tuple(
            tuple(
                check_count(f"the device of stage {s}{which and f' in {which[:-4]}'}", d, 0)
                for s, d in enumerate(path)
            )
            for which, path in user_paths.items()
        )
        for k, path in enumerate(paths[1:]):
            if len(path) != len(paths[0]):
                raise ArgumentError(
                    f"paths of {len(paths[0])} and of {len(path)} stages (others[{k}]); each "
                    "micro-batch goes through the same stages, so give paths of one length"
                )
        for stage, devices in enumerate(zip(*paths, strict=True)):
            if len(set(devices)) < len(devices):
                raise ArgumentError(
                    f"stage {stage} lies on devices {list(devices)}: copies of a stage belong on "
                    "different devices"
                )
        used = {device for path in paths for device in path}
        if len(used) != 1 + max(used, default=0):
            idle = next(device for device in itertools.count() if device not in used)
            places = ", ".join(str(list(path)) for path in paths)
            raise ArgumentError(
                f"placement {places} leaves device {idle} without a stage; "
                "number the devices from 0 without gaps"
            )
        object.__setattr__(self, "paths", paths)

    @property
    def device_of(self) -> tuple[int, ...]:
        """Device of each stage, on the first path."""
        return self.paths[0]

    @cached_property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.device_of)

    @cached_property
    def n_paths(self) -> int:
        """Number of paths, which is the number of copies of each stage."""
        return len(self.paths)

    @cached_property
    def n_devices(self) -> int:
        """Number of devices."""
        return 1 + max(max(path) for path in self.paths)

    @property
    def n_chunks(self) -> int:
        """Largest number of stages on a device, copies counted."""
        return int(np.bincount(np.concatenate(self.paths)).max())

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that a device holds, path after path, in ascending order.

        Parameters
        ----------
        device
            Number of the device, from 0.

        Returns
        -------
        tuple of int
            Numbers of the stages; a device of several paths may hold a copy of any.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.looped(n_devices=2, n_chunks=2).stages_of(1)
        (1, 3)
        """
        if check_count("device", device, 0) >= self.n_devices:
            raise ArgumentError(
                f"there is no device {device}; the placement has {self.n_devices}, "
                f"0..{self.n_devices - 1}"
            )
        return tuple(s for path in self.paths for s, d in enumerate(path) if d == device)

    def path_of(self, n_microbatches: int) -> NDArray[np.int64]:
        """Return the path of each micro-batch: equal shares, the first micro-batches on path 0.

        Parameters
        ----------
        n_microbatches
            Number of micro-batches of a step.

        Returns
        -------
        numpy.ndarray
            Number of the path of each micro-batch; shape ``(n_microbatches,)``.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.bidirectional(2).path_of(4).tolist()
        [0, 0, 1, 1]
        """
        check_microbatches(check_count("n_microbatches", n_microbatches))
        return np.arange(n_microbatches) * self.n_paths // n_microbatches

    @staticmethod
    def linear(n_devices: int) -> Placement:
        """Place stage ``i`` on device ``i``.

        Parameters
        ----------
        n_devices
            Number of devices, which is that of stages.

        Returns
        -------
        Placement
            One stage a device.
        """
        return Placement.looped(n_devices, 1)

    @staticmethod
    def looped(n_devices: int, n_chunks: int) -> Placement:
        """Place stage ``s`` on device ``s % n_devices``: ``n_chunks`` stages each.

        Megatron-LM, arXiv 2104.04473.

        Parameters
        ----------
        n_devices
            Number of devices.
        n_chunks
            Number of stages of each device.

        Returns
        -------
        Placement
            ``n_devices * n_chunks`` stages.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.looped(n_devices=2, n_chunks=2).device_of
        (0, 1, 0, 1)
        """
        n_devices = check_count("n_devices", n_devices)
        n_chunks = check_count("n_chunks", n_chunks)
        check_stages(n_devices * n_chunks)
        return _placement(tuple(s % n_devices for s in range(n_devices * n_chunks)))

    @staticmethod
    def v_shaped(n_devices: int) -> Placement:
        """Place two stages a device, down and up again: device 0 holds the first and the last.

        Parameters
        ----------
        n_devices
            Number of devices.

        Returns
        -------
        Placement
            ``2 * n_devices`` stages.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.v_shaped(3).device_of
        (0, 1, 2, 2, 1, 0)
        """
        return Placement.waves(n_devices, 1)

    @staticmethod
    def waves(n_devices: int, n_waves: int) -> Placement:
        """Place stages down and up the devices ``n_waves`` times: two stages a device each time.

        Hanayo, arXiv 2308.15762.

        Parameters
        ----------
        n_devices
            Number of devices.
        n_waves
            Number of times that stages go down and up.

        Returns
        -------
        Placement
            ``2 * n_devices * n_waves`` stages.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.waves(n_devices=2, n_waves=2).device_of
        (0, 1, 1, 0, 0, 1, 1, 0)
        """
        n_devices = check_count("n_devices", n_devices)
        n_waves = check_count("n_waves", n_waves)
        check_stages(2 * n_devices * n_waves)
        down = range(n_devices)
        return _placement((*down, *reversed(down)) * n_waves)

    @staticmethod
    def bidirectional(n_devices: int) -> Placement:
        """Place the stages down the devices and a copy of them up (Chimera, arXiv 2107.06925).

        Parameters
        ----------
        n_devices
            Number of devices, which is even.

        Returns
        -------
        Placement
            ``n_devices`` stages on two paths.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Placement.bidirectional(2).paths
        ((0, 1), (1, 0))
        """
        n_devices = check_count("n_devices", n_devices)
        check_stages(2 * n_devices)
        down = range(n_devices)
        if n_devices % 2:
            raise ArgumentError(
                f"a bidirectional placement needs an even number of devices, got {n_devices}"
            )
        return Placement(down, tuple(reversed(down)))


@lru_cache(maxsize=32)
def _placement(device_of: tuple[int, ...]) -> Placement:
    return Placement(device_of)


def replica_devices(n_replicas: int, n_devices: int, layout: Layout) -> NDArray[np.int64]:
    """Return the devices of each replica of a pipeline; shape ``(n_replicas, n_devices)``.

    - ``"replica_major"``: the devices of a replica have consecutive numbers, so that its stages
      are neighbours.
    - ``"stage_major"``: the devices of a stage's replicas have consecutive numbers, so that they
      reduce their gradients inside a node.

    >>> replica_devices(2, 3, "replica_major").tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> replica_devices(2, 3, "stage_major").tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    numbers = np.arange(n_replicas * n_devices)
    if layout == "stage_major":
        return numbers.reshape(n_devices, n_replicas).T
    return numbers.reshape(n_replicas, n_devices)
