"""Bytes that the exchange of keys and values adds to the attention core.

==============  =============================================================================
exchange        bytes
==============  =============================================================================
``ring``        buffers of two parts of keys and values, of which one arrives while the other
                is used; backward also of their gradients
``all_gather``  keys and values of the whole sequence; backward also their gradients
``all_to_all``  inputs of the exchange beside its outputs; and the core's own output, which is
                kept beside the one that the projection gets (Transformer Engine from 2.8 on)
==============  =============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesim.models.memory_tensors import Operation, Tensors

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


def context_bytes(shard: Shard, x: Tensors) -> Operation:
    """Return the bytes that the exchange keeps, and those during F and B; 0 for one GPU."""
    c, pair = shard.context_parallel, x.keys + x.values
    if c == 1:
        return Operation("exchange", 0.0, 0.0, 0.0)
    if shard.context_exchange == "ring":
        return Operation("exchange", 0.0, 2 * pair, 4 * pair)
    if shard.context_exchange == "all_gather":
        return Operation("exchange", 0.0, c * pair, 2 * c * pair)
    sent = x.queries + pair
    return Operation("exchange", x.output, sent, sent)
