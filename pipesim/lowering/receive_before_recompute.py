"""Receive a gradient before the recompute that could fill the wait for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.rules import PAIRS
from pipesim.graph.tasks import Kinds
from pipesim.ops import RECVS, Op
from pipesim.utils.csr import Ints


def gradients_first(kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]) -> Ints:
    """Return the order in which each RECV_B comes before the R of its stage and micro-batch.

    Messages of a channel keep their order: those before the RECV_B move with it.
    """
    op, stage, replica = kinds.op[kind], kinds.stage[kind], kinds.replica[kind]
    place = np.arange(len(kind), dtype=np.float64)
    cell = (replica, stage, np.maximum(microbatch, 0))
    recompute = np.full([int(column.max(initial=0)) + 1 for column in cell], np.inf)
    of_r = np.flatnonzero(op == Op.R)
    recompute[tuple(column[of_r] for column in cell)] = place[of_r] - 0.5
    received = np.flatnonzero(op == Op.RECV_B)
    before = recompute[tuple(column[received] for column in cell)]
    place[received] = np.minimum(place[received], before)
    received = np.flatnonzero(kinds.is_op(RECVS)[kind])
    channel = _channels(kinds)[kind[received]]
    for number in np.unique(channel):
        own = received[channel == number]
        place[own] = np.minimum.accumulate(place[own][::-1])[::-1]
    order: Ints = np.argsort(place, kind="stable")
    return order


def _channels(kinds: Kinds) -> Ints:
    """Return the number of the pair of devices of each kind of RECV; -1 for other kinds."""
    n_stages = int(kinds.stage.max(initial=0)) + 1
    homes = np.zeros((int(kinds.replica.max(initial=0)) + 1, n_stages), dtype=np.int64)
    homes[kinds.replica, kinds.stage] = kinds.device
    channels = np.full(len(kinds), -1, dtype=np.int64)
    for recv, (_, offset) in PAIRS.items():
        own = np.flatnonzero(kinds.op == recv)
        peer = kinds.peer_stage[own]
        peer = np.where(peer < 0, kinds.stage[own] + offset, peer)
        source = homes[kinds.replica[own], peer]
        channels[own] = source * (int(kinds.device.max()) + 1) + kinds.device[own]
    return channels
