"""Channels: messages of one direction between two devices of different processes.

Activations and gradients go apart. The sender compares tensors with the shapes that were agreed on
before the first step. The receiver has set memory of those shapes aside; it compares the header
with what its own task graph says, and only then does anyone see what came with it.

A small message is one piece, header first: a second piece would cost as much again. Large ones, and
those that wait for their receiver, are a header and then each tensor, so that nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.message_headers import are_there, check, marked
from pipeexec.distributed.signatures import Signature
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Asked", "Channel", "Expected", "Lost", "Route", "Sent", "real"]

#: Most bytes of a message that is one piece: above, copying its tensors takes longer.
_SMALL = 1 << 20
_ABSENT = torch.zeros(1, dtype=torch.uint8)


class Lost(ExecutionError):
    """The connection to another process broke; ``rank`` is its number, -1 if any may be."""

    def __init__(self, rank: int, cause: Exception) -> None:
        first = (str(cause) or type(cause).__name__).splitlines()[0]
        who = "another process" if rank < 0 else f"rank {rank}"
        super().__init__(f"the connection to {who} broke: {first}")
        self.rank = rank


class Route(NamedTuple):
    """Where a channel goes: the ranks and devices at its ends, and the op of its SENDs."""

    source_rank: int
    target_rank: int
    source: int
    target: int
    op: Op


class Expected(NamedTuple):
    """A message as it should be: its header, and what its tensors are."""

    head: Tensor
    signature: Signature
    in_one: bool  # header and tensors as one piece

    @classmethod
    def of(cls, head: Tensor, signature: Signature, *, waits: bool) -> Expected:
        """Return the message of a header; one that ``waits`` for its receiver is not one piece."""
        nbytes = sum(torch.Size(e.shape).numel() * e.dtype.itemsize for e in signature)
        return cls(head, signature, not waits and nbytes <= _SMALL)


class _Piece:
    """A header and tensors in one piece of memory, each on a boundary of 64 bytes."""

    def __init__(self, message: Expected) -> None:
        places, end = [], _rounded(message.head.nbytes)
        for entry in message.signature:
            nbytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
            places.append((end, nbytes))
            end += _rounded(nbytes)
        self.memory = torch.empty(end, dtype=torch.uint8)
        self.head = self.memory[: message.head.nbytes].view(torch.int64)
        self.values = [
            self.memory[start : start + nbytes].view(entry.dtype).view(entry.shape)
            for (start, nbytes), entry in zip(places, message.signature, strict=True)
        ]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class Asked(NamedTuple):
    """A message that was asked for: its header, its tensors, and what ends when they are here."""

    head: Tensor
    first: dist.Work
    values: list[Tensor]
    works: list[dist.Work]


class Sent(NamedTuple):
    """A message on its way: what ends when it is gone, and its memory where that is used again."""

    works: list[dist.Work]
    piece: _Piece | None = None


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
        self._free: dict[Signature, list[_Piece]] = {}

    def offer(self, message: Expected, values: Values) -> dist.Work:
        """Send the header of a message that is not one piece; ends when the receiver has asked."""
        return self._send(marked(message.head, message.signature, values), 2 * self.tag)

    def send(self, message: Expected, values: Values) -> Sent:
        """Send the tensors of a message that was offered."""
        return Sent([
            # The receiver has asked for an absent one too.
            self._send(_ABSENT if value is None else value.contiguous(), 2 * self.tag + 1)
            for entry, value in zip(message.signature, values, strict=True)
            if 0 not in entry.shape
        ])  # fmt: skip

    def post(self, message: Expected, values: Values) -> Sent:
        """Send a whole message, without waiting."""
        if not message.in_one:
            offered = self.offer(message, values)
            return Sent([offered, *self.send(message, values).works])
        free = self._free.setdefault(message.signature, [])
        piece = free.pop() if free else _Piece(message)
        piece.head.copy_(marked(message.head, message.signature, values))
        for place, value in zip(piece.values, values, strict=True):
            if value is not None:
                place.copy_(value)
        return Sent([self._send(piece.memory, 2 * self.tag)], piece)

    def finish(self, message: Expected, sent: Sent) -> None:
        """Wait until a message is gone."""
        for work in sent.works:
            self.wait(work, self.route.target_rank)
        if sent.piece is not None:
            self._free[message.signature].append(sent.piece)

    def ask(self, message: Expected, device: torch.device) -> Asked:
        """Ask for the next message, into memory set aside for it."""
        if message.in_one:
            piece = _Piece(message)
            return Asked(piece.head, self._receive(piece.memory, 2 * self.tag), piece.values, [])
        head = torch.empty_like(message.head)
        first = self._receive(head, 2 * self.tag)
        values = [torch.empty(e.shape, dtype=e.dtype, device=device) for e in message.signature]
        works = [self._receive(value, 2 * self.tag + 1) for value in values if value.numel()]
        return Asked(head, first, values, works)

    def ask_ahead(self, message: Expected, device: torch.device) -> None:
        """Ask for the message after the one that is accepted, so that it need not wait later."""
        self._ahead = self.ask(message, device)

    def accept(self, message: Expected, device: torch.device) -> Asked:
        """Wait for the header of the next message, and return it once it is the expected one.

        Raises
        ------
        Mismatch
            If it is another message, or of other shapes or types.
        Lost
            If the sender is gone.
        """
        asked, self._ahead = self._ahead or self.ask(message, device), None
        self.wait(asked.first, self.route.source_rank)
        if asked.head.numpy().tobytes() != message.head.numpy().tobytes():
            check(asked.head.tolist(), message.head.tolist(), self.route.source_rank)
        return asked

    def receive(self, message: Expected, asked: Asked) -> Values:
        """Wait for the tensors of a message whose header was accepted, and return them."""
        for work in asked.works:
            self.wait(work, self.route.source_rank)
        if asked.head.numpy().tobytes() == message.head.numpy().tobytes():
            return tuple(asked.values)
        there = are_there(asked.head.tolist())
        return tuple(v if present else None for v, present in zip(asked.values, there, strict=True))

    # The group's own calls: those of torch.distributed take three times as long, to check what is
    # known here.
    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.send([real(tensor)], self.route.target_rank, tag)
        except RuntimeError as error:
            raise Lost(self.route.target_rank, error) from error

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.recv([real(tensor)], self.route.source_rank, tag)
        except RuntimeError as error:
            raise Lost(self.route.source_rank, error) from error

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a message to be gone, or to be here."""
        try:
            work.wait()
        except RuntimeError as error:
            raise Lost(peer, error) from error


def real(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers can be sent; complex ones as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
