"""Checks of the arguments of context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipesim.errors import ArgumentError, check_flag, check_name
from pipesim.models.size_checks import check_divides

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


ContextExchange = Literal["ring", "all_gather", "all_to_all"]
CONTEXT_EXCHANGES = ("ring", "all_gather", "all_to_all")


def check_context(shard: Shard) -> None:
    """Raise `ArgumentError` if context parallelism does not suit the sizes that it splits."""
    c, length = shard.context_parallel, shard.model.sequence_length
    check_name("context_exchange", shard.context_exchange, CONTEXT_EXCHANGES)
    check_flag("context_balance", shard.context_balance)
    check_flag("context_shards_optimizer", shard.context_shards_optimizer)
    if c == 1:
        return
    splits_heads = shard.context_exchange == "all_to_all"
    if length % c or (shard.context_balance and not splits_heads and length % (2 * c)):
        parts = f"{c} parts" if length % c else f"{2 * c} parts, two a GPU (context_balance=True)"
        raise ArgumentError(
            f"context_parallel={c} splits a sequence into {parts}, which do not divide "
            f"sequence_length={length}; choose context_parallel such that they do"
            + ("" if length % c else ", or give context_balance=False")
        )
    if shard.sequence_parallel:
        check_divides(
            "tensor_parallel", shard.tensor_parallel, "sequence_length / context_parallel",
            length // c,
        )  # fmt: skip
    if not splits_heads:
        return
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(shard.model, name)
        if heads % shard.n_gpus:
            raise ArgumentError(
                f'context_exchange="all_to_all" splits heads among the {shard.n_gpus} GPUs of a '
                f"device (tensor_parallel x context_parallel), which do not divide {name}={heads}; "
                'give fewer, or context_exchange="ring"'
            )
