"""Bytes that stages always hold, and that tasks allocate and release (rule 10 of docs/time.md)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import border_bytes, input_bytes, message_bytes
from pipesim.ops import Op
from pipesim.timeline.gradient_memory import waiting_gradients
from pipesim.utils.csr import Ints, bincount
from pipesim.utils.jit import kernel

__all__ = [
    "StaticBytes",
    "changes",
    "dropped_activations",
    "finite_bytes",
    "kind_bytes",
    "static",
    "static_parts",
    "weight_versions",
    "workspaces",
]

Floats = NDArray[np.float64]


class StaticBytes(NamedTuple):
    """Bytes that each device holds throughout, by what they are for; shape ``(n_devices,)``."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats


def static_parts(graph: TaskGraph, costs: Costs) -> StaticBytes:
    """Return the parts of `static`."""
    homes = graph.homes.ravel()
    parts = (np.broadcast_to(part, graph.homes.shape) for part in _stage_parts(graph, costs))
    return StaticBytes(*(bincount(homes, part.ravel(), graph.n_devices) for part in parts))


def static(graph: TaskGraph, costs: Costs) -> NDArray[np.float64]:
    """Return bytes that each device holds throughout; shape ``(n_devices,)``.

    - Parameters count once for each version that a stage holds; see `weight_versions`.
    - A replica holds its share of a sharded optimizer's state, and all gradients, as in ZeRO-1.
    - One gradient a parameter is held throughout. Further gradients, which wait for a reduction,
      are among the `changes`.
    - A forward-only graph holds parameters alone.

    Raises
    ------
    CostsError
        If the sum of the bytes of a device is not finite.
    """
    parameters, gradients, optimizer = _stage_parts(graph, costs)
    with np.errstate(over="ignore"):
        held = parameters + gradients + optimizer
    return finite_bytes(bincount(graph.homes.ravel(), held.ravel(), graph.n_devices))


def _stage_parts(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return bytes of parameters, gradients and optimizer; one value a stage, or a replica too."""
    parameters, gradients, optimizer = (
        costs.per_stage(f"{name}_bytes", graph.n_stages)
        for name in ("parameter", "gradient", "optimizer")
    )
    if graph.forward_only:
        return weight_versions(graph) * parameters, 0 * gradients, 0 * optimizer
    with np.errstate(over="ignore"):
        return (
            weight_versions(graph) * parameters,
            gradients,
            optimizer / graph.optimizer_shares,
        )


def finite_bytes(nbytes: Floats) -> Floats:
    """Return the bytes of each device, checked to be finite.

    Raises
    ------
    CostsError
        For bytes of a device whose sum is not finite.
    """
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
        role = np.select([kinds.op == Op.F, kinds.op == Op.STEP], [1, 3], 0)
        role[kinds.is_op(frozenset({Op.B, Op.W}))] = 2
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
    - The input of stage 0 belongs to the caller and counts as 0. Tensors of skip connections are
      input too.
    - In a forward-only graph, inputs and outputs of stages live as long as tasks need them.
    - Gradients that wait for a reduction are allocated by the first B or W that adds to them, and
      released by their REDUCE_GRAD; see `pipesim.timeline.gradient_memory`.
    """
    kind_allocated, kept, kind_released = kind_bytes(graph, costs)
    dropped, waiting = dropped_activations(graph), waiting_gradients(graph, costs)
    allocated, released = kind_allocated[graph.kind], kind_released[graph.kind]
    if len(dropped):
        is_dropped = dropped[graph.replica, graph.stage, np.maximum(graph.microbatch, 0)]
        allocated = np.where(is_dropped, kept[graph.kind], allocated)
    allocated[waiting.backward] += waiting.nbytes
    released[waiting.reduction] += waiting.nbytes
    return allocated, released


def kind_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return bytes that each kind allocates, allocates if R allocates the rest, and releases."""
    if graph.forward_only:
        allocated, released = _forward_kind_bytes(graph, costs)
        return allocated, allocated, released
    n_stages, op, stage = graph.n_stages, graph.kinds.op, graph.kinds.stage
    activation, weight_grad, outputs = (
        costs.per_stage(f"{name}_bytes", n_stages)
        for name in ("activation", "weight_grad", "output")
    )
    inputs = np.zeros(n_stages)
    inputs[1:] = outputs[:-1]
    if graph.skips or costs.skip_bytes is not None:
        inputs += input_bytes(n_stages, graph.skips, costs.skip_sizes)
    kept_input = np.minimum(inputs, activation)
    allocated, kept, released = tables = np.zeros((3, len(Op), n_stages))
    allocated[Op.F], kept[Op.F] = activation, kept_input
    allocated[Op.R] = kept[Op.R] = activation - kept_input
    allocated[Op.I] = kept[Op.I] = np.maximum(0.0, weight_grad - activation)
    released[Op.B], released[Op.W] = activation, weight_grad
    released[Op.I] = np.maximum(0.0, activation - weight_grad)
    of_kinds: Floats = tables[:, op, stage]
    return of_kinds[0], of_kinds[1], of_kinds[2]


def _forward_kind_bytes(graph: TaskGraph, costs: Costs) -> tuple[Floats, Floats]:
    """Return bytes that each kind of a forward-only graph allocates and releases.

    They are outputs of stages and tensors of skips. F allocates its output. The SEND releases it,
    and the RECV allocates it on the device of the next stage, whose F releases it. Without a
    message, the F of the next stage releases it. The output of the last stage counts as 0.
    """
    n_stages, kinds = graph.n_stages, graph.kinds
    outputs = costs.per_stage("output_bytes", n_stages)
    skips = message_bytes(kinds, graph.skips, graph.portals, costs.skip_sizes)
    produced, consumed = np.zeros((2, n_stages))
    produced[:-1] = consumed[1:] = outputs[:-1]
    for (source, target), size in border_bytes(graph.skips, graph.portals, costs.skip_sizes):
        produced[source] += size
        consumed[target] += size
    is_output = kinds.peer_stage < 0
    forward, send, recv = (kinds.op == op for op in (Op.F, Op.SEND_F, Op.RECV_F))
    sent = np.where(is_output, outputs[kinds.stage], skips)
    received = np.where(is_output, outputs[kinds.stage - 1], skips)
    allocated = np.where(forward, produced[kinds.stage], np.where(recv, received, 0.0))
    released = np.where(forward, consumed[kinds.stage], np.where(send, sent, 0.0))
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
