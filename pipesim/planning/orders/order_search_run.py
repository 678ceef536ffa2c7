"""The search of `optimize`: first orders, local search, proof, within a limit of effort."""

from __future__ import annotations

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
    evaluate,
    has_equal_microbatches,
    meets,
    order_problem,
)
from pipesim.order_search.lane_order import n_microbatches
from pipesim.order_search.objective import ROUNDING
from pipesim.planning.orders.cp_sat import prove
from pipesim.planning.orders.cp_sat.proof import MOST_TASKS
from pipesim.planning.orders.effort import Effort
from pipesim.planning.orders.first_orders import Candidate, first_orders, sequential_candidate
from pipesim.planning.orders.microbatch_search import improve_both
from pipesim.planning.orders.model_size import can_prove
from pipesim.planning.orders.move_rate import moves_a_second
from pipesim.planning.orders.periods import fewer_microbatches, unrolled
from pipesim.scheduling.placement import Placement

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
#: Moves of such a call if moves are counted, and those for a unit of CP-SAT's deterministic time,
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
class Search:
    """A search for the best order of a placement; `best` is the best one at any moment.

    Attributes
    ----------
    placement, costs, limit, objective, effort
        As in `pipesim.optimize`; ``limit`` has the bytes of each device, or is None.
    report
        Called after each step of the search.
    problem
        The lanes of all micro-batches.
    best, first
        The best order, and the one from which the search started; None before there is one.
    firsts
        Different first orders, the best one first.
    better
        The best orders of the steps after these, the latest last.
    lower_bound, evaluations
        As in `OptimizedSchedule`.
    tries_all
        Whether all first orders are tried and kept, even if one of them meets the bound.
    is_exact
        Whether the values of orders are those of a simulation. If not, they may be below the
        bound, which then ends nothing.
    """

    placement: Placement
    costs: Costs
    limit: list[float] | None
    objective: Objective
    effort: Effort
    report: Callable[[Search], None]
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
        total = self.effort.evaluations

        def stop() -> bool:
            self.report(self)
            return total is None and self.effort.share >= _PROOF_SHARE

        proof = prove(
            self.problem,
            self.best.order,
            self.target,
            objective=self.objective,
            seconds=None if total is not None else self._seconds_until(_PROOF_SHARE),
            work=None if total is None else self._proof_work(total),
            seed=self.effort.seed,
            stop=stop,
        )
        self.lower_bound = max(self.lower_bound, proof.lower_bound)
        if proof.order is not None:
            self.note(self._candidate(proof.order, "CP-SAT"))
        if proof.interrupted:
            raise KeyboardInterrupt
        self.report(self)

    def _proof_work(self, evaluations: int) -> float:
        """Return the work of CP-SAT that counts as some evaluations; tiny problems get enough."""
        least = min(_LEAST_WORK, _WORK_OF_TASKS / int(self.problem.count.sum()))
        return max(least, evaluations / _MOVES_A_UNIT)

    def _seconds_until(self, share: float) -> float:
        """Return the seconds until a share of the effort is spent, at least a tenth of one."""
        return max(0.1, self.effort.seconds * (share - self.effort.share))

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
        part = Search(
            self.placement, self.costs, self.limit, self.objective, self.effort,
            lambda _: self.report(self), small, is_exact=self.is_exact,
        )  # fmt: skip
        part.lower_bound = part._bound(search=False)
        if self.is_exact:
            part.lower_bound = min(part.lower_bound, self._target_of_part(small))
        share = self.effort.after(_PERIOD_SHARE)
        try:
            part.first = part._first()
            part._improve(share)
        finally:  # after Ctrl-C too
            self.evaluations += part.evaluations
            for candidate in filter(None, (part.best, part.first)):
                self._repeat(small, candidate)
                if self.effort.is_spent():
                    break

    def _repeat(self, small: OrderProblem, candidate: Candidate) -> None:
        """Note the order that repeats a period of an order with fewer micro-batches."""
        order = unrolled(small, candidate.order, self.problem, self.objective, self.effort.is_spent)
        if order is not None:
            self.note(self._candidate(order, "period"))

    def _target_of_part(self, small: OrderProblem) -> float:
        """Return a value of fewer micro-batches with which a repeated period can meet the bound.

        It does if each further micro-batch takes the busiest device's seconds of it.
        """
        more = (self.problem.count - small.count) * small.seconds
        busiest = np.bincount(small.device, more, small.n_devices).max()
        return max(0.0, self.target - float(busiest))
