"""Clip gradients by their norm over two stages of two replicas, as torch does for the whole model.

Prints::

    step 1: norm 23.93 before clipping, largest difference to torch less than 1e-5
    step 2: norm 22.66 before clipping, largest difference to torch less than 1e-5
    step 3: norm 19.93 before clipping, largest difference to torch less than 1e-5
    tasks that compute the norm: 4, one a device
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets, reduction="none").sum(1).mean()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(block() for _ in range(4)))
    whole = copy.deepcopy(model)
    inputs, targets = torch.randn(16, 16), torch.randn(16, 16)

    optimizer = sgd(whole.parameters())
    schedule = ps.schedule("1f1b", n_devices=2, n_microbatches=4)
    graph = ps.lower(schedule, n_replicas=2, grad_norm=True)
    with px.Pipeline(
        [model[:2], model[2:]], graph, ["cpu"] * 4, loss_fn, sgd, max_grad_norm=0.5
    ) as pipeline:
        for number in range(1, 4):
            result = pipeline.step(inputs, targets)

            optimizer.zero_grad()
            loss_fn(whole(inputs), targets).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            optimizer.step()
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            largest = max((a - b).abs().max() for a, b in pairs)
            assert max(largest, abs(result.grad_norm - norm)) < 1e-5
            text = "before clipping, largest difference to torch less than 1e-5"
            print(f"step {number}: norm {result.grad_norm:.2f} {text}")
    n_tasks = sum(op == ps.Op.GRAD_NORM for op in graph.op)
    print(f"tasks that compute the norm: {n_tasks}, one a device")


if __name__ == "__main__":
    main()
