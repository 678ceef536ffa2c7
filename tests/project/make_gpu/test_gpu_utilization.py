"""The table of the page of ``make gpu`` on how slices are used."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_modules import part

import pipesim as ps
from pipeexec.validation.accuracy import Row
from pipeexec.validation.result import Validation

pytestmark = pytest.mark.usefixtures("gpu_script")


def save_run(folder: Path, flops: float | None) -> None:
    """Write a run directory of GPipe, 2 micro-batches on 2 slices, and the records of its step."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    costs = ps.Costs(forward=1.0, backward=2.0)
    slow = ps.Costs(forward=1.0, backward=2.0, network=ps.Network(latency=0.5))
    predicted, measured = ps.simulate(graph, costs), ps.simulate(graph, slow)
    times = (measured.makespan,)
    row = Row(predicted, measured, times, times, (0.0, 0.0), (0.0,))
    Validation({"gpipe": row}, costs).save(folder / "bfloat16" / "graph-on-gpipe", figures=False)
    work: dict[str, Any] = {"kind": "work", "began": 0.0, "ended": 1.0, "slices": 2}
    work |= {"dtype": "bfloat16", "flops": flops, "slice_rate": 8e12}
    (folder / "bfloat16.jsonl").write_text("" if flops is None else json.dumps(work) + "\n")
    part("outcomes").Outcome("bfloat16", "passed", 1.0, "").save(folder)


def test_the_page_tells_rates_and_causes(tmp_path: Path) -> None:
    """Of 9 s predicted and 10 s measured: forwards of 1 s, backwards of 2, messages of 0.5.

    Each slice computes 6 s, and waits 1 s for a forward, 2 s for a backward, and for messages.
    """
    save_run(tmp_path, flops=16e12)
    part("publishing").publish(tmp_path)
    page = (tmp_path / "README.md").read_text()
    section = page[page.index("## Use of the slices") : page.index("## What failed")]
    title, _, *rows = (line for line in section.splitlines() if line.startswith("|"))
    assert title.split(" | ")[4:] == [
        "TFLOP/s", "share", "while busy", "warm up", "cool down", "latency |"
    ]  # fmt: skip
    assert rows == [
        "| 2 | gpipe | True | bfloat16 | 0.8 | 10.0% | 16.7% "
        "| 11.1%, 10.0% | 22.2%, 20.0% | 0.0%, 10.0% |"
    ]
    assert (tmp_path / "utilization.csv").is_file()


def test_the_table_needs_no_data_sheet(tmp_path: Path) -> None:
    """Nor the records of the step, which older archives lack; runs that were cut are left out."""
    save_run(tmp_path, flops=None)
    (tmp_path / "validation-2" / "eager-on-gpipe").mkdir(parents=True)
    table = part("utilization").utilization(tmp_path)
    (row,) = part("utilization").readable(table).to_dict("records")
    assert [row[name] for name in ("type", "TFLOP/s", "share", "while busy")] == ["-"] * 4
    assert row["cool down"] == "22.2%, 20.0%"


@pytest.mark.parametrize("n", [2, 4])
def test_operations_of_a_step_are_recorded(gpu_script: ModuleType, tmp_path: Path, n: int) -> None:
    """Two for each weight of a product and each token forward, and twice as many backward.

    The two products of attention have as many as 2 x the sequence's weights a token and width.
    """
    bench = part("bench").Bench(tmp_path, dry=True)
    report = part("report").Report(tmp_path / "text.txt", dry=True)
    part("validation")._record_work(bench, report, n)
    (work,) = part("report").records_of(report.records)
    weights = [x for x in bench.layers(2 * n).parameters() if x.dim() == 2][2:]  # no embeddings
    tokens = 2 * n * bench.sequence
    products = sum(x.numel() for x in weights) + 2 * n * 2 * bench.sequence * bench.width
    assert work["flops"] == 3 * 2 * tokens * products
    assert work["slice_rate"] == 67e12 * {2: 64, 4: 32}[n] / 132
