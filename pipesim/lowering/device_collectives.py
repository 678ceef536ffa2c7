"""Add the collectives that have one member a device: sums over tied stages, norm of all gradients.

Tasks of two devices with one stage each, which are tied, in issue order::

    device 0 | ... 0B1 0REDUCE_TIED.0 0GRAD_NORM 0STEP
    device 1 | ... 1B1 1REDUCE_TIED.0 1GRAD_NORM 1STEP

A REDUCE_TIED comes right after the last gradients of its stages. All optimizer steps, and the
gathers after them, come after all other tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pipesim.errors import ArgumentError
from pipesim.graph.options import Tied, checked_tied, tied_text
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.lowering.issue_order import Issued
from pipesim.ops import SENDS, WEIGHT_GRADS, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints


class DeviceCollectives(NamedTuple):
    """Groups of tied stages, and whether the norm of all gradients is computed before the steps."""

    tied: Tied = ()
    grad_norm: bool = False


def checked_device_collectives(
    schedule: Schedule,
    tied: Iterable[Iterable[int]] | str,
    grad_norm: bool,
    sharded: tuple[int, ...],
    step: str,
) -> DeviceCollectives:
    """Return the options of `pipesim.lower`, checked to suit the schedule."""
    groups = checked_tied(tied, schedule.n_stages)
    if groups and schedule.placement.shares_stages:
        raise ArgumentError(
            f"tied={tied_text(groups)!r}, but paths of schedule {schedule.name!r} share stages on "
            "one device, and gradients of tied stages are summed path by path; leave tied out"
        )
    if (groups or grad_norm) and schedule.n_batches > 1:
        what = [f"tied={tied_text(groups)!r}"] * bool(groups) + ["grad_norm=True"] * grad_norm
        raise ArgumentError(
            f"{' and '.join(what)}, but schedule {schedule.name!r} steps {schedule.n_batches} "
            "times while micro-batches are in flight: a stage would step before other stages have "
            "the gradients of its mini-batch; take a schedule of one mini-batch"
        )
    if grad_norm and step == "none":
        raise ArgumentError(
            'grad_norm=True, but step="none": the norm of the gradients is for the optimizer '
            "steps; leave step or grad_norm out"
        )
    for group in groups:
        for stage in sorted(set(group) & set(sharded)):
            raise ArgumentError(
                f"tied names stage {stage}, which is sharded: each replica has other rows of its "
                "embedding, so that no other stage has a copy; leave it out of tied or sharded"
            )
    return DeviceCollectives(groups, grad_norm)


def with_device_collectives(
    collectives: DeviceCollectives, kinds: Kinds, issued: Issued, overlap: bool
) -> tuple[Kinds, Issued]:
    """Add the collectives to the tasks of one replica; return all kinds and tasks.

    With ``overlap``, sums are on the stream of collectives.
    """
    if not (collectives.tied or collectives.grad_norm):
        return kinds, issued
    phase = issued.phase
    late = kinds.is_op(frozenset({Op.STEP, Op.UNSHARD}))[issued.kind]
    phase[late] += len(issued.ends)
    tables, added, places = [kinds], list[Ints](), list[int]()
    stream = StreamKind.COLLECTIVE if overlap else StreamKind.COMPUTE
    early_phase, early_kind = phase[~late], issued.kind[~late]
    for group, stages in enumerate(collectives.tied):
        for replica in range(len(kinds.homes)):
            own = kinds.is_op(WEIGHT_GRADS | {Op.REDUCE_GRAD}) & np.isin(kinds.stage, stages)
            own &= kinds.replica == replica
            last = np.flatnonzero(own[early_kind])[-1]
            place = _next_phase(early_phase, last)
            if place < len(early_kind) and kinds.op[early_kind[place]] in SENDS:
                place = _next_phase(early_phase, place)  # messages first, as before reductions
            places.append(place)
            tables.append(_tied_kinds(kinds.homes, replica, group, stages, stream))
    if collectives.grad_norm:  # the lowest stage of the lowest replica on each device
        places.append(len(early_phase))
        devices, first = np.unique(kinds.homes, return_index=True)
        replicas, lowest = np.divmod(first, kinds.homes.shape[1])
        same = np.ones_like(lowest)
        tables.append(
            Kinds(Op.GRAD_NORM * same, devices, lowest, replicas, StreamKind.COMPUTE * same)
        )
    number = len(kinds)
    for table in tables[1:]:
        added.append(number + np.arange(len(table)))
        number += len(table)
    return Kinds.joined(*tables), _inserted(issued, phase, late, places, added)


def _next_phase(phase: Ints, task: int) -> int:
    """Return the first task of the phase after that of a task."""
    return int(np.searchsorted(phase, phase[task], side="right"))


def _inserted(
    issued: Issued, phase: Ints, late: Ints, places: list[int], added: list[Ints]
) -> Issued:
    """Return the tasks with each list of ``added`` kinds before a place, and late tasks last.

    Places count the tasks that are not late. The members of a collective are one phase.
    """
    order = np.argsort(late, kind="stable")
    sizes = [len(kinds) for kinds in added]
    where = np.repeat(places, sizes)
    new_phases = np.repeat(-1 - np.arange(len(added)), sizes)
    kind = np.insert(issued.kind[order], where, np.concatenate(added))
    microbatch = np.insert(issued.microbatch[order], where, -1)
    return Issued.of_phases(kind, microbatch, np.insert(phase[order], where, new_phases))


def _tied_kinds(
    homes: Ints, replica: int, group: int, stages: tuple[int, ...], stream: int
) -> Kinds:
    """Return the members of a REDUCE_TIED of one replica: the lowest stage on each device."""
    devices, first = np.unique(homes[replica, list(stages)], return_index=True)
    stage = np.array(stages)[first]
    same = np.ones_like(stage)
    return Kinds(
        Op.REDUCE_TIED * same, devices, stage, replica * same, stream * same, part=group * same
    )
