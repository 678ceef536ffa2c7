"""Makespans predicted from a GPU's data sheet alone, before anything has run on it.

Each slice gets its multiprocessors' share of the operations a second, and of the memory's bytes a
second one part in as many as there are slices, since all read at once. Nothing is fitted, so a
prediction is shorter than a step by as much as kernels miss the nominal rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch

import pipesim as ps
from on_gpu.bench import GROUPS, Bench, lowered
from pipeexec.devices.green_contexts import part_size


class DataSheet(NamedTuple):
    """Nominal rates of a GPU.

    Attributes
    ----------
    flops
        FP32 operations a second outside tensor cores.
    bfloat16
        bfloat16 operations a second of tensor cores, for dense matrices.
    bandwidth
        Bytes a second of its memory.
    n_sms, major
        Multiprocessors, and major compute capability.
    """

    flops: float
    bfloat16: float
    bandwidth: float
    n_sms: int
    major: int


#: By a part of the name that the driver gives (NVIDIA's data sheets of H100, H200 and A100).
SHEETS = {
    "H100 80GB HBM3": DataSheet(67e12, 989e12, 3.35e12, 132, 9),
    "H100 PCIe": DataSheet(51e12, 756e12, 2.0e12, 114, 9),
    "H200": DataSheet(67e12, 989e12, 4.8e12, 132, 9),
    "A100-SXM4-80GB": DataSheet(19.5e12, 312e12, 2.039e12, 108, 8),
}
#: Seconds of a kernel beside its work; assumed. The host launches a CUDA graph as a whole.
OVERHEAD = 2e-6
#: Tensors of a parameter's size that SGD with momentum reads and writes.
_MOVED_BY_SGD = 5


def sheet_of(bench: Bench) -> tuple[str, DataSheet] | None:
    """Return the data sheet of the GPU, that of an H100 in a dry run, or None."""
    name = "H100 80GB HBM3" if bench.dry else torch.cuda.get_device_name(bench.gpu)
    return next(((part, sheet) for part, sheet in SHEETS.items() if part in name), None)


def slice_rate(sheet: DataSheet, n: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations a second of one of ``n`` slices: its share by multiprocessors."""
    rate = sheet.bfloat16 if dtype == torch.bfloat16 else sheet.flops
    return rate * part_size(sheet.n_sms, n, sheet.major) / sheet.n_sms


def predicted(bench: Bench, sheet: DataSheet, counts: Sequence[int]) -> pd.DataFrame:
    """Return the makespan of each schedule (s) on each number of slices.

    Columns ``slices``, ``schedule``, ``overlap``, ``makespan``.
    """
    rows: list[dict[str, Any]] = []
    for n in counts:
        m, n_blocks = 2 * n, 2 * n
        layers = bench.layer_costs(n)
        gpu = ps.GPU(flops=slice_rate(sheet, n), bandwidth=sheet.bandwidth / n, overhead=OVERHEAD)
        for name, options in (item for group in GROUPS for item in group):
            for overlap in (True, False):
                graph = lowered(name, n, m, overlap, **options)
                costs = layers.costs(bench.balance(graph.n_stages, n_blocks), gpu)
                makespan = ps.simulate(graph, _with_steps(costs, gpu, graph.n_stages)).makespan
                rows.append(
                    {"slices": n, "schedule": name, "overlap": overlap, "makespan": makespan}
                )
    return pd.DataFrame(rows)


def _with_steps(costs: ps.Costs, gpu: ps.GPU, n_stages: int) -> ps.Costs:
    """Return costs with I and W, each half of B, and SGD's steps, which move memory."""
    half = tuple((costs.per_stage("backward", n_stages) / 2).tolist())
    step = costs.per_stage("parameter_bytes", n_stages) * _MOVED_BY_SGD / gpu.bandwidth
    return replace(costs, input_grad=half, weight_grad=half, optimizer_step=tuple(step.tolist()))
