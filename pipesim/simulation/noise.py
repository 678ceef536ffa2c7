"""Noise: variation of tasks and devices, stragglers, slow links and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.kind_routes import message_ends
from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import (
    ArgumentError,
    CostsError,
    UnknownNameError,
    check_count,
    check_name,
    number,
)
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COMPUTE, COPIES, SENDS, TRANSFERS, Op
from pipesim.simulation.distributions import Distribution, Failures, check_distribution, tabulated
from pipesim.utils import random_draws
from pipesim.utils.checks import Count, Whole, checked


def distributions_by_name(task: object) -> dict[str, object]:
    """Return the distributions of compute tasks by their names in error messages."""
    if not isinstance(task, Mapping):
        return {"task": task}
    for name in task:
        try:
            check_name("compute operation", name, [op.name for op in COMPUTE])
        except UnknownNameError as error:
            raise UnknownNameError(f"task: {error}") from None
    return {f"task {name}": value for name, value in task.items()}


def checked_factors(name: str, factors: Mapping[Any, object]) -> dict[Any, float]:
    """Return factors as floats; raise `ArgumentError` for other values."""
    checked = {}
    for where, factor in factors.items():
        got = number(factor)
        if got is None or not 0 < got < np.inf:
            raise ArgumentError(f"{name}[{where!r}] must be a factor > 0, got {factor!r}")
        checked[where] = got
    return checked


Floats = NDArray[np.float64]


class Draws(NamedTuple):
    """Columns of noise that engines read."""

    #: Quantiles of each distribution; shape ``(n, 3, BINS)``.
    tables: Floats
    #: Distribution that each kind of task draws from, or -1; shape ``(n_kinds,)``.
    table_of_kind: NDArray[np.int8]
    #: Whether each kind computes, and its device; shape ``(n_kinds,)``.
    computes: NDArray[np.bool_]
    device: NDArray[np.int64]
    #: Seconds of a device's work between failures, 0 for none; seconds of the pause after each.
    hit_every: float
    pause: float


@checked
@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variation of the durations of tasks from scenario to scenario.

    A compute task of d seconds on device x lasts ``d * slow[x] * device factor * task factor``.
    With a failure it lasts a pause longer. Messages, copies and collectives have a ``message``
    factor.

    Attributes
    ----------
    seed
        Whole number. The same seed and scenario always give the same durations. Constant factors
        need none.
    task
        Factors of compute tasks, drawn for each task: one distribution, or one for each operation.
        A schedule that cuts the same work into more tasks averages them away: to compare schedules
        with unlike numbers of chunks, give ``device``.
    device
        Factors of devices, drawn once for each device and scenario.
    message
        Factors of the seconds of messages (not of their latency), of collectives and of copies to
        and from host memory, drawn for each. All members of a collective have the same factor and
        last equally long.
    gpus_per_device
        Number of GPUs that work in step as one device, such as a tensor-parallel group. The largest
        of their factors counts, and the failure of one GPU is a failure of the device.
    slow_devices
        Constant factors on compute tasks, by device.
    slow_links
        Constant factors on seconds and latency of messages, by (sender, receiver). They do not
        change collectives.
    failures
        Failures of devices and the pauses after them.

    Examples
    --------
    A device that takes twice as long delays a step of 9 s.

    >>> import pipesim as ps
    >>> from pipesim.simulation import LogNormal
    >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
    >>> costs = ps.Costs(forward=1, backward=2)
    >>> noise = ps.Noise(task=LogNormal(0.02), slow_devices={1: 2.0}, seed=0)
    >>> round(ps.simulate(graph, costs, noise=noise).makespan)
    15
    """

    seed: Whole | None = None
    task: Distribution | Mapping[str, Distribution] | None = None
    device: Distribution | None = None
    message: Distribution | None = None
    gpus_per_device: Count = 1
    slow_devices: Annotated[Mapping[int, float], "{3: 1.2}"] = field(default_factory=dict)
    slow_links: Annotated[Mapping[tuple[int, int], float], "{(0, 1): 1.2}"] = field(
        default_factory=dict
    )
    failures: Failures | None = None

    def __post_init__(self) -> None:
        drawn = {"device": self.device, "message": self.message}
        for name, value in {**distributions_by_name(self.task), **drawn}.items():
            check_distribution(name, value)
        random = (self.task, self.device, self.message, self.failures)
        if self.seed is None and any(part is not None for part in random):
            raise ArgumentError(
                "random noise needs a seed, so that it can be repeated: Noise(seed=0)"
            )
        if self.failures is not None and not self._hit_every > 0:
            raise ArgumentError(
                f"failures: every={self.failures.every!r} s of one GPU, over "
                f"gpus_per_device={self.gpus_per_device}, is too small a number for the seconds "
                "between failures of a device; give a larger every"
            )
        for name in ("slow_devices", "slow_links"):
            object.__setattr__(self, name, checked_factors(name, getattr(self, name)))
        for link in self.slow_links:
            if not (isinstance(link, tuple) and len(link) == 2):
                raise ArgumentError(
                    f"slow_links names pairs of sender and receiver, such as (0, 1), got {link!r}"
                )

    @property
    def _hit_every(self) -> float:
        """Seconds of a device's work between failures, 0 for none."""
        return 0.0 if self.failures is None else self.failures.every / self.gpus_per_device

    def slowed(self, graph: TaskGraph, costs: TaskCosts) -> TaskCosts:
        """Return costs multiplied by the constant factors of slow devices and links.

        Parameters
        ----------
        graph, costs
            A task graph, and `pipesim.Costs.of` that graph.

        Returns
        -------
        TaskCosts
            Costs with longer seconds, and longer latencies of slow links.
        """
        if costs.drawn is not None:  # the noise then varies the drawn seconds
            costs = costs.per_task()
        if self.slow_devices or self.slow_links:
            with np.errstate(over="ignore"):
                costs = self._with_slow(graph, costs)
        self._check_longest(costs)
        return costs

    def _check_longest(self, costs: TaskCosts) -> None:
        """Raise `CostsError` if factors and pauses may make a task or a latency infinite."""
        base = float(costs.table.duration.max(initial=0.0))
        by_op = self.task if isinstance(self.task, Mapping) else {"": self.task}
        most = 1.0
        for drawn in ((self.device,), (*by_op.values(), self.message)):
            tables = [tabulated(d, self.gpus_per_device) for d in drawn if d is not None]
            most *= max([1.0, *(float(table.max()) for table in tables)])
        longest = base * most + (0.0 if self.failures is None else self.failures.pause)
        for what, seconds in (
            ("a task", longest),
            ("a latency", costs.table.latency.max(initial=0)),
        ):
            if not np.isfinite(seconds):
                raise CostsError(
                    f"with this noise {what} may last {seconds} s: {base:g} s by the costs, times "
                    f"factors up to {most:g}; make the costs, or the factors, smaller"
                )

    def _with_slow(self, graph: TaskGraph, costs: TaskCosts) -> TaskCosts:
        n_devices = graph.n_devices
        for device in {*self.slow_devices, *(d for link in self.slow_links for d in link)}:
            if check_count("a slow device", device, minimum=0) >= n_devices:
                raise ArgumentError(
                    f"device {device} is slow, but there are {n_devices} devices, "
                    f"0..{n_devices - 1}"
                )
        kinds, on_device = graph.kinds, np.ones(n_devices)
        on_device[list(self.slow_devices)] = list(self.slow_devices.values())
        factor = np.where(kinds.is_op(COMPUTE), on_device[kinds.device], 1.0)
        transfers = np.flatnonzero(kinds.is_op(TRANSFERS))
        source, target = message_ends(graph, transfers)
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
        """Return the columns for draws on a graph, which engines read.

        Parameters
        ----------
        graph
            A task graph.

        Returns
        -------
        Draws
            Tables of quantiles, and the table of each kind of task.
        """
        kinds = graph.kinds
        which = np.full(len(kinds), -1, dtype=np.int8)
        by_op = self.task if isinstance(self.task, Mapping) else {}
        varying: list[tuple[Distribution | None, NDArray[np.bool_], int]] = [
            (self.message, kinds.is_op(SENDS | COLLECTIVES | COPIES), 1),
            *((d, kinds.op == Op[op], self.gpus_per_device) for op, d in by_op.items()),
        ]
        if self.task is not None and not isinstance(self.task, Mapping):
            varying.append((self.task, kinds.is_op(COMPUTE), self.gpus_per_device))
        tables: list[Floats] = []
        for distribution, members, gpus in varying:
            if distribution is not None and members.any():
                which[members] = len(tables)
                tables.append(tabulated(distribution, gpus))
        return Draws(
            np.array(tables, dtype=np.float64).reshape(-1, 3, random_draws.BINS),
            which,
            kinds.is_op(COMPUTE),
            kinds.device.copy(),  # loops are compiled for arrays that can be written
            self._hit_every,
            0.0 if self.failures is None else self.failures.pause,
        )

    def device_factors(self, n_devices: int, scenarios: Sequence[int]) -> Floats:
        """Return the factor of each device in each scenario.

        Parameters
        ----------
        n_devices
            Number of devices.
        scenarios
            Numbers of the scenarios, from 0 on.

        Returns
        -------
        numpy.ndarray
            Shape ``(len(scenarios), n_devices)``; ones without ``device``.
        """
        if self.device is None:
            return np.ones((len(scenarios), n_devices))
        table = tabulated(self.device, self.gpus_per_device)
        index = np.arange(n_devices, dtype=np.uint64)
        keys = self.keys(scenarios)[:, random_draws.DEVICE_DRAWS, None]
        return random_draws.factors(table, random_draws.random_bits(keys, index[None, :]))

    def keys(self, scenarios: Sequence[int]) -> NDArray[np.uint64]:
        """Return the keys of draws for tasks, devices and failures.

        Parameters
        ----------
        scenarios
            Numbers of the scenarios, from 0 on.

        Returns
        -------
        numpy.ndarray
            Unsigned integers of 64 bits, shape ``(len(scenarios), 3)``.

        Examples
        --------
        A scenario has the same keys alone and among others.

        >>> import pipesim as ps
        >>> noise = ps.Noise(seed=0)
        >>> bool((noise.keys([7])[0] == noise.keys([3, 7])[1]).all())
        True
        """
        return random_draws.keys(int(self.seed or 0), scenarios)

    def applied(self, graph: TaskGraph, costs: TaskCosts, scenario: int = 0) -> TaskCosts:
        """Return the costs of one scenario: the seconds of each of its tasks.

        Parameters
        ----------
        graph, costs
            A task graph, and `pipesim.Costs.of` that graph.
        scenario
            Number of the scenario, from 0 on; 0 by default.

        Returns
        -------
        TaskCosts
            Costs whose ``duration`` has the random and the constant factors; `pipesim.simulate`
            takes them.

        Examples
        --------
        >>> import pipesim as ps
        >>> from pipesim.simulation import Normal
        >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
        >>> costs = ps.Costs(forward=1, backward=2)
        >>> noise = ps.Noise(task=Normal(0.1), seed=0)
        >>> applied = noise.applied(graph, costs.of(graph), scenario=3)
        >>> alone = ps.simulate(graph, costs, noise=noise, scenario=3)
        >>> ps.simulate(graph, applied).makespan == alone.makespan
        True
        """
        if check_count("scenario", scenario, minimum=0) >= 2**63:
            raise ArgumentError(f"scenario must be below 2^63, got {scenario}")
        costs = self.slowed(graph, costs)
        return replace(costs, drawn=self.draw(graph, costs, scenario))

    def draw(self, graph: TaskGraph, costs: TaskCosts, scenario: int) -> Floats:
        """Return the seconds of each task in one scenario, from costs that are `slowed`.

        Parameters
        ----------
        graph
            A task graph.
        costs
            Costs that `slowed` returned for it.
        scenario
            Number of the scenario, from 0 on.

        Returns
        -------
        numpy.ndarray
            Seconds, shape ``(len(graph),)``.
        """
        prepared = self.prepare(graph)
        keys = self.keys([scenario])[0]
        index = np.arange(len(graph), dtype=np.uint64)
        groups = graph.collectives  # all members use the draw of the first
        index[groups.values] = groups.values[groups.ptr[groups.rows]]
        of_device = self.device_factors(graph.n_devices, [scenario])[0]
        computes = prepared.computes[graph.kind]
        drawn: Floats = costs.duration * np.where(computes, of_device[graph.device], 1.0)
        for row, table in enumerate(prepared.tables):
            tasks = np.flatnonzero((prepared.table_of_kind == row)[graph.kind])
            drawn[tasks] *= random_draws.factors(
                table, random_draws.random_bits(keys[random_draws.TASK_DRAWS], index[tasks])
            )
        if prepared.hit_every > 0:
            bits = random_draws.random_bits(keys[random_draws.FAILURE_DRAWS], index)
            hit = random_draws.uniform(bits) * prepared.hit_every < drawn
            drawn += np.where(computes & hit, prepared.pause, 0.0)
        return drawn
