"""Order of schedules on 8 MI300X, predicted from sizes and one fitted scalar.

- Measured: Primus-Pipeline (AMD, rocm.blogs.amd.com/software-tools-optimization/primus-pipeline),
  Llama 2 7B on one node, a pipeline of 8 devices. Tokens a second of each schedule over those of
  1F1B.
- Predicted: costs of ``Transformer.preset("llama2_7b")`` on the preset ``mi300x``. The scalar is
  the latency of a message (s), fitted to the ratios.

The publication gives neither the sequence length nor the number of micro-batches. Here they are
4,096 tokens and 32: the power of two for which interleaved 1F1B without latency gains most nearly
what was measured.

``python benchmarks/published_mi300x.py`` prints the table and writes it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from _machine import ROOT, publish, table

import pipesim as ps

#: Measured throughput over that of 1F1B, schedule, and number of stages.
MEASURED = {
    "1f1b": (1.0, "1f1b", 8),
    "vpp2": (1.09, "interleaved_1f1b", 16),
    "zb": (1.13, "zb_1p", 8),
    "zbv": (1.12, "zbv", 16),
    "v-half": (1.08, "v_half", 16),
    "v-min": (0.88, "v_min", 16),
}
MICROBATCHES = 32
OUT = ROOT / "results" / "benchmarks" / "published_mi300x.txt"
#: Latencies that are tried (s).
LATENCIES = [k * 1e-4 for k in range(41)]


def throughputs(latency: float) -> dict[str, float]:
    """Return the predicted throughput of each schedule over that of 1F1B."""
    model = ps.Transformer.preset("llama2_7b", sequence_length=4096, bytes_per_gradient=4)
    network = ps.Network(latency=latency)
    seconds = {}
    for name, (_, schedule, n_stages) in MEASURED.items():
        costs = model.costs(
            n_stages, gpu="mi300x", microbatch_size=1, flash_attention=True, partition="even"
        )
        graph = ps.lower(ps.schedule(schedule, 8, MICROBATCHES))
        seconds[name] = ps.simulate(graph, replace(costs, network=network)).makespan
    return {name: seconds["1f1b"] / value for name, value in seconds.items()}


def distance(ratios: dict[str, float]) -> float:
    """Return the root mean square of the logarithms of predicted over measured ratios."""
    errors = [math.log(ratios[name] / row[0]) for name, row in MEASURED.items() if name != "1f1b"]
    return math.sqrt(sum(x * x for x in errors) / len(errors))


def main() -> None:
    """Fit the latency, and print measured and predicted ratios and orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    free = throughputs(0.0)
    latency = min(LATENCIES, key=lambda x: distance(throughputs(x)))
    fitted = throughputs(latency)
    rows = [
        [
            name,
            f"{measured:.2f}",
            f"{free[name]:.3f}",
            f"{fitted[name]:.3f}",
            f"{fitted[name] / measured - 1:+.1%}",
        ]
        for name, (measured, *_) in MEASURED.items()
    ]
    orders = {
        label: " > ".join(sorted(MEASURED, key=lambda name: -values[name]))
        for label, values in (
            ("measured", {name: row[0] for name, row in MEASURED.items()}),
            ("predicted", fitted),
        )
    }
    lines = [
        "# python benchmarks/published_mi300x.py",
        "",
        f"Llama 2 7B, 8 stages of devices, {MICROBATCHES} micro-batches; fitted latency of a "
        f"message: {latency * 1e3:.1f} ms",
        "",
        *table(["schedule", "measured", "no latency", "fitted", "error"], rows, 1),
        "",
        *(f"{label:<10} {order}" for label, order in orders.items()),
    ]
    publish(lines, out)


if __name__ == "__main__":
    main()
