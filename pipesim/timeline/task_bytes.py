"""Bytes that stages always hold, and that tasks allocate and release (rule 10 of docs/time.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import cost_classes
from pipesim.costs.pricing import (
    copied_bytes,
    held_bytes,
    kept_inputs,
    moved_bytes,
    outputs_before,
    skip_sizes,
)
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import border_bytes, message_bytes
from pipesim.ops import COPIES, WEIGHT_GRADS, Op
from pipesim.utils.csr import Ints, bincount
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]

# Bytes of gradients that wait for their reduction, in addition to those that a stage always holds.
#
# A stage that reduces after every k micro-batches has one gradient for each group of k. It holds
# this gradient from the first backward of the group to the end of its reduction, since the next
# group adds to another one meanwhile. The gradient that a mini-batch reduces first is the one that
# the others are then added to: it is always held, and counted with the parameters.
#
# If replicas share the gradients of a stage (`TaskGraph.parameter_shares`), only the share is
# always held. Then every group's gradient is held from its first backward to the end of its
# reduction. If the stage reduces once, all micro-batches are one group.


class Waiting(NamedTuple):
    """Gradients that wait for their reduction, one entry each."""

    #: The first B (or W) that adds to it, which allocates the bytes at its start.
    backward: Ints
    #: The REDUCE_GRAD that releases them at its end.
    reduction: Ints
    #: Bytes of the gradients of the stage, but for experts that no other replica has.
    nbytes: NDArray[np.float64]


def waiting_gradients(graph: TaskGraph, costs: Costs) -> Waiting:
    """Return the gradients of each replica's stages, without the first of each mini-batch.

    Of stages whose gradients are sharded, the first is among them.
    """
    none = np.empty(0, dtype=np.int64)
    if Op.REDUCE_GRAD not in graph.kinds.ops:
        return Waiting(none, none, np.empty(0))
    is_shared = graph.parameter_shares > 1
    once = is_shared & (graph.reduction_groups == 0)
    groups = np.where(once, graph.n_microbatches, graph.reduction_groups)
    is_reduction = (graph.kinds.op == Op.REDUCE_GRAD) & (groups[graph.kinds.stage] > 0)
    if not is_reduction.any():
        return Waiting(none, none, np.empty(0))
    reductions = np.flatnonzero(is_reduction[graph.kind])
    of_group = np.where(once[graph.stage], graph.n_microbatches - 1, graph.microbatch)
    reductions = reductions[of_group[reductions] >= 0]
    backwards = np.flatnonzero(graph.is_op(WEIGHT_GRADS))
    backwards = backwards[groups[graph.stage[backwards]] > 0]
    # The first task of each key in order of ids, which is the order of its stream.
    keys, first = np.unique(
        _group_keys(graph, backwards, graph.microbatch, groups), return_index=True
    )
    size = graph.n_microbatches // graph.n_batches
    cell = graph.replica[reductions] * graph.n_stages + graph.stage[reductions]
    batch = of_group[reductions] // size
    _, first_of_batch = np.unique(cell * graph.n_batches + batch, return_index=True)
    held = first_of_batch[~is_shared[graph.stage[reductions[first_of_batch]]]]
    reductions = np.delete(reductions, held)
    needed = _group_keys(graph, reductions, of_group, groups)
    index = np.minimum(np.searchsorted(keys, needed), max(0, len(keys) - 1))
    exists = keys[index] == needed if len(keys) else np.zeros(len(reductions), dtype=bool)
    reductions, index = reductions[exists], index[exists]
    n_replicas = graph.n_replicas * graph.options.n_equal
    nbytes = moved_bytes(costs, graph.n_stages, n_replicas, "gradient")[graph.stage[reductions]]
    return Waiting(backwards[first[index]], reductions, nbytes)


def _group_keys(graph: TaskGraph, tasks: Ints, microbatch: Ints, groups: Ints) -> Ints:
    """Return the number of each task's combination of replica, stage and group of micro-batches."""
    stage = graph.stage[tasks]
    group = microbatch[tasks] // groups[stage]
    keys: Ints = (graph.replica[tasks] * graph.n_stages + stage) * graph.n_microbatches + group
    return keys


class RowBytes(NamedTuple):
    """Bytes that tasks change, one row for tasks with the same bytes."""

    #: Row of each task; shape ``(len(graph),)``.
    row: Ints
    #: Kind of the tasks of each row; shape ``(n_rows,)``.
    kind: Ints
    #: Bytes that tasks of a row allocate at their start, allocate if R allocates the rest, release
    #: at their end, and hold only while they run.
    allocated: Floats
    kept: Floats
    released: Floats
    workspace: Floats


