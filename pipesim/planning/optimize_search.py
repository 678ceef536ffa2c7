"""The search of `optimize`: first orders, local search, proof, within a limit of effort."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipesim.analysis.lower_bounds.lower_bound import lower_bound
from pipesim.costs.costs import Costs
from pipesim.ops import Op
from pipesim.order_search import (
    LaneOrder,
    LocalSearch,
    Objective,
    OrderProblem,
    anneal_microbatches,
    evaluate,
    has_equal_microbatches,
    meets,
    order_problem,
)
from pipesim.order_search.evaluate import ROUNDING
from pipesim.order_search.improve import periods_of
from pipesim.order_search.lane_order import n_microbatches
from pipesim.planning.cp_sat_proof import MOST_TASKS, prove
from pipesim.planning.first_orders import Candidate, first_orders, sequential_candidate
from pipesim.scheduling.placement import Placement


@dataclass
class Effort:
    """Limit of a search: seconds, or evaluations in their place."""

    seconds: float
    evaluations: int | None
    seed: int
    began: float = field(default_factory=time.perf_counter)

    @property
    def share(self) -> float:
        """Share of the seconds that have passed."""
        return (time.perf_counter() - self.began) / self.seconds

    def is_spent(self, share: float = 1.0) -> bool:
        """Return whether a share of the seconds has passed; never if evaluations are counted."""
        return self.evaluations is None and self.share >= share

    def after(self, share: float) -> float:
        """Return the share of the effort at which a share of what is left now has passed."""
        passed = 0.0 if self.evaluations is not None else min(self.share, 1.0)
        return passed + share * (1.0 - passed)


#: Share of the effort after which the local search gives way to CP-SAT: with one stage a device,
#: and with several, where CP-SAT rarely finds better orders.
_LOCAL_SHARE, _LOCAL_SHARE_CHUNKS = 0.4, 0.65
#: Share after which CP-SAT gives way to the local search, and the share of what is left for which
#: a period of many micro-batches is searched.
_PROOF_SHARE, _PERIOD_SHARE = 0.8, 0.6
#: Share of the effort that is left after which no more first orders are tried: with all
#: micro-batches if a period of them is searched, and else.
_FIRST_SHARE_LARGE, _FIRST_SHARE = 0.1, 0.2
#: Most first orders that are kept.
_MOST_FIRST = 16
#: Seconds of a call of the local search, after which progress is shown.
_CALL_SECONDS = 0.05
#: Moves of a call if moves are counted, and those for a unit of CP-SAT's deterministic time,
#: which takes up to 40 s with 900 tasks.
_CALL_MOVES, _MOVES_A_UNIT = 2000, 5_000_000
#: Seconds of a whole search from which the lower bound is raised by a search of its own.
_SECONDS_WITH_SEARCH = 5.0
#: Least work of CP-SAT: enough to prove tiny problems, and less with more tasks.
_LEAST_WORK, _WORK_OF_TASKS = 0.1, 10.0
#: Most orders that are kept beside the best one.
_MOST_KEPT = 24


def _key(order: LaneOrder) -> bytes:
    """Return a key by which equal orders are found."""
    more = b"" if order.microbatches is None else order.microbatches.tobytes()
    return order.lanes.tobytes() + more


@dataclass
class OrderSearch:
    """A search for the best order of a placement; `best` is the best one at any moment.

    The first fields are arguments of `pipesim.optimize`; ``limit`` has the bytes of each device, or
    is None. ``report`` is called after each step of the search.

    - ``first`` is the order from which the search started, and ``firsts`` are different first
      orders, the best one first. ``better`` are the best orders of the steps after these, the
      latest last.
    - ``tries_all``: whether all first orders are tried and kept, even if one of them meets the
      bound.
    - ``is_exact``: whether the values of orders are those of a simulation. If not, they may be
      below the bound, which then ends nothing.
    """

    placement: Placement
    costs: Costs
    limit: list[float] | None
    objective: Objective
    effort: Effort
    report: Callable[[OrderSearch], None]
    problem: OrderProblem
    best: Candidate | None = None
    first: Candidate | None = None
    firsts: list[Candidate] = field(default_factory=list)
    better: list[Candidate] = field(default_factory=list)
    lower_bound: float = 0.0
    evaluations: int = 0
    tries_all: bool = False
    is_exact: bool = True

    @property
    def is_done(self) -> bool:
        """Whether the best order meets the bound."""
        return self.best is not None and meets(self.best.value, self.target)

    @property
    def kept(self) -> list[Candidate]:
        """The first orders and the best ones of the steps; the last one is `best`."""
        return [*reversed(self.firsts), *self.better]

    @property
    def target(self) -> float:
        """Value that no order goes below (s)."""
        return self.lower_bound if self.is_exact else 0.0

    def run(self) -> None:
        """Search until the best order is proved, or the effort is spent."""
        self.note(sequential_candidate(self.problem, self.objective))
        is_short = self.effort.evaluations is None and self.effort.seconds < _SECONDS_WITH_SEARCH
        self.lower_bound = self._bound(search=not is_short)
        self.first = self._first()
        self.report(self)
        if self.is_done:
            return
        if not has_equal_microbatches(self.problem):
            improve_both(self)
            return
        if self._is_large:
            self._repeat_period()
        is_proof_possible = can_prove(self.problem, self.effort)
        share = _LOCAL_SHARE if self.placement.n_chunks == 1 else _LOCAL_SHARE_CHUNKS
        self._improve(share if is_proof_possible else 1.0)
        if is_proof_possible and not self.is_done:
            if not self.effort.is_spent(_PROOF_SHARE):
                self._prove()
            if not self.is_done:
                self._improve(1.0)

    @property
    def _is_large(self) -> bool:
        """Whether there are so many micro-batches that a period of them is searched first."""
        m = n_microbatches(self.problem)
        is_large = int(self.problem.count.sum()) > MOST_TASKS and m > 2 * self._few(m)
        return is_large and has_equal_microbatches(self.problem)

    def _few(self, m: int) -> int:
        return fewer_microbatches(m, self.placement.n_stages, self.placement.n_paths)

    def note(self, candidate: Candidate) -> None:
        """Keep an order if it is better than the best one."""
        if self.best is None or candidate.value < self.best.value:
            self.best = candidate
            self.better = [*self.better, candidate][-_MOST_KEPT:]

    def _first(self) -> Candidate:
        """Return the best first order; all are tried, unless one meets the bound or time is up."""
        problem, objective, effort = self.problem, self.objective, self.effort
        different: dict[bytes, Candidate] = {}
        last_share = effort.after(_FIRST_SHARE_LARGE if self._is_large else _FIRST_SHARE)
        orders = first_orders(
            problem, self.placement, self.costs, objective, lambda: effort.is_spent(last_share)
        )
        for candidate in orders:
            different.setdefault(_key(candidate.order), candidate)
            self.note(candidate)
            if self.is_done and not self.tries_all:
                return candidate
        last = sequential_candidate(problem, objective)
        different.setdefault(_key(last.order), last)
        most = None if self.tries_all else _MOST_FIRST
        self.firsts = sorted(different.values(), key=lambda x: x.value)[:most]
        self.best, self.better = self.firsts[0], []
        return self.best

    def _bound(self, *, search: bool) -> float:
        """Return the lower bound of the problem (s), raised by a search or not."""
        problem = self.problem
        has_bytes = bool((problem.allocated > 0).any())
        return lower_bound(
            self.placement,
            n_microbatches(problem),
            self.costs,
            self.limit if has_bytes else None,
            split_backward=bool((problem.op == Op.W).any()),
            objective=self.objective,
            search=search,
        )

    def _improve(self, share: float) -> None:
        """Improve the best order by local search, until a share of the effort is spent."""
        if self.effort.is_spent(share):
            return
        search, before = self._local_search(share), self.evaluations
        target = self.target * (1.0 + ROUNDING)
        total = self.effort.evaluations
        while search.value > target:
            if total is not None:
                left = int(total * share) - self.evaluations
                if left <= 0:
                    return
                search.advance(min(_CALL_MOVES, left), target)
            else:
                if self.effort.is_spent(share):
                    return
                search.advance_for(_CALL_SECONDS, 2**31, target)
            self.evaluations = before + search.moves
            self.note(Candidate(search.order, search.value, "local search"))
            self.report(self)

    def _local_search(self, share: float) -> LocalSearch:
        """Return a local search from the best order and the first ones, for a share of the effort.

        Its number of moves follows from a short trial if the effort is counted in seconds.
        """
        assert self.best is not None
        best, effort = self.best, self.effort
        others = [x.order for x in self.firsts if x is not best]
        if effort.evaluations is not None:
            budget = max(1, int(effort.evaluations * share) - self.evaluations)
        else:
            rate = moves_a_second(self.problem, best.order, self.objective, effort)
            left = effort.seconds * max(0.0, share - effort.share)
            budget = max(1, int(rate * left))
        return LocalSearch(
            self.problem,
            best.order,
            seed=effort.seed + (self.evaluations > 0),
            objective=self.objective,
            others=others,
            budget=budget,
        )

    def _prove(self) -> None:
        """Prove the best order with CP-SAT, or find a better one and raise the bound."""
        assert self.best is not None
        effort = self.effort
        seconds = work = None
        if effort.evaluations is None:
            seconds = max(0.1, effort.seconds * (_PROOF_SHARE - effort.share))
        else:
            least = min(_LEAST_WORK, _WORK_OF_TASKS / int(self.problem.count.sum()))
            work = max(least, effort.evaluations / _MOVES_A_UNIT)

        def stop() -> bool:
            self.report(self)
            return effort.is_spent(_PROOF_SHARE)

        proof = prove(
            self.problem,
            self.best.order,
            self.target,
            objective=self.objective,
            seconds=seconds,
            work=work,
            seed=effort.seed,
            stop=stop,
        )
        self.lower_bound = max(self.lower_bound, proof.lower_bound)
        if proof.order is not None:
            self.note(self._candidate(proof.order, "CP-SAT"))
        if proof.interrupted:
            raise KeyboardInterrupt
        self.report(self)

    def _candidate(self, order: LaneOrder, name: str) -> Candidate:
        value = getattr(evaluate(self.problem, order), self.objective)
        return Candidate(order, value, name)

    def _repeat_period(self) -> None:
        """Search with fewer micro-batches, and repeat a period of the order."""
        small = order_problem(
            self.placement,
            self._few(n_microbatches(self.problem)),
            self.costs,
            split_backward=bool((self.problem.op == Op.W).any()),
            memory_limit=self.limit,
        )
        part = OrderSearch(
            self.placement, self.costs, self.limit, self.objective, self.effort,
            lambda _: self.report(self), small, is_exact=self.is_exact,
        )  # fmt: skip
        part.lower_bound = part._bound(search=False)
        if self.is_exact:
            # A repeated period can meet the bound if each further micro-batch takes the busiest
            # device's seconds of it.
            more = (self.problem.count - small.count) * small.seconds
            busiest = float(np.bincount(small.device, more, small.n_devices).max())
            part.lower_bound = min(part.lower_bound, max(0.0, self.target - busiest))
        share = self.effort.after(_PERIOD_SHARE)
        try:
            part.first = part._first()
            part._improve(share)
        finally:  # after Ctrl-C too
            self.evaluations += part.evaluations
            for candidate in filter(None, (part.best, part.first)):
                order = unrolled(
                    small, candidate.order, self.problem, self.objective, self.effort.is_spent
                )
                if order is not None:
                    self.note(self._candidate(order, "period"))
                if self.effort.is_spent():
                    break


#: Share of the effort in which it is measured, and the most seconds.
_TRIAL_SHARE, _TRIAL_SECONDS = 0.02, 0.1


def moves_a_second(
    problem: OrderProblem, order: LaneOrder, objective: Objective, effort: Effort
) -> float:
    """Return the moves a second of a short local search from an order.

    Loops are compiled before that, which does not count as effort.
    """
    began = time.perf_counter()
    LocalSearch.compile()
    effort.began += time.perf_counter() - began
    trial = LocalSearch(problem, order, seed=effort.seed, objective=objective)
    seconds = min(_TRIAL_SECONDS, _TRIAL_SHARE * effort.seconds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        trial.advance_for(seconds / 4, 2**31)
    return trial.rate


#: Seconds for each pair of tasks of a device in the model of its memory limit, and the most that
#: the model may take, as a share of the seconds, if that is more than a second.
_PAIR_SECONDS, _MODEL_SHARE = 5e-6, 0.1


def can_prove(problem: OrderProblem, effort: Effort) -> bool:
    """Return whether CP-SAT takes the problem, and builds its model within about a second.

    It takes micro-batches to be identical. The model has a boolean for pairs of tasks of devices
    that hold several stages and have a limit.
    """
    if problem.count.sum() > MOST_TASKS or not has_equal_microbatches(problem):
        return False
    limited = np.isfinite(problem.limit)
    changes = (problem.allocated != problem.released) & limited[problem.device]
    n_tasks = np.bincount(problem.device, np.where(changes, problem.count, 0), problem.n_devices)
    rows = np.unique(np.stack([problem.device, problem.stage, problem.path]), axis=1)
    several = np.bincount(rows[0], minlength=problem.n_devices) > 1
    seconds = _PAIR_SECONDS * float((n_tasks**2)[several].sum())
    return effort.evaluations is not None or seconds <= max(1.0, _MODEL_SHARE * effort.seconds)


# Micro-batches that differ: their order, and the order of each device, in turn.

#: Moves of a round for each task, and as a share of all that will be made, at most.
_ANNEAL_MOVES, _ANNEAL_SHARE = 100, 0.1
#: Moves of the orders of devices for each move of micro-batches, which takes as long as these.
_RATIO = 10
#: Temperatures of micro-batches, in mean seconds of a task, in turn.
_HOT, _COLD = (1.0, 0.1, 3.0, 0.3), 0.02
#: Orders from which rounds start.
_MOST_ORDERS = 8
#: Tasks of orders of moved micro-batches after which the time is checked.
_CALL_TASKS = 200_000


def improve_both(search: OrderSearch) -> None:
    """Improve the orders of micro-batches that differ until the effort is spent.

    A round starts from one of the best orders. It moves micro-batches first, with the order of
    each device as it is, and then tasks, with the order of micro-batches as it is. Every second
    round starts from the best order, the others from the next best ones.
    """
    assert search.best is not None
    effort, target = search.effort, search.target * (1.0 + ROUNDING)
    total, n_tasks = effort.evaluations, int(search.problem.count.sum())
    if total is None:
        rate = moves_a_second(search.problem, search.best.order, search.objective, effort)
        total = max(1, int(rate * effort.seconds * max(0.0, 1.0 - effort.share)))
    length = max(1, min(_ANNEAL_MOVES * n_tasks, int(_ANNEAL_SHARE * total)))
    pool, number = search.firsts[:_MOST_ORDERS], 0
    while search.best.value > target and not _is_spent(search):
        number += 1
        rank = (number & -number).bit_length() - 1  # 0 1 0 2 0 1 0 3 ...
        result = _round(search, pool[rank % len(pool)], number, length, target)
        pool = sorted([*pool, result], key=lambda x: x.value)[:_MOST_ORDERS]


def _is_spent(search: OrderSearch) -> bool:
    return search.effort.is_spent() or _moves_left(search) <= 0


def _moves_left(search: OrderSearch) -> int:
    """Return the number of moves that are left; very many if seconds are counted."""
    total = search.effort.evaluations
    return 2**62 if total is None else total - search.evaluations


def _anneal(
    search: OrderSearch, order: LaneOrder, number: int, n_moves: int, target: float
) -> LaneOrder:
    """Return an order after moves of micro-batches; the temperature falls from call to call."""
    random = np.random.default_rng((search.effort.seed, number))
    hot, done = _HOT[number % len(_HOT)], 0
    size = max(1, _CALL_TASKS // len(order.lanes))
    while done < n_moves and not _is_spent(search):
        n = min(size, n_moves - done, _moves_left(search))
        order = anneal_microbatches(
            search.problem,
            order,
            n_moves=n,
            random=random,
            objective=search.objective,
            temperature=hot * (_COLD / hot) ** (done / n_moves),
            target=target,
        )
        done += n
        search.evaluations += n
    return order


def _round(
    search: OrderSearch, start: Candidate, number: int, length: int, target: float
) -> Candidate:
    """Return the result of a round from an order; it is noted in the search."""
    order = _anneal(search, start.order, number, max(1, length // _RATIO), target)
    result = search._candidate(order, "local search")
    search.note(result)
    search.report(search)
    local = LocalSearch(
        search.problem, order, seed=search.effort.seed + number, objective=search.objective,
        budget=length,
    )  # fmt: skip
    while local.moves < length and local.value > target and not _is_spent(search):
        before = local.moves
        local.advance(min(_CALL_MOVES, length - local.moves, _moves_left(search)), target)
        search.evaluations += local.moves - before
        result = Candidate(local.order, local.value, "local search")
        search.note(result)
        search.report(search)
    return result


# Orders of many micro-batches: a period of an order of fewer ones, repeated.
#
# In the middle of a good order, devices repeat themselves. So a period
# (`pipesim.order_search.improve`) of it can be repeated any number of times.

#: Micro-batches of a path in the longest period; shorter ones divide it.
LONGEST_PERIOD = 12
#: Periods that are tried, for each length.
_MOST_STARTS = 40


def fewer_microbatches(n_microbatches: int, n_stages: int, n_paths: int) -> int:
    """Return a number of micro-batches with room for warm-up, cool-down and a period between.

    The rest of the micro-batches is a multiple of each period.
    """
    step = LONGEST_PERIOD * n_paths
    least = 3 * n_stages
    return least + (n_microbatches - least) % step


def unrolled(
    small: OrderProblem,
    order: LaneOrder,
    problem: OrderProblem,
    objective: Objective,
    is_late: Callable[[], bool] = lambda: False,
) -> LaneOrder | None:
    """Return the best order of a problem that repeats a period of an order of a smaller one.

    ``problem`` has the lanes of ``small`` with more micro-batches, by a multiple of
    `LONGEST_PERIOD` on each path. ``is_late`` is called after each order that is tried;
    once it is true, no more are tried. The result is None if the devices have no period in common.
    """
    more = int((problem.count - small.count)[0])
    least, best = np.inf, None
    for period in (1, 2, 3, 4, 6, 12):
        begins = periods_of(small, order, period)
        chosen = np.linspace(0, len(begins) - 1, min(len(begins), _MOST_STARTS)).astype(int)
        for first in begins[chosen].tolist():
            longer = _repeated(small, order, first, period, more // period)
            value = getattr(evaluate(problem, longer), objective)
            if value < least:
                least, best = value, longer
            if best is not None and is_late():
                return best
    return best


def _repeated(
    problem: OrderProblem, order: LaneOrder, first: list[int], period: int, n_times: int
) -> LaneOrder:
    """Return an order in which each device repeats its period so many times more."""
    rows = []
    n_lanes = np.bincount(problem.device, minlength=problem.n_devices)
    for device, begin in enumerate(first):
        row = order.lanes[order.ptr[device] : order.ptr[device + 1]]
        begin -= int(order.ptr[device])
        end = begin + period * int(n_lanes[device])
        rows.append(np.concatenate([row[:end], np.tile(row[begin:end], n_times), row[end:]]))
    ptr = np.cumsum([0, *map(len, rows)])
    return LaneOrder(np.concatenate(rows), ptr.astype(np.int64))
