"""torchgpipe's published ablation, run here: mechanisms of `pipeexec.GPipe` switched on in turn.

The published one is of the U-Net (5, 64) in four partitions on Tesla P40s. Two cores cannot run
four partitions at once. So each partition here takes an imposed time and no core: its layers sleep
as long as those of the U-Net take, and messages, of imposed links, likewise. Both are as
``benchmarks/torchgpipe_published.py`` predicts them, fitted on the row "dependency", and ten times
as fast. Tensors have a thousandth of the bytes. All else is real: the module, its threads and
streams, autograd's order, skips, recomputes.

Predictions come from steps of the last row, apart from those that are measured. Gains are over the
row above. The published baseline is the order that autograd took on GPUs, which is not known
(`pipesim.autograd_orders`). So there are two baselines:

- "baseline": torch's engine chooses the order while it runs, as in torchgpipe on a CPU. The
  prediction is `GPipe.graph`'s.
- "baseline imposed": all R of a stage come before its B. Its memory is near the published one. The
  published gain of "+ dependency" stands beside the gain over this row.

Without copy streams both ends of a message wait for each other, as on default streams.

``python benchmarks/ablation.py`` prints the tables and writes them, and ``results/ablation/``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _data_sheet import costs_of, fit, reached, skips_of
from _machine import ROOT, header, publish, table
from _torchgpipe import ablation
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.gpipe.skip import pop, skippable, stash
from pipeexec.validation.accuracy import Row
from pipeexec.validation.result import Validation

OUT = ROOT / "results" / "benchmarks" / "ablation.txt"
RUN = ROOT / "results" / "ablation"
#: How much faster than predicted for a P40, and how much smaller tensors are.
FASTER, SMALLER = 10, 1000
PUBLISHED = {"baseline imposed": "baseline", "+ dependency": "dependency",
             "+ copy streams": "dependency+streams",
             "+ portals": "dependency+streams+portals"}  # fmt: skip
#: The order that torch's engine chooses, without the mechanisms.
CHOSEN = "baseline"
#: How the order of the backward comes about in each row.
ORDERS = {CHOSEN: "engine's choice", "baseline imposed": "imposed"}
_DEFAULT_STREAM = {"copy_streams": False, "recompute_waits": True, "portals": False}


class _Imposed(torch.autograd.Function):
    """Takes its time, holds bytes until its backward, and makes tensors of zeros."""

    @staticmethod
    def forward(
        ctx: Any, seconds: tuple[float, float], held: int, sizes: Sequence[int], *inputs: Tensor
    ) -> Any:
        ctx.seconds, ctx.shapes = seconds[1], [x.shape for x in inputs]
        ctx.save_for_backward(torch.empty(held, dtype=torch.uint8))
        time.sleep(seconds[0])
        return tuple(torch.zeros(1, max(1, size // 4)) for size in sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        time.sleep(ctx.seconds)
        return None, None, None, *(torch.zeros(shape) for shape in ctx.shapes)


def partition(
    seconds: tuple[float, float], held: int, size: int, pops: Sequence[str], stashes: dict[str, int]
) -> nn.Module:
    """Return a layer: seconds of F and B; bytes of activations, of its output and its skips."""

    @skippable(pop=list(pops), stash=list(stashes))
    class ImposedLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Generator[stash | pop, Tensor, Tensor]:
            skips = []
            for name in pops:
                skips.append((yield pop(name)))
            sizes = [size, *stashes.values()]
            outputs = _Imposed.apply(seconds, held, sizes, self.weight, x, *skips)  # type: ignore[no-untyped-call]
            for name, skip in zip(stashes, outputs[1:], strict=True):
                yield stash(name, skip)
            return outputs[0]

    return ImposedLayer()  # type: ignore[no-any-return]


def imposed(costs: ps.Costs, n: int) -> nn.Sequential:
    """Return a model of ``n`` layers that take what the costs say."""
    per_stage = {
        name: costs.per_stage(name, n) for name in ("forward", "backward", "activation_bytes")
    }
    sizes = costs.per_stage("output_bytes", n)
    skips = {f"{a}-{b}": (a, b, int(size)) for (a, b), size in skips_of(costs).items()}
    return nn.Sequential(
        *(
            partition(
                (per_stage["forward"][j] / FASTER, per_stage["backward"][j] / FASTER),
                int(per_stage["activation_bytes"][j] / SMALLER),
                int(sizes[j] / SMALLER) if j < n - 1 else 4,
                [name for name, (_, target, _) in skips.items() if target == j],
                {name: size // SMALLER for name, (a, _, size) in skips.items() if a == j},
            )
            for j in range(n)
        )
    )


def all_first(n: int, m: int) -> ps.Schedule:
    """Return the order in which all R of a stage come before its B; the last B has no R."""
    newest_first = range(m)[::-1]
    return ps.Schedule.from_orders(
        [
            [
                *(f"{j}F{i}" for i in range(m)),
                *(f"{j}R{i}" for i in newest_first[1:]),
                *(f"{j}B{i}" for i in newest_first),
            ]
            for j in range(n)
        ],
        name="gpipe",
    )


def models(costs: ps.Costs, link: float, n: int, m: int) -> dict[str, px.GPipe]:
    """Return a module a row: the two baselines, then each mechanism in turn."""
    network = ps.Network(bandwidth=link * FASTER / SMALLER)
    rows: dict[str, dict[str, Any]] = {
        CHOSEN: {"dependencies": False, **_DEFAULT_STREAM},
        "baseline imposed": {
            "dependencies": False, "backward_order": all_first(n, m), **_DEFAULT_STREAM,
        },
        "+ dependency": _DEFAULT_STREAM,
        "+ copy streams": {"portals": False},
        "+ portals": {},
    }  # fmt: skip
    return {
        name: px.GPipe(
            imposed(costs, n), [1] * n, devices=px.workers(n, link=network), chunks=m, **options
        )
        for name, options in rows.items()
    }


def gains(speeds: dict[str, float]) -> dict[str, str]:
    """Return how many times as fast each row is as the one above it."""
    names = list(PUBLISHED)
    texts = {names[0]: "-"}
    for above, name in itertools.pairwise(names):
        texts[name] = f"{speeds[above] / speeds[name]:.2f}"
    return texts


def lines_of(validation: Validation, published: dict[str, tuple[float, float]]) -> list[list[str]]:
    """Return a line a row, with the published figures: samples a second, and GiB."""
    seconds = {name: (row.prediction, float(np.median(row.makespans)))
               for name, row in validation.rows.items()}  # fmt: skip
    predicted, measured = (gains({k: v[side] for k, v in seconds.items()}) for side in (0, 1))
    of_paper = gains({name: 1 / speed for name, (speed, _) in published.items()})
    held = {name: memory(row) for name, row in validation.rows.items()}
    unit = held["+ dependency"][1]
    lines = []
    for name, row in validation.rows.items():
        speed, gib = published.get(name, (np.nan, np.nan))
        shares = gib / published["+ dependency"][1], *(nbytes / unit for nbytes in held[name])
        of_memory = ["-" if np.isnan(share) else f"{share:.2f}" for share in shares]
        lines.append([
            name, ORDERS.get(name, "fork and join"), *(f"{x * 1e3:.1f}" for x in seconds[name]),
            f"{np.median(row.errors):+.1%}",
            *(column.get(name, "-") for column in (predicted, measured, of_paper)),
            "-" if np.isnan(speed) else f"{speed:.1f}", *of_memory[1:], of_memory[0],
        ])  # fmt: skip
    return lines


def memory(row: Row) -> tuple[float, float]:
    """Return bytes on all devices at their peaks, predicted and measured."""
    return float(row.predicted.memory.peak.sum()), float(sum(row.peak_memory))


COLUMNS = (
    "row", "order", "predicted", "measured", "error", "gain predicted", "measured", "published",
    "samples/s", "memory predicted", "measured", "published",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    parser.add_argument("--run", type=Path, default=RUN, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=9, help="measured a row; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = f"load average before: {os.getloadavg()[0]:.1f}"
    rows = {row.name: row for row in ablation()}
    machine = reached(fit([rows["dependency"]]))
    row = rows["dependency"]
    n, m = len(row.balance), row.n_microbatches
    validation = px.validate(
        models(costs_of(row, machine), machine.link, n, m),
        loss_fn=nn.functional.mse_loss,
        batches=iter(lambda: (torch.zeros(m, 1), torch.zeros(m, 1)), None),
        n_steps=args.steps,
        repeat=2,
    )
    published = {name: (rows[step].published.speed, rows[step].published.memory)
                 for name, step in PUBLISHED.items()}  # fmt: skip
    validation.save(args.run, transfers=True)
    rows_of_gain = [validation.rows[name] for name in (CHOSEN, "+ dependency")]
    predicted, measured = (
        above / below
        for above, below in (
            [row.prediction for row in rows_of_gain],
            [float(np.median(row.makespans)) for row in rows_of_gain],
        )
    )
    publish(
        [
            *header(["torch", "numpy"]), load, "", *validation.notes, "",
            f"{n} partitions, {m} micro-batches; makespans in ms; gains over the row above;",
            "memory of all devices over that of '+ dependency', measured; published: torchgpipe's,",
            "of the U-Net (5, 64) on four P40s (samples a second; memory as PyTorch kept it)", "",
            *table(COLUMNS, lines_of(validation, published), 2), "",
            f"gain of '+ dependency' over the order that the engine chose: {predicted:.2f} "
            f"predicted, {measured:.2f} measured",
            "orders: the engine chose that of 'baseline' as it ran; that of 'baseline imposed' was",
            "given to it; fork and join give the others",
        ],
        args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