def row_bytes(graph: TaskGraph, costs: Costs) -> RowBytes:
    """Return the bytes that tasks change: a row a kind, for each class of equal micro-batches."""
    row, classes = _class_rows(graph, costs)
    tables = [(*kind_bytes(graph, own), workspaces(graph, own)) for own in classes]
    columns = map(np.concatenate, zip(*tables, strict=True))
    return RowBytes(row, np.tile(np.arange(len(graph.kinds)), len(tables)), *columns)


def _class_rows(graph: TaskGraph, costs: Costs) -> tuple[Ints, Sequence[Costs]]:
    """Return the row of each task in tables of the kinds of each class, and costs of each class."""
    classes = cost_classes(costs, graph)
    if classes is None:
        return graph.kind, [costs]
    return classes.rows(graph.kind, len(graph.kinds)), classes.costs


class StaticBytes(NamedTuple):
    """Bytes that each device holds throughout, by what they are for; shape ``(n_devices,)``."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats


def static_parts(graph: TaskGraph, costs: Costs) -> StaticBytes:
    """Return the parts of `static`."""
    parts = (np.broadcast_to(part, graph.homes.shape) for part in _stage_parts(graph, costs))
    return StaticBytes(*(_of_devices(graph, part) for part in parts))


def _of_devices(graph: TaskGraph, held: Floats) -> Floats:
    """Return the bytes of each device, from those of `homes`; replicas share stages there."""
    holds = graph.kinds.holds
    return bincount(graph.homes[holds], held[holds], graph.n_devices)


def static(graph: TaskGraph, costs: Costs) -> NDArray[np.float64]:
    """Return bytes that each device holds throughout; shape ``(n_devices,)``.

    - Parameters count once for each version that a stage holds; see `weight_versions`.
    - A replica holds its share of a sharded optimizer's state, and all gradients, as in ZeRO-1.
      Of sharded parameters it holds its share, and that of their gradients.
    - One gradient a parameter is held throughout. Further gradients, which wait for a reduction,
      are among the `changes`.
    - A forward-only graph holds parameters alone.
    """
    parameters, gradients, optimizer = _stage_parts(graph, costs)
    with np.errstate(over="ignore"):
        held = parameters + gradients + optimizer
    return finite_bytes(_of_devices(graph, held))


def _stage_parts(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return bytes of parameters, gradients and optimizer; one value a stage, or a replica too."""
    with np.errstate(over="ignore"):
        parameters = weight_versions(graph) * held_bytes(costs, graph, "parameter")
        if graph.forward_only:
            none = np.zeros(graph.n_stages)
            return parameters, none, none
        return (
            parameters,
            held_bytes(costs, graph, "gradient"),
            held_bytes(costs, graph, "optimizer"),
        )


def finite_bytes(nbytes: Floats) -> Floats:
    """Return the bytes of each device; raise `CostsError` unless they are finite."""
    infinite = np.flatnonzero(~np.isfinite(nbytes))
    if len(infinite):
        raise CostsError(
            f"device {infinite[0]} would hold {nbytes[infinite[0]]} bytes: activation_bytes, "
            "parameter_bytes and optimizer_bytes of its stages are too many to be added; check them"
        )
    return nbytes


def weight_versions(graph: TaskGraph) -> NDArray[np.int64]:
    """Return the most versions of its weights that each stage holds at once.

    Usually one; two if weights are double-buffered. If they are stashed, a stage holds the newest
    version and each version with which a micro-batch in flight began. Shape
    ``(n_replicas, n_stages)``.
    """
    most = np.ones((graph.n_replicas, graph.n_stages), dtype=np.int64)
    if graph.weight_versions == "double_buffered":
        return most + 1
    if graph.weight_versions == "stashed":
        kinds = graph.kinds
        role = np.select([(kinds.op == Op.F) & kinds.begins, kinds.op == Op.STEP], [1, 3], 0)
        role[kinds.is_op(WEIGHT_GRADS) & kinds.completes] = 2
        cell = kinds.replica * graph.n_stages + kinds.stage
        version = np.zeros((most.size, graph.n_microbatches), dtype=np.int64)
        in_flight = np.zeros((most.size, graph.n_batches + 1), dtype=np.int64)
        _versions(graph.kind, graph.microbatch, role, cell, version, in_flight, most.reshape(-1))
    return most


