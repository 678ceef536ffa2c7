"""`order_by`: make a schedule from a priority and limits, by list scheduling."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import (
    ArgumentError,
    CostsWarning,
    PipeError,
    check_count,
    check_flag,
    check_name,
    check_text,
    check_type,
    number,
)
from pipesim.list_scheduling.limits import check_weight_bytes, checked_costs
from pipesim.list_scheduling.problem import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Problem,
    action_columns,
    in_order,
    make_problem,
    operations,
)
from pipesim.list_scheduling.scheduler import Ranks, list_orders, scheduled
from pipesim.ops import Action, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import Ints, bincount
from pipesim.utils.texts import Bytes


@checked_names
def order_by(
    placement: Placement,
    n_microbatches: int,
    costs: Costs | None = None,
    *,
    priority: str | Priority = "backward_first",
    memory_limit: Bytes | Sequence[Bytes] | None = None,
    activation_limit: Bytes | Sequence[Bytes] | None = None,
    in_flight: int | Sequence[int] | None = None,
    split_backward: bool = True,
    patience: float = 0.0,
    name: str = "custom",
) -> Schedule:
    """Put F, I and W (or F and B) of all stages and micro-batches in order, by list scheduling.

    Each device, whenever it is free, starts the action that comes first by ``priority`` among
    those that are ready and fit. The costs determine when actions are ready; messages are assumed
    to find their links free. The result is an order without times: `pipesim.simulate` computes
    when its actions run.

    Orders never deadlock, with any limits and any priority: a device reserves room and a place in
    flight for the oldest micro-batch that it has not run yet. The oldest one is that of the lowest
    number, and for ``"longest_first"``, ``"shortest_first"`` and ``"critical_path"`` the first by
    length.

    Parameters
    ----------
    placement
        Which device holds which stage.
    n_microbatches
        Micro-batches of a step, at least one for each path of the placement.
    costs
        Seconds of F, of I and W (or of B), and of messages; bytes of activations, as rule 10 of
        docs/time.md counts them without recompute. By default a second each, and no bytes. They
        may differ between micro-batches.
    priority
        Which action a device starts first:

        - ``"backward_first"``: B or I, then F, then W, each in order of micro-batches, the
          deepest stage first.
        - ``"forward_first"``: F, then B or I, then W.
        - ``"first_come"``: the action that was ready first.
        - ``"critical_path"``: the action with the most seconds of work after it.
        - ``"longest_first"``, ``"shortest_first"``: as ``"backward_first"``, with micro-batches in
          order of their length (LPT and SPT in the literature), the seconds of a micro-batch over
          all stages. Equally long ones stay in order. Each path has its own micro-batches.
        - a function ``priority(action, ready)``, called when the action's predecessors have been
          ordered, with the time at which it will be ready (s). It returns a number or a tuple of
          numbers, and the lowest goes first.
    memory_limit
        All bytes that a device may hold, as in `pipesim.simulate`: one number, or one a device,
        each also as ``"80GiB"``. None: no limit. Parameters, gradients, optimizer and the largest
        workspace of the device are taken off. A W that makes room for an F takes the rank of that
        F.
    activation_limit
        Bytes of activations alone that a device may hold, likewise.
    in_flight
        Most micro-batches between F and B (or I) on a stage: one number, or one a stage.
    split_backward
        Whether the backward is I and W, or B.
    patience
        A W whose room no F needs starts only if no known F or I will be ready within ``patience``
        times the seconds of W. 0: at once; 1: only if it delays nothing.
    name
        Name of the schedule.

    Returns
    -------
    Schedule
        Order of the actions of each device.

    Warns
    -----
    CostsWarning
        If there is a limit, and the costs have no ``activation_bytes``, or W has no
        ``weight_grad_bytes``.

    See Also
    --------
    pipesim.optimize : Search for the order that takes the least time.
    pipesim.schedule : Build a schedule of the literature.

    Examples
    --------
    1F1B is a limit of micro-batches in flight, and a priority:

    >>> import pipesim as ps
    >>> uniform = ps.Costs(forward=1, backward=2)
    >>> schedule = ps.order_by(ps.Placement.linear(3), 8, uniform, priority="forward_first",
    ...                        in_flight=[3, 2, 1], split_backward=False)
    >>> schedule == ps.schedule("1f1b", 3, 8)
    True
    """
    is_limited = memory_limit is not None or activation_limit is not None
    if is_limited and isinstance(placement, Placement):
        user_costs = checked_costs(costs)
        if not np.any(user_costs.activation_bytes) and not np.any(user_costs.weight_grad_bytes):
            warn_caller(
                f"{'activation' if memory_limit is None else 'memory'}_limit limits nothing: the "
                "costs have no activation_bytes; give them, such as "
                "ps.Costs(..., activation_bytes=1, weight_grad_bytes=1) to count micro-batches of "
                "a stage",
                CostsWarning,
            )
        elif split_backward:
            check_weight_bytes(user_costs, placement.n_stages)
    return list_schedule(
        placement,
        n_microbatches,
        costs,
        priority=priority,
        memory_limit=memory_limit,
        activation_limit=activation_limit,
        in_flight=in_flight,
        split_backward=split_backward,
        patience=patience,
        name=name,
    )


def list_schedule(
    placement: Placement,
    n_microbatches: int,
    costs: Costs | None = None,
    *,
    priority: str | Priority = "backward_first",
    memory_limit: object = None,
    activation_limit: object = None,
    in_flight: object = None,
    split_backward: bool = True,
    patience: float = 0.0,
    name: str = "custom",
    microbatches: Ints | None = None,
) -> Schedule:
    """Order actions as `order_by` does, without warnings.

    ``microbatches`` is the order in which a named priority takes micro-batches, in place of its
    own: a permutation that leaves each micro-batch on its path.
    """
    check_type("placement", placement, Placement)
    check_flag("split_backward", split_backward)
    check_text("name", name)
    paths = f" on {placement.n_paths} paths" if placement.n_paths > 1 else ""
    # Each path has at least one micro-batch.
    n_microbatches = check_count(f"n_microbatches{paths}", n_microbatches, placement.n_paths)
    finite_patience = number(patience)
    if finite_patience is None or not 0 <= finite_patience < math.inf:
        raise ArgumentError(f"patience must be finite and >= 0, got {patience!r}")
    is_limited = memory_limit is not None or activation_limit is not None
    if placement.shares_stages and in_flight is not None and is_limited:
        raise ArgumentError(
            "in_flight and a memory limit, but paths of the placement share stages: micro-batches "
            "of several paths could wait for each other for ever; give one of the two limits"
        )
    problem = make_problem(
        placement,
        n_microbatches,
        checked_costs(costs),
        split_backward,
        activation_limit,
        in_flight,
        memory_limit,
    )
    if microbatches is None:
        microbatches = microbatch_order(priority, problem)
    if microbatches is not None:
        problem = in_order(problem, microbatches)
    ranks = action_ranks(priority, problem, operations(problem))
    schedule = scheduled(problem, list_orders(problem, ranks, finite_patience), placement, name)
    return schedule if microbatches is None else schedule.with_microbatch_order(microbatches)


# Priorities: which of the ready actions a device starts first.

Floats = NDArray[np.float64]
#: ``priority(action, ready)`` ranks an action that is ready at ``ready`` seconds; lowest first.
Priority = Callable[[Action, float], Any]


def action_ranks(priority: object, problem: Problem, ops: Sequence[Op]) -> Ranks:
    """Return the ranks of all actions by a name of `PRIORITIES`, or a user's `Priority`."""
    if callable(priority):
        try:
            inspect.signature(priority).bind(Action(0, Op.F, 0), 0.0)
        except TypeError as error:
            raise ArgumentError(
                f"priority must be a function of (action, ready), got {priority!r}: {error}"
            ) from error
        except ValueError:  # some functions in C have no signature: their call shows what they take
            pass
        scores = cast(Floats, _UserScores(priority, problem, ops))
        return Ranks(scores, np.zeros(len(problem.lane), int), by_arrival=True)
    return PRIORITIES[check_name("priority", priority, PRIORITIES)](problem)


