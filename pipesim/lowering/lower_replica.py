"""Lower one of several equal replicas alone, with its part in their collectives.

The tasks are those of the first copy (`pipesim.graph.copies`) of ``lower(schedule, n_replicas=n)``
for any ``n`` above 1: replicas have the same tasks in the same order.
"""

from __future__ import annotations

from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.schedule_checks import verify_listing
from pipesim.lowering.clock_cycles import issue
from pipesim.lowering.communication import add_partners
from pipesim.lowering.exchanges import Exchanges
from pipesim.lowering.lower_options import checked_collectives
from pipesim.lowering.recompute_and_steps import clock_cycles, with_recomputes_and_steps
from pipesim.lowering.recomputed_microbatches import recompute_label
from pipesim.scheduling.memory_checks import check_tasks
from pipesim.scheduling.schedule import Schedule


def lower_replica(schedule: Schedule, *, replicated: bool, shard_optimizer: bool) -> TaskGraph:
    """Return the graph of one replica.

    Parameters
    ----------
    schedule
        Schedule; verified first.
    replicated
        Whether there are several replicas. The graph then has the member of this replica in each
        collective.
    shard_optimizer
        As in `pipesim.lower`.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; see `pipesim.verify`.
    CapacityError
        If the graph would not fit in memory.
    """
    verify_listing(schedule)
    check_tasks(len(schedule))
    collectives = checked_collectives(
        schedule, "last", 1, Exchanges(), 2 if replicated else 1, shard_optimizer, "flush"
    )
    options = LoweringOptions(
        recompute=recompute_label(schedule, "listed"),
        n_batches=schedule.n_batches,
        n_slices=schedule.n_slices,
        grad_sync=collectives.grad_sync,
        weight_versions=schedule.weight_versions,
    )
    compute = with_recomputes_and_steps(schedule, "listed", "flush", False, ())
    kinds, partners = add_partners(compute.kinds, True, "per_peer", collectives, ())
    cycles = clock_cycles(schedule, compute)
    issued = issue(compute, cycles, partners, True, 1, collectives.groups)
    return TaskGraph.of_kinds(
        kinds, issued.kind, issued.microbatch, name=schedule.name, options=options
    ).as_verified()
