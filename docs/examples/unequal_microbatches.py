"""Train on sequences of different lengths, one length a micro-batch, without padding.

Prints::

    loss differs by less than 1e-6 from the unsplit model's mean over all tokens
    gradients differ by less than 1e-6
    micro-batches of 5, 12, 7 and 12 tokens: seconds of 3 shapes measured for each stage
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

LENGTHS = [5, 12, 7, 12]


def loss_fn(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Micro-batches have unlike numbers of tokens, so return the sum and the count."""
    total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 10))
    whole = copy.deepcopy(model)
    tokens = [torch.randint(10, (2, length)) for length in LENGTHS]
    inputs = px.Microbatches(tokens)
    targets = px.Microbatches([x.roll(-1, 1) for x in tokens])

    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with px.Pipeline([model[:2], model[2:]], graph, ["cpu"] * 2, loss_fn) as pipeline:
        loss = pipeline.step(inputs, targets).loss
        costs = px.profile(pipeline, inputs, targets)

    pairs = [loss_fn(whole(x), y) for x, y in zip(inputs, targets, strict=True)]
    expected = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    expected.backward()
    assert abs(loss - expected) < 1e-6
    print("loss differs by less than 1e-6 from the unsplit model's mean over all tokens")
    both = zip(model.parameters(), whole.parameters(), strict=True)
    assert max((a.grad - b.grad).abs().max() for a, b in both) < 1e-6
    print("gradients differ by less than 1e-6")

    timeline = ps.simulate(graph, costs)
    assert timeline.makespan >= max(map(sum, costs.forward))
    n_shapes = len(set(costs.forward[0]))
    lengths = "5, 12, 7 and 12"
    print(
        f"micro-batches of {lengths} tokens: seconds of {n_shapes} shapes measured for each stage"
    )


if __name__ == "__main__":
    main()
