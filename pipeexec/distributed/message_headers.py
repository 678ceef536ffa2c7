"""Headers of messages between processes: they identify the message and describe its tensors.

The layout of a header follows from the shapes that processes agree on before the first step
(`pipeexec.distributed.signatures`), so both ends know its length.
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

#: First two words of every header: a magic number, and the version of the layout.
_MAGIC, _VERSION = 0x70697065, 1
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
#: Words before the tensors: magic number, version, the five of `Content`, number of tensors.
_N_FIELDS = 8
_STEP_AT = 2
#: Tensors of a message.
_CONTENT = {Op.SEND_F: "the output", Op.SEND_B: "the input gradient"}


class Mismatch(ExecutionError):
    """A message that its receiver, or its sender, does not expect."""


class Content(NamedTuple):
    """Identity of a message: its step, its SEND's op and stage, its micro-batch and path."""

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
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ExecutionError(
                f"{_CONTENT[content.op]} of stage {content.stage} is {entry}, whose type cannot be "
                f"sent between processes; convert it to one of {names}"
            )
        words += [_DTYPES.index(entry.dtype), len(entry.shape), *entry.shape]
    return torch.tensor(words, dtype=torch.int64)


def mark_absent(head: Tensor, signature: Signature, values: Values) -> Tensor:
    """Return a header that marks the tensors which are None in ``values`` as absent."""
    if all(value is not None for value in values):
        return head
    head, index = head.clone(), _N_FIELDS
    for entry, value in zip(signature, values, strict=True):
        if value is None:
            head[index] = -1
        index += 2 + len(entry.shape)
    return head


def set_step(heads: Iterable[Tensor], step: int) -> None:
    """Set the step of headers; none of them may be in transit."""
    for head in heads:
        head.numpy()[_STEP_AT] = step


def _tensors(words: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the number of the type (-1: absent) and the shape of each tensor in a header.

    Raises
    ------
    IndexError
        If the header is too short for the tensors that it lists.
    """
    tensors, index = [], _N_FIELDS
    for _ in range(words[_N_FIELDS - 1]):
        end = index + 2 + words[index + 1]
        if not index + 2 <= end <= len(words):
            raise IndexError
        tensors.append((words[index], list(words[index + 2 : end])))
        index = end
    return tensors


def present(words: Sequence[int]) -> list[bool]:
    """Return, for each tensor of a message, whether it is present."""
    return [dtype >= 0 for dtype, _ in _tensors(words)]


def check(got: Sequence[int], expected: Sequence[int], source: int) -> None:
    """Raise `Mismatch` unless the headers are equal, except for absent gradients.

    Parameters
    ----------
    got, expected
        Words of the headers.
    source
        Rank of the sender.
    """
    if list(got[:2]) != [_MAGIC, _VERSION]:
        raise Mismatch(
            f"the message from rank {source} is not a pipeexec message of this version (it begins "
            f"with {list(got[:2])}); run the same release in every process, and nothing else over "
            "its process groups"
        )
    is_gradient = expected[3] == Op.SEND_B
    with suppress(IndexError):  # a garbled list of tensors
        if got[:_N_FIELDS] == expected[:_N_FIELDS] and all(
            a == b or (is_gradient and a == (-1, b[1]))
            for a, b in zip(_tensors(got), _tensors(expected), strict=True)
        ):
            return
    raise Mismatch(
        f"expected {_describe(expected)} from rank {source}, got {_describe(got)}; every "
        "process must run the same graph on batches of the same shape"
    )


def _describe(words: Sequence[int]) -> str:
    """Return a header as text; its words may be anything."""
    step, op, stage, microbatch, path = words[2:7]
    name = Op(op).name if op in set(Op) else f"op {op}"
    on_path = f" on path {path}" if path else ""
    try:
        tensors = [
            f"{str(_DTYPES[dtype]).removeprefix('torch.')} {shape}" if dtype >= 0 else "none"
            for dtype, shape in _tensors(words)
        ]
    except IndexError:
        tensors = ["a garbled list of tensors"]
    return f"{stage}{name}{microbatch} of step {step}{on_path} ({', '.join(tensors) or 'nothing'})"
