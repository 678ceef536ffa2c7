"""Schedule the learning rates of all stages, with weight decay for matrices alone, by name.

Prints::

    step 1: loss 1.1533, rates [0.00333, 0.00333]
    step 2: loss 1.1338, rates [0.00667, 0.00667]
    step 3: loss 1.0959, rates [0.01, 0.01]
    step 4: loss 1.0410, rates [0.00854, 0.00854]
    step 5: loss 0.9957, rates [0.005, 0.005]
    the unsplit model's losses differ by less than 1e-5
"""

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import pipeexec as px
import pipesim as ps


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def optimizer(named_parameters) -> torch.optim.Optimizer:
    matrices, others = [], []
    for name, parameter in named_parameters:
        (matrices if name.endswith("weight") else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 1 / 3, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, milestones=[2])


def main() -> None:
    warnings.filterwarnings("ignore", message=".*epoch parameter")  # SequentialLR's own
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    whole = copy.deepcopy(model)
    inputs, targets = torch.randn(8, 16), torch.randn(8, 16)
    adam = optimizer(whole.named_parameters())
    schedule = warm_up_then_cosine(adam)

    largest = 0.0
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with px.Pipeline([model[:2], model[2:]], graph, ["cpu"] * 2, loss_fn, optimizer) as pipeline:
        scheduler = px.LRSchedulers(pipeline, warm_up_then_cosine)
        for number in range(1, 6):
            rates = [float(f"{rate:.3g}") for rate in scheduler.get_last_lr()]
            loss = pipeline.step(inputs, targets).loss
            scheduler.step()
            print(f"step {number}: loss {loss:.4f}, rates {rates}")

            adam.zero_grad()
            expected = loss_fn(whole(inputs), targets)
            expected.backward()
            adam.step()
            schedule.step()
            largest = max(largest, abs(loss - expected).item())
    assert largest < 1e-5
    print("the unsplit model's losses differ by less than 1e-5")


if __name__ == "__main__":
    main()
