"""Channels: messages of one direction between two devices of different processes.

Activations and gradients have separate channels. Processes agree on shapes before the first step.
The sender compares its tensors with these shapes, and the receiver has allocated memory for them.
The receiver compares the header with its own task graph before any task sees the tensors.

A small message is one piece, header first: a second piece would cost as much again. Larger messages
are a header and then each tensor, so that nothing is copied. So are messages whose SEND waits for
its receiver (rendezvous).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.message_headers import check, mark_absent, present
from pipeexec.distributed.signatures import Signature
from pipesim.errors import ExecutionError
from pipesim.ops import Op

#: Most bytes of a message that is one piece; copying larger ones takes longer.
_MAX_PIECE = 1 << 20
#: Most signatures of which a channel keeps pieces of memory.
_MOST_SIGNATURES = 32
_ABSENT = torch.zeros(1, dtype=torch.uint8)


class LostConnection(ExecutionError):
    """The connection to another process broke; ``rank`` is its number, -1 if any may be."""

    def __init__(self, rank: int, cause: Exception) -> None:
        first = (str(cause) or type(cause).__name__).splitlines()[0]
        who = "another process" if rank < 0 else f"rank {rank}"
        super().__init__(f"the connection to {who} broke: {first}")
        self.rank = rank


class ChannelRoute(NamedTuple):
    """Ends of a channel: their ranks and devices, and the op of its SENDs."""

    source_rank: int
    target_rank: int
    source: int
    target: int
    op: Op


class ExpectedMessage(NamedTuple):
    """A message as both ends expect it.

    Attributes
    ----------
    head
        Its header.
    signature
        Shapes and types of its tensors.
    in_one
        Whether header and tensors are one piece.
    """

    head: Tensor
    signature: Signature
    in_one: bool

    @classmethod
    def make(cls, head: Tensor, signature: Signature, *, waits: bool) -> ExpectedMessage:
        """Return the message of a header; one that ``waits`` for its receiver is not one piece."""
        nbytes = sum(torch.Size(e.shape).numel() * e.dtype.itemsize for e in signature)
        return cls(head, signature, not waits and nbytes <= _MAX_PIECE)


class _Piece:
    """A header and tensors in one piece of memory, each on a boundary of 64 bytes."""

    def __init__(self, message: ExpectedMessage) -> None:
        places, end = [], _round_up(message.head.nbytes)
        for entry in message.signature:
            nbytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
            places.append((end, nbytes))
            end += _round_up(nbytes)
        self.memory = torch.empty(end, dtype=torch.uint8)
        self.head = self.memory[: message.head.nbytes].view(torch.int64)
        self.values = [
            self.memory[start : start + nbytes].view(entry.dtype).view(entry.shape)
            for (start, nbytes), entry in zip(places, message.signature, strict=True)
        ]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class PostedReceive(NamedTuple):
    """A message whose receives are posted.

    Attributes
    ----------
    head
        Memory of its header.
    head_work
        Ends when the header has arrived.
    values
        Memory of its tensors.
    works
        End when the tensors have arrived; empty if they come with the header.
    """

    head: Tensor
    head_work: dist.Work
    values: list[Tensor]
    works: list[dist.Work]


class SentMessage(NamedTuple):
    """A message in transit.

    Attributes
    ----------
    works
        End when the message is sent.
    piece
        Its memory, to be used again; None if it is not one piece.
    """

    works: list[dist.Work]
    piece: _Piece | None = None


class Channel:
    """One direction between two devices of different processes, over gloo.

    Parameters
    ----------
    route
        Its ends.
    tag
        Distinguishes it from other channels between the same processes.
    group
        Process group of all processes, which carries its messages.
    """

    def __init__(self, route: ChannelRoute, tag: int, group: dist.ProcessGroup) -> None:
        self.route, self.tag, self.group = route, tag, group
        self._ahead: PostedReceive | None = None
        self._free: dict[Signature, list[_Piece]] = {}

    def offer(self, message: ExpectedMessage, values: Values) -> dist.Work:
        """Send the header of a message that is not one piece; ends when its receive is posted."""
        return self._send(mark_absent(message.head, message.signature, values), 2 * self.tag)

    def send(self, message: ExpectedMessage, values: Values) -> SentMessage:
        """Send the tensors of a message whose header was sent by `offer`."""
        return SentMessage([
            # The receiver has posted a receive for an absent tensor too.
            self._send(_ABSENT if value is None else value.contiguous(), 2 * self.tag + 1)
            for entry, value in zip(message.signature, values, strict=True)
            if 0 not in entry.shape
        ])  # fmt: skip

    def post(self, message: ExpectedMessage, values: Values) -> SentMessage:
        """Send a whole message, without waiting."""
        if not message.in_one:
            offered = self.offer(message, values)
            return SentMessage([offered, *self.send(message, values).works])
        free = self._free.get(message.signature)
        piece = free.pop() if free else _Piece(message)
        piece.head.copy_(mark_absent(message.head, message.signature, values))
        for place, value in zip(piece.values, values, strict=True):
            if value is not None:
                place.copy_(value)
        return SentMessage([self._send(piece.memory, 2 * self.tag)], piece)

    def finish(self, message: ExpectedMessage, sent: SentMessage) -> None:
        """Wait until a message is sent."""
        for work in sent.works:
            self.wait(work, self.route.target_rank)
        if sent.piece is not None:
            if message.signature not in self._free and len(self._free) >= _MOST_SIGNATURES:
                self._free.clear()  # batches of evaluations may have any number of shapes
            self._free.setdefault(message.signature, []).append(sent.piece)

    def post_receive(self, message: ExpectedMessage, device: torch.device) -> PostedReceive:
        """Post the receives of the next message, into newly allocated memory."""
        if message.in_one:
            piece = _Piece(message)
            work = self._receive(piece.memory, 2 * self.tag)
            return PostedReceive(piece.head, work, piece.values, [])
        head = torch.empty_like(message.head)
        head_work = self._receive(head, 2 * self.tag)
        values = [torch.empty(e.shape, dtype=e.dtype, device=device) for e in message.signature]
        works = [self._receive(value, 2 * self.tag + 1) for value in values if value.numel()]
        return PostedReceive(head, head_work, values, works)

    def post_next_receive(self, message: ExpectedMessage, device: torch.device) -> None:
        """Post the receives of the message after the current one, so that it does not wait."""
        self._ahead = self.post_receive(message, device)

    def accept(self, message: ExpectedMessage, device: torch.device) -> PostedReceive:
        """Wait for the header of the next message; return the message if it is the expected one.

        Raises
        ------
        Mismatch
            If it is another message, or has other shapes or types.
        LostConnection
            If the sender has ended.
        """
        posted, self._ahead = self._ahead or self.post_receive(message, device), None
        self.wait(posted.head_work, self.route.source_rank)
        if posted.head.numpy().tobytes() != message.head.numpy().tobytes():
            check(posted.head.tolist(), message.head.tolist(), self.route.source_rank)
        return posted

    def receive(self, message: ExpectedMessage, posted: PostedReceive) -> Values:
        """Wait for the tensors of a message that was accepted; return them, None for absent."""
        for work in posted.works:
            self.wait(work, self.route.source_rank)
        if posted.head.numpy().tobytes() == message.head.numpy().tobytes():
            return tuple(posted.values)
        is_present = present(posted.head.tolist())
        return tuple(v if x else None for v, x in zip(posted.values, is_present, strict=True))

    # The methods of the process group: the functions of torch.distributed take three times as long,
    # for checks that are not needed here.
    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.send([as_real(tensor)], self.route.target_rank, tag)
        except RuntimeError as error:
            raise LostConnection(self.route.target_rank, error) from error

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.recv([as_real(tensor)], self.route.source_rank, tag)
        except RuntimeError as error:
            raise LostConnection(self.route.source_rank, error) from error

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait until a message is sent, or received; raise `LostConnection` if that fails."""
        try:
            work.wait()
        except RuntimeError as error:
            raise LostConnection(peer, error) from error


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor that gloo and NCCL can send: complex numbers as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
