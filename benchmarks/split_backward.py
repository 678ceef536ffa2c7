"""I and W against B: what it costs to split a backward, in ours and in torch's own helpers.

One process, one thread. In each round, B, ours and torch's (`stage_backward_input` and
`stage_backward_weight` of torch.distributed.pipelining) take turns, each after a forward of its
own, on one module and micro-batch; gradients add up. Columns are

- F, F split: milliseconds of a forward, for B and for ours;
- B, I, W: milliseconds of our tasks, and ``(I+W)/B`` of the round's own times;
- torch: ``(I+W)/B`` of torch's helpers, over the same B;
- after F, I, W: KiB that the stage holds then, counted storage by storage.

All are medians over the rounds, of the thread's CPU time: neighbours on a shared machine then count
only for the caches that they take.

``python benchmarks/split_backward.py`` prints the table and writes it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import thread_time
from typing import NamedTuple

import torch
from _machine import ROOT, header, number, publish, table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.image_models import convnet
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage

COLUMNS = ("stage", "F", "F split", "B", "I", "W", "(I+W)/B", "torch", "after F", "I", "W")
OUT = ROOT / "results" / "benchmarks" / "split_backward.txt"


class SplitCase(NamedTuple):
    """A stage and a micro-batch for it."""

    name: str
    module: nn.Module
    input: Tensor


def cases() -> Iterator[SplitCase]:
    """Yield transformer blocks and convolution stages of several sizes."""
    for d_model in (128, 256, 512):
        for n_samples in (1, 4):
            block = gpt(n_layers=1, d_model=d_model)[1]
            name = f"block, d_model {d_model}, {n_samples} x 128 tokens"
            yield SplitCase(name, block, torch.randn(n_samples, 128, d_model))
    blocks = gpt(n_layers=4, d_model=256)[1:5]
    yield SplitCase("4 blocks, d_model 256, 2 x 128 tokens", blocks, torch.randn(2, 128, 256))
    for channels, size in ((16, 32), (32, 32), (64, 16)):
        block = convnet(n_blocks=1, channels=channels, image_size=size)[1]
        name = f"residual block, {channels} channels, 8 x {size} x {size}"
        yield SplitCase(name, block, torch.randn(8, channels, size, size))


def timed(times: list[float], call: Callable[[], object]) -> None:
    """Append the milliseconds of a call."""
    start = thread_time()
    kept = call()
    times.append((thread_time() - start) * 1e3)
    del kept


class Turns:
    """The three that take turns, and their times in milliseconds."""

    def __init__(self, case: SplitCase) -> None:
        self.module, self.input = case.module, case.input
        self.stage = Stage(case.module, 1, torch.device("cpu"), ActivationCounter())
        self.gradient = torch.randn_like(case.module(case.input)).detach()
        self.times: dict[str, list[float]] = {}

    def whole(self) -> None:
        """F and B."""
        self._time("F", lambda: self.stage.forward(0, (self.input,), 0, False))
        self._time("B", lambda: self.stage.backward(0, (self.gradient,)))

    def split(self) -> None:
        """F, I and W."""
        self._time("F split", lambda: self.stage.forward(0, (self.input,), 0, False, True))
        self._time("I", lambda: self.stage.input_grad(0, (self.gradient,)))
        self._time("W", lambda: self.stage.weight_grad(0))

    def torch_split(self) -> None:
        """The same with torch's helpers."""
        leaf = self.input.detach().requires_grad_()
        output = self.module(leaf)
        weights = list(self.module.parameters())
        kept: list[object] = []

        def input_grad() -> None:
            _, groups = stage_backward_input([output], [self.gradient], [leaf], iter(weights))
            kept.append(groups)

        self._time("torch I", input_grad)
        self._time("torch W", lambda: stage_backward_weight(iter(weights), kept.pop()))  # type: ignore[arg-type]

    def _time(self, name: str, call: Callable[[], object]) -> None:
        timed(self.times.setdefault(name, []), call)

    def ratio(self, prefix: str = "") -> float:
        """Return the median over the rounds of I and W over B."""
        columns = (self.times[name] for name in (f"{prefix}I", f"{prefix}W", "B"))
        return statistics.median((i + w) / b for i, w, b in zip(*columns, strict=True))

    def held(self) -> list[int]:
        """Return the bytes that the stage holds after F, I and W."""
        stage = self.stage
        stage.meter = meter = ActivationMeter([*self.module.parameters(), *self.module.buffers()])
        readings = []
        for call in (
            lambda: stage.forward(0, (self.input,), 0, False, True),
            lambda: stage.input_grad(0, (self.gradient,)),
            lambda: stage.weight_grad(0),
        ):
            call()
            readings.append(meter.current)
        stage.meter = None
        return readings


def measure(case: SplitCase, seconds: float, least: int) -> list[str]:
    """Return the row of a case."""
    turns = Turns(case)
    order = [turns.whole, turns.split, turns.torch_split]
    for call in order * 3:
        call()
    turns.times.clear()
    start, n_rounds = thread_time(), 0
    while n_rounds < least or thread_time() - start < seconds:
        for call in order[n_rounds % 3 :] + order[: n_rounds % 3]:
            call()
        n_rounds += 1
    medians = [statistics.median(turns.times[name]) for name in ("F", "F split", "B", "I", "W")]
    return [
        case.name,
        *(number(value) for value in medians),
        f"{turns.ratio():.2f}",
        f"{turns.ratio('torch '):.2f}",
        *(f"{nbytes / 1024:,.0f}" for nbytes in turns.held()),
    ]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU time for each row")
    parser.add_argument("--least", type=int, default=21, help="rounds that each row has at least")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(case, options.seconds, options.least) for case in cases()]
    unit = "ms of CPU time; after F, I, W: KiB held"
    publish([*header(["torch"]), unit, "", *table(COLUMNS, rows, 1)], options.out)


if __name__ == "__main__":
    main()
