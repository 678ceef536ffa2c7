"""Evaluate during training: dropout is off, and the training goes on as if nothing had happened.

Prints::

    trained without evaluations: 3 losses
    trained with evaluations: the same losses to the last bit
    loss and accuracy differ by less than 1e-6 from those of the unsplit model
"""

import copy

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.5))


def loss_fn(output: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    accuracy = (output.argmax(-1) == targets).float().mean()
    return nn.functional.cross_entropy(output, targets), {"accuracy": accuracy}


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(block() for _ in range(4)), nn.Linear(16, 5))
    batch = torch.randn(8, 16), torch.randint(5, (8,))
    held_out = torch.randn(30, 16), torch.randint(5, (30,))  # of any size
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))

    losses: dict[bool, list[float]] = {False: [], True: []}
    for evaluates in losses:
        torch.manual_seed(1)  # of dropout
        copied = copy.deepcopy(model)
        stages = [copied[:2], copied[2:]]
        with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, sgd) as pipeline:
            for _ in range(3):
                losses[evaluates].append(float(pipeline.step(*batch).loss))
                if evaluates:
                    result = pipeline.evaluate(*held_out)
    print(f"trained without evaluations: {len(losses[False])} losses")
    assert losses[True] == losses[False]
    print("trained with evaluations: the same losses to the last bit")

    with torch.no_grad():
        loss, metrics = loss_fn(copied.eval()(held_out[0]), held_out[1])
    assert abs(result.loss - loss) < 1e-6
    assert abs(result.metrics["accuracy"] - metrics["accuracy"]) < 1e-6
    print("loss and accuracy differ by less than 1e-6 from those of the unsplit model")


if __name__ == "__main__":
    main()
