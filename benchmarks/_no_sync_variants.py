"""The loops of Hugging Face Accelerate's guide "Gradient synchronization", in plain torch.

Four are the scripts that its table was measured with (github.com/muellerzr/timing_experiments at
8018fef: baseline.py, codeparrot_backwards.py, no_sync.py, good.py); they step after batches 0, K,
2K..., so that batches may be left at the end. The fifth is the guide's own first listing, which
reduces in the last batch of an epoch, and clears no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px

Parts = Sequence[tuple[Tensor, Tensor]]
mse = nn.functional.mse_loss


def baseline(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: Parts, k: int
) -> None:
    for step, (inputs, targets) in enumerate(parts):
        loss = mse(ddp(inputs), targets) / k
        loss.backward()
        if step % k == 0:
            optimizer.step()
            optimizer.zero_grad()


def no_sync_improper(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: Parts, k: int
) -> None:
    for step, (inputs, targets) in enumerate(parts):
        loss = mse(ddp(inputs), targets) / k
        if step % k != 0:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def no_sync(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: Parts, k: int
) -> None:
    for step, (inputs, targets) in enumerate(parts):
        if step % k != 0:
            with ddp.no_sync():
                loss = mse(ddp(inputs), targets) / k
                loss.backward()
        else:
            loss = mse(ddp(inputs), targets) / k
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def accumulate(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: Parts, k: int
) -> None:
    """As Accelerate's ``accumulate``, by our own class; it steps after batches K - 1, 2K - 1..."""
    accumulation = px.GradientAccumulation(ddp, optimizer, k)
    for inputs, targets in parts:
        with accumulation.microbatch():
            accumulation.backward(mse(ddp(inputs), targets))
    accumulation.flush()


def listing(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: Parts, k: int
) -> None:
    """The guide's first listing, for epochs of ``k`` batches."""
    for step, (inputs, targets) in enumerate(parts):
        if step % k != k - 1:
            with ddp.no_sync():
                mse(ddp(inputs), targets).backward()
        else:
            mse(ddp(inputs), targets).backward()
            optimizer.step()


VARIANTS: dict[
    str, Callable[[DistributedDataParallel, torch.optim.Optimizer, Parts, int], None]
] = {
    "baseline": baseline,
    "no_sync_improper": no_sync_improper,
    "no_sync": no_sync,
    "accumulate": accumulate,
    "listing": listing,
}
