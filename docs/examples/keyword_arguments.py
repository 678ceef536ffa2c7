"""Give stages the keyword arguments of the model: positions, a scale without dimensions, and None.

Prints::

    stage 0 calls embedding to blocks.1
    stage 1 calls blocks.2 to head
    loss differs by less than 1e-6 from that of the unsplit model
    gradients differ by less than 1e-6
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, angles: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.linear(x) * angles.cos()
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, words: Tensor, places: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        x, angles = self.embedding(words), places[..., None] / 10
        for block in self.blocks:
            x = block(x, angles=angles, scale=scale)
        return self.head(x) if bias is None else self.head(x) + bias


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    whole = copy.deepcopy(model)
    words, targets = torch.randint(10, (2, 8, 6))
    places = torch.arange(6).expand(8, 6)
    batch = {"words": words, "places": places, "scale": torch.tensor(0.5), "bias": None}

    stages = px.split(model, 2, sample=batch)
    for number, names in enumerate(stages.modules):
        print(f"stage {number} calls {names[0]} to {names[-1]}")
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn) as pipeline:
        loss = pipeline.step(batch, targets).loss

    expected = loss_fn(whole(**batch), targets)
    expected.backward()
    assert abs(loss - expected) < 1e-6
    print("loss differs by less than 1e-6 from that of the unsplit model")
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert max((a.grad - b.grad).abs().max() for a, b in pairs) < 1e-6
    print("gradients differ by less than 1e-6")


if __name__ == "__main__":
    main()
