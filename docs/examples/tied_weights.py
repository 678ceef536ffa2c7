"""Train a model whose head is its embedding: two stages have copies, which stay equal.

Prints::

    tied: stage 0 model.embedding.weight, stage 1 model.head.weight
    step 1: loss differs by less than 1e-5 from that of the unsplit model
    step 2: loss differs by less than 1e-5 from that of the unsplit model
    step 3: loss differs by less than 1e-5 from that of the unsplit model
    copies are equal to the last bit, and differ by less than 1e-5 from the unsplit model's
    the state has the keys of the model
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    whole = copy.deepcopy(model)
    words, targets = torch.randint(10, (2, 8, 6))

    stages = px.split(model, 2, sample=words)
    for group in stages.tied:
        print("tied:", ", ".join(f"stage {stage} {name}" for stage, name in group))
    schedule = ps.schedule("1f1b", n_devices=2, n_microbatches=4)
    graph = ps.lower(schedule, tied=stages.tied_stages)
    optimizer = adam(whole.parameters())
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, adam) as pipeline:
        for number in range(1, 4):
            loss = pipeline.step(words, targets).loss

            optimizer.zero_grad()
            expected = loss_fn(whole(words), targets)
            expected.backward()
            optimizer.step()
            assert abs(loss - expected) < 1e-5
            print(f"step {number}: loss differs by less than 1e-5 from that of the unsplit model")
        state = pipeline.state_dict()
    first, second = (stages[stage].get_parameter(name) for stage, name in stages.tied[0])
    assert torch.equal(first, second)
    assert (first - whole.head.weight).abs().max() < 1e-5
    text = "differ by less than 1e-5 from the unsplit model's"
    print(f"copies are equal to the last bit, and {text}")
    assert state.keys() == whole.state_dict().keys()
    print("the state has the keys of the model")


if __name__ == "__main__":
    main()
