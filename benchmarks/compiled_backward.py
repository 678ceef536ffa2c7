"""I, W and B of a compiled stage: without a compiler, with inductor, and with `px.SplitBackward`.

One process, one thread, a stage of GPT blocks. In each round the three stages take turns, each with
F and B, then F, I and W; gradients are compared once, before. Columns are milliseconds of the
thread's CPU time, medians over the rounds; I and W over B, which in both compiled rows is that of
inductor; and KiB that the stage holds after F, I and W.

``python benchmarks/compiled_backward.py`` prints the table and writes it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from pathlib import Path

import torch
from _machine import ROOT, header, number, publish, table
from split_backward import SplitCase, Turns
from torch import nn

import pipeexec as px
from pipeexec.demo_models.gpt import gpt

COLUMNS = ("stage", "F split", "B", "I", "W", "I/B", "W/B", "(I+W)/B", "after F", "I", "W")
OUT = ROOT / "results" / "benchmarks" / "compiled_backward.txt"
BACKENDS = {"eager": None, "inductor": "inductor", "px.SplitBackward()": px.SplitBackward()}


def measure(blocks: nn.Module, n_rounds: int) -> list[list[str]]:
    """Return a row for each backend."""
    x = torch.randn(2, 128, 256)
    turns = {}
    for name, backend in BACKENDS.items():
        module = copy.deepcopy(blocks)
        compiled = module if backend is None else torch.compile(module, backend=backend)
        turns[name] = Turns(SplitCase(name, compiled, x))  # type: ignore[arg-type]
        turns[name].gradient = turns["eager"].gradient
        turns[name].split()
    gradients = [[p.grad for p in t.module.parameters()] for t in turns.values()]
    for own in gradients[1:]:
        torch.testing.assert_close(own, gradients[0], rtol=1e-3, atol=1e-3)
    for _ in range(n_rounds):
        for subject in turns.values():
            subject.whole()
            subject.split()
    rows, whole = [], 0.0
    for name, subject in turns.items():
        # The first times are those of compilers, and of caches.
        f, b, i, w = (
            statistics.median(subject.times[column][3:]) for column in ("F split", "B", "I", "W")
        )
        whole = b if name != "px.SplitBackward()" else whole
        shares = (f"{part / whole:.2f}" for part in (i, w, i + w))
        held = (f"{nbytes / 1024:,.0f}" for nbytes in subject.held())
        rows.append([name, *map(number, (f, b, i, w)), *shares, *held])
    return rows


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the stage")
    parser.add_argument("--rounds", type=int, default=41, help="rounds")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, within its compiler
    blocks = gpt(n_layers=options.blocks, d_model=256)[1 : options.blocks + 1]
    rows = measure(blocks, options.rounds)
    unit = f"ms of CPU time: {options.blocks} blocks, d_model 256, 2 x 128 tokens; KiB held"
    publish([*header(["torch"]), unit, "", *table(COLUMNS, rows, 1)], options.out)


if __name__ == "__main__":
    main()
