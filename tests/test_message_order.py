"""Messages between two processes: with and without rendezvous, of shapes that differ, none."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from executing import cut, dense, mse, unsplit
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.messages import Content, header, marked
from pipeexec.signatures import Entry
from pipesim.ops import Op


class Pair(nn.Module):
    """Returns two tensors, of which the next stage uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """Return them."""
        y = self.layer(x)
        return y, 2 * y


class First(nn.Linear):
    """Takes two tensors, and leaves the second without a gradient."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        """Return the layer's value at the first."""
        return super().forward(x)


def be_rank(rank: int, port: int) -> None:
    """Be one of two processes: run steps, and compare gradients with the unsplit model's."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    with px.join(timeout=20) as processes:
        for rendezvous in (False, True):
            for absent in (False, True):
                check_gradients(processes, rendezvous, absent)


def check_gradients(processes: px.Processes, rendezvous: bool, absent: bool) -> None:
    """Run three steps of seven samples in three micro-batches; sizes differ."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [Pair(), First(4, 4)] if absent else list(cut(dense(4), [2, 2]))
    width = 4 if absent else next(stages[0].parameters()).shape[1]
    x = torch.randn(7, width)
    with torch.no_grad():
        y = stages[0](x)
        target = torch.zeros_like(stages[1](*y) if absent else stages[1](y))
    reference = copy.deepcopy(stages)
    graph = ps.lower(ps.schedule("1f1b", 2, 3), rendezvous=rendezvous)
    with px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as pipeline:
        for _ in range(3):
            pipeline.step(x, target)
            unsplit(reference, graph, x, target) if not absent else mse(
                reference[1](*reference[0](x)), target
            ).backward()
    own = zip(
        stages[processes.rank].parameters(),
        reference[processes.rank].parameters(),
        strict=True,
    )
    for mine, other in own:
        torch.testing.assert_close(mine.grad, other.grad)


def test_two_processes() -> None:
    """A SEND that waits for its receiver ends, as does one that does not; values are right."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(be_rank, (port,), nprocs=2)


@pytest.mark.parametrize("absent", [(), (0,), (1,), (0, 1)])
def test_absent_tensors_are_marked(absent: tuple[int, ...]) -> None:
    """The type's number is -1; shapes stay, and so does the header that is kept."""
    signature = Entry((2, 3), torch.float32), Entry((), torch.float64)
    head = header(Content(5, Op.SEND_B, 1, 0, 0), signature)
    before = head.clone()
    values = tuple(None if k in absent else torch.zeros(e.shape) for k, e in enumerate(signature))
    after = marked(head, signature, values)
    assert torch.equal(head, before)
    assert [at for at in range(len(head)) if after[at] != head[at]] == [(8, 12)[k] for k in absent]
    assert all(after[(8, 12)[k]] == -1 for k in absent)
