"""One rank of a pipeline that freezes itself with SIGSTOP in each phase of a step.

``python frozen_rank.py PHASES TIMEOUT`` runs in the environment that torchrun gives. Step k freezes
in the k-th of the phases, which commas divide, in rank k modulo the number of ranks. Another
process continues it. The rank prints the loss of each step; `plain_losses` returns those of torch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

#: Phases in which a rank may freeze.
PHASES = ("between", "forward", "loss", "backward", "optimizer", "result", "evaluation")
#: Phases of the last stage only.
_OF_LAST = ("loss",)
N_MICROBATCHES = 4
#: The phase in which this process is to freeze, once; empty for none.
PENDING: list[str] = []


def freeze(phase: str) -> None:
    """Freeze this process if it is to freeze in ``phase``."""
    if [phase] == PENDING:
        PENDING.clear()
        time.sleep(0.3)  # other threads have looked at their clocks
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)  # they look at them first


class Freezing(nn.Module):
    """A layer whose forward and backward may freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        freeze("forward")
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: freeze("backward"))
        return y


class FreezingSGD(torch.optim.SGD):
    """An optimizer that may freeze."""

    def step(self, closure: Any = None) -> Any:
        freeze("optimizer")
        return super().step(closure)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss; may freeze."""
    freeze("loss")
    return nn.functional.mse_loss(output, target)


def make_stages(n_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Freezing() for _ in range(n_stages)]


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)


def plain_losses(n_stages: int, n_steps: int) -> list[float]:
    """Return the losses of steps of the unsplit model."""
    model = nn.Sequential(*make_stages(n_stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        x, y = batch()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(phases: Sequence[str], timeout: float) -> None:
    torch.set_num_threads(1)
    n_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    n_stages = max(2, n_ranks)
    processes = px.join(timeout) if n_ranks > 1 else None
    options: dict[str, Any] = (
        {"timeout": timeout} if processes is None else {"processes": processes}
    )
    graph = ps.lower(ps.schedule("1f1b", n_stages, N_MICROBATCHES))
    with px.Pipeline(
        make_stages(n_stages),
        graph,
        ["cpu"] * (n_stages // n_ranks),
        loss_fn,
        lambda p: FreezingSGD(p, lr=0.1),
        **options,
    ) as pipeline:
        for step, phase in enumerate(phases):
            freezing = n_ranks - 1 if phase in _OF_LAST else step % n_ranks
            PENDING[:] = [phase] if rank == freezing else []
            freeze("between")
            result = pipeline.step(*batch())
            freeze("result")
            sys.stdout.write(f"loss {float(pipeline.gather(result).loss):.6f}\n")
            sys.stdout.flush()
            if phase == "evaluation":
                if PENDING:
                    PENDING[:] = ["forward"]
                pipeline.evaluate(*batch())
            assert not PENDING, f"{phase}: this rank has not frozen"
    if processes is not None:
        processes.close()


if __name__ == "__main__":
    main(sys.argv[1].split(","), float(sys.argv[2]))
