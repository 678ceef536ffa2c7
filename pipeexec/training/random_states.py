"""States of the random-number generators that decide which batches a loader yields, as JSON."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _generators(loader: object) -> list[torch.Generator]:
    """Return the generators of a DataLoader, of its samplers and of its dataset, if any."""
    sampler, batch_sampler = (getattr(loader, x, None) for x in ("sampler", "batch_sampler"))
    holders = (
        loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None),
        getattr(sampler, "sampler", None), getattr(loader, "dataset", None),
    )  # fmt: skip
    values = (getattr(holder, "generator", None) for holder in holders)
    own = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return list(own.values())


def random_states(loader: object = None) -> dict[str, Any]:
    """Return the states of the global generators, and of those of a loader; JSON can hold them.

    Global are those of torch on the CPU, of Python's `random` and of NumPy.
    """
    version, numbers, gauss = random.getstate()
    kind, words, place, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(words).tolist(), int(place), int(has_gauss), float(cached)],
        "loader": [_text(generator.get_state()) for generator in _generators(loader)],
    }


def restore_random_states(states: Mapping[str, Any], loader: object = None) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, words, *rest = states["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))  # noqa: NPY002
    for generator, state in zip(_generators(loader), states["loader"], strict=False):
        generator.set_state(_tensor(state))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def preserved_random_states(loader: object = None) -> Iterator[None]:
    """Restore the states at the end of a block."""
    states = random_states(loader)
    try:
        yield
    finally:
        restore_random_states(states, loader)
