"""Channels between GPUs of different processes: headers by gloo and the hosts, tensors by NCCL.

The receiver's host waits for the header and compares it before it posts the receives of the
tensors; no stream waits for a header. Every channel has a separate communicator, so messages of
other channels cannot block it. NCCL connects at first use: every channel is used once before the
first step, in the same order in every process.

A token travels before the tensors and ends the receiver's wait. So RECV begins when its SEND has
begun, as on CPU; NCCL's receive alone would count its waiting as transfer.

Not yet measured on several GPUs.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.channels import (
    Channel,
    ChannelRoute,
    ExpectedMessage,
    LostConnection,
    PostedReceive,
    SentMessage,
    as_real,
)
from pipeexec.distributed.message_headers import mark_absent

#: Most headers in transit: far more than a host is ever ahead of another.
_MAX_AHEAD = 4096


class NcclChannel(Channel):
    """One direction between two GPUs of different processes.

    Parameters
    ----------
    route, tag, group
        As for `Channel`; ``group`` carries headers.
    pair
        NCCL's process group of the two processes.
    device
        The GPU of this process's end.
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
            call(as_real(tensor), peer, group=self.pair).wait()  # type: ignore[operator]
        except RuntimeError as error:
            raise LostConnection(peer, error) from error
