"""Predict the output of a whole batch with the stages, nested as the model returns it.

Prints::

    classes: (11,), features: 4 of (11, 16)
    the largest difference to the unsplit model is less than 1e-6
    a batch of one sample: (1,)
"""

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
        features = []
        for block in self.blocks:
            x = block(x).tanh()
            features.append(x)
        return {"classes": self.head(x).argmax(-1), "features": features}


def no_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    raise NotImplementedError("this pipeline only predicts")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    inputs = torch.randn(11, 16)
    stages = px.split(model, 2, sample=inputs)
    schedule = ps.schedule("gpipe", n_devices=2, n_microbatches=4)
    graph = ps.lower(schedule, forward_only=True)
    with px.Pipeline(stages, graph, ["cpu"] * 2, no_loss) as pipeline:
        output = pipeline.predict(inputs)
        one = pipeline.predict(inputs[:1])
    features = output["features"]
    shapes = {tuple(x.shape) for x in features}
    print(f"classes: {tuple(output['classes'].shape)}, features: {len(features)} of {shapes.pop()}")

    with torch.no_grad():
        expected = model(inputs)
    assert torch.equal(output["classes"], expected["classes"])
    differences = [(a - b).abs().max() for a, b in zip(features, expected["features"], strict=True)]
    assert max(differences) < 1e-6
    print("the largest difference to the unsplit model is less than 1e-6")
    print(f"a batch of one sample: {tuple(one['classes'].shape)}")


if __name__ == "__main__":
    main()
