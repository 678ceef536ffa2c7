"""Headers of messages between processes: what a message is, and what its tensors are.

The layout of a header follows from the shapes that were agreed on before the first step
(`pipeexec.distributed.signatures`), so that both ends know how long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.signatures import Signature
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Content", "Mismatch", "are_there", "check", "header", "marked", "set_step"]

#: Begins every header; the second word is the version of their layout.
_MAGIC, _VERSION = 0x70697065, 1
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
#: Magic number, version, the five numbers of a `Content`, and how many tensors there are.
_N_FIELDS = 8
_STEP_AT = 2


class Mismatch(ExecutionError):
    """A message that is not the one its receiver, or its sender, expects."""


class Content(NamedTuple):
    """What a message is: its step, its SEND's op and stage, its micro-batch and path."""

    step: int
    op: Op
    stage: int
    microbatch: int
    path: int


def header(content: Content, signature: Signature) -> Tensor:
    """Return the header of a message, shape ``(n_words,)``."""
    words = [_MAGIC, _VERSION, *map(int, content), len(signature)]
    for entry in signature:
        if entry.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ExecutionError(
                f"what stage {content.stage} hands on is {entry}, whose type cannot be sent "
                f"between processes; convert it to one of {known}"
            )
        words += [_DTYPES.index(entry.dtype), len(entry.shape), *entry.shape]
    return torch.tensor(words, dtype=torch.int64)


def marked(head: Tensor, signature: Signature, values: Values) -> Tensor:
    """Return a header in which those of ``values`` that are None are marked as absent."""
    if all(value is not None for value in values):
        return head
    head, at = head.clone(), _N_FIELDS
    for entry, value in zip(signature, values, strict=True):
        if value is None:
            head[at] = -1
        at += 2 + len(entry.shape)
    return head


def set_step(heads: Iterable[Tensor], step: int) -> None:
    """Make headers those of a step; none of them may be on its way."""
    for head in heads:
        head.numpy()[_STEP_AT] = step


def _tensors(words: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the number of the type (-1: absent) and the shape of each tensor in a header.

    Raises
    ------
    IndexError
        If the header has no room for what it says.
    """
    found, at = [], _N_FIELDS
    for _ in range(words[_N_FIELDS - 1]):
        end = at + 2 + words[at + 1]
        if not at + 2 <= end <= len(words):
            raise IndexError
        found.append((words[at], list(words[at + 2 : end])))
        at = end
    return found


def are_there(words: Sequence[int]) -> list[bool]:
    """Return which tensors of a message are there."""
    return [dtype >= 0 for dtype, _ in _tensors(words)]


def check(got: Sequence[int], expected: Sequence[int], source: int) -> None:
    """Raise unless the headers differ in absent gradients only."""
    if list(got[:2]) != [_MAGIC, _VERSION]:
        raise Mismatch(
            f"what rank {source} sent is no message of ours (it begins with {list(got[:2])}); run "
            "the same release in every process, and nothing else over its process groups"
        )
    is_gradient = expected[3] == Op.SEND_B
    with suppress(IndexError):  # a garbled list of tensors
        if got[:_N_FIELDS] == expected[:_N_FIELDS] and all(
            a == b or (is_gradient and a == (-1, b[1]))
            for a, b in zip(_tensors(got), _tensors(expected), strict=True)
        ):
            return
    raise Mismatch(
        f"expected {_described(expected)} from rank {source}, got {_described(got)}; every "
        "process must run the same graph on batches of the same shape"
    )


def _described(words: Sequence[int]) -> str:
    """Return a header's text; it may hold anything."""
    step, op, stage, microbatch, path = words[2:7]
    name = Op(op).name if op in set(Op) else f"op {op}"
    on = f" on path {path}" if path else ""
    try:
        tensors = [
            f"{str(_DTYPES[dtype]).removeprefix('torch.')} {shape}" if dtype >= 0 else "none"
            for dtype, shape in _tensors(words)
        ]
    except IndexError:
        tensors = ["a garbled list of tensors"]
    return f"{stage}{name}{microbatch} of step {step}{on} ({', '.join(tensors) or 'nothing'})"
