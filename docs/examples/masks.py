"""Give every stage of a transformer its masks: of padding, a row a sample, and one that broadcasts.

Prints::

    loss differs by less than 1e-6 from that of the unsplit model
    gradients differ by less than 1e-6
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
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, words: Tensor, is_padding: Tensor, is_future: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, src_mask=is_future[0], src_key_padding_mask=is_padding)
        return self.head(x)


def loss_fn(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Micro-batches have unlike numbers of words, so return the sum and the count."""
    total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    whole = copy.deepcopy(model)
    words, lengths = torch.randint(10, (8, 6)), torch.tensor([6, 2, 3, 6, 4, 1, 5, 6])
    is_padding = torch.arange(6) >= lengths[:, None]  # (8, 6): split into micro-batches
    is_future = torch.ones(1, 6, 6, dtype=torch.bool).triu(1)  # (1, 6, 6): whole to each of them
    batch = {"words": words, "is_padding": is_padding, "is_future": is_future}
    targets = words.roll(-1, 1).masked_fill(is_padding, -100)

    stages = px.split(model, 2, sample=batch)
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn) as pipeline:
        loss = pipeline.step(batch, targets).loss

    total, count = loss_fn(whole(**batch), targets)
    (total / count).backward()
    assert abs(loss - total / count) < 1e-6
    print("loss differs by less than 1e-6 from that of the unsplit model")
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert max((a.grad - b.grad).abs().max() for a, b in pairs) < 1e-6
    print("gradients differ by less than 1e-6")


if __name__ == "__main__":
    main()
