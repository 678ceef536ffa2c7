"""Batches of the text of Python's manual, which is part of every Python: English, 465 KB.

Pages of the manual quote each other, so that the evaluation is about text that is partly known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor

Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


def batches(
    batch_size: int = 16, context: int = 128, held_out: float = 0.1
) -> tuple[Batches, Batches]:
    """Return functions from the number of an epoch to its batches: to train, and to evaluate.

    Inputs and targets are int64 ``(batch_size, context)``, one token a byte; targets are one byte
    later.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    values = torch.tensor(list(text), dtype=torch.uint8)
    border = int(len(values) * (1 - held_out))
    training = partial(_epoch, values[:border], batch_size, context)
    return training, partial(_in_order, values[border:], batch_size, context)


def _epoch(
    text: Tensor, batch_size: int, context: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all samples once, cut from another place and in another order in each epoch."""
    draw = torch.Generator().manual_seed(epoch)
    offset = int(torch.randint(context, (), generator=draw))
    samples = text[offset:].unfold(0, context + 1, context)
    for rows in torch.randperm(len(samples), generator=draw).split(batch_size):
        if len(rows) == batch_size:
            yield _pair(samples[rows])


def _in_order(
    text: Tensor, batch_size: int, context: int, _: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for samples in text.unfold(0, context + 1, context).split(batch_size):
        yield _pair(samples)


def _pair(samples: Tensor) -> tuple[Tensor, Tensor]:
    tokens = samples.long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
