"""Orders of tasks: forwards by clock cycle, and backwards without dependencies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.autograd_engine import engine_order
from pipesim.scheduling.schedule import Schedule

#: A forward: micro-batch and partition.
Cell = tuple[int, int]
#: A task: operation, micro-batch and partition.
PartitionTask = tuple[Op, int, int]


def clock_cycles(m: int, n: int) -> Iterator[list[Cell]]:
    """Yield the forwards of each clock cycle, as micro-batch and partition, in issue order.

    In cycle ``k`` partition ``j`` runs micro-batch ``k - j`` (torchgpipe, arXiv 2004.09910, section
    3.1). The order is deterministic, and the input of each partition was made one cycle before.

    Examples
    --------
    >>> list(clock_cycles(2, 3))
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]


def unordered_backward(
    n_partitions: int,
    recomputed: Sequence[bool],
    seed: int | None = None,
    schedule: Schedule | None = None,
) -> list[PartitionTask]:
    """Return the tasks of a backward without dependencies, in the order of the engine on a CPU.

    - With a ``schedule``, the tasks of each partition are in its order, partition by partition from
      the last to the first.
    - With a ``seed``, the micro-batches of each partition are shuffled: first all its R, then all
      its B, partition by partition from the last to the first.
    """
    if schedule is not None:
        orders = schedule.orders[::-1]
        return [task for order in orders for task in _backward_tasks(order, recomputed)]
    if seed is None:
        actions = engine_order(n_partitions, len(recomputed), sum(recomputed))
        return [(action.op, action.microbatch or 0, action.stage) for action in actions]
    draws = random.Random(seed)
    tasks: list[PartitionTask] = []
    for j in range(n_partitions):
        microbatches = list(range(len(recomputed)))
        draws.shuffle(microbatches)
        tasks += [(Op.B, i, j) for i in microbatches]
        tasks += [(Op.R, i, j) for i in microbatches if recomputed[i]]
    return tasks[::-1]


def _backward_tasks(
    order: Iterable[Action | Overlapped], recomputed: Sequence[bool]
) -> Iterator[PartitionTask]:
    """Yield R and B of a partition; an R that is not listed comes right before its B."""
    left = {i for i, again in enumerate(recomputed) if again}
    for action in order:
        assert isinstance(action, Action)
        i = action.microbatch or 0
        if action.op in (Op.R, Op.B) and i in left:
            left.remove(i)
            yield Op.R, i, action.stage
        if action.op == Op.B:
            yield Op.B, i, action.stage
