"""Bytes and seconds of OFFLOAD and RELOAD, the copies between devices and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import input_bytes
from pipesim.ops import COPIES, KEPT, Op

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs
    from pipesim.costs.kind_routes import KindRoutes


Floats = NDArray[np.float64]
#: Field of `Costs` with the measured seconds of each copy.
MEASURED_COPIES = {Op.OFFLOAD: "offload", Op.RELOAD: "reload"}


def kept_inputs(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes of input that F of each stage keeps for R; shape ``(n_stages,)``.

    That of stage 0 belongs to the caller and counts as 0. Tensors of skip connections are input
    too.
    """
    n_stages = graph.n_stages
    inputs = np.zeros(n_stages)
    inputs[1:] = costs.per_stage("output_bytes", n_stages)[:-1]
    if graph.skips or costs.skip_bytes is not None:
        inputs += input_bytes(n_stages, graph.skips, costs.skip_sizes)
    return np.minimum(inputs, costs.per_stage("activation_bytes", n_stages))


def copied_bytes(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes that each kind of OFFLOAD and RELOAD moves, 0 for other kinds.

    They are the stage's share of ``activation_bytes``, unless ``offload_bytes`` are given; those of
    a recomputed micro-batch are its input.

    Raises
    ------
    CostsError
        If a stage would move more bytes than its activations have.
    """
    kinds, n_stages = graph.kinds, graph.n_stages
    activation = costs.per_stage("activation_bytes", n_stages)
    moved = graph.offload_shares * activation
    if costs.offload_bytes is not None:
        moved = costs.per_stage("offload_bytes", n_stages)
    copies = kinds.is_op(COPIES)
    whole = copies & (kinds.part < 0)
    stages = np.unique(kinds.stage[whole])
    more = stages[moved[stages] > activation[stages]]
    if len(more):
        raise CostsError(
            f"offload_bytes of stage {more[0]} are {moved[more[0]]:.16g}, and its activation_bytes "
            f"{activation[more[0]]:.16g}; OFFLOAD cannot move more than there are"
        )
    nbytes = np.where(whole, moved[kinds.stage], 0.0)
    inputs = copies & (kinds.part == KEPT.index("input"))
    nbytes[inputs] = kept_inputs(graph, costs)[kinds.stage[inputs]]
    return nbytes


def price_copies(costs: Costs, routes: KindRoutes, duration: Floats, nbytes: Floats) -> None:
    """Fill the seconds and bytes of OFFLOADs and RELOADs.

    Measured seconds of a stage are those of its activations. If it copies inputs too, these take
    the share that their bytes have in those.

    Raises
    ------
    CostsError
        If the network has no host link, and the seconds were not measured.
    """
    graph, (rows, links) = routes.graph, routes.copies
    if not len(rows):
        return
    own = copied_bytes(graph, costs)[rows]
    nbytes[rows] = own
    ops, stages, n_stages = graph.kinds.op[rows], graph.kinds.stage[rows], graph.n_stages
    is_input = graph.kinds.part[rows] == KEPT.index("input")
    for op, name in MEASURED_COPIES.items():
        copies = ops == op
        if getattr(costs, name) is not None:
            whole = np.zeros(n_stages)
            np.maximum.at(whole, stages[copies & ~is_input], own[copies & ~is_input])
            share = np.where(is_input & (whole[stages] > 0), own, 1.0)
            share[is_input] /= np.where(whole > 0, whole, 1.0)[stages[is_input]]
            seconds = costs.per_stage(name, n_stages)[stages] * share
            duration[rows[copies]] = seconds[copies]
        elif links is not None:
            duration[rows[copies]] = links.latency[copies] + own[copies] / links.bandwidth[copies]
        elif copies.any():
            raise CostsError(
                f"graph {graph.name!r} has {op.name} tasks, but the network of the costs has no "
                "link to host memory; give such as Network(host=HostLink(latency=10e-6, "
                f"bandwidth=25e9)), or {name}=, the measured seconds"
            )
