"""Messages between processes: a header that says what follows, checked before it is received.

A channel carries the messages of one direction between two devices, activations and gradients
apart. Its sender offers a message by its header; its receiver compares the header with what its
own task graph says, and only then gives memory for the tensors. The headers' layout follows from
the shapes that were agreed on before the first step (`pipeexec.signatures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.signatures import Signature
from pipeexec.stage import Values
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Channel", "Content", "Lost", "Mismatch", "Route", "header"]

#: Begins every header; the second word is the version of their layout.
_MAGIC, _VERSION = 0x70697065, 1
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
#: Magic number, version, the five numbers of a `Content`, and how many tensors there are.
_N_FIELDS = 8


class Lost(ExecutionError):
    """The connection to another process broke; ``rank`` is its number."""

    def __init__(self, rank: int, cause: Exception) -> None:
        first = (str(cause) or type(cause).__name__).splitlines()[0]
        super().__init__(f"the connection to rank {rank} broke: {first}")
        self.rank = rank


class Mismatch(ExecutionError):
    """A message that is not the one its receiver, or its sender, expects."""


class Route(NamedTuple):
    """Where a channel goes: the ranks and devices at its ends, and the op of its SENDs."""

    source_rank: int
    target_rank: int
    source: int
    target: int
    op: Op


class Content(NamedTuple):
    """What a message is: its step, its SEND's op and stage, its micro-batch and path."""

    step: int
    op: Op
    stage: int
    microbatch: int
    path: int


def header(content: Content, signature: Signature, values: Values | None = None) -> Tensor:
    """Return the header of a message, shape ``(n_words,)``.

    Of ``values``, where they are given, those that are None are marked as absent.
    """
    words = [_MAGIC, _VERSION, *map(int, content), len(signature)]
    for number, entry in enumerate(signature):
        absent = values is not None and values[number] is None
        words += [-1 if absent else _DTYPES.index(entry.dtype), len(entry.shape), *entry.shape]
    return torch.tensor(words, dtype=torch.int64)


class Channel:
    """One direction between two devices of different processes, over gloo.

    Parameters
    ----------
    route
        Its ends.
    tag
        Tells it from the other channels between the same processes.
    group
        Process group that carries it.
    """

    def __init__(self, route: Route, tag: int, group: dist.ProcessGroup) -> None:
        self.route, self.tag, self.group = route, tag, group

    def offer(self, head: Tensor) -> dist.Work:
        """Send a header; its work ends when the receiver has asked for it."""
        return self._work(dist.isend, head, self.route.target_rank, 2 * self.tag)

    def send(self, values: Values) -> None:
        """Send the tensors of a message that was offered, and wait until they are gone."""
        works = [
            self._work(dist.isend, value.contiguous(), self.route.target_rank, 2 * self.tag + 1)
            for value in values
            if value is not None and value.numel()
        ]
        for work in works:
            self.wait(work, self.route.target_rank)

    def accept(self, expected: Tensor) -> Tensor:
        """Wait for the next message to be offered; return its header, once it is the expected one.

        Raises
        ------
        Mismatch
            If it is another message, or of other shapes or types.
        Lost
            If the sender is gone.
        """
        head = torch.empty_like(expected)
        source = self.route.source_rank
        self.wait(self._work(dist.irecv, head, source, 2 * self.tag), source)
        if not torch.equal(head, expected):
            _check(head.tolist(), expected.tolist(), source)
        return head

    def receive(self, signature: Signature, head: Tensor, device: torch.device) -> Values:
        """Receive the tensors of a message whose header was accepted."""
        values: list[Tensor | None] = []
        source = self.route.source_rank
        for entry, there in zip(signature, _there(head.tolist()), strict=True):
            if not there:
                values.append(None)
                continue
            value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if value.numel():
                self.wait(self._work(dist.irecv, value, source, 2 * self.tag + 1), source)
            values.append(value)
        return tuple(values)

    def _work(self, call: Any, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            work: dist.Work = call(tensor, peer, group=self.group, tag=tag)
        except RuntimeError as error:
            raise Lost(peer, error) from error
        return work

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a message to be gone, or to be here."""
        try:
            work.wait()
        except RuntimeError as error:
            raise Lost(peer, error) from error


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


def _there(words: Sequence[int]) -> list[bool]:
    """Return which tensors of a message are there."""
    return [dtype >= 0 for dtype, _ in _tensors(words)]


def _check(got: Sequence[int], expected: Sequence[int], source: int) -> None:
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
