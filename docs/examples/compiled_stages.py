"""Compile the blocks of a split model with `torch.compile`.

The backend counts runs of compiled graphs here; leave it out for inductor.

Prints::

    4 blocks ran compiled, for each of 4 micro-batches: True
    loss and gradients are those of the unsplit model
"""

import copy

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pipeexec as px
import pipesim as ps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    whole = copy.deepcopy(model)
    inputs, targets = torch.randn(8, 16), torch.randn(8, 4)
    runs: list[GraphModule] = []

    def backend(graph: GraphModule, _: object):
        def run(*args: Tensor):
            runs.append(graph)
            return graph.forward(*args)

        return run

    stages = px.split(model, 2, sample=inputs)
    for stage in stages:
        stage.compile(backend=backend)

    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn) as pipeline:
        loss = pipeline.step(inputs, targets).loss
    n_blocks = sum("gelu" in graph.code for graph in runs)
    print(f"4 blocks ran compiled, for each of 4 micro-batches: {n_blocks == 4 * 4}")

    expected = loss_fn(whole(inputs), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    print("loss and gradients are those of the unsplit model")


if __name__ == "__main__":
    main()
