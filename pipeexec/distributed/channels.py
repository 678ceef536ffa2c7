"""Channels: messages of one direction between two devices of different processes.

Activations and gradients have separate channels. Processes agree on shapes before the first step
(`pipeexec.distributed.signatures`). The sender compares its tensors with these shapes, and the
receiver has allocated memory for them. A header identifies each message and describes its tensors;
its length follows from the shapes. The receiver compares the header with its own task graph before
any task sees the tensors.

A small message is one piece, header first: a second piece would cost as much again. Larger messages
are a header and then each tensor, so that nothing is copied. So are messages whose SEND waits for
its receiver (rendezvous).

Between CPU workers, messages travel by gloo, between GPUs their tensors by NCCL. The latter is not
yet measured on several GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.signatures import Signature
from pipesim.errors import ExecutionError
from pipesim.ops import Op

# Headers

#: First two words of every header: a magic number, and the version of the layout.
_MAGIC, _VERSION = 0x70697065, 2
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
#: Words before the tensors: magic number, version, the six of `Content`, number of tensors.
_N_FIELDS = 9
_STEP_AT = 2
#: Tensors of a message.
_CONTENT = {Op.SEND_F: "the output", Op.SEND_B: "the input gradient"}


class Mismatch(ExecutionError):
    """A message that its receiver, or its sender, does not expect."""


class Content(NamedTuple):
    """Identity of a message: step, its SEND's op and stage, target stage, micro-batch and path."""

    step: int
    op: Op
    stage: int
    target: int
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

    It raises IndexError if the header is too short for the tensors that it lists.
    """
    tensors, index = [], _N_FIELDS
    for _ in range(words[_N_FIELDS - 1]):
        end = index + 2 + words[index + 1]
        if not index + 2 <= end <= len(words):
            raise IndexError
        tensors.append((words[index], list(words[index + 2 : end])))
        index = end
    return tensors


def present_tensors(words: Sequence[int]) -> list[bool]:
    """Return, for each tensor of a message, whether it is present."""
    return [dtype >= 0 for dtype, _ in _tensors(words)]


def check_header(got: Sequence[int], expected: Sequence[int], source: int) -> None:
    """Raise `Mismatch` unless headers are equal, except for absent gradients.

    ``source`` is the rank of the sender.
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
    step, op, stage, target, microbatch, path = words[2:8]
    name = Op(op).name if op in set(Op) else f"op {op}"
    on_path = f" on path {path}" if path else ""
    try:
        tensors = [
            f"{str(_DTYPES[dtype]).removeprefix('torch.')} {shape}" if dtype >= 0 else "none"
            for dtype, shape in _tensors(words)
        ]
    except IndexError:
        tensors = ["a garbled list of tensors"]
    to = f" to stage {target}" if abs(target - stage) > 1 else ""
    return (
        f"{stage}{name}{microbatch}{to} of step {step}{on_path} ({', '.join(tensors) or 'nothing'})"
    )


# Channels over gloo

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
    """A message as both ends expect it."""

    head: Tensor
    signature: Signature
    in_one: bool  # whether header and tensors are one piece

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
    """A message whose receives are posted."""

    head: Tensor  # memory of its header
    head_work: dist.Work
    values: list[Tensor]  # memory of its tensors
    works: list[dist.Work]  # of the tensors; empty if they come with the header


class SentMessage(NamedTuple):
    """A message in transit."""

    works: list[dist.Work]
    piece: _Piece | None = None  # its memory, to be used again


class Channel:
    """One direction between two devices of different processes, over gloo.

    ``tag`` distinguishes it from other channels between the same processes. ``group`` is the
    process group of all processes, which carries its messages.
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

        It raises `Mismatch` if it is another message, or has other shapes or types, and
        `LostConnection` if the sender has ended.
        """
        posted, self._ahead = self._ahead or self.post_receive(message, device), None
        self.wait(posted.head_work, self.route.source_rank)
        if posted.head.numpy().tobytes() != message.head.numpy().tobytes():
            check_header(posted.head.tolist(), message.head.tolist(), self.route.source_rank)
        return posted

    def receive(self, message: ExpectedMessage, posted: PostedReceive) -> Values:
        """Wait for the tensors of a message that was accepted; return them, None for absent."""
        for work in posted.works:
            self.wait(work, self.route.source_rank)
        if posted.head.numpy().tobytes() == message.head.numpy().tobytes():
            return tuple(posted.values)
        is_present = present_tensors(posted.head.tolist())
        return tuple(v if x else None for v, x in zip(posted.values, is_present, strict=True))

    # The methods of the process group: the functions of torch.distributed take three times as long,
    # for checks that are not needed here.
    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.send([_as_real(tensor)], self.route.target_rank, tag)
        except RuntimeError as error:
            raise LostConnection(self.route.target_rank, error) from error

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return self.group.recv([_as_real(tensor)], self.route.source_rank, tag)
        except RuntimeError as error:
            raise LostConnection(self.route.source_rank, error) from error

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait until a message is sent, or received; raise `LostConnection` if that fails."""
        try:
            work.wait()
        except RuntimeError as error:
            raise LostConnection(peer, error) from error


def _as_real(tensor: Tensor) -> Tensor:
    """Return a tensor that gloo and NCCL can send: complex numbers as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# Channels over NCCL
