"""Record the order in which torch runs the backward of torchgpipe 0.0.7 on CPUs.

``python tests/helpers/torchgpipe_orders.py FOLDER``, with torchgpipe's package in ``FOLDER`` (such
as ``pip download --no-deps torchgpipe==0.0.7``, unpacked), writes ``data/torchgpipe_orders.json``.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
from places import DATA
from torch import Tensor, nn

OUT = DATA / "torchgpipe_orders.json"
#: Micro-batches and partitions.
SHAPES = ((4, 1), (1, 3), (2, 2), (4, 3), (3, 4), (8, 4), (5, 6))
MODES = ("always", "except_last", "never")


class _Noted(torch.autograd.Function):
    """Notes when the backward of a partition comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], partition: int) -> Tensor:
        ctx.log, ctx.action = log, f"{partition}B{int(x.detach()[0, 0])}"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.log.append(ctx.action)
        return gradient, None, None


class Layer(nn.Module):
    """Adds nothing, with a gradient; notes its recomputes and backwards.

    The values of a micro-batch are its number.
    """

    def __init__(self, partition: int, log: list[str], is_recomputing: Any) -> None:
        super().__init__()
        self.partition, self.log, self.is_recomputing = partition, log, is_recomputing
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_recomputing():
            self.log.append(f"{self.partition}R{int(x.detach()[0, 0])}")
        return _Noted.apply(x + self.zero, self.log, self.partition)


def recorded(package: Any, m: int, n: int, checkpoint: str, *, dependencies: bool) -> str:
    """Return the order of R and B in a step that is not the first."""
    from torchgpipe import pipeline

    log: list[str] = []
    model = package.GPipe(
        nn.Sequential(*(Layer(j, log, package.is_recomputing) for j in range(n))),
        [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint,
    )  # fmt: skip
    depend = pipeline.depend
    if not dependencies:  # as torchgpipe's benchmarks/unet-timeline/main.py does
        pipeline.depend = lambda before, after: None
    try:
        for _ in range(2):
            log.clear()
            model(torch.arange(m, dtype=torch.float)[:, None].repeat(1, 2)).sum().backward()
    finally:
        pipeline.depend = depend
    return " ".join(log)


def main(folder: str) -> None:
    """Record all shapes."""
    sys.path.insert(0, folder)
    import torchgpipe

    torch.set_num_threads(1)
    orders = [
        {
            "m": m, "n": n, "checkpoint": checkpoint, "dependencies": dependencies,
            "order": recorded(torchgpipe, m, n, checkpoint, dependencies=dependencies),
        }
        for dependencies, (m, n), checkpoint in itertools.product((False, True), SHAPES, MODES)
    ]  # fmt: skip
    source = {"torchgpipe": torchgpipe.__version__, "torch": torch.__version__, "devices": "cpu"}
    rows = ",\n".join("  " + json.dumps(order) for order in orders)
    OUT.write_text(f'{{"source": {json.dumps(source)},\n"orders": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
