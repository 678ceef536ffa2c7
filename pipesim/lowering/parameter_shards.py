"""Gather parameters before their uses, and free them if each replica holds a share (FSDP).

Tasks of one device with two stages, ``F F B B`` of stages 0 and 1 and one micro-batch, by the
number of stages whose parameters a device keeps (`ParameterShards.window`)::

    every  U 0F R  U 1F R  U 1B R  U 0B R         U UNSHARD    R RESHARD
    1      U 0F R  U 1F      1B R  U 0B R         stage 1 is the next stage that is used
    2      U 0F    U 1F      1B R    0B R         both are among the next two stages
    step   U 0F    U 1F      1B R    0B R         from the first use to the last one

A use is an F, or a backward: the tasks from R, or from B or I, to B or I of a micro-batch. W is no
use: a weight gradient is the product of an input and a gradient of an output, without parameters.

Replicas that share the optimizer alone keep all parameters. They gather what the step before has
changed (``gather_parameters="before_forward"``), once a stage and without prefetch::

    compute        0F    1F  1B  0B  STEP STEP
    unshard   U0   U1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.framework.framework import GatherParameters
from pipesim.graph.options import Prefetch, prefetch_by_device
from pipesim.graph.tasks import Kinds, ListedTasks, StreamKind
from pipesim.lowering.issue_order import Issued
from pipesim.ops import PASSES, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel
from pipesim.utils.texts import parse_int

ShardParameters: TypeAlias = Literal["none", "every", "step"] | int
SHARD_PARAMETERS = ("none", "every", "step")
_FORWARD, _BACKWARD = range(len(PASSES))


class ParameterShards(NamedTuple):
    """Stages whose parameters are sharded, and how long a device keeps gathered parameters."""

    stages: tuple[int, ...] = ()
    #: A device keeps the parameters of this number of stages that it uses next. 0 frees them after
    #: each use.
    window: int = 0
    #: Number of compute tasks that an UNSHARD may run beside; see `pipesim.graph.dependencies`.
    prefetch: Prefetch = 1
    #: Whether parameters are freed after their uses. Otherwise a device gathers those of each stage
    #: once, before the stage's first F.
    frees: bool = True


def checked_parameter_shards(
    schedule: Schedule,
    shard_parameters: ShardParameters,
    gather_parameters: GatherParameters,
    prefetch: Prefetch,
    sharded: tuple[int, ...],
    **others: object,
) -> ParameterShards:
    """Return what is gathered before its use, by options of `pipesim.lower` that suit the schedule.

    ``others`` are other arguments of `pipesim.lower`, checked: ``n_replicas``, ``shard_optimizer``,
    ``grad_sync`` and ``tied``.
    """
    value = checked_shard_parameters(shard_parameters)
    stages = tuple(stage for stage in range(schedule.n_stages) if stage not in sharded)
    name, paths = schedule.name, schedule.placement.n_paths
    is_early = gather_parameters == "before_forward"
    if is_early and not others["shard_optimizer"]:
        raise ArgumentError(
            'gather_parameters="before_forward" is for replicas that share the optimizer, and '
            "gather what others have stepped; add shard_optimizer=True, or leave it out"
        )
    if is_early and paths > 1:
        raise ArgumentError(
            f'gather_parameters="before_forward", but schedule {name!r} has {paths} paths, whose '
            'copies of a stage begin with other micro-batches; take "after_step"'
        )
    if value == "none":
        gathers = is_early and others["n_replicas"] != 1
        return ParameterShards(stages if gathers else (), frees=False)
    windows: Mapping[object, int] = {"every": 0, "step": schedule.n_stages}
    window = windows[value] if isinstance(value, str) else min(value, schedule.n_stages)
    what = f"shard_parameters={shard_parameters!r}"
    tied = others["tied"]
    wrong: Mapping[str, object] = {
        "there is one replica, which holds all parameters; add n_replicas=2, or more": (
            others["n_replicas"] == 1
        ),
        "shard_optimizer=True gathers parameters once a step instead; sharded parameters have a "
        "sharded optimizer already: leave shard_optimizer out": others["shard_optimizer"],
        'grad_sync="bucketed": a stage gathers and reduces its parameters as a whole; take "last", '
        '"every" or a number': "bucketed" in str(others["grad_sync"]),
        f"tied={tied}: the replicas share the gradients of each tied stage in another way, so that "
        "copies cannot be summed; leave tied or shard_parameters out": tied,
        f"schedule {name!r} has {paths} paths, which hold copies of their "
        "own; take a schedule of one path": paths > 1,
        f"schedule {name!r} steps {schedule.n_batches} times while micro-batches are in flight; "
        "take a schedule of one mini-batch": schedule.n_batches > 1,
    }
    for text in (text for text, is_wrong in wrong.items() if is_wrong):
        raise ArgumentError(f"{what}, but {text}")
    return ParameterShards(stages, window, prefetch)


def checked_shard_parameters(value: object) -> ShardParameters:
    """Return the option ``shard_parameters`` of `pipesim.lower`: a mode, or a number of stages."""
    if isinstance(value, str):
        if value in SHARD_PARAMETERS or (number := parse_int(value)) is None:
            check_name("shard_parameters", value, SHARD_PARAMETERS)
            return value  # type: ignore[return-value]  # one of them
        value = number
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(
            f"shard_parameters must be {', '.join(map(repr, SHARD_PARAMETERS))}, or the number of "
            f"stages whose parameters a device keeps; got {value!r} ({type(value).__name__})"
        )
    return check_count("shard_parameters", value)


def with_parameter_shards(
    shards: ParameterShards, kinds: Kinds, issued: Issued, overlap: bool
) -> tuple[Kinds, Issued]:
    """Add UNSHARD and RESHARD to the tasks of one replica; return all kinds and tasks.

    - RESHARD comes right after the last use of parameters that are not kept.
    - UNSHARD comes right after the compute task that it waits for, ``prefetch + 1`` places before
      the use, in the order of uses of its device. Without ``overlap`` it comes right before the
      use, on the compute stream.
    - UNSHARDs of parameters that are kept come first, in the order of the first Fs of stages.
    """
    if not shards.stages:
        return kinds, issued
    order = ListedTasks.by_device(kinds, issued.kind)
    own, microbatch = issued.kind[order.tasks], issued.microbatch[order.tasks]
    device, stage, op = kinds.device[own], kinds.stage[own], kinds.op[own]
    part = np.where(op == Op.F, _FORWARD, _BACKWARD)
    if shards.frees:
        uses = kinds.is_op(frozenset({Op.F, Op.R, Op.B, Op.I}))[own] & np.isin(stage, shards.stages)
        opens = _opens(kinds, own, microbatch)
        spans = _spans(uses, opens, order.place, device, stage, shards.window)
        gathered, freed = map(np.flatnonzero, spans)
    else:
        forwards = np.flatnonzero((op == Op.F) & np.isin(stage, shards.stages))
        gathered = forwards[np.unique(stage[forwards], return_index=True)[1]]
        gathered, freed = gathered[np.argsort(order.tasks[gathered])], gathered[:0]
    where = order.first[order.place[gathered]] if shards.frees else np.zeros_like(gathered)
    if overlap and shards.frees:
        of_place = kinds.device[issued.kind[order.first]]
        on_device = np.searchsorted(of_place, device[gathered])  # first place of the device
        ahead = prefetch_by_device(shards.prefetch, kinds.homes.max() + 1, len(order.place))
        where = _early_places(order, stage, on_device, gathered, freed, ahead[device[gathered]])
    rows = np.concatenate([freed, gathered])
    places = np.concatenate([order.last[order.place[freed]] + 1, where])
    ops = np.repeat([Op.RESHARD, Op.UNSHARD], [len(freed), len(gathered)])
    return _inserted(kinds, issued, rows, places, (ops, device, stage, part, microbatch), overlap)


def _early_places(
    order: ListedTasks, stage: Ints, on_device: Ints, gathered: Ints, freed: Ints, ahead: Ints
) -> Ints:
    """Return the position of each UNSHARD among the tasks, if it is on a stream of its own.

    ``gathered`` and ``freed`` are the compute tasks before which parameters are gathered, and after
    which they are freed. ``on_device`` is the first place of each gather's device, and ``ahead``
    the number of compute tasks that it may run beside.
    """
    gate = order.place[gathered] - 1 - ahead
    where = np.where(gate >= on_device, order.last[np.maximum(gate, 0)] + 1, 0)
    previous = _previous_frees(stage, gathered, freed)
    freed_at = order.last[order.place[np.maximum(previous, 0)]] + 1
    where = np.where(previous >= 0, np.maximum(where, freed_at), where)
    for first in np.unique(on_device):
        rows = on_device == first
        where[rows] = np.maximum.accumulate(where[rows])
    return where


def _opens(kinds: Kinds, own: Ints, microbatch: Ints) -> Ints:
    """Return 1 for tasks that open a use, -1 for those that close it, 0 for others.

    An R opens a backward, which its B or I closes. The first and the last segment of a stage with
    experts open and close theirs. ``own`` are the kinds of tasks.
    """
    op, stage = kinds.op[own], kinds.stage[own]
    begins, completes = kinds.begins[own], kinds.completes[own]
    recomputed = np.zeros((int(stage.max()) + 1, int(microbatch.max()) + 1), dtype=bool)
    opens = op == Op.R
    recomputed[stage[opens], microbatch[opens]] = True
    closes = ((op == Op.B) | (op == Op.I)) & recomputed[stage, microbatch] & completes
    segment = begins.astype(np.int64) - completes  # 0 for whole tasks
    steps: Ints = opens.astype(np.int64) - closes + segment
    return steps


@kernel()
def _spans(
    is_use: NDArray[np.bool_],
    opens: Ints,
    place: Ints,
    device: Ints,
    stage: Ints,
    window: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tasks are the first, and the last, with gathered parameters.

    Parameters are kept between two uses of a stage in one place, in one backward, and if fewer than
    ``window`` other stages of the device are used between them. Tasks come device by device.
    """
    is_first, is_last = np.zeros_like(is_use), np.zeros_like(is_use)
    n_stages = stage.max() + 1
    home = np.full(n_stages, -1, dtype=np.int64)
    latest = np.full(n_stages, -1, dtype=np.int64)  # latest use: its task
    used = np.full((n_stages, 2), -1, dtype=np.int64)  # the latest two places of uses
    n_open = np.zeros(n_stages, dtype=np.int64)
    for task in range(len(is_use)):
        if not is_use[task]:
            continue
        s, before = stage[task], latest[stage[task]]
        keeps = before >= 0 and (place[before] == place[task] or n_open[s] > 0)
        if before >= 0 and not keeps and window > 0:
            between = 0
            for other in range(n_stages):
                if other == s or home[other] != device[task]:
                    continue
                last = used[other, 0] if used[other, 0] < place[task] else used[other, 1]
                between += last > place[before]
            keeps = between < window
        if not keeps:
            is_first[task] = True
            if before >= 0:
                is_last[before] = True
        if used[s, 0] != place[task]:
            used[s, 1] = used[s, 0]
            used[s, 0] = place[task]
        latest[s], home[s] = task, device[task]
        n_open[s] += opens[task]
    for s in range(n_stages):
        if latest[s] >= 0:
            is_last[latest[s]] = True
    return is_first, is_last


