"""Inputs and targets of the batches that a `torch.utils.data.DataLoader` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipesim.errors import ArgumentError


def as_inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch of a loader.

    A tuple or list of two has inputs and targets. The inputs of a mapping with ``"labels"``, as
    models of transformers take them, are all of it; the targets are these labels.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch, batch["labels"]
    raise ArgumentError(
        f"a batch is {_outline(batch)}, and neither a pair of inputs and targets nor a mapping "
        "with 'labels'; give the loader a collate_fn that returns such a pair"
    )


def _outline(batch: Any) -> str:
    """Return the type of a batch, and keys or types in it."""
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"a {kind} with {', '.join(map(repr, list(batch)[:8])) or 'nothing'}"
    if isinstance(batch, Tensor):
        return f"a {kind} of shape {tuple(batch.shape)}"
    return f"a {kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else f"a {kind}"