@kernel()
def _versions(
    kind: Ints,
    microbatch: Ints,
    role: Ints,
    cell: Ints,
    version: Ints,
    in_flight: Ints,
    most: Ints,
) -> None:
    """Fill ``most``. Tasks of a kind begin a micro-batch (role 1), end it (2), or are STEPs (3).

    ``cell`` numbers the stages of all replicas. ``version`` is the version of each micro-batch,
    ``in_flight`` the number of micro-batches of each version; both must be zeros before.
    """
    newest, n_versions = np.zeros_like(most), np.zeros_like(most)
    for task in range(len(kind)):
        r, c, m = role[kind[task]], cell[kind[task]], microbatch[task]
        if r == 0:
            continue
        if r == 1:
            version[c, m] = newest[c]
            in_flight[c, newest[c]] += 1
            n_versions[c] += in_flight[c, newest[c]] == 1
        elif r == 2:
            in_flight[c, version[c, m]] -= 1
            n_versions[c] -= in_flight[c, version[c, m]] == 0
        else:
            newest[c] += 1
        most[c] = max(most[c], n_versions[c] + (in_flight[c, newest[c]] == 0))


def changes(graph: TaskGraph, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes that each task allocates at its start, and that it releases at its end.

    - F allocates its activations, or only its input if R allocates the rest.
    - B releases all of them.
    - I keeps ``weight_grad_bytes``, which W releases. If these are more than the activations, I
      allocates the rest.
    - The input of a stage without a stage before it belongs to the caller and counts as 0. Tensors
      of skip connections are input too.
    - OFFLOAD releases the bytes that it moves to host memory, and RELOAD allocates them.
    - UNSHARD of sharded parameters allocates those of its stage, and RESHARD releases them.
    - In a forward-only graph, inputs and outputs of stages live as long as tasks need them. Keys
      and values of slices live until the last slice of their sequence; see `_kept_keys`.
    - Gradients that wait for a reduction are allocated by the first B or W that adds to them, and
      released by their REDUCE_GRAD; see `waiting_gradients`.
    """
    rows = row_bytes(graph, costs)
    dropped, waiting = dropped_activations(graph), waiting_gradients(graph, costs)
    allocated, released = rows.allocated[rows.row], rows.released[rows.row]
    if len(dropped):
        is_dropped = dropped[graph.replica, graph.stage, np.maximum(graph.microbatch, 0)]
        allocated = np.where(is_dropped, rows.kept[rows.row], allocated)
    allocated[waiting.backward] += waiting.nbytes
    released[waiting.reduction] += waiting.nbytes
    if graph.forward_only and graph.n_slices > 1:
        kept, freed = _kept_keys(graph, costs)
        return allocated + kept, released + freed
    return allocated, released


def _kept_keys(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats]:
    """Return bytes of keys and values that each task of a forward-only graph keeps, and frees.

    F keeps those of its slice. The F of the last slice frees those of all slices of its sequence.
    """
    kinds, (row, classes) = graph.kinds, _class_rows(graph, costs)
    tables = [own.per_stage("kv_cache_bytes", graph.n_stages)[kinds.stage] for own in classes]
    nbytes = np.concatenate(tables)[row]
    begins, ends = (((kinds.op == Op.F) & x)[graph.kind] for x in (kinds.begins, kinds.completes))
    kept = np.where(begins, nbytes, 0.0)
    sequence, number = np.divmod(graph.microbatch, graph.n_slices)
    ends &= number == graph.n_slices - 1
    sums = np.zeros((graph.n_replicas, graph.n_stages, sequence.max(initial=0) + 1))
    cell = graph.replica, graph.stage, sequence
    np.add.at(sums, tuple(column[begins] for column in cell), kept[begins])
    return kept, np.where(ends, sums[cell], 0.0)


def kind_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return bytes that each kind allocates, allocates if R allocates the rest, and releases."""
    if graph.forward_only:
        allocated, released = _forward_kind_bytes(graph, costs)
        kept = allocated
    else:
        allocated, kept, released = _training_kind_bytes(graph, costs)
    if Op.RESHARD in graph.kinds.ops:
        gathered, freed = gathered_bytes(graph, costs)
        return allocated + gathered, kept + gathered, released + freed
    return allocated, kept, released


def _training_kind_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return `kind_bytes` of a graph with backwards, without those of parameters."""
    n_stages, op, stage = graph.n_stages, graph.kinds.op, graph.kinds.stage
    activation, weight_grad = (
        costs.per_stage(f"{name}_bytes", n_stages) for name in ("activation", "weight_grad")
    )
    kept_input = kept_inputs(graph, costs)
    allocated, kept, released = tables = np.zeros((3, len(Op), n_stages))
    allocated[Op.F], kept[Op.F] = activation, kept_input
    allocated[Op.R] = kept[Op.R] = activation - kept_input
    allocated[Op.I] = kept[Op.I] = np.maximum(0.0, weight_grad - activation)
    released[Op.B], released[Op.W] = activation, weight_grad
    released[Op.I] = np.maximum(0.0, activation - weight_grad)
    of_kinds: Floats = tables[:, op, stage]
    if graph.kinds.has_segments:
        of_kinds[:2, ~graph.kinds.begins] = 0.0  # the first allocates and
        of_kinds[2, ~graph.kinds.completes] = 0.0  # the last releases
    if not graph.kinds.ops.isdisjoint(COPIES):
        moved = copied_bytes(graph, costs)
        of_kinds[:2, op == Op.RELOAD] = moved[op == Op.RELOAD]
        of_kinds[2, op == Op.OFFLOAD] = moved[op == Op.OFFLOAD]
    return of_kinds[0], of_kinds[1], of_kinds[2]


def gathered_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats]:
    """Return bytes of parameters that each kind gathers (UNSHARD) and frees (RESHARD).

    They are all parameters of the stage, but for experts that no other replica has. The replica's
    share is not part of the buffer that is gathered into: torch's ``fully_shard`` too holds both
    (`torch.distributed.fsdp._fully_shard`, ``FSDPParam.init_all_gather_outputs``).
    """
    kinds = graph.kinds
    n_replicas = graph.n_replicas * graph.options.n_equal
    nbytes = moved_bytes(costs, graph.n_stages, n_replicas, "parameter")[kinds.stage]
    return np.where(kinds.gathers_shards, nbytes, 0.0), np.where(
        kinds.op == Op.RESHARD, nbytes, 0.0
    )


def _forward_kind_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats]:
    """Return bytes that each kind of a forward-only graph allocates and releases.

    They are outputs of stages and tensors of skips; an output counts once for each stage that it
    goes to. F allocates its output. The SEND releases it, and the RECV allocates it on the device
    of the next stage, whose F releases it. Without a message, the F of the next stage releases it.
    An output that goes to no stage counts as 0.
    """
    kinds, outputs = graph.kinds, costs.per_stage("output_bytes", graph.n_stages)
    skip_bytes = skip_sizes(graph, costs)
    skips = message_bytes(kinds, graph.skips, graph.portals, skip_bytes)
    consumed = outputs_before(graph, costs)
    produced = np.roll(consumed, -1)
    for (source, target), size in border_bytes(graph.skips, graph.portals, skip_bytes):
        produced[source] += size
        consumed[target] += size
    is_output = kinds.peer_stage < 0
    forward, send, recv = (kinds.op == op for op in (Op.F, Op.SEND_F, Op.RECV_F))
    begins, completes = forward & kinds.begins, forward & kinds.completes
    sent = np.where(is_output, outputs[kinds.stage], skips)
    received = np.where(is_output, outputs[kinds.stage - 1], skips)
    allocated = np.where(completes, produced[kinds.stage], np.where(recv, received, 0.0))
    released = np.where(begins, consumed[kinds.stage], np.where(send, sent, 0.0))
    return allocated, released


def workspaces(graph: TaskGraph, costs: Costs) -> Floats:
    """Return bytes that tasks of each kind hold only while they run."""
    table = np.zeros((len(Op), graph.n_stages))
    table[Op.F] = table[Op.R] = costs.per_stage("forward_workspace_bytes", graph.n_stages)
    backward = costs.per_stage("backward_workspace_bytes", graph.n_stages)
    table[Op.B] = table[Op.I] = table[Op.W] = backward
    of_kinds: Floats = table[graph.kinds.op, graph.kinds.stage]
    return of_kinds


def dropped_activations(graph: TaskGraph) -> NDArray[np.bool_]:
    """Mark the micro-batches whose activations F drops and R recomputes.

    Shape ``(n_replicas, n_stages, n_microbatches)``; empty if the graph has no R.
    """
    is_recompute = graph.kinds.op == Op.R
    if not is_recompute.any():
        return np.empty((0, 0, 0), dtype=bool)
    dropped = np.zeros((graph.n_replicas, graph.n_stages, graph.n_microbatches), dtype=bool)
    tasks = np.flatnonzero(is_recompute[graph.kind])
    kind = graph.kind[tasks]
    dropped[graph.kinds.replica[kind], graph.kinds.stage[kind], graph.microbatch[tasks]] = True
    return dropped
