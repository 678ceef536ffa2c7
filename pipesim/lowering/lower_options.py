"""Check the options of `pipesim.lower`, and derive its collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from pipesim.errors import ArgumentError, check_count, check_flag, check_name
from pipesim.graph.grad_sync import (
    GradSyncArgument,
    checked_grad_sync,
    group_sizes,
    of_stages,
    to_text,
)
from pipesim.lowering.communication import Collectives
from pipesim.lowering.exchanges import Exchanges
from pipesim.lowering.issue_order import ISSUE_ORDERS
from pipesim.lowering.recomputed_microbatches import RECOMPUTE
from pipesim.scheduling.placement import LAYOUTS
from pipesim.scheduling.schedule import Schedule

Streams = Literal["per_peer", "single", "per_microbatch"]
STREAMS: tuple[Streams, ...] = ("per_peer", "single", "per_microbatch")
#: Values of each option of `pipesim.lower` that is a name. All others that `check_options` takes
#: are True or False.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "recompute": ("listed", *RECOMPUTE),
    "streams": STREAMS,
    "issue_order": ISSUE_ORDERS,
    "step": ("flush", "none"),
    "layout": LAYOUTS,
}
#: Buckets that a stage may have; each is a task.
_MOST_BUCKETS = 1000


def check_options(**options: object) -> None:
    """Check options that are names or flags, and their combinations."""
    for name, value in options.items():
        if name in _NAMES:
            check_name("recompute mode" if name == "recompute" else name, value, _NAMES[name])
        else:
            check_flag(name, value)
    if options["recompute_waits"] and options["overlap"]:
        raise ArgumentError(
            "recompute_waits=True, but transfers overlap: a gradient is received on its own "
            "stream, and R never waits for it; add overlap=False, or leave recompute_waits out"
        )


def checked_collectives(
    schedule: Schedule,
    grad_sync: GradSyncArgument,
    n_buckets: int,
    exchanges: Exchanges,
    n_replicas: int,
    shard_optimizer: bool,
    step: str,
) -> Collectives:
    """Return the collectives of a schedule, from options of `pipesim.lower`."""
    n_stages = schedule.n_stages
    if check_count("n_buckets", n_buckets) > _MOST_BUCKETS:
        raise ArgumentError(f"n_buckets must be at most {_MOST_BUCKETS}, got {n_buckets}")
    batch_size = schedule.n_microbatches // schedule.n_batches
    syncs = checked_grad_sync(grad_sync, n_stages, batch_size)
    _check_reduced_stages(grad_sync, exchanges.sharded)
    reduces = n_replicas * schedule.placement.n_paths > 1
    collectives = Collectives(
        grad_sync=syncs,
        buckets=tuple(
            n_buckets if sync == "bucketed" else 1
            for sync in (of_stages(syncs, n_stages) if reduces else ())
        ),
        groups=tuple(group_sizes(syncs, n_stages).tolist()),
        exchanges=exchanges,
        unshards=shard_optimizer and n_replicas > 1,
    )
    _check_collectives(schedule, collectives, to_text(syncs), step)
    return collectives


def forward_collectives(collectives: Collectives) -> Collectives:
    """Return the collectives of a forward-only graph: exchanges, but no reductions and gathers."""
    return collectives._replace(
        grad_sync="last",
        buckets=(),
        groups=(0,) * len(collectives.groups),
        exchanges=collectives.exchanges._replace(accumulates=False),
        unshards=False,
    )


def checked_sharded(sharded: Iterable[int] | int, schedule: Schedule) -> tuple[int, ...]:
    """Return the numbers of the sharded stages."""
    try:
        if isinstance(sharded, (str, Mapping)):
            raise TypeError
        sequence = (sharded,) if isinstance(sharded, (int, np.integer)) else sharded
        stages = tuple(itertools.islice(sequence, schedule.n_stages + 1))
    except TypeError:
        raise ArgumentError(
            f"sharded must be the numbers of stages, such as [0], got {sharded!r}"
        ) from None
    for stage in stages:
        if check_count("sharded: a stage", stage, 0) >= schedule.n_stages:
            raise ArgumentError(
                f"sharded names stage {stage}; there are {schedule.n_stages} stages, "
                f"0..{schedule.n_stages - 1}"
            )
        if stage == schedule.n_stages - 1:
            raise ArgumentError(
                f"sharded names stage {stage}, the last one, which computes the loss; its vectors "
                "have to go to a stage after it"
            )
    if len(set(stages)) < len(stages):
        raise ArgumentError(f"sharded names a stage twice: {list(stages)}; name each once")
    return stages


def _check_reduced_stages(grad_sync: GradSyncArgument, sharded: tuple[int, ...]) -> None:
    """Raise if ``grad_sync`` is a mapping with a sharded stage."""
    named = set(grad_sync) & set(sharded) if isinstance(grad_sync, Mapping) else set()
    if named:
        raise ArgumentError(
            f"grad_sync names stage {min(named)}, which is sharded and reduces no gradients: it "
            'exchanges them; leave it out, and give sparse_grad_sync="every" or "last"'
        )


def _check_collectives(
    schedule: Schedule, collectives: Collectives, grad_sync: str, step: str
) -> None:
    """Raise for collectives that do not suit a schedule."""
    several = any(collectives.groups)
    if schedule.placement.n_paths > 1 and (several or collectives.sharded):
        what = f'grad_sync="{grad_sync}"' if several else f"sharded={list(collectives.sharded)}"
        raise ArgumentError(
            f"{what}, but schedule {schedule.name!r} has {schedule.placement.n_paths} paths, each "
            "with other micro-batches; take a schedule of one path"
        )
    if schedule.n_batches > 1 and step == "none" and collectives.buckets:
        raise ArgumentError(
            f'step="none", but schedule {schedule.name!r} has {schedule.n_batches} mini-batches, '
            "whose gradients are reduced over replicas: without steps between them those of one "
            "would be added to those of the next; leave step out, or take n_replicas=1"
        )
    if collectives.unshards and schedule.n_batches > 1:
        raise ArgumentError(
            f"shard_optimizer=True, but schedule {schedule.name!r} steps {schedule.n_batches} "
            "times while micro-batches are in flight; take a schedule of one mini-batch"
        )
    if collectives.sharded and schedule.n_batches > 1:
        raise ArgumentError(
            f"sharded={list(collectives.sharded)}, but schedule {schedule.name!r} steps "
            f"{schedule.n_batches} times while micro-batches are in flight, and shards have no "
            "versions of their weights; take a schedule of one mini-batch"
        )
