"""What makes steps differ: noise of tasks and devices, stragglers, slow links, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipesim import draws
from pipesim.costs import TaskCosts, message_ends
from pipesim.errors import ArgumentError, check_count, check_name, number
from pipesim.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COMPUTE, SENDS, TRANSFERS, Op

__all__ = ["Distribution", "Draws", "Empirical", "Failures", "LogNormal", "Noise", "Normal"]

Floats = NDArray[np.float64]


class Distribution(Protocol):
    """Of factors on a duration, by its quantile function; hashable, as a frozen dataclass is."""

    def __hash__(self) -> int: ...

    def quantile(self, level: Floats) -> Floats:
        """Return the factors below which shares ``level`` (0..1, exclusive) of all draws lie."""


class Draws(NamedTuple):
    """Noise as engines take it.

    Attributes
    ----------
    tables
        Quantiles of each distribution; shape ``(n, 3, BINS)``.
    which
        Distribution that each kind of task draws from, or -1; shape ``(n_kinds,)``.
    computes, device
        Of each kind: whether it computes, and where.
    hit_every, pause
        Seconds of a device's work between failures, 0 for none; and how long each takes.
    """

    tables: Floats
    which: NDArray[np.int8]
    computes: NDArray[np.bool_]
    device: NDArray[np.int64]
    hit_every: float
    pause: float


def _standard_normal(level: Floats) -> Floats:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(x) for x in level.ravel().tolist()]).reshape(level.shape)


@dataclass(frozen=True)
class Normal:
    """Factors of mean 1 and standard deviation ``std``; those below 0 are 0.

    That is one in three million where ``std`` is 0.2; far beyond, the mean is above 1.
    """

    std: float

    def __post_init__(self) -> None:
        _check_spread("std", self.std)

    def quantile(self, level: Floats) -> Floats:
        """See `Distribution`."""
        return np.maximum(0.0, 1.0 + self.std * _standard_normal(level))


@dataclass(frozen=True)
class LogNormal:
    """Factors of mean 1 whose logarithm has the standard deviation ``sigma``."""

    sigma: float

    def __post_init__(self) -> None:
        _check_spread("sigma", self.sigma)

    def quantile(self, level: Floats) -> Floats:
        """See `Distribution`."""
        return np.exp(self.sigma * _standard_normal(level) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Empirical:
    """Measured values, each as likely as the others, divided by their mean.

    Parameters
    ----------
    samples
        Such as the seconds that an operation took, step after step.

    Raises
    ------
    ArgumentError
        If there are none, or one is negative or not finite, or all are 0.
    """

    samples: Sequence[float] | Floats

    def __post_init__(self) -> None:
        try:
            values = np.sort(np.asarray(self.samples, dtype=np.float64).ravel())
        except (TypeError, ValueError):
            raise ArgumentError(f"samples must be numbers, got {self.samples!r}") from None
        if not len(values):
            raise ArgumentError("samples are empty; give at least one measured value")
        bad = values[~(np.isfinite(values) & (values >= 0))]
        if len(bad):
            raise ArgumentError(f"samples must be finite and >= 0, got {bad[0]}")
        if not values.any():
            raise ArgumentError("samples are all 0; a factor cannot be made of them")
        object.__setattr__(self, "samples", tuple(values.tolist()))

    def quantile(self, level: Floats) -> Floats:
        """See `Distribution`."""
        values = np.array(self.samples) / np.mean(self.samples)
        found: Floats = values[np.minimum((level * len(values)).astype(np.int64), len(values) - 1)]
        return found


@dataclass(frozen=True)
class Failures:
    """Pauses, as after a failure: a task that is hit lasts ``pause`` longer.

    Attributes
    ----------
    every
        Seconds of work between failures of one GPU, on average. A task of d seconds is hit with
        the chance d / every.
    pause
        Seconds until the device goes on.
    """

    every: float
    pause: float

    def __post_init__(self) -> None:
        for name, least in (("every", "> 0"), ("pause", ">= 0")):
            value = number(getattr(self, name))
            if value is None or not 0 <= value < np.inf or (value == 0 and least == "> 0"):
                raise ArgumentError(
                    f"{name} must be finite seconds {least}, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the durations of tasks vary from scenario to scenario.

    A compute task of d seconds on device x lasts ``d * slow[x] * device factor * task factor``,
    and a pause longer where it is hit. Messages and collectives take their ``message`` factor.

    Attributes
    ----------
    seed
        A whole number. The same seed and scenario give the same durations, always.
    task
        Factors of compute tasks, drawn for each: one distribution, or one an operation.
    device
        Factors of devices, drawn once a scenario.
    message
        Factors of the seconds of messages (not of their latency) and collectives, drawn for each;
        all members of a collective last as long.
    gpus_per_device
        GPUs that work in step as one device, such as a tensor-parallel group: of the factors of
        each, the largest counts, and any one's failure is the device's.
    slow_devices
        Constant factors on compute tasks, by device.
    slow_links
        Constant factors on seconds and latency of messages, by (sender, receiver). Collectives are
        not slowed by them.
    failures
        Pauses.

    Raises
    ------
    ArgumentError
        For a missing seed, factors that are not positive, and operations that do not compute.

    Examples
    --------
    >>> noise = Noise(task=LogNormal(0.02), slow_devices={3: 1.2}, seed=0)
    """

    seed: int | None = None
    task: Distribution | Mapping[str, Distribution] | None = None
    device: Distribution | None = None
    message: Distribution | None = None
    gpus_per_device: int = 1
    slow_devices: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    failures: Failures | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            raise ArgumentError("noise needs a seed, so that it can be repeated: Noise(seed=0)")
        for name, least in (("seed", 0), ("gpus_per_device", 1)):  # as ints, numpy's included
            object.__setattr__(self, name, check_count(name, getattr(self, name), least))
        given = dict(self.task) if isinstance(self.task, Mapping) else {"task": self.task}
        for name in given if isinstance(self.task, Mapping) else ():
            check_name("compute operation", name, [op.name for op in COMPUTE])
        for name, value in {**given, "device": self.device, "message": self.message}.items():
            _check_distribution(name, value)
        if not isinstance(self.failures, Failures | None):
            raise ArgumentError(f"failures must be a pipesim.Failures, got {self.failures!r}")
        _check_factors("slow_devices", self.slow_devices, "{3: 1.2}")
        _check_factors("slow_links", self.slow_links, "{(0, 1): 1.2}")
        for link in self.slow_links:
            if not (isinstance(link, tuple) and len(link) == 2):
                raise ArgumentError(
                    f"slow_links names pairs of sender and receiver, such as (0, 1), got {link!r}"
                )

    def slowed(self, graph: TaskGraph, costs: TaskCosts) -> TaskCosts:
        """Return costs with the constant factors of slow devices and links in them.

        Raises
        ------
        ArgumentError
            For a device that the graph does not have.
        """
        if costs.drawn is not None:  # from here on these are the seconds that vary
            costs = costs.per_task()
        if not self.slow_devices and not self.slow_links:
            return costs
        known = graph.n_devices
        for device in {*self.slow_devices, *(d for link in self.slow_links for d in link)}:
            if check_count("a slow device", device, minimum=0) >= known:
                raise ArgumentError(
                    f"device {device} is slow, but there are {known} devices, 0..{known - 1}"
                )
        kinds, on_device = graph.kinds, np.ones(known)
        on_device[list(self.slow_devices)] = list(self.slow_devices.values())
        factor = np.where(kinds.is_op(COMPUTE), on_device[kinds.device], 1.0)
        transfers = np.flatnonzero(kinds.is_op(TRANSFERS))
        source, target = message_ends(kinds, transfers)
        for (a, b), slower in self.slow_links.items():
            on_link = transfers[(source == a) & (target == b)]
            if not len(on_link):
                raise ArgumentError(f"no message goes from device {a} to {b}; it cannot be slow")
            factor[on_link] = slower
        if costs.row is not graph.kind:  # a row a task
            costs = costs.per_task()
            factor, is_transfer = factor[graph.kind], graph.is_op(TRANSFERS)
        else:
            is_transfer = kinds.is_op(TRANSFERS)
        table = costs.table._replace(
            duration=costs.table.duration * factor,
            latency=costs.table.latency * np.where(is_transfer, factor, 1.0),
        )
        return replace(costs, table=table)

    def prepare(self, graph: TaskGraph) -> Draws:
        """Return what draws need of a graph."""
        kinds = graph.kinds
        which = np.full(len(kinds), -1, dtype=np.int8)
        by_op = self.task if isinstance(self.task, Mapping) else {}
        varying: list[tuple[Distribution | None, NDArray[np.bool_], int]] = [
            (self.message, kinds.is_op(SENDS | COLLECTIVES), 1),
            *((d, kinds.op == Op[op], self.gpus_per_device) for op, d in by_op.items()),
        ]
        if self.task is not None and not isinstance(self.task, Mapping):
            varying.append((self.task, kinds.is_op(COMPUTE), self.gpus_per_device))
        tables: list[Floats] = []
        for distribution, members, gpus in varying:
            if distribution is not None and members.any():
                which[members] = len(tables)
                tables.append(_table(distribution, gpus))
        hit_every, pause = 0.0, 0.0
        if self.failures is not None:
            hit_every = self.failures.every / self.gpus_per_device
            pause = float(self.failures.pause)
        return Draws(
            np.array(tables, dtype=np.float64).reshape(-1, 3, draws.BINS),
            which,
            kinds.is_op(COMPUTE),
            kinds.device,
            hit_every,
            pause,
        )

    def device_factors(self, n_devices: int, scenarios: Sequence[int]) -> Floats:
        """Return the factor of each device in each scenario; shape ``(n, n_devices)``."""
        if self.device is None:
            return np.ones((len(scenarios), n_devices))
        table = _table(self.device, self.gpus_per_device)
        index = np.arange(n_devices, dtype=np.uint64)
        keys = self.keys(scenarios)[:, draws.OF_DEVICES, None]
        return draws.factors(table, draws.mixed(keys, index[None, :]))

    def keys(self, scenarios: Sequence[int]) -> NDArray[np.uint64]:
        """Return the keys of draws for tasks, devices and failures; shape ``(n, 3)``."""
        assert self.seed is not None
        return draws.keys(int(self.seed), scenarios)

    def applied(self, graph: TaskGraph, costs: TaskCosts, scenario: int = 0) -> TaskCosts:
        """Return the costs of one scenario: what its tasks take, one by one.

        Raises
        ------
        ArgumentError
            For a scenario that is no whole number from 0 to 2^63 - 1.
        """
        if check_count("scenario", scenario, minimum=0) >= 2**63:
            raise ArgumentError(f"scenario must be below 2^63, got {scenario}")
        costs = self.slowed(graph, costs)
        return replace(costs, drawn=self.draw(graph, costs, scenario))

    def draw(self, graph: TaskGraph, costs: TaskCosts, scenario: int) -> Floats:
        """Return the seconds of each task in one scenario, from costs that are `slowed`."""
        prepared = self.prepare(graph)
        keys = self.keys([scenario])[0]
        index = np.arange(len(graph), dtype=np.uint64)
        groups = graph.collectives  # all members last what the first one draws
        index[groups.values] = groups.values[groups.ptr[groups.rows]]
        of_device = self.device_factors(graph.n_devices, [scenario])[0]
        computes = prepared.computes[graph.kind]
        drawn: Floats = costs.duration * np.where(computes, of_device[graph.device], 1.0)
        for row, table in enumerate(prepared.tables):
            mine = np.flatnonzero((prepared.which == row)[graph.kind])
            drawn[mine] *= draws.factors(table, draws.mixed(keys[draws.OF_TASKS], index[mine]))
        if prepared.hit_every > 0:
            hit = (
                draws.shares(draws.mixed(keys[draws.OF_FAILURES], index)) * prepared.hit_every
                < drawn
            )
            drawn += np.where(computes & hit, prepared.pause, 0.0)
        return drawn


