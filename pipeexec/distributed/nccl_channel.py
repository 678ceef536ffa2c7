"""Channels between GPUs of different processes: headers by gloo and the hosts, tensors by NCCL.

The host of the receiver compares the header before it asks for the tensors, and waits for it; no
stream does. Every channel has a communicator of its own, so that messages of other channels cannot
block it, and it is used before the first step, in one order everywhere: NCCL connects at first use.

A token, sent ahead of the tensors, ends the receiver's wait: RECV begins when its SEND has, as
on CPU, where NCCL's own receive would count its waiting as transfer.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.distributed.channels import Asked, Channel, Expected, Lost, Route, Sent, real
from pipeexec.distributed.message_headers import marked

__all__ = ["NcclChannel"]

#: Headers that may be on their way: far more than a host is ever ahead of another.
_MOST_AHEAD = 4096


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
        route: Route,
        tag: int,
        group: dist.ProcessGroup,
        pair: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(route, tag, group)
        self.pair, self.device = pair, device
        self._offered: deque[dist.Work] = deque(maxlen=_MOST_AHEAD)  # keeps them alive

    def warm_up(self, rank: int) -> None:
        """Connect: let a token go from one end to the other, and wait for it."""
        if rank == self.route.source_rank:
            self._token_out()
        else:
            self._token_in()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def offer(self, message: Expected, values: Values) -> dist.Work:
        """Send the header, and the token; wait for neither."""
        work = self._send(marked(message.head, message.signature, values), 2 * self.tag)
        self._offered.append(work)
        self._token_out()
        return work

    def post(self, message: Expected, values: Values) -> Sent:
        """Send a whole message, behind what the current stream has queued."""
        self.offer(message, values)
        return self.send(message, values)

    def send(self, message: Expected, values: Values) -> Sent:
        """Send the tensors of a message that was offered; the stream waits until they are gone."""
        for value in values:
            if value is not None and value.numel():
                self._over(dist.isend, value.contiguous(), self.route.target_rank)
        return Sent([])

    def ask(self, message: Expected, device: torch.device) -> Asked:
        """Ask for the next header."""
        head = torch.empty_like(message.head)
        return Asked(head, self._receive(head, 2 * self.tag), [], [])

    def accept(self, message: Expected, device: torch.device) -> Asked:
        """Wait on the host for the expected header, and on the stream for its token."""
        asked = super().accept(message, device)
        self._token_in()
        return asked

    def receive(self, message: Expected, asked: Asked) -> Values:
        """Receive the tensors of a message whose header was accepted, behind the current stream."""
        empty = [torch.empty(e.shape, dtype=e.dtype, device=self.device) for e in message.signature]
        values = super().receive(message, asked._replace(values=empty))
        for value in values:
            if value is not None and value.numel():
                self._over(dist.irecv, value, self.route.source_rank)
        return values

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a header to be here; one that was offered is taken in its time."""
        if work not in self._offered:
            super().wait(work, peer)

    def _token_out(self) -> None:
        self._over(dist.isend, torch.zeros(1, device=self.device), self.route.target_rank)

    def _token_in(self) -> None:
        self._over(dist.irecv, torch.empty(1, device=self.device), self.route.source_rank)

    def _over(self, call: object, tensor: Tensor, peer: int) -> None:
        """Send or receive a tensor; the current stream waits for it, the host does not."""
        try:
            call(real(tensor), peer, group=self.pair).wait()  # type: ignore[operator]
        except RuntimeError as error:
            raise Lost(peer, error) from error
