"""The extra state of a `ShardedEmbedding`: which rows of which tables a ``state_dict`` has."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeexec.embedding.row_layout import RowLayout
from pipesim.errors import ArgumentError


def row_state(layout: RowLayout, rank: int, n_ranks: int) -> Tensor:
    """Return the rank, the number of ranks, the rows of each table, and a code of the placement.

    Codes are negative: none for ``"modulo"``, -1 for ``"hash"``, -2 and a digest for
    ``"frequency"``.
    """
    codes = {"modulo": [], "hash": [-1], "frequency": [-2, layout.digest]}
    return torch.tensor([rank, n_ranks, *layout.n_rows, *codes[layout.placement]])


def check_row_state(state: Tensor, layout: RowLayout, rank: int, n_ranks: int) -> None:
    """Raise `ArgumentError` unless a state has the rows of this rank."""
    if state.tolist() == row_state(layout, rank, n_ranks).tolist():
        return
    state_rank, n_state_ranks, *rows = state.tolist()
    end = next((i for i, x in enumerate(rows) if x < 0), len(rows))
    placement = {0: "modulo", -1: "hash", -2: "frequency"}.get(sum(rows[end:][:1]), "?")
    raise ArgumentError(
        f"a state of rank {state_rank} of {n_state_ranks}, tables of {rows[:end]} rows"
        f"{f' placed by {placement}' if rows[end:] or layout.placement != 'modulo' else ''}, "
        f"cannot be loaded into rank {rank} of {n_ranks}, tables of {list(layout.n_rows)} rows "
        f"placed by {layout.placement}; keep full_weight() instead, and load it by from_full"
    )


def row_numbers(layout: RowLayout, rank: int) -> Tensor:
    """Return the number of the row at each place of a rank; -1 for an unused place.

    A row's number is its key, plus the rows of the tables before its own.
    """
    numbers = torch.full((layout.rows_per_rank,), -1)
    for table, place, keys in layout.shards(rank):
        numbers[place] = keys + sum(layout.n_rows[:table])
    return numbers