@lru_cache(maxsize=64)
def _table(distribution: Distribution, slowest_of: int) -> Floats:
    table = draws.quantile_table(distribution.quantile, slowest_of)
    bad = table[~(np.isfinite(table) & (table >= 0))]
    if len(bad):
        raise ArgumentError(f"factors must be finite and >= 0, but {distribution!r} has {bad[0]}")
    return table


def _check_distribution(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, type) or not hasattr(value, "quantile"):
        raise ArgumentError(f"{name} must be a distribution, such as Normal(0.02), got {value!r}")
    try:
        hash(value)  # its table is made once
    except TypeError:
        raise ArgumentError(
            f"{name} must be hashable, as a frozen dataclass is, got {value!r}"
        ) from None


def _check_factors(name: str, factors: object, example: str) -> None:
    if not isinstance(factors, Mapping):
        raise ArgumentError(f"{name} must be a mapping, such as {example}, got {factors!r}")
    for where, factor in factors.items():
        got = number(factor)
        if got is None or not 0 < got < np.inf:
            raise ArgumentError(f"{name}[{where!r}] must be a factor > 0, got {factor!r}")


def _check_spread(name: str, value: object) -> None:
    got = number(value)
    if got is None or not 0 <= got < np.inf:
        raise ArgumentError(f"{name} must be finite and >= 0, got {value!r}")
