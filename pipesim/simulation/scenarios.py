"""`simulate_many`: one graph in many scenarios of noise, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import ArgumentError, check_count, check_flag, number
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE
from pipesim.simulation.engines import compiled, simpy_engine
from pipesim.simulation.noise import Noise
from pipesim.simulation.overlap_cost import run_twice
from pipesim.simulation.simulate import (
    checked_costs,
    checked_noise,
    predict_timeline,
    simulate,
    warn_of_costs,
    warn_of_memory_limit,
)
from pipesim.timeline.timeline import LONGEST, Timeline
from pipesim.utils import jit
from pipesim.utils.checks import checked_names
from pipesim.utils.host_memory import check_memory

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]
#: Bytes of a scenario: makespan, bubble, number, and its share of the list of parts.
_BYTES_PER_SCENARIO = 80
#: Largest number of threads a core; more of them only cost memory.
_MOST_THREADS = 32


@dataclass(frozen=True, repr=False)
class Scenarios:
    """Makespan and bubble of one step in many scenarios of noise; made by `pipesim.simulate_many`.

    Attributes
    ----------
    graph, costs, noise
        The graph, costs and noise that were simulated.
    makespan
        Seconds of each scenario's step; shape ``(n,)``.
    bubble_fraction
        Share of the time of all devices without compute tasks, 0..1; shape ``(n,)``.
    quiet_makespan
        Seconds of the step without noise.
    """

    graph: TaskGraph
    costs: Costs | TaskCosts
    noise: Noise
    makespan: Floats
    bubble_fraction: Floats
    quiet_makespan: float

    def __len__(self) -> int:
        return len(self.makespan)

    def __repr__(self) -> str:
        return (
            f"<Scenarios of {self.graph.name}: {len(self)}, median makespan "
            f"{np.median(self.makespan):.6g} s, without noise {self.quiet_makespan:.6g} s>"
        )

    def percentiles(self, levels: Sequence[float] = (1, 5, 25, 50, 75, 95, 99)) -> pd.DataFrame:
        """Return percentiles of makespan, slowdown and bubble over all scenarios.

        Parameters
        ----------
        levels
            Percentiles, 0 to 100.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``percentile``. Columns: ``makespan`` (s), ``slowdown`` (makespan over that
            without noise) and ``bubble_fraction`` (0..1), each by itself.

        Examples
        --------
        Without random factors, all scenarios are equal.

        >>> import pipesim as ps
        >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
        >>> costs, noise = ps.Costs(forward=1, backward=2), ps.Noise(slow_devices={1: 2.0}, seed=0)
        >>> many = ps.simulate_many(graph, costs, noise, 4, progress=False)
        >>> many.percentiles([50])
                    makespan  slowdown  bubble_fraction
        percentile
        50              15.0  1.666667              0.4
        """
        from pipesim.utils.packages import pandas as pd

        checked = [number(level) for level in levels] if isinstance(levels, Iterable) else []
        if not checked or not all(x is not None and 0 <= x <= 100 for x in checked):
            raise ArgumentError(f"levels must be percentiles from 0 to 100, got {levels!r}")
        makespan = np.percentile(self.makespan, levels)
        columns = {
            "makespan": makespan,
            "slowdown": makespan / self.quiet_makespan if self.quiet_makespan else np.nan,
            "bubble_fraction": np.percentile(self.bubble_fraction, levels),
        }
        return pd.DataFrame(columns, index=pd.Index(list(levels), name="percentile"))

    def timeline(self, scenario: int) -> Timeline:
        """Simulate one of the scenarios again, with every start and end.

        Parameters
        ----------
        scenario
            Number of the scenario, from 0 on.

        Returns
        -------
        Timeline
            As `pipesim.simulate` returns it for this noise and scenario.

        Examples
        --------
        The slowest of 100 scenarios:

        >>> import pipesim as ps
        >>> from pipesim.simulation import Normal
        >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
        >>> costs, noise = ps.Costs(forward=1, backward=2), ps.Noise(device=Normal(0.1), seed=0)
        >>> many = ps.simulate_many(graph, costs, noise, 100, progress=False)
        >>> slowest = int(many.makespan.argmax())
        >>> bool(many.timeline(slowest).makespan == many.makespan[slowest])
        True
        """
        if check_count("scenario", scenario, minimum=0) >= len(self):
            raise ArgumentError(f"there is no scenario {scenario} of {len(self)}, counted from 0")
        return simulate(self.graph, self.costs, noise=self.noise, scenario=scenario)


@checked_names
def simulate_many(
    graph: TaskGraph,
    costs: Costs | TaskCosts,
    noise: Noise,
    n: int,
    *,
    n_jobs: int = -1,
    progress: bool = True,
) -> Scenarios:
    """Simulate scenarios 0 to ``n - 1`` of ``noise``.

    Scenario ``k`` has exactly the makespan of ``simulate(graph, costs, noise=noise, scenario=k)``,
    for any number of scenarios or cores. Its bubble is equal up to rounding of sums.

    Parameters
    ----------
    graph, costs
        As `pipesim.simulate` takes them.
    noise
        The variation, and its seed.
    n
        Number of scenarios.
    n_jobs
        Number of threads, at most 32 a core; -1 for one a core.
    progress
        Whether to show a progress bar after the first second.

    Returns
    -------
    Scenarios
        Makespan (s) and bubble (0..1) of each scenario; shape ``(n,)`` each.

    Raises
    ------
    CostsError, GraphError, NetworkError
        As `pipesim.simulate`.
    CapacityError
        If the scenarios that run at once, or all results, would not fit in memory.

    Warns
    -----
    CostsWarning
        Once, as `pipesim.simulate` does.
    MemoryLimitWarning
        Once, if the step without noise needs more memory than a device has; see `simulate`.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim.simulation import Normal
    >>> graph, costs = ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(forward=1, backward=2)
    >>> noise = ps.Noise(task=Normal(0.1), seed=0)
    >>> scenarios = ps.simulate_many(graph, costs, noise, n=100, progress=False)
    >>> len(scenarios), scenarios.quiet_makespan
    (100, 9.0)
    >>> alone = ps.simulate(graph, costs, noise=noise, scenario=3)
    >>> bool(scenarios.makespan[3] == alone.makespan)
    True
    """
    n = check_count("n", n)
    check_flag("progress", progress)
    if not (isinstance(n_jobs, int) and n_jobs == -1):
        n_jobs = check_count("n_jobs", n_jobs)
    check_memory("holding all scenarios", n * _BYTES_PER_SCENARIO, f"ask for fewer than n={n}")
    cores = len(os.sched_getaffinity(0)) or 1
    workers = cores if n_jobs == -1 else min(n_jobs, _MOST_THREADS * cores)
    tasks = checked_costs(graph, costs)
    slowed = checked_noise(noise).slowed(graph, tasks)
    quiet = predict_timeline(graph, tasks)
    warn_of_costs(graph, costs)
    warn_of_memory_limit(quiet)
    makespan, busy = np.empty(n), np.empty(n)
    size = max(1, min(compiled.LANES, -(-n // workers)))
    parts = [np.arange(k, min(k + size, n)) for k in range(0, n, size)]
    in_batches = jit.available() and slowed.table.overlap_cost is None
    many = (compiled.ScenarioBatches if in_batches else _OneByOne)(graph, slowed, noise)
    at_once = min(workers, len(parts))
    check_memory(
        f"running {at_once} x {size} scenarios of {len(graph):,} tasks at once",
        at_once * many.nbytes(size),
        "use fewer n_jobs",
    )

    def work(part: NDArray[np.int64]) -> int:
        makespan[part], busy[part] = many(part.tolist())
        return len(part)

    with _bar(n, progress) as done:
        _run_in_threads(work, parts, workers, done)
    endless = np.flatnonzero(~(makespan <= LONGEST))
    if len(endless):  # raises CostsError with the task
        predict_timeline(graph, costs, noise=noise, scenario=int(endless[0]))
    time = graph.n_devices * makespan
    bubble = np.where(time > 0, 1.0 - busy / np.where(time > 0, time, 1.0), 1.0)
    return Scenarios(graph, costs, noise, makespan, np.maximum(bubble, 0.0), quiet.makespan)


def _run_in_threads(
    work: Callable[[NDArray[np.int64]], int],
    parts: Sequence[NDArray[np.int64]],
    n_threads: int,
    done: Callable[[int], object],
) -> None:
    """Call ``work`` with each part, and ``done`` with each result; stop at the first error."""
    with ThreadPoolExecutor(n_threads) as pool:
        try:
            for job in as_completed([pool.submit(work, part) for part in parts]):
                done(job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _bar(n: int, progress: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds a number of finished scenarios to the progress bar."""
    if not progress:
        yield lambda _: None
        return
    from pipesim.utils.packages import tqdm

    with tqdm(total=n, unit="scenario", delay=1.0) as bar:
        yield bar.update


class _OneByOne:
    """Scenarios one after the other, with the interface of `compiled.ScenarioBatches`.

    They run in the reference engine, if numba is missing.
    """

    @staticmethod
    def nbytes(_: int) -> int:
        """Return 0: the memory of SimPy's events is unknown."""
        return 0

    def __init__(self, graph: TaskGraph, costs: TaskCosts, noise: Noise) -> None:
        self.graph, self.costs, self.noise = graph, costs, noise
        self.run = partial(run_twice, (compiled if jit.available() else simpy_engine).run)

    def __call__(self, scenarios: Sequence[int]) -> tuple[Floats, Floats]:
        makespan, busy = np.empty(len(scenarios)), np.empty(len(scenarios))
        for k, scenario in enumerate(scenarios):
            drawn = self.noise.draw(self.graph, self.costs, scenario)
            start, end = self.run(self.graph, replace(self.costs, drawn=drawn))
            makespan[k], busy[k] = end.max(), (end - start)[self.graph.is_op(COMPUTE)].sum()
        return makespan, busy