#
# The receiver's host waits for the header and compares it before it posts the receives of the
# tensors; no stream waits for a header. Every channel has a separate communicator, so messages of
# other channels cannot block it. NCCL connects at first use: every channel is used once before the
# first step, in the same order in every process.
#
# A token travels before the tensors and ends the receiver's wait. So RECV begins when its SEND has
# begun, as on CPU; NCCL's receive alone would count its waiting as transfer.

#: Most headers in transit: far more than a host is ever ahead of another.
_MAX_AHEAD = 4096


class NcclChannel(Channel):
    """One direction between two GPUs of different processes.

    ``group`` carries headers. ``pair`` is NCCL's process group of the two processes, and ``device``
    the GPU of this process's end.
    """

    def __init__(
        self,
        route: ChannelRoute,
        tag: int,
        group: dist.ProcessGroup,
        pair: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(route, tag, group)
        self.pair, self.device = pair, device
        self._offered: deque[dist.Work] = deque(maxlen=_MAX_AHEAD)  # keeps them alive

    def warm_up(self, rank: int) -> None:
        """Connect: send a token from one end to the other, and wait for it."""
        if rank == self.route.source_rank:
            self._send_token()
        else:
            self._receive_token()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def offer(self, message: ExpectedMessage, values: Values) -> dist.Work:
        """Send the header and the token; wait for neither."""
        work = self._send(mark_absent(message.head, message.signature, values), 2 * self.tag)
        self._offered.append(work)
        self._send_token()
        return work

    def post(self, message: ExpectedMessage, values: Values) -> SentMessage:
        """Send a whole message, after the work that the current stream has queued."""
        self.offer(message, values)
        return self.send(message, values)

    def send(self, message: ExpectedMessage, values: Values) -> SentMessage:
        """Send the tensors of a message after `offer`; the stream waits until they are sent."""
        for value in values:
            if value is not None and value.numel():
                self._transfer(dist.isend, value.contiguous(), self.route.target_rank)
        return SentMessage([])

    def post_receive(self, message: ExpectedMessage, device: torch.device) -> PostedReceive:
        """Post the receive of the next header."""
        head = torch.empty_like(message.head)
        return PostedReceive(head, self._receive(head, 2 * self.tag), [], [])

    def accept(self, message: ExpectedMessage, device: torch.device) -> PostedReceive:
        """Wait on the host for the expected header, and on the stream for its token."""
        posted = super().accept(message, device)
        self._receive_token()
        return posted

    def receive(self, message: ExpectedMessage, posted: PostedReceive) -> Values:
        """Receive the tensors of a message that was accepted, in order of the current stream."""
        empty = [torch.empty(e.shape, dtype=e.dtype, device=self.device) for e in message.signature]
        values = super().receive(message, posted._replace(values=empty))
        for value in values:
            if value is not None and value.numel():
                self._transfer(dist.irecv, value, self.route.source_rank)
        return values

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait until a header is received; do not wait for one that was sent by `offer`."""
        if work not in self._offered:
            super().wait(work, peer)

    def _send_token(self) -> None:
        self._transfer(dist.isend, torch.zeros(1, device=self.device), self.route.target_rank)

    def _receive_token(self) -> None:
        self._transfer(dist.irecv, torch.empty(1, device=self.device), self.route.source_rank)

    def _transfer(self, call: object, tensor: Tensor, peer: int) -> None:
        """Send or receive a tensor by NCCL; the current stream waits for it, the host does not."""
        try:
            call(_as_real(tensor), peer, group=self.pair).wait()  # type: ignore[operator]
        except RuntimeError as error:
            raise LostConnection(peer, error) from error