def _previous_frees(stage: Ints, gathered: Ints, freed: Ints) -> Ints:
    """Return the task after which parameters were freed before each gather, -1 for none."""
    previous = np.full(len(gathered), -1, dtype=np.int64)
    for number in np.unique(stage[gathered]).tolist():
        rows = np.flatnonzero(stage[gathered] == number)
        previous[rows[1:]] = freed[stage[freed] == number][: len(rows) - 1]
    return previous


def _inserted(
    kinds: Kinds,
    issued: Issued,
    rows: Ints,
    places: Ints,
    columns: tuple[Ints, ...],
    overlap: bool,
) -> tuple[Kinds, Issued]:
    """Return all kinds, and the tasks with a new one before each of ``places``.

    ``columns`` are the operation of each new task, and device, stage, part and micro-batch of all
    compute tasks, of which ``rows`` are those that use the parameters. RESHARDs belong to the phase
    of that compute task, UNSHARDs are a phase of their own.
    """
    op, device, stage, part, microbatch = columns
    table = np.stack([op, device[rows], stage[rows], part[rows]])
    unique, number = np.unique(table, axis=1, return_inverse=True)
    ops, devices, stages, parts = unique
    gathers = StreamKind.UNSHARD if overlap else StreamKind.COMPUTE
    stream = np.where(ops == Op.UNSHARD, gathers, StreamKind.COMPUTE)
    added = Kinds(ops, devices, stages, np.zeros_like(stages), stream, part=parts)
    phase = issued.phase
    own = np.where(op == Op.RESHARD, phase[np.maximum(places - 1, 0)], -1 - np.arange(len(op)))
    kind = np.insert(issued.kind, places, (len(kinds) + number.ravel()).astype(np.int32))
    of_microbatch = np.insert(issued.microbatch, places, microbatch[rows])
    phase = np.insert(phase, places, own)
    return kinds.joined(added), Issued.of_phases(kind, of_microbatch, phase)
