"""Exchanges of keys and values between the GPUs that share a sequence.

Letters are those of `pipesim.models.transformer`, with T = bs/c tokens of a GPU and e bytes an
element; w are elements of values of a token, o those of the core's output. Messages of one GPU:

==============  ==========================================  ======================================
exchange        forward                                     backward
==============  ==========================================  ======================================
``ring``        c - 1 steps of eT(k + w)/t                  c - 1 steps of them and their gradients
``all_gather``  all-gather of ecT(k + w)/t                  the same, and a reduce-scatter
``all_to_all``  all-to-all of eT(q + k + w)/t, and of       the same
                eTo/t
==============  ==========================================  ======================================

A ring computes attention to the keys that it has while the next ones arrive: of each step but the
first, only the seconds count in which the message takes longer than the c-th of the core. The other
exchanges do not overlap with compute.

Sources: Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3;
Llama Team, arXiv 2407.21783, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509,
section 3; Transformer Engine, ``context_parallel.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipesim.network.network import Network
from pipesim.network.node_collectives import (
    gpus_all_to_all,
    gpus_ring_step,
    group_of_gpus,
    ring,
)

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard
    from pipesim.network.links import Nodes


class ContextCollective(NamedTuple):
    """The exchange around one attention core, forward or backward.

    Attributes
    ----------
    is_backward
        Whether gradients are exchanged too.
    n_collectives
        Number of collectives or messages.
    """

    is_backward: bool
    n_collectives: int

    def seconds(self, shard: Shard, network: Network, core: tuple[float, float]) -> float:
        """Return the seconds in which no kernel runs.

        ``core`` are the seconds of the core's kernels, forward and backward.
        """
        if network.nodes is None:
            return 0.0
        return _EXCHANGES[shard.context_exchange](
            shard, network.nodes, core[self.is_backward], self.is_backward
        )


def context_collectives(shard: Shard) -> tuple[ContextCollective, ContextCollective] | None:
    """Return the exchanges of one layer, forward and backward; None without context parallelism."""
    c = shard.context_parallel
    if c == 1:
        return None
    counts = {"ring": (c - 1, c - 1), "all_gather": (1, 2), "all_to_all": (2, 2)}
    forward, backward = counts[shard.context_exchange]
    return ContextCollective(False, forward), ContextCollective(True, backward)


def _kv_bytes(shard: Shard) -> float:
    """Return the bytes of keys and values of a GPU's tokens."""
    model = shard.model
    width = (model.kv_size + model.value_size) / shard.tensor_parallel
    return model.bytes_per_activation * width * shard.tokens


def _ring(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of a ring's messages that exceed those of the core."""
    c, t = shard.context_parallel, shard.tensor_parallel
    nbytes = _kv_bytes(shard) * (2 if is_backward else 1)
    return (c - 1) * max(0.0, gpus_ring_step(nodes, nbytes, c, t) - core / c)


def _all_gather(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of the all-gather of all keys and values, or of both collectives."""
    c, t = shard.context_parallel, shard.tensor_parallel
    half = ring(group_of_gpus(nodes, c, t), c * _kv_bytes(shard)) / 2
    return half * (2 if is_backward else 1)


def _all_to_all(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of both exchanges, of queries, keys and values, and of the output."""
    model, t = shard.model, shard.tensor_parallel
    token = model.bytes_per_activation * shard.tokens / t
    widths = (model.query_size + model.kv_size + model.value_size, model.core_output_size)
    c = shard.context_parallel
    return sum(gpus_all_to_all(nodes, token * width, c, t) for width in widths)


_EXCHANGES = {"ring": _ring, "all_gather": _all_gather, "all_to_all": _all_to_all}
