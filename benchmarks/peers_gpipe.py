"""A training step of `pipeexec.GPipe` beside torchgpipe's, in one run.

Same model, balance, micro-batches and threads of torch (one): forward, mean squared error and
backward, no optimizer. Both take turns step by step, so that a machine that slows down slows both;
of each pair of steps comes one ratio. The module without a pipeline, run one micro-batch after
the other, says what the layers alone take: what is left of a step, over its tasks (F, B and R of
each micro-batch in each partition), is what a task costs besides. With as many cores as partitions
it can be negative.

``python benchmarks/peers_gpipe.py`` writes ``results/benchmarks/peers_gpipe.txt``. torchgpipe is no
dependency: ``pip install torchgpipe==0.0.7``, or put it on PYTHONPATH.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of worker threads, too; read when torch is loaded

import argparse
import copy
import gc
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from _machine import ROOT, header, publish, table
from torch import Tensor, nn

import pipeexec as px
from pipeexec.demo_models.registry import build_model

OUT = ROOT / "results" / "benchmarks" / "peers_gpipe.txt"
Step = Callable[[], float]


class GPipeCase(NamedTuple):
    """A model in partitions, and its samples; ``size`` samples a micro-batch."""

    name: str
    layers: nn.Sequential
    sample: tuple[int, ...]
    n: int
    chunks: int = 8
    size: int = 8


def dense(width: int, n: int, size: int) -> GPipeCase:
    """Return four linear layers, each with a ReLU."""
    layers = [x for _ in range(4) for x in (nn.Linear(width, width), nn.ReLU())]
    return GPipeCase(f"4 linear({width})", nn.Sequential(*layers), (width,), n, size=size)


def cases() -> list[GPipeCase]:
    """Return models from next to nothing a task to several milliseconds."""
    torch.manual_seed(0)
    dense_cases = [dense(width, n, 32) for width in (8, 128, 256, 512, 1024) for n in (2, 4)]
    images = build_model("convnet", layers=6, width=16, image_size=16).layers
    dense_cases += [GPipeCase("convnet", images, (3, 16, 16), n, size=4) for n in (2, 4)]
    return dense_cases


def balance(n_layers: int, n: int) -> list[int]:
    """Return as equal numbers of layers as can be."""
    return [n_layers * (j + 1) // n - n_layers * j // n for j in range(n)]


def mean_squared(output: Tensor) -> Tensor:
    """Return a loss of an output, all of whose targets are 1."""
    return (output - 1).square().mean()


def timed(model: Callable[[Tensor], Tensor], layers: nn.Module, inputs: Tensor) -> Step:
    """Return a step that says how many seconds it took."""

    def step() -> float:
        for parameter in layers.parameters():
            parameter.grad = None
        start = perf_counter()
        mean_squared(model(inputs)).backward()
        return perf_counter() - start

    return step


def measure(case: GPipeCase, checkpoint: str, rounds: int) -> list[str]:
    """Return a row of the table."""
    import torchgpipe

    inputs = torch.rand(case.chunks * case.size, *case.sample)
    steps = []
    for make in (px.GPipe, torchgpipe.GPipe):
        model = make(
            copy.deepcopy(case.layers),
            balance(len(case.layers), case.n),
            devices=["cpu"] * case.n,
            chunks=case.chunks,
            checkpoint=checkpoint,
        )
        steps.append(timed(model, model, inputs))

    def plain(x: Tensor) -> Tensor:
        return torch.cat([case.layers(part) for part in x.chunk(case.chunks)])

    steps.append(timed(plain, case.layers, inputs))
    seconds: list[list[float]] = [[] for _ in steps]
    gc.collect()
    gc.disable()
    for number in range(rounds + 5):
        for step, times in zip(steps, seconds, strict=True):
            took = step()
            if number >= 5:
                times.append(took)
    gc.enable()
    ratios = sorted(a / b for a, b in zip(seconds[0], seconds[1], strict=True))
    own, peer, alone = (statistics.median(times) for times in seconds)
    recomputed = {"always": case.chunks, "except_last": case.chunks - 1, "never": 0}[checkpoint]
    n_tasks = case.n * (2 * case.chunks + recomputed)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return [
        case.name,
        str(case.n),
        checkpoint,
        f"{alone * 1e3:.2f}",
        f"{own * 1e3:.2f}",
        f"{peer * 1e3:.2f}",
        f"{statistics.median(ratios):.3f}",
        f"{low:.2f}-{high:.2f}",
        *(f"{(median - alone) / n_tasks * 1e6:.0f}" for median in (own, peer)),
    ]


COLUMNS = ["model", "partitions", "checkpoint", "plain ms", "ours ms", "torchgpipe ms",
           "ours/torchgpipe", "10-90 %", "ours us/task", "torchgpipe us/task"]  # fmt: skip


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps a row")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # more partitions than cores; torchgpipe's own
    rows = [
        measure(case, checkpoint, options.rounds)
        for case in cases()
        for checkpoint in ("except_last", "never")
    ]
    lines = header(["torch", "torchgpipe"])
    remark = (
        f"Medians of {options.rounds} steps each, in turn; ratios of neighbouring steps, their "
        "median and where 80 % of them lie. us/task: what a step takes beyond the plain module's, "
        "over its F, B and R."
    )
    publish([*lines, "", *table(COLUMNS, rows, 3), "", remark], options.out)


if __name__ == "__main__":
    main()
