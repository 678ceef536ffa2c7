"""Add OFFLOAD and RELOAD tasks: activations that wait elsewhere for their backward.

They wait in host memory, or on the paired device of the pipeline.

The middle device of three in 1F1B, with ``offload="all"`` and ``prefetch=1``::

    compute | 1F0 | 1F1 | 1B0       | 1F2      | 1B1 | ...
    offload |           | 1OFFLOAD1 |
    reload  |                       | 1RELOAD1 |

An OFFLOAD comes right after its F. A RELOAD comes right after the compute task ``prefetch + 1``
places before its consumer, which is R, B or I. Activations whose consumer comes at most
``prefetch + 1`` compute tasks after F stay on the device, such as those of micro-batch 0: the
RELOAD would have to wait for the OFFLOAD, and the consumer for both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.graph.options import (
    OffloadTarget,
    Prefetch,
    StageOffload,
    checked_offload,
    paired_devices,
    prefetch_by_device,
)
from pipesim.graph.tasks import Kinds, ListedTasks, StreamKind
from pipesim.lowering.issue_order import Issued
from pipesim.ops import KEPT, RECVS, SENDS, Op
from pipesim.scheduling.placement import Edges, entry_stages
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints

Bools = NDArray[np.bool_]


class Offloads(NamedTuple):
    """Activations to offload: of all stages of a device together, or of each stage."""

    values: StageOffload | tuple[StageOffload, ...] = StageOffload(share=0.0)
    #: Compute tasks that a RELOAD may run beside.
    prefetch: Prefetch = 1
    #: Stages whose rows are spread over the replicas; they offload nothing.
    sharded: tuple[int, ...] = ()
    target: OffloadTarget = "host"

    @property
    def is_none(self) -> bool:
        """Whether nothing is offloaded."""
        return all(value.is_none for value in self.of_stages(1))

    def of_stages(self, n_stages: int) -> tuple[StageOffload, ...]:
        """Return the value of each stage."""
        return self.values if isinstance(self.values, tuple) else (self.values,) * n_stages

    @property
    def text(self) -> str:
        """The value as text, which `pipesim.lower` takes."""
        return "/".join(value.text for value in self.of_stages(1))


def checked_offloads(
    offload: object,
    prefetch: Prefetch,
    schedule: Schedule,
    sharded: tuple[int, ...],
    target: OffloadTarget,
) -> Offloads:
    """Return the options of `pipesim.lower`, checked to suit the schedule."""
    if isinstance(offload, str) and offload == "none":
        return Offloads(prefetch=prefetch, sharded=sharded)
    values = checked_offload(offload, schedule.n_stages)  # type: ignore[arg-type]
    if target == "peer" and schedule.placement.shares_stages:
        raise ArgumentError(
            f'offload_to="peer", but paths of schedule {schedule.name!r} share stages, so that a '
            'device is in several pipelines and has no one peer; take offload_to="host"'
        )
    named = [s for s in sharded if isinstance(values, tuple) and not values[s].is_none]
    if named:
        raise ArgumentError(
            f"offload names stage {named[0]}, which is sharded: its backward needs the keys of a "
            "micro-batch alone, which stay on the device; leave it out"
        )
    return Offloads(values, prefetch, sharded, target)


class _Activations(NamedTuple):
    """Activations of micro-batches that may be offloaded, one entry each.

    ``place`` and ``consumer`` are the positions of F and of its first consumer among the compute
    tasks of their device.
    """

    cell: Ints
    device: Ints
    stage: Ints
    replica: Ints
    microbatch: Ints
    place: Ints
    consumer: Ints
    is_input: Bools


def with_offloads(
    offloads: Offloads, kinds: Kinds, issued: Issued, overlap: bool, name: str, edges: Edges
) -> tuple[Kinds, Issued, tuple[float, ...]]:
    """Add the copies to the tasks of one replica.

    With ``overlap``, copies have streams of their own. Otherwise an OFFLOAD follows the SENDs of
    its F, and a RELOAD comes before the RECVs of its consumer. ``name`` is that of the schedule,
    ``edges`` are those of its placement.

    Returns
    -------
    Kinds, Issued, tuple of float
        All kinds and tasks, and the share of each stage; see `LoweringOptions.offload_shares`.
    """
    if offloads.is_none:
        return kinds, issued, ()
    order = ListedTasks.by_device(kinds, issued.kind)
    held = _activations(offloads, kinds, issued, order, edges)
    if offloads.target == "peer":  # the middle of an odd number of devices has none
        has_peer = paired_devices(kinds.homes)[held.device] != held.device
        held = _Activations(*(column[has_peer] for column in held))
    n_stages = kinds.homes.shape[1]
    ahead = prefetch_by_device(offloads.prefetch, kinds.homes.max() + 1, len(issued.kind))
    chosen = _chosen(offloads, held, n_stages, ahead[held.device])
    if not chosen.any():
        raise ArgumentError(
            f"offload={offloads.text!r}, but schedule {name!r} has no activations to offload: each "
            f"is needed again within prefetch + 1 = {ahead.min() + 1} compute tasks, or "
            "fewer micro-batches than one were chosen; give a larger share, a smaller prefetch, "
            'or offload="none"'
        )
    held = _Activations(*(column[chosen] for column in held))
    kinds, copies = _copy_kinds(kinds, held, overlap)
    after, before = _places(kinds, issued, order, held, ahead[held.device], overlap)
    # Ties of one position: OFFLOADs first, then RELOADs in the order of their consumers.
    offset = np.concatenate([after, before])
    rank = np.concatenate([held.place, held.consumer])
    is_reload = np.repeat([0, 1], len(after))
    by_position = np.lexsort((rank, is_reload, offset))
    offset, kind = offset[by_position], copies.ravel()[by_position]
    microbatch = np.tile(held.microbatch, 2)[by_position]
    shares = [value.share for value in offloads.of_stages(n_stages)]
    return (
        kinds,
        Issued(
            np.insert(issued.kind, offset, kind).astype(np.int32),
            np.insert(issued.microbatch, offset, microbatch).astype(np.int32),
            issued.ends + np.searchsorted(offset, issued.ends, side="right"),
        ),
        tuple(share or 1.0 for share in shares) if any(0 < share < 1 for share in shares) else (),
    )


def _activations(
    offloads: Offloads, kinds: Kinds, issued: Issued, order: ListedTasks, edges: Edges
) -> _Activations:
    """Return the activations of all forwards that keep any.

    Those of sharded stages are left out, and so are inputs of the pipeline, which are the caller's.
    """
    own, microbatch = issued.kind[order.tasks], issued.microbatch[order.tasks]
    op, stage, replica = kinds.op[own], kinds.stage[own], kinds.replica[own]
    width, n_stages = int(microbatch.max(initial=0)) + 1, kinds.homes.shape[1]
    cell = (replica * n_stages + stage) * width + microbatch
    none = len(order.tasks)
    consumer = np.full(kinds.homes.size * width, none, dtype=np.int64)
    uses = np.flatnonzero(kinds.is_op(frozenset({Op.R, Op.B, Op.I}))[own])
    np.minimum.at(consumer, cell[uses], order.place[uses])
    is_input = np.zeros(len(consumer), dtype=bool)
    is_input[cell[op == Op.R]] = True
    forwards = (op == Op.F) & kinds.completes[own]
    forwards = np.flatnonzero(forwards & ~np.isin(stage, offloads.sharded))
    forwards = forwards[consumer[cell[forwards]] < none]
    is_entry = np.isin(stage[forwards], entry_stages(edges, n_stages))
    forwards = forwards[~is_input[cell[forwards]] | ~is_entry]
    cells = cell[forwards]
    return _Activations(
        cells,
        kinds.device[own[forwards]],
        stage[forwards],
        replica[forwards],
        microbatch[forwards],
        order.place[forwards],
        consumer[cells],
        is_input[cells],
    )


def _chosen(offloads: Offloads, held: _Activations, n_stages: int, ahead: Ints) -> Bools:
    """Mark the activations to offload.

    Of equal lifespans, counted in compute tasks of the device, the lower stage comes first, then
    the lower micro-batch.
    """
    lifespan = held.consumer - held.place
    values = offloads.of_stages(n_stages)
    chosen = np.array([not value.is_none for value in values])[held.stage]
    together = not isinstance(offloads.values, tuple)
    group = held.device if together else held.replica * n_stages + held.stage
    order = np.lexsort((held.microbatch, held.stage, -lifespan, group))
    starts = np.searchsorted(group[order], group[order], side="left")
    sizes = np.searchsorted(group[order], group[order], side="right") - starts
    longest = np.array([value.longest for value in values])[held.stage[order]]
    # Products such as 0.29 * 100 are a little below the whole number that was meant.
    most = np.floor(longest * sizes * (1 + 1e-12))
    selected = np.zeros(len(order), dtype=bool)
    selected[order] = np.arange(len(order)) - starts < most
    marked: Bools = chosen & selected & (lifespan > ahead + 1)
    kept = np.array([value.above for value in values])[held.stage]
    whole = (kept > 0) & ~held.is_input
    marked &= (kept == 0) | whole
    for number in np.unique(group[whole]):
        rows = np.flatnonzero(whole & (group == number))
        back = held.consumer[rows] - ahead[rows]
        marked[rows] &= _activations_above(
            held.place[rows], held.consumer[rows], back, int(kept[rows[0]])
        )
    return marked


def _activations_above(place: Ints, consumer: Ints, back: Ints, most: int) -> Bools:
    """Mark activations without which at most ``most`` stay, those that are needed last first.

    A copy takes as long as a compute task here. So activations are away from the second place after
    their F on, to the place before ``back``. To remove those that are needed last is optimal for
    intervals.
    """
    marked, leave = np.zeros(len(place), dtype=bool), place + 2
    waiting, live = np.argsort(place, kind="stable").tolist(), list[int]()
    for now in np.unique(np.concatenate([place, back])):
        while waiting and place[waiting[0]] <= now:
            live.append(waiting.pop(0))
        live = [k for k in live if consumer[k] >= now]
        could = [k for k in live if leave[k] <= now < back[k]]
        movable = sorted((k for k in could if not marked[k]), key=lambda k: -int(consumer[k]))
        n_held = len(live) - len(could) + len(movable)
        marked[movable[: max(0, n_held - most)]] = True
    return marked


def _copy_kinds(kinds: Kinds, held: _Activations, overlap: bool) -> tuple[Kinds, Ints]:
    """Return the kinds with those of the copies; and the kinds of OFFLOAD and RELOAD of each.

    The latter have shape ``(2, len(held.cell))``.
    """
    columns = np.stack([held.stage, held.replica, held.is_input])
    (stage, replica, is_input), number = np.unique(columns, axis=1, return_inverse=True)
    device, n = kinds.homes[replica, stage], len(stage)
    part = np.where(is_input, KEPT.index("input"), -1)
    tables = [
        Kinds(
            np.full(n, op), device, stage, replica,
            np.full(n, stream if overlap else StreamKind.COMPUTE), part=part,
        )
        for op, stream in ((Op.OFFLOAD, StreamKind.OFFLOAD), (Op.RELOAD, StreamKind.RELOAD))
    ]  # fmt: skip
    first = len(kinds) + number.ravel()
    return kinds.joined(*tables), np.stack([first, n + first])


def _places(
    kinds: Kinds,
    issued: Issued,
    order: ListedTasks,
    held: _Activations,
    ahead: Ints,
    overlap: bool,
) -> tuple[Ints, Ints]:
    """Return the positions in the issue order before which OFFLOADs and RELOADs come."""
    if overlap:
        return order.last[held.place] + 1, order.last[held.consumer - 1 - ahead] + 1
    by_device = np.argsort(kinds.device[issued.kind], kind="stable")
    position = np.empty(len(by_device), dtype=np.int64)
    position[by_device] = np.arange(len(by_device))
    op = kinds.op[issued.kind[by_device]]
    others = np.append(np.flatnonzero(~np.isin(op, sorted(SENDS))), len(op))
    next_other = others[np.searchsorted(others, position[order.last[held.place]] + 1)]
    no_recvs = np.flatnonzero(~np.isin(op, sorted(RECVS)))
    last = np.searchsorted(no_recvs, position[order.first[held.consumer]] - 1, side="right") - 1
    return by_device[next_other - 1] + 1, by_device[no_recvs[last]] + 1
