"""1F1B with vocabulary parallelism on the paper's models, predicted from their sizes.

- Published (Yeung et al., arXiv 2411.05288): settings of table 1, on A100 80 GB; the abstract says
  that throughput is 5 to 51 % higher than with naive approaches.
- *even* and *balanced* are 1F1B with whole matrices on the first and the last device, with as many
  layers on each device, or such that the slowest device takes the least time.
- *messages*: the last layers send hidden states to each device. *broadcast*: each device sends them
  once, as a tree or ring of a collective does.
- Constants are those of presets. Nothing is fitted.

``python benchmarks/vocabulary_parallel.py`` prints the table and writes it, within a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from _machine import ROOT, publish, table

import pipesim as ps

#: Layers, heads and hidden size for each number of devices, which is that of GPUs.
MODELS = {8: (32, 24, 3072), 16: (48, 32, 4096), 32: (64, 40, 5120)}
MICROBATCHES = 128


def as_broadcast(costs: ps.Costs, p: int) -> ps.Costs:
    """Return costs in which all devices together send hidden states as often as one did."""
    hidden, numbers = costs.per_stage("output_bytes", 3 * p + 1)[[p, 2 * p]].tolist()
    share = hidden / (p - 1)
    return replace(
        costs,
        skip_bytes={
            **{(k, p): share for k in range(p - 1)},
            **{(2 * p - 1, 2 * p + k): share for k in range(1, p)},
            **{(2 * p + k, 3 * p): numbers for k in range(p - 1)},
        },
    )


def row(p: int, length: int, vocabulary: int) -> list[str]:
    """Return the seconds of a step in each way, and how much faster it is than the naive ones."""
    n_layers, heads, hidden = MODELS[p]
    model = ps.Transformer(
        hidden_size=hidden, n_layers=n_layers, n_heads=heads, sequence_length=length,
        vocabulary_size=1024 * vocabulary, tied_embeddings=False, dropout=False,
    )  # fmt: skip
    settings = {
        "gpu": "a100_80gb", "microbatch_size": 1, "flash_attention": True,
        "network": ps.Network.preset("dgx_a100"),
    }  # fmt: skip
    chain = ps.lower(ps.schedule("1f1b", p, MICROBATCHES))
    even, balanced = (
        ps.simulate(chain, model.costs(p, partition=x, **settings)) for x in ("even", "balanced")
    )
    costs = model.costs([n_layers // p] * p, vocabulary_parallel=True, **settings)
    graph = ps.lower(ps.schedule("1f1b", p, MICROBATCHES, vocabulary_parallel=costs))
    messages, broadcast = (ps.simulate(graph, x) for x in (costs, as_broadcast(costs, p)))
    times = [x.makespan for x in (even, balanced, messages, broadcast)]
    gains = [f"{100 * (times[1] / own - 1):+.0f}%" for own in times[2:]]
    memory = [f"{x.memory.peak.max() / 1e9:.1f}" for x in (balanced, messages)]
    return [str(p), str(length), f"{vocabulary}k", *(f"{x:.2f}" for x in times), *gains, *memory]


def lines() -> list[str]:
    head = [
        "GPUs", "sequence", "vocabulary", "even s", "balanced s", "messages s", "broadcast s",
        "messages / balanced", "broadcast / balanced", "balanced GB", "divided GB",
    ]  # fmt: skip
    rows = [row(p, s, v) for p in MODELS for s in (2048, 4096) for v in (32, 64, 128, 256)]
    return table(head, rows, 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "vocabulary_parallel.txt")
    options = parser.parse_args()
    publish(["# python benchmarks/vocabulary_parallel.py", "", *lines()], options.out)
