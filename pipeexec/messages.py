"""Messages between processes: a header that says what follows, checked before it is received.

A channel carries the messages of one direction between two devices, activations and gradients
apart. Its sender compares the tensors with the shapes that were agreed on before the first step
(`pipeexec.signatures`), and sends the header ahead of them. Its receiver has set buffers of those
shapes aside; it compares the header with what its own task graph says, and only then does anyone
see what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.signatures import Signature
from pipeexec.stage import Values
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = [
    "Asked",
    "Channel",
    "Content",
    "Lost",
    "Mismatch",
    "Route",
    "header",
    "marked",
    "set_step",
]

#: Begins every header; the second word is the version of their layout.
_MAGIC, _VERSION = 0x70697065, 1
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
#: Magic number, version, the five numbers of a `Content`, and how many tensors there are.
_N_FIELDS = 8
_STEP_AT = 2
_ABSENT = torch.zeros(1, dtype=torch.uint8)


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


def header(content: Content, signature: Signature) -> Tensor:
    """Return the header of a message, shape ``(n_words,)``."""
    words = [_MAGIC, _VERSION, *map(int, content), len(signature)]
    for entry in signature:
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


class Asked(NamedTuple):
    """A message on its way: its header, its tensors, and the works that end when they are here."""

    head: Tensor
    work: dist.Work
    values: list[Tensor]
    works: list[dist.Work]


class Channel:
    """One direction between two devices of different processes, over gloo.

    Parameters
    ----------
    route
        Its ends.
    tag
        Tells it from the other channels between the same processes.
    group
        Process group of all processes, which carries it.
    """

    def __init__(self, route: Route, tag: int, group: dist.ProcessGroup) -> None:
        self.route, self.tag, self.group = route, tag, group
        self._ahead: Asked | None = None

    def offer(self, head: Tensor) -> dist.Work:
        """Send a header; its work ends when the receiver has asked for it."""
        return self._send(head, 2 * self.tag)

    def send(self, signature: Signature, values: Values) -> list[dist.Work]:
        """Send the tensors of a message after its header; their works end when they are gone."""
        return [
            # The receiver has asked for an absent one too.
            self._send(_ABSENT if value is None else value.contiguous(), 2 * self.tag + 1)
            for entry, value in zip(signature, values, strict=True)
            if 0 not in entry.shape
        ]

    def ask(self, expected: Tensor, signature: Signature, device: torch.device) -> Asked:
        """Ask for the next message: its header, and its tensors into buffers set aside for them."""
        head = torch.empty_like(expected)
        work = self._receive(head, 2 * self.tag)
        values = [torch.empty(e.shape, dtype=e.dtype, device=device) for e in signature]
        works = [self._receive(value, 2 * self.tag + 1) for value in values if value.numel()]
        return Asked(head, work, values, works)

    def ask_ahead(self, expected: Tensor, signature: Signature, device: torch.device) -> None:
        """Ask for the message after the one that is accepted, so that it need not wait later."""
        self._ahead = self.ask(expected, signature, device)

    def accept(self, expected: Tensor, signature: Signature, device: torch.device) -> Asked:
        """Wait for the header of the next message, and return it once it is the expected one.

        Raises
        ------
        Mismatch
            If it is another message, or of other shapes or types.
        Lost
            If the sender is gone.
        """
        asked, self._ahead = self._ahead or self.ask(expected, signature, device), None
        self.wait(asked.work, self.route.source_rank)
        if not torch.equal(asked.head, expected):
            _check(asked.head.tolist(), expected.tolist(), self.route.source_rank)
        return asked

    def receive(self, asked: Asked) -> Values:
        """Wait for the tensors of a message whose header was accepted, and return them."""
        for work in asked.works:
            self.wait(work, self.route.source_rank)
        there = _there(asked.head.tolist())
        return tuple(v if present else None for v, present in zip(asked.values, there, strict=True))

    # The group's own calls: those of torch.distributed take three times as long, to check what is
    # known here.
    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        peer = self.route.target_rank
        try:
            return self.group.send([_real(tensor)], peer, tag)
        except RuntimeError as error:
            raise Lost(peer, error) from error

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        peer = self.route.source_rank
        try:
            return self.group.recv([_real(tensor)], peer, tag)
        except RuntimeError as error:
            raise Lost(peer, error) from error

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a message to be gone, or to be here."""
        try:
            work.wait()
        except RuntimeError as error:
            raise Lost(peer, error) from error


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers gloo can send; complex ones as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
