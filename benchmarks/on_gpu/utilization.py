"""Use of slices by the measured steps of validations, from their run directories.

Operations a second over a slice's share of the data sheet, and idle time by its cause.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

import pipeexec as px
from on_gpu.report import records_of
from on_gpu.steps import STEPS
from pipeexec.validation.accuracy import Row
from pipesim.analysis.idle import CAUSES, idle_shares
from pipesim.errors import RunDirectoryError

#: What the page says of the table.
ABOUT = (
    "Means over the slices, in the median step. `TFLOP/s`: of matrix products alone. `share`: of "
    "the slice's rate by the data sheet, which is its share of the multiprocessors. `while busy`: "
    "the same, over the seconds in which it computes. The other columns are the bubble by cause, "
    "as shares of the makespan: predicted, then measured. Causes below 0.05 % in all rows are left "
    "out."
)


def utilization(folder: Path) -> pd.DataFrame:
    """Return a row for each validated schedule, transfers overlapping, of a folder of results.

    ``rate`` is operations a second of a slice, over the makespan. ``share`` and ``busy_share`` are
    over the rate of the data sheet, and NaN where that is unknown. Columns such as
    ``latency_predicted`` and ``latency_measured`` are shares of all slices' time.
    """
    rows: list[dict[str, Any]] = []
    for step in (name for name in STEPS if STEPS[name].module == "on_gpu.validation"):
        work = next((x for x in records_of(folder / f"{step}.jsonl") if x["kind"] == "work"), {})
        for kind in ("graph", "eager"):
            for run in sorted((folder / step).glob(f"{kind}-on-*")):
                try:
                    validated = px.load_run(run).rows
                except RunDirectoryError:  # the step was cut
                    continue
                about = {"step": step, "cuda_graph": kind == "graph", "dtype": work.get("dtype")}
                rows += [
                    {**about, "schedule": name, **_use(row, work)}
                    for name, row in validated.items()
                ]
    return pd.DataFrame(rows)


def _use(row: Row, work: dict[str, Any]) -> dict[str, Any]:
    """Return the rate of a slice, and the shares of causes of idle time."""
    measured = row.measured
    flops, peak = work.get("flops"), work.get("slice_rate")
    rate, busy_rate = (
        float("nan") if flops is None else flops / seconds
        for seconds in (measured.n_devices * measured.makespan, measured.busy.sum())
    )
    shares = idle_shares({"predicted": row.predicted, "measured": measured})
    return {
        "slices": measured.n_devices, "rate": rate,
        "share": rate / (peak or float("nan")), "busy_share": busy_rate / (peak or float("nan")),
        **{f"{cause}_{kind}": shares.loc[kind, cause] for cause in CAUSES for kind in shares.index},
    }  # fmt: skip


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table in TFLOP/s and per cent."""
    texts: dict[str, Any] = {
        "slices": table["slices"], "schedule": table["schedule"],
        "CUDA graph": table["cuda_graph"], "type": table["dtype"].fillna("-"),
        "TFLOP/s": _texts(table["rate"] / 1e12, "{:.3g}"),
        "share": _texts(table["share"], "{:.1%}"),
        "while busy": _texts(table["busy_share"], "{:.1%}"),
    }  # fmt: skip
    for cause in CAUSES:
        pair = table[[f"{cause}_predicted", f"{cause}_measured"]]
        if pair.to_numpy().max() >= 0.0005:
            texts[cause.replace("_", " ")] = [f"{a:.1%}, {b:.1%}" for a, b in pair.to_numpy()]
    return pd.DataFrame(texts)


def _texts(column: pd.Series[float], form: str) -> pd.Series[str]:
    return column.map(lambda value: "-" if pd.isna(value) else form.format(value))
