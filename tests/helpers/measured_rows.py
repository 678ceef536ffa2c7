"""Rows of measured steps whose seconds follow from a known GPU and network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pipesim as ps

MACHINE = "dgx_a100"
#: The GPU that took the steps, far from the preset, and the share of its network's bandwidths.
TRUTH = replace(
    ps.GPU.preset("a100_80gb"),
    flops=1.8e14,
    bandwidth=1.1e12,
    launch=4e-5,
    synchronization=1e-3,
)
TRUE_EFFICIENCY = 0.5
SIZES = {"n_layers": 4, "n_heads": 16, "sequence_length": 1024, "vocabulary_size": 32000}
#: Hidden size, micro-batch size, tensor-parallel size, devices of the pipeline, micro-batches.
_RUNS = (
    (8192, 4, 1, 1, 2), (2048, 8, 1, 1, 2), (2048, 2, 1, 4, 8), (512, 1, 1, 1, 2),
    (512, 1, 2, 2, 4), (8192, 2, 8, 1, 2), (4096, 4, 8, 2, 4), (1024, 8, 1, 4, 4),
)  # fmt: skip


def true_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a row's step on `TRUTH`, from the public functions alone."""
    size = row.get("tensor_parallel", 1)
    model = ps.Transformer(hidden_size=row["hidden_size"], **SIZES)
    costs = model.costs(
        row["n_devices"],
        microbatch_size=row["microbatch_size"],
        tensor_parallel=size,
        partition="even",
        gpu=TRUTH,
        network=ps.Network.preset(MACHINE, TRUE_EFFICIENCY, size),
    )
    order = ps.schedule("1f1b", row["n_devices"], row["n_microbatches"])
    return ps.simulate(ps.lower(order, overlap=row["overlap"]), costs).makespan


def measured_rows(*, overlap: bool = False, n_devices: int | None = None) -> list[dict[str, Any]]:
    """Return rows of measured steps; with ``n_devices`` only those of such a pipeline."""
    rows = []
    for hidden, microbatch_size, tensor_parallel, devices, n_microbatches in _RUNS:
        row = {
            **SIZES, "hidden_size": hidden, "microbatch_size": microbatch_size,
            "tensor_parallel": tensor_parallel, "n_devices": n_devices or devices,
            "n_microbatches": n_microbatches, "overlap": overlap,
        }  # fmt: skip
        rows.append({**row, "seconds": true_seconds(row)})
    return rows
