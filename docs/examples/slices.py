"""Train a GPT whose sequences run in slices, and compare with the unsplit model.

Prints::

    1f1b, 4 sequences: bubble 20.0%, peak activations 2 sequences
    seq1f1b, 16 slices: bubble 5.9%, peak activations 1.25 sequences
    step 1: loss 3.80, difference to torch less than 1e-5
    step 2: loss 3.58, difference to torch less than 1e-5
    largest difference of a weight less than 1e-5
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

VOCABULARY, WIDTH = 32, 16


class Embedding(nn.Module):
    """Tokens and positions; the first position of a slice is that in its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.cache = px.KeyValueCache()

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        first = self.cache.offset(n)
        return self.token(tokens) + self.position.weight[first : first + n]


class Block(nn.Module):
    """Causal attention; the cache has keys and values of the earlier slices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache = px.KeyValueCache()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = self.cache.attend(*heads)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    whole_sequences = ps.schedule("1f1b", n_devices=2, n_microbatches=4)
    slices = ps.schedule("seq1f1b", n_devices=2, n_microbatches=16, n_slices=4)
    for schedule in (whole_sequences, slices):
        size = schedule.n_slices  # a slice takes a fourth of the time and memory
        costs = ps.Costs(forward=1 / size, backward=2 / size, activation_bytes=1 / size)
        timeline = ps.simulate(ps.lower(schedule), costs)
        what = "slices" if size > 1 else "sequences"
        print(
            f"{schedule.name}, {schedule.n_microbatches} {what}: bubble "
            f"{timeline.bubble_fraction:.1%}, peak activations {timeline.memory.peak.max():g} "
            "sequences"
        )

    model = nn.Sequential(Embedding(), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))
    whole = copy.deepcopy(model)
    tokens = torch.randint(0, VOCABULARY, (4, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optimizer = sgd(whole.parameters())
    with px.Pipeline(
        [model[:2], model[2:]], ps.lower(slices), ["cpu"] * 2, loss_fn, sgd
    ) as pipeline:
        for number in (1, 2):
            result = pipeline.step(inputs, targets)

            optimizer.zero_grad()
            loss = loss_fn(whole(inputs), targets)
            loss.backward()
            optimizer.step()
            assert abs(result.loss - loss) < 1e-5
            print(f"step {number}: loss {result.loss:.2f}, difference to torch less than 1e-5")
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-5
    print("largest difference of a weight less than 1e-5")


if __name__ == "__main__":
    main()
