"""Train in bfloat16: `torch.autocast` around a step holds for all stages, and for the loss.

Prints::

    output: torch.bfloat16, gradients: torch.float32
    step 1: losses differ by 0
    step 2: losses differ by 0
    step 3: losses differ by 0
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(block() for _ in range(4)))
    whole = copy.deepcopy(model)
    inputs, targets = torch.randn(8, 16), torch.randn(8, 16)

    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=1))
    with px.Pipeline([model[:2], model[2:]], graph, ["cpu"] * 2, loss_fn, optimizer) as pipeline:
        adam = optimizer(whole.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            output = pipeline.predict(inputs)
        for number in range(1, 4):
            with torch.autocast("cpu", torch.bfloat16):
                result = pipeline.step(inputs, targets)
                loss = loss_fn(whole(inputs), targets)
            loss.backward()
            if number == 1:
                print(f"output: {output.dtype}, gradients: {model[0][1].weight.grad.dtype}")
            adam.step()
            adam.zero_grad()
            print(f"step {number}: losses differ by {abs(result.loss - loss):.3g}")


if __name__ == "__main__":
    main()
