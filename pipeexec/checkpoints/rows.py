"""Rows of sharded embeddings, and of their optimizers' state, with the number of each row.

A process saves its rows. Another number of processes, or another placement, finds the rows by their
numbers. A row's number is its key, plus the rows of the tables before its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeexec.checkpoints.tensor_files import read_tensors
from pipeexec.embedding.row_state import row_numbers
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipesim.errors import CheckpointError


def row_tensors(
    prefix: str, embedding: ShardedEmbedding, state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of this process's rows, and facts about the embedding for the manifest.

    Parameters
    ----------
    prefix
        Beginning of the embedding's keys, ``"0.embedding."``.
    state
        State of its parameter; the tensors that have a row for each row are taken out of it.
    """
    layout, rank = embedding.layout, embedding.rank
    numbers = row_numbers(layout, rank)
    used = (numbers >= 0).nonzero()[:, 0]
    columns = {"weight": embedding.weight.detach()}
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and value.dim() and len(value) == layout.rows_per_rank:
            columns[f"state.{name}"] = state.pop(name)
    tensors = {
        f"{prefix}{name}@{rank}": value[used.to(value.device)] for name, value in columns.items()
    }
    tensors[f"{prefix}numbers@{rank}"] = numbers[used]
    facts = {
        "n_rows": list(layout.n_rows), "dim": embedding.dim, "n_ranks": layout.n_ranks,
        "columns": list(columns),
    }  # fmt: skip
    return tensors, facts


def check_rows(prefix: str, embedding: ShardedEmbedding, manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a checkpoint has the tables of an embedding."""
    facts = manifest["rows"].get(prefix)
    if facts is None:
        raise CheckpointError(
            f"the checkpoint lacks the rows of {prefix}weight; give one of this model"
        )
    own = (list(embedding.n_rows), embedding.dim)
    if own != (facts["n_rows"], facts["dim"]):
        raise CheckpointError(
            f"'{prefix}weight' has tables of {facts['n_rows']} rows of {facts['dim']} in the "
            f"checkpoint, and of {own[0]} rows of {own[1]} in the model; give one of this model"
        )


def load_rows(
    folder: Path, prefix: str, embedding: ShardedEmbedding, manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return this process's rows: ``"weight"``, and tensors of state such as ``"state.exp_avg"``.

    The files of one saved process are in memory at a time.
    """
    numbers = row_numbers(embedding.layout, embedding.rank)
    return _selected(folder, prefix, numbers, manifest)


def all_rows(folder: Path, prefix: str, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all rows, table after table; as `load_rows`."""
    total, specs = sum(manifest["rows"][prefix]["n_rows"]), manifest["tensors"]["rows"]
    saved = [spec[0][0] for key, spec in specs.items() if key.startswith(f"{prefix}numbers@")]
    if sum(saved) != total:  # before there is memory for as many rows as the manifest tells
        raise _lacks_rows(folder, prefix)
    numbers = torch.arange(total)
    return _selected(folder, prefix, numbers, manifest)


def _selected(
    folder: Path, prefix: str, numbers: Tensor, manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the rows of some numbers; zeros for -1."""
    facts, specs = manifest["rows"][prefix], manifest["tensors"]["rows"]
    ordered, places = numbers.sort()
    columns: dict[str, Tensor] = {}
    n_rows = 0
    for rank in range(facts["n_ranks"]):
        names = {name: f"{prefix}{name}@{rank}" for name in ("numbers", *facts["columns"])}
        if missing := [name for name in names.values() if name not in specs]:
            raise CheckpointError(
                f"the checkpoint {folder} lacks {missing[0]!r}; give another checkpoint"
            )
        part = read_tensors(folder, "rows", manifest, names.values())
        saved = part[names["numbers"]]
        position = torch.searchsorted(ordered, saved).clamp(max=len(ordered) - 1)
        is_own = ordered[position] == saved
        target = places[position[is_own]]
        n_rows += len(target)
        for name in facts["columns"]:
            rows = part[names[name]]
            if name not in columns:
                columns[name] = rows.new_zeros(len(numbers), *rows.shape[1:])
            columns[name][target] = rows[is_own]
    if n_rows != int((numbers >= 0).sum()):
        raise _lacks_rows(folder, prefix)
    return columns


def _lacks_rows(folder: Path, prefix: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} lacks rows of {prefix}weight; give another checkpoint"
    )
