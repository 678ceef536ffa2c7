"""Save a training run, resume it in as many stages and in more, and load it into the whole model.

Prints::

    resumed in 2 stages: losses are equal to the last bit, dropout included
    resumed in 3 stages, without dropout: losses are equal
    the unsplit model continues with the same losses
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import pipeexec as px
import pipesim as ps


def network(seed: int, dropout: float) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def on_workers(model: nn.Sequential, ends: list[int]) -> px.Pipeline:
    """Return a pipeline whose stages end before these layers."""
    stages = [model[a:b] for a, b in zip([0, *ends], [*ends, len(model)], strict=True)]
    graph = ps.lower(ps.schedule("1f1b", len(stages), 4))
    return px.Pipeline(stages, graph, ["cpu"] * len(stages), loss_fn, adam, pin_threads=False)


def main() -> None:
    torch.set_num_threads(1)
    inputs, targets = torch.randn(16, 16), torch.randn(16, 4)

    def losses(pipeline: px.Pipeline) -> list[float]:
        return [float(pipeline.step(inputs, targets).loss) for _ in range(3)]

    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for dropout in (0.5, 0.0):
            with on_workers(network(0, dropout), [2]) as pipeline:
                losses(pipeline)
                px.save_checkpoint(pipeline, Path(folder) / f"dropout-{dropout}")
                expected[dropout] = losses(pipeline)
        with on_workers(network(1, 0.5), [2]) as pipeline:
            px.load_checkpoint(pipeline, Path(folder) / "dropout-0.5")
            assert losses(pipeline) == expected[0.5]
        print("resumed in 2 stages: losses are equal to the last bit, dropout included")
        with on_workers(network(1, 0.0), [1, 2]) as pipeline:
            px.load_checkpoint(pipeline, Path(folder) / "dropout-0.0")
            torch.testing.assert_close(losses(pipeline), expected[0.0])
        print("resumed in 3 stages, without dropout: losses are equal")
        content = px.read_checkpoint(Path(folder) / "dropout-0.0")
    model = network(2, 0.0)
    optimizer = adam(model.parameters())
    model.load_state_dict(content["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=content["optimizer"])
    for expected_loss in expected[0.0]:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.item(), expected_loss)
    print("the unsplit model continues with the same losses")


if __name__ == "__main__":
    main()
