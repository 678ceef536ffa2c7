"""Orders of torch's autograd engine when its threads race: the best and the worst."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.lowering.lower import lower
from pipesim.lowering.recomputes import Recompute
from pipesim.ops import Action, Op
from pipesim.scheduling.autograd_engine import engine_order
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import Count, Whole, checked

if TYPE_CHECKING:
    import pandas as pd


#: Order of the backward of one device: True for an R, False for a B.
_Steps = tuple[bool, ...]


@dataclass(frozen=True, repr=False)
class AutogradOrders:
    """Possible orders of an unordered backward, and their timelines; see `autograd_orders`.

    Attributes
    ----------
    schedules
        One for each simulated order. The first is the order of the engine on a CPU. If not all
        orders were simulated, the second has each R right before its B, and the third all R first.
    timelines
        One for each schedule.
    n_possible
        Number of possible orders: exact up to 2 ** 43, infinity above 1e308.

    Examples
    --------
    >>> import pipesim as ps
    >>> orders = ps.autograd_orders(2, 2, ps.Costs(forward=1, backward=2))
    >>> orders
    <AutogradOrders: 2 orders (all), makespan 11 to 12 s>
    >>> orders.makespans.tolist(), round(orders.spread, 3)
    ([11.0, 12.0], 0.091)
    """

    schedules: tuple[Schedule, ...]
    timelines: tuple[Timeline, ...]
    n_possible: float

    @property
    def is_exhaustive(self) -> bool:
        """Whether every possible order was simulated; best and worst are among simulated ones."""
        return len(self.schedules) == self.n_possible

    @cached_property
    def makespans(self) -> NDArray[np.float64]:
        """Makespan of each order (s); shape ``(len(schedules),)``."""
        return np.array([timeline.makespan for timeline in self.timelines])

    @cached_property
    def peak_memory(self) -> NDArray[np.float64]:
        """Bytes of the fullest device in each order; shape ``(len(schedules),)``."""
        return np.array([timeline.memory.peak.max() for timeline in self.timelines])

    @property
    def best(self) -> Timeline:
        """Timeline of the fastest order."""
        return self.timelines[int(self.makespans.argmin())]

    @property
    def worst(self) -> Timeline:
        """Timeline of the slowest order."""
        return self.timelines[int(self.makespans.argmax())]

    @property
    def spread(self) -> float:
        """Slowest over fastest makespan, minus 1; NaN if the fastest is 0 s."""
        fastest, slowest = float(self.makespans.min()), float(self.makespans.max())
        return slowest / fastest - 1 if fastest else math.nan

    @property
    def table(self) -> pd.DataFrame:
        """One row each for the fastest, the median and the slowest order, and that on a CPU.

        Columns: ``makespan`` (s), ``peak_memory`` (bytes of the fullest device).
        """
        from pipesim.utils.packages import pandas as pd

        ranked = np.argsort(self.makespans, kind="stable")
        rows = {
            "best": ranked[0], "median": ranked[(len(ranked) - 1) // 2], "worst": ranked[-1],
            "on a CPU": 0,
        }  # fmt: skip
        columns = {"makespan": self.makespans, "peak_memory": self.peak_memory}
        chosen = {name: values[list(rows.values())] for name, values in columns.items()}
        return pd.DataFrame(chosen, index=list(rows))

    def __repr__(self) -> str:
        share = "all" if self.is_exhaustive else f"of {self.n_possible:,.8g}"
        return (
            f"<AutogradOrders: {len(self.schedules)} orders ({share}), makespan "
            f"{self.makespans.min():.6g} to {self.makespans.max():.6g} s>"
        )

    def _repr_html_(self) -> str:
        html: str = self.table.to_html()
        return html


@checked
def autograd_orders(
    n_devices: Count,
    n_microbatches: Count,
    costs: Costs,
    *,
    recompute: Recompute = "always",
    recompute_thread: Literal["device", "caller"] = "device",
    n_orders: Count = 200,
    seed: Whole = 0,
    **lowering: Any,
) -> AutogradOrders:
    """Simulate possible orders of an unordered backward of GPipe on GPUs.

    On GPUs torch's engine has one thread for each device. The thread runs the newest of the ready
    nodes. Gradients come from the thread of the next device, so the set of ready nodes depends on a
    race:

    - In every outcome, the backwards of a device run newest first, and so do its recomputes.
      Recomputes are newer than any backward.
    - The race decides how many recomputes a device is ahead of its backwards.
    - So the orders of a device are all those in which R and B are in order and each R is before its
      B. With m of each, there are ``C(2m, m) / (m + 1)`` orders, Catalan's number.
    - On the last device all gradients are ready at once, so that all R come first.

    This is a model of the engine (torch/csrc/autograd/engine.cpp). It is checked against torch on
    CPUs, where threads do not race (`pipesim.schedule` with ``backward_order="autograd"``), not on
    GPUs.

    Parameters
    ----------
    n_devices, n_microbatches
        Numbers of devices and of micro-batches of the pipeline; each device has one stage.
    costs
        Costs of its tasks.
    recompute
        Micro-batches that are recomputed, as for `lower`.
    recompute_thread
        Thread that runs a recompute:

        - ``"device"``: the thread of its device, as in torch 2.13, which queues a node by its
          device.
        - ``"caller"``: the thread that calls backward, as in torch 1, which queued a node by the
          device of its gradients; a recompute of torchgpipe has no gradients. Recomputes then race
          with backwards on the last device too.
    n_orders
        Largest number of orders to simulate. If more are possible, the extremes are simulated (each
        R right before its B; all R first; the order on a CPU), and others drawn uniformly.
    seed
        Seed of the drawn orders.
    **lowering
        Further arguments of `lower`, such as ``overlap=False, recompute_waits=True`` for
        torchgpipe's default streams.

    Returns
    -------
    AutogradOrders
        Schedule and timeline of each simulated order.

    See Also
    --------
    pipesim.schedule : Build ``"gpipe"`` with one of the orders as ``backward_order``.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, output_bytes=1, network=ps.Network(bandwidth=1))
    >>> waits = {"overlap": False, "rendezvous": True, "recompute_waits": True}
    >>> orders = ps.autograd_orders(2, 3, costs, **waits)
    >>> orders
    <AutogradOrders: 5 orders (all), makespan 24 to 26 s>
    """
    n, m, generator = n_devices, n_microbatches, np.random.default_rng(seed)
    if "recompute_first" in lowering:
        raise ArgumentError("autograd_orders chooses when R runs; leave recompute_first out")
    n_recomputed = {"always": m, "except_last": m - 1, "never": 0}[recompute]
    races = n if recompute_thread == "caller" else n - 1
    order = engine_order(n, m, n_recomputed)  # on a CPU
    by_cpu = tuple(tuple(a.op == Op.R for a in order if a.stage == stage) for stage in range(n))
    different = dict.fromkeys([by_cpu])
    n_possible = _n_possible(m if n_recomputed else 0, races)
    last = (_first(m, n_recomputed),) * (n - races)
    for orders in _chosen(m, n_recomputed, races, n_possible <= n_orders, generator):
        if len(different) >= min(n_orders, n_possible):
            break
        different.setdefault((*orders, *last))
    schedules = tuple(_schedule(orders, m, n_recomputed) for orders in different)
    timelines = tuple(
        predict_timeline(lower(schedule, **lowering), costs) for schedule in schedules
    )
    return AutogradOrders(schedules, timelines, n_possible)


def _chosen(
    m: int, n_recomputed: int, races: int, every: bool, generator: np.random.Generator
) -> Iterator[tuple[_Steps, ...]]:
    """Yield orders of the racing devices: ``every`` one, or the extremes and then drawn ones."""
    if every:
        yield from itertools.product(list(_steps(m, n_recomputed)), repeat=races)
        return
    nearest = (False,) * (m - n_recomputed) + (True, False) * n_recomputed  # each R before its B
    yield (nearest,) * races
    yield (_first(m, n_recomputed),) * races
    while True:
        yield tuple(_drawn(m, n_recomputed, generator) for _ in range(races))


def _n_possible(m: int, races: int) -> float:
    """Return the number of possible orders: Catalan's number to the power of ``races``."""
    log = races * (math.lgamma(2 * m + 1) - 2 * math.lgamma(m + 1) - math.log(m + 1))
    if log < 30:
        return int((math.comb(2 * m, m) // (m + 1)) ** races)
    return math.exp(log) if log < 709 else math.inf


def _steps(m: int, n_recomputed: int) -> Iterator[_Steps]:
    """Yield every order of a device: no prefix has more B than R, apart from B without R."""
    spare = m - n_recomputed

    def extended(steps: _Steps, n_r: int, n_b: int) -> Iterator[_Steps]:
        if n_r == n_recomputed and n_b == m:
            yield steps
        if n_r < n_recomputed:
            yield from extended((*steps, True), n_r + 1, n_b)
        if n_b < min(m, n_r + spare):
            yield from extended((*steps, False), n_r, n_b + 1)

    return extended((), 0, 0)


def _drawn(m: int, n_recomputed: int, generator: np.random.Generator) -> _Steps:
    """Draw one order of a device, uniformly.

    By the cycle lemma, exactly one rotation of a shuffled row of m R and m + 1 B has, before its
    last B, no prefix with more B than R.
    """
    if not n_recomputed:
        return (False,) * m
    row = generator.permutation([1] * m + [-1] * (m + 1))
    first = int(np.cumsum(row).argmin()) + 1
    steps = tuple(bool(x > 0) for x in np.roll(row, -first)[:-1].tolist())
    # With m - 1 recomputes, the first R is dropped: the B without R may come at any time.
    return steps[m - n_recomputed :]


def _first(m: int, n_recomputed: int) -> _Steps:
    """Return the order in which all R come first."""
    return (True,) * n_recomputed + (False,) * m


def _schedule(orders: Sequence[_Steps], m: int, n_recomputed: int) -> Schedule:
    """Return a schedule of GPipe's forwards and backwards in these orders."""

    def actions(stage: int, steps: _Steps) -> Iterator[Action]:
        yield from (Action(stage, Op.F, i) for i in range(m))
        recomputes, backwards = iter(range(n_recomputed)[::-1]), iter(range(m)[::-1])
        for is_r in steps:
            yield Action(stage, *((Op.R, next(recomputes)) if is_r else (Op.B, next(backwards))))

    return Schedule.from_orders(
        [list(actions(stage, steps)) for stage, steps in enumerate(orders)],
        placement=Placement.linear(len(orders)),
        n_microbatches=m,
        name="gpipe",
    )
