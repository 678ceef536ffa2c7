"""Placements: which device holds which stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_name, number
from pipesim.scheduling.memory_checks import check_microbatches, check_stages
from pipesim.utils.checks import checked_names

Layout = Literal["replica_major", "stage_major"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
#: Stages ``(source, target)`` between which activations go; empty for a chain of stages.
Edges: TypeAlias = tuple[tuple[int, int], ...]

_MODULES = (
    'give the devices of the stages of each module, such as {"vision": [0], "language": [1, 2]}, '
    'or of its replicas, such as {"vision": [[0], [1]], "language": [2, 3]}'
)
_FEEDS = 'give the modules that a module feeds, such as {"vision": "language"}'
_EDGES = "[(0, 2), (1, 2)]"


@checked_names
@dataclass(frozen=True, repr=False)
class Placement:
    """Which device holds which stage; every device holds at least one.

    Micro-batches may take several paths through the devices, equally many each. Paths with a stage
    on different devices have a copy of it each; on one device they share it: its parameters, their
    gradients and its optimizer step.

    Stages are a chain, unless ``edges`` make them a graph: an encoder and a language model, or two
    encoders that feed one model. A stage without an edge from it computes a loss.

    Parameters
    ----------
    device_of
        Number of the device of each stage, from 0 without gaps; shape ``(n_stages,)``.
    *others
        The same for each further path; `device_of` is the first one.
    edges
        Pairs of stages, source before target, between which activations and gradients go. None,
        or no pairs: each stage to the next.

    Attributes
    ----------
    paths
        ``paths[k][s]`` is the device of stage ``s`` on path ``k``.
    edges
        The pairs in order; empty for a chain.

    Examples
    --------
    Stages 0 and 3 on device 0, stages 1 and 2 on device 1:

    >>> import pipesim as ps
    >>> placement = ps.Placement([0, 1, 1, 0])
    >>> placement.n_devices, placement.n_stages, placement.stages_of(0)
    (2, 4, (0, 3))

    Stages 0 and 1 are two encoders, whose outputs stage 2 takes:

    >>> ps.Placement([0, 1, 2, 3], edges=[(0, 2), (1, 2), (2, 3)])
    Placement(paths=((0, 1, 2, 3),), edges=((0, 2), (1, 2), (2, 3)))
    """

    paths: tuple[tuple[int, ...], ...]
    edges: Edges

    def __init__(
        self,
        device_of: Sequence[int],
        *others: Sequence[int],
        edges: Iterable[tuple[int, int]] | None = None,
    ) -> None:
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
        used = {device for path in paths for device in path}
        if len(used) != 1 + max(used, default=0):
            idle = next(device for device in itertools.count() if device not in used)
            places = ", ".join(str(list(path)) for path in paths)
            raise ArgumentError(
                f"placement {places:.80} leaves device {idle} without a stage; "
                "number the devices from 0 without gaps"
            )
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "edges", checked_edges(edges, len(paths[0])))

    def __repr__(self) -> str:
        edges = f", edges={self.edges!r}" if self.edges else ""
        return f"Placement(paths={self.paths!r}{edges})"

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
        """Number of paths."""
        return len(self.paths)

    @cached_property
    def n_devices(self) -> int:
        """Number of devices."""
        return 1 + max(max(path) for path in self.paths)

    @cached_property
    def shares_stages(self) -> bool:
        """Whether several paths have a stage on one device."""
        return not is_first_on_device(np.asarray(self.paths)).all()

    @property
    def has_replicas(self) -> bool:
        """Whether paths differ in their devices or share stages, unlike those of two directions."""
        return self.shares_stages or len(set(map(frozenset, self.paths))) > 1

    @property
    def n_chunks(self) -> int:
        """Largest number of stages on a device, copies counted."""
        homes = np.asarray(self.paths)
        return int(np.bincount(homes[is_first_on_device(homes)]).max())

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
        stages = (s for path in self.paths for s, d in enumerate(path) if d == device)
        return tuple(dict.fromkeys(stages))

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

    @staticmethod
    def rerouted(
        n_devices: int,
        n_replicas: int,
        n_microbatches: int,
        speeds: Mapping[tuple[int, int], float],
    ) -> Placement:
        """Place replicas of a pipeline, some of whose workers are dead or slow.

        A worker is the device of a stage in a replica. The micro-batches of each stage are divided
        over its workers by speed: a worker that takes fewer passes the others to workers of the
        same stage in other replicas, which have the same weights (ReCycle, arXiv 2405.14009). On
        each other stage a micro-batch stays in its replica.

        Devices are numbered replica after replica, without workers that take no micro-batch.
        `Noise.slow_devices` simulates the slow ones.

        Parameters
        ----------
        n_devices
            Number of devices of a replica without failures, which is that of stages.
        n_replicas
            Number of data-parallel replicas.
        n_microbatches
            Micro-batches of a step over all replicas, a multiple of ``n_replicas``.
        speeds
            Relative speed of workers, ``(replica, stage)``: 0 for a dead one, 1 for those that are
            not listed.

        Returns
        -------
        Placement
            Paths of which each has as many of the ``n_microbatches``.

        Raises
        ------
        ArgumentError
            If a stage has no worker with a speed above 0.

        Examples
        --------
        Stage 1 of replica 1 is dead. Device 1 takes its micro-batches, and devices 2 and 3 are
        stages 0 and 2 of replica 1:

        >>> import pipesim as ps
        >>> ps.Placement.rerouted(3, n_replicas=2, n_microbatches=8, speeds={(1, 1): 0}).paths
        ((0, 1, 2), (3, 1, 4))
        """
        n_devices = check_count("n_devices", n_devices)
        n_replicas = check_count("n_replicas", n_replicas)
        n_microbatches = check_count("n_microbatches", n_microbatches)
        check_microbatches(n_microbatches)
        check_stages(n_devices * n_microbatches)
        if n_microbatches % n_replicas:
            raise ArgumentError(
                f"n_microbatches={n_microbatches} are no whole number for each of {n_replicas} "
                f"replicas; give a multiple of {n_replicas}"
            )
        speed = _worker_speeds(n_devices, n_replicas, speeds)
        own = np.repeat(np.arange(n_replicas), n_microbatches // n_replicas)
        worker = np.stack([_workers(own, column) for column in speed.T], axis=1)
        _, device = np.unique(worker * n_devices + np.arange(n_devices), return_inverse=True)
        routes = np.column_stack([own, device.reshape(worker.shape)])
        paths, count = np.unique(routes, axis=0, return_counts=True)
        repeats = count // np.gcd.reduce(count)
        return Placement(*np.repeat(paths[:, 1:], repeats, axis=0).tolist())

    @staticmethod
    def from_modules(
        modules: Mapping[str, Sequence[int] | Sequence[Sequence[int]]],
        feeds: Mapping[str, str | Sequence[str]],
    ) -> Placement:
        """Place modules, each a chain of stages, whose last stages feed first stages of others.

        Stages are numbered module after module. Modules with the same devices are colocated.

        Each module may have data-parallel replicas, as many as it needs. Replica ``r`` of ``k``
        runs the micro-batches ``i`` of ``m`` with ``i * k // m == r``: equal shares, or one more,
        and the first replicas of two modules have the same micro-batches. Paths are as many as the
        least common multiple of the numbers of replicas. In the orders of `order_by`, a device
        takes micro-batches of its paths in turn, so that all replicas after it start early.

        Parameters
        ----------
        modules
            Device of each stage of each module, or a list of such devices for each replica of the
            module. Modules are in an order in which each comes before those that it feeds.
        feeds
            Module, or modules, that take the output of the last stage of a module. A module that
            feeds none computes a loss.

        Returns
        -------
        Placement
            The stages of all modules, and their edges.

        Examples
        --------
        A vision encoder and an audio encoder feed a language model of two stages:

        >>> import pipesim as ps
        >>> modules = {"vision": [0, 1], "audio": [2], "language": [3, 4]}
        >>> feeds = {"vision": "language", "audio": "language"}
        >>> ps.Placement.from_modules(modules, feeds).edges
        ((0, 1), (1, 3), (2, 3), (3, 4))

        Four replicas of an encoder, of which the first two feed the first of two replicas of a
        language model:

        >>> modules = {"vision": [[0], [1], [2], [3]], "language": [[4, 5], [6, 7]]}
        >>> ps.Placement.from_modules(modules, {"vision": "language"}).paths
        ((0, 4, 5), (1, 4, 5), (2, 6, 7), (3, 6, 7))
        """
        for what, mapping, advice in (("modules", modules, _MODULES), ("feeds", feeds, _FEEDS)):
            if not isinstance(mapping, Mapping):
                raise ArgumentError(f"{what} must be a mapping, got {mapping!r:.60}; {advice}")
        replicas = {name: _replicas(name, devices) for name, devices in modules.items()}
        n_paths, n_stages = math.lcm(*map(len, replicas.values())), 0
        ends: dict[str, tuple[int, int]] = {}
        for name, rows in replicas.items():
            ends[name] = n_stages, n_stages + len(rows[0]) - 1
            n_stages += len(rows[0])
        check_stages(n_paths * n_stages)
        edges = [(s, s + 1) for first, last in ends.values() for s in range(first, last)]
        for name, target in ((a, b) for a, bs in feeds.items() for b in _names(bs)):
            name = check_name("module in feeds", name, list(ends))
            target = check_name(f"module fed by {name!r}", target, list(ends))
            if ends[name][0] >= ends[target][0]:
                raise ArgumentError(
                    f"feeds: {name!r} feeds {target!r}, which comes no later in modules; list a "
                    "module before those that it feeds"
                )
            edges.append((ends[name][1], ends[target][0]))
        if not edges and len(ends) > 1:
            raise ArgumentError(f"feeds: none of {len(ends)} modules feeds another; {_FEEDS}")
        paths = (
            [device for rows in replicas.values() for device in rows[path * len(rows) // n_paths]]
            for path in range(n_paths)
        )
        return Placement(*paths, edges=edges)


def _is_list(value: object) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _replicas(name: str, devices: Any) -> list[list[int]]:
    """Return the devices of each replica of a module, one a stage, checked."""
    is_nested = _is_list(devices) and any(map(_is_list, devices))
    rows = list(devices) if is_nested else [devices]
    if not all(_is_list(row) and len(row) for row in rows):
        raise ArgumentError(
            f"modules: {name!r} must be a sequence of device numbers, one a stage, or one such "
            f"sequence for each replica, got {devices!r:.60}; {_MODULES}"
        )
    counts = sorted({len(row) for row in rows})
    if len(counts) > 1:
        raise ArgumentError(
            f"modules: {name!r} has replicas of {counts[0]} and of {counts[-1]} stages; give the "
            "devices of all stages of each replica, those that hold several stages repeated"
        )
    own = [[check_count(f"modules: a device of {name!r}", d, 0) for d in row] for row in rows]
    for stage, column in enumerate(zip(*own, strict=True)):
        first = dict[int, int]()
        for replica, device in enumerate(column):
            if first.setdefault(device, replica) != replica:
                raise ArgumentError(
                    f"modules: replicas {first[device]} and {replica} of {name!r} have their stage "
                    f"{stage} on device {device}, where they are one; give it once, or give it "
                    "devices of its own in each replica"
                )
    return own


def _worker_speeds(n_devices: int, n_replicas: int, speeds: object) -> NDArray[np.float64]:
    """Return the speed of each worker, checked; shape ``(n_replicas, n_devices)``."""
    advice = "give the speed of workers (replica, stage), such as {(1, 2): 0} for a dead one"
    if not isinstance(speeds, Mapping):
        raise ArgumentError(f"speeds must be a mapping, got {speeds!r:.60}; {advice}")
    table = np.ones((n_replicas, n_devices))
    for worker, value in speeds.items():
        if not isinstance(worker, tuple) or len(worker) != 2:
            raise ArgumentError(f"speeds: {worker!r:.60} is no worker; {advice}")
        replica, stage = (
            check_count(f"speeds: the {name} of a worker", k, 0)
            for name, k in zip(("replica", "stage"), worker, strict=True)
        )
        if replica >= n_replicas or stage >= n_devices:
            raise ArgumentError(
                f"speeds has worker ({replica}, {stage}), but there are {n_replicas} replicas of "
                f"{n_devices} stages; {advice}"
            )
        speed = number(value)
        if speed is None or not 0 <= speed < math.inf:
            raise ArgumentError(
                f"speed of worker ({replica}, {stage}) must be finite and >= 0, got {value!r:.60}"
            )
        table[replica, stage] = speed
    for dead in np.flatnonzero(~table.any(axis=0))[:1].tolist():
        raise ArgumentError(
            f"all workers of stage {dead} have speed 0, so that none has its weights; leave one "
            "above 0, or place the stages on fewer devices"
        )
    return table


def _workers(own: NDArray[np.int64], speed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the replica whose worker runs each micro-batch on one stage.

    ``own`` is the replica of each micro-batch, in order; ``speed`` that of each worker.
    """
    n, n_replicas = len(own), len(speed)
    m, share = n // n_replicas, np.zeros(n_replicas, dtype=np.int64)
    alive = np.flatnonzero(speed)
    speed = speed / speed.max()  # no sum is too large
    share[alive] = n * speed[alive] / speed[alive].sum()
    for _ in range(n - int(share.sum())):  # the worker that then ends first takes one more
        share[alive[np.argmin((share[alive] + 1) / speed[alive])]] += 1
    kept = np.minimum(share, m)[own]
    place = np.arange(n) % m
    passed = np.flatnonzero((place + 1) * kept // m == place * kept // m)
    passed = passed[np.lexsort((own[passed], place[passed]))]
    more = np.maximum(share - m, 0)
    takers = np.repeat(np.arange(n_replicas), more)
    turn = np.concatenate([(np.arange(k) + 0.5) / max(k, 1) for k in more])
    workers = own.copy()
    workers[passed] = takers[np.argsort(turn, kind="stable")]
    return workers


def _names(names: object) -> list[object]:
    """Return the modules that one module feeds."""
    if isinstance(names, Sequence) and not isinstance(names, (str, bytes)):
        return list(names)
    return [names]


def checked_edges(edges: object, n_stages: int) -> Edges:
    """Return edges in order, each from a stage to a later one; empty for a chain."""
    if edges is None:
        return ()
    if not isinstance(edges, Iterable) or isinstance(edges, (str, bytes, Mapping)):
        raise ArgumentError(f"edges must be pairs of stages, such as {_EDGES}, got {edges!r:.60}")
    pairs = list(itertools.islice(edges, n_stages * (n_stages - 1) // 2 + 1))  # more repeat one
    if not pairs:
        return ()
    listed = set[tuple[int, int]]()
    for pair in pairs:
        if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:
            raise ArgumentError(f"{pair!r:.60} is no edge; give pairs of stages, such as {_EDGES}")
        source, target = (check_count("edges: a stage", stage, 0) for stage in pair)
        if not source < target < n_stages:
            raise ArgumentError(
                f"edge ({source}, {target}) does not lead from a stage to a later one of 0.."
                f"{n_stages - 1}; number stages so that each comes before those that it feeds, "
                "which leaves no cycle"
            )
        if (source, target) in listed:
            raise ArgumentError(f"edge ({source}, {target}) is given twice; give it once")
        listed.add((source, target))
    alone = set(range(n_stages)).difference(*listed) if n_stages > 1 else ()
    if alone:
        raise ArgumentError(
            f"stage {min(alone)} has no edge: no activations go to it or from it; give an edge "
            f"such as {(min(alone) - 1, min(alone)) if min(alone) else (0, 1)}, or leave the stage "
            "out"
        )
    chain = {(stage, stage + 1) for stage in range(n_stages - 1)}
    return () if listed == chain else tuple(sorted(listed))


def stage_pairs(edges: Edges, n_stages: int) -> NDArray[np.int64]:
    """Return source and target of each edge, those of a chain included; shape ``(n_edges, 2)``."""
    chain = [(stage, stage + 1) for stage in range(n_stages - 1)]
    return np.array(edges or chain, dtype=np.int64).reshape(-1, 2)


@lru_cache(maxsize=32)
def reached_stages(edges: Edges, n_stages: int) -> NDArray[np.bool_]:
    """Return whether edges lead from a stage to another one, over others or not: [from, to]."""
    reach = np.zeros((n_stages, n_stages), dtype=bool)
    for source, target in reversed(stage_pairs(edges, n_stages).tolist()):
        reach[source] |= reach[target]
        reach[source, target] = True
    return reach


def chains_of(stages: Iterable[int], reach: NDArray[np.bool_]) -> list[list[int]]:
    """Return ascending stages as chains: edges lead from each stage of one to the next."""
    chains: list[list[int]] = []
    for stage in stages:
        own = next((chain for chain in chains if reach[chain[-1], stage]), None)
        if own is None:
            chains.append([stage])
        else:
            own.append(stage)
    return chains


@lru_cache(maxsize=32)
def entry_stages(edges: Edges, n_stages: int) -> tuple[int, ...]:
    """Return the stages that no edge leads to: they take the inputs of the pipeline."""
    targets = stage_pairs(edges, n_stages)[:, 1].tolist()
    return tuple(sorted(set(range(n_stages)).difference(targets)))


def follows_previous(edges: Edges, n_stages: int) -> NDArray[np.bool_]:
    """Return whether each stage takes the output of the stage before; shape ``(n_stages,)``."""
    follows = np.full(n_stages, not edges)
    follows[:1] = False
    follows[[target for source, target in edges if target == source + 1]] = True
    return follows


def neighbors(edges: Edges, n_stages: int, step: int) -> NDArray[np.int64]:
    """Return the stage one ``step`` (1 or -1) from each stage, itself where no edge goes there."""
    follows, stages = np.append(follows_previous(edges, n_stages), False), np.arange(n_stages)
    return stages + np.where(follows[stages + (step > 0)], step, 0)


def skip_edges(edges: Edges) -> Edges:
    """Return the edges that are no step of a chain: their messages have the form of a skip's."""
    return tuple(edge for edge in edges if edge[1] > edge[0] + 1)


@lru_cache(maxsize=32)
def _placement(device_of: tuple[int, ...]) -> Placement:
    return Placement(device_of)


def first_on_device(homes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first path, or replica, that has each stage on the device of each path.

    Paths with a stage on one device share it. ``homes`` has the device of each stage, and the
    result has its shape: ``(n_paths, n_stages)``.

    >>> first_on_device(np.array([[0, 1], [2, 1]])).tolist()
    [[0, 0], [1, 0]]
    """
    n_stages = homes.shape[1]
    cells = homes * n_stages + np.arange(n_stages)
    _, first, number = np.unique(cells, return_index=True, return_inverse=True)
    paths: NDArray[np.int64] = (first // n_stages)[number.reshape(homes.shape)]
    return paths


def is_first_on_device(homes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each path is the first with each stage on its device; see `first_on_device`.

    >>> is_first_on_device(np.array([[0, 1], [2, 1]])).tolist()
    [[True, True], [True, False]]
    """
    is_first: NDArray[np.bool_] = first_on_device(homes) == np.arange(len(homes))[:, None]
    return is_first


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