def _turns(problem: Problem, microbatch: Ints) -> Ints:
    """Return the turn of each micro-batch: its number, but paths that share stages alternate."""
    if (problem.shared == np.arange(len(problem.shared))).all():
        return microbatch
    path = np.searchsorted(problem.first, microbatch, side="right") - 1
    return (microbatch - problem.first[path]) * problem.n_paths + path


def _by_phase(*phases: int) -> Callable[[Problem], Ranks]:
    """Return a priority: phases in this order, then micro-batches, then deep stages first."""

    def make_ranks(problem: Problem) -> Ranks:
        phase, stage, microbatch = action_columns(problem)
        position = np.argsort(phases)[phase].astype(float)
        turn = _turns(problem, microbatch)
        return Ranks(position, turn * problem.n_stages - stage, by_arrival=False)

    return make_ranks


def _first_come(problem: Problem) -> Ranks:
    phase, stage, microbatch = action_columns(problem)
    tie = (_turns(problem, microbatch) * 3 + phase) * problem.n_stages - stage
    return Ranks(np.zeros(len(tie)), tie, by_arrival=True)


#: Priorities that take micro-batches by length, and its sign.
_BY_LENGTH = {"longest_first": -1.0, "critical_path": -1.0, "shortest_first": 1.0}


def _critical_path(problem: Problem) -> Ranks:
    """Rank by the seconds of the longest chain of actions that begins with this one."""
    phase, _, microbatch = action_columns(problem)
    chain, ptr, n_copies = problem.seconds.copy(), problem.lane_ptr, len(problem.home)
    forward, *others = np.split(np.arange(len(ptr) - 1), np.arange(1, problem.n_phases) * n_copies)
    # Each lane after those that its arcs lead to.
    for lane in [*itertools.chain.from_iterable(reversed(others)), *forward[::-1]]:
        targets = problem.arc_to[problem.arc_ptr[lane] : problem.arc_ptr[lane + 1]]
        if len(targets):
            after = [chain[ptr[target] : ptr[target + 1]] for target in targets]
            chain[ptr[lane] : ptr[lane + 1]] += np.max(after, axis=0)
    return Ranks(-chain, _turns(problem, microbatch) * 3 + phase, by_arrival=False)


def microbatch_order(priority: object, problem: Problem) -> Ints | None:
    """Return the micro-batches in the order in which a priority starts them; None for their own.

    Equally long ones stay in order, and each path has its own ones.
    """
    if not isinstance(priority, str) or priority not in _BY_LENGTH:
        return None
    _, _, microbatch = action_columns(problem)
    seconds = bincount(microbatch, problem.seconds, problem.n_microbatches)
    length = _BY_LENGTH[priority] * seconds
    path = np.repeat(np.arange(problem.n_paths), problem.n_of_path)
    order: Ints = np.lexsort((length, path))
    is_own = bool((order[1:] > order[:-1]).all())
    return None if is_own else order


#: The priorities that have a name.
PRIORITIES: dict[str, Callable[[Problem], Ranks]] = {
    "backward_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "forward_first": _by_phase(FORWARD, BACKWARD, WEIGHT),
    "first_come": _first_come,
    "critical_path": _critical_path,
    # For micro-batches in this order, see `microbatch_order`.
    "longest_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "shortest_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
}


class _UserScores:
    """The scores of a user's priority, computed when the time of an action is known.

    Every score is a tuple of numbers.
    """

    def __init__(self, priority: Priority, problem: Problem, ops: Sequence[Op]) -> None:
        phase, stage, microbatch = (column.tolist() for column in action_columns(problem))
        self._columns = phase, stage, microbatch
        self._priority, self._ops = priority, ops
        self._scores: list[tuple[float, ...]] = [()] * len(phase)

    def __getitem__(self, action: int) -> tuple[float, ...]:
        return self._scores[action]

    def __setitem__(self, index: int, ready: float) -> None:
        phase, stage, microbatch = (column[index] for column in self._columns)
        action = Action(stage, self._ops[phase], microbatch)
        try:
            rank = self._priority(action, float(ready))
        except PipeError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, raised {type(error).__name__}: "
                f"{error}"
            ) from error
        numbers = [number(x) for x in (rank if isinstance(rank, tuple) else (rank,))]
        if not numbers or None in numbers:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, must be a number or a tuple of "
                f"numbers, got {rank!r}"
            )
        self._scores[index] = tuple(x for x in numbers if x is not None)
