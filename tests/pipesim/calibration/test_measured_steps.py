"""Measured steps from files, DataFrames and mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipesim.calibration.measured_steps import measured_steps
from pipesim.errors import ArgumentError, ArgumentTypeError, UnknownNameError

TEXT = """\
label, model, n_layers, layers_per_stage, sequence_parallel, bytes_per_gradient, schedule, seconds
first, llama3_8b, 4, "1,2,1", true, 2.5, 1f1b, 0.5

second, llama3_8b, 8, , False, , gpipe, 1e-1
"""
FIRST = {
    "label": "first", "model": "llama3_8b", "n_layers": 4, "layers_per_stage": [1, 2, 1],
    "sequence_parallel": True, "bytes_per_gradient": 2.5, "schedule": "1f1b",
}  # fmt: skip
SECOND = {"label": "second", "model": "llama3_8b", "n_layers": 8, "sequence_parallel": False,
          "schedule": "gpipe"}  # fmt: skip
GOOD = {"model": "llama3_8b", "microbatch_size": 1, "n_microbatches": 2}


def written(folder: Path, text: str) -> Path:
    path = folder / "steps.csv"
    path.write_text(text.replace(', "', ',"'))
    return path


def test_a_file_has_numbers_lists_truth_values_and_empty_cells(tmp_path: Path) -> None:
    first, second = measured_steps(written(tmp_path, TEXT))
    assert (first.settings, first.seconds, first.label) == (FIRST, 0.5, "first")
    assert (second.settings, second.seconds) == (SECOND, 0.1)
    assert type(first.settings["n_layers"]) is int
    assert second.where.endswith("steps.csv, line 4")


def test_a_frame_is_read_as_its_file(tmp_path: Path) -> None:
    """An empty cell makes a column of whole numbers one of floats."""
    path = tmp_path / "steps.csv"
    path.write_text("model,microbatch_size,n_replicas,overlap,seconds\nllama3_8b,1,2,True,0.5\n"
                    "llama3_8b,2,,False,0.25\n")  # fmt: skip
    frame = pd.read_csv(path)
    assert frame["n_replicas"].dtype == float
    from_file, from_frame = measured_steps(path), measured_steps(frame)
    assert [s.settings for s in from_file] == [s.settings for s in from_frame]
    assert from_frame[0].settings == {
        "model": "llama3_8b", "microbatch_size": 1, "n_replicas": 2, "overlap": True
    }  # fmt: skip
    assert type(from_frame[0].settings["n_replicas"]) is int
    assert "n_replicas" not in from_frame[1].settings


@pytest.mark.parametrize("cell", ["1", "yes", "True", "0", "no", "false"])
def test_flags_in_any_form(cell: str, tmp_path: Path) -> None:
    """1 is true where a column is true or false, and a number elsewhere."""
    path = written(tmp_path, f"model,n_replicas,overlap,dropout,seconds\ngpt2,1,{cell},1,0.5\n")
    settings = measured_steps(path)[0].settings
    assert settings["overlap"] is (cell in ("1", "yes", "True"))
    assert [type(settings[name]) for name in ("n_replicas", "dropout")] == [int, bool]
    (step,) = measured_steps(pd.DataFrame([{**GOOD, "overlap": np.True_, "seconds": 1.0}]))
    assert step.settings["overlap"] is True


def test_mappings() -> None:
    (step,) = measured_steps([{**GOOD, "seconds": np.float32(0.5)}])
    assert (step.settings, step.seconds, step.label) == (GOOD, 0.5, "row 0")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), None, "fast", True])
def test_seconds_must_be_finite_and_above_zero(seconds: Any) -> None:
    rows = [{**GOOD, "seconds": 1.0}, {**GOOD, "seconds": seconds}]
    with pytest.raises(ArgumentError, match=r"row 1: seconds must be a finite number above 0"):
        measured_steps(rows)
    with pytest.raises(ArgumentError, match=r"row 1: seconds"):
        measured_steps(pd.DataFrame(rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its first line must name columns"),
        ("model,seconds\n", "has no measured step"),
        ("model,second\nllama3_8b,1\n", "unknown column 'second'; did you mean 'seconds'"),
        ("modl,seconds\nllama3_8b,1\n", "unknown column 'modl'; did you mean 'model'"),
        ("tensor_paralel,seconds\n1,1\n", "did you mean 'tensor_parallel'"),
        ("chunks,seconds\n1,1\n", "did you mean 'n_chunks'"),
        ("model,model,seconds\na,b,1\n", "column 'model' occurs twice"),
        ("model,n_layers\nllama3_8b,4\n", "column 'seconds' is missing; give the measured"),
        ("model,seconds\nllama3_8b,1,2\n", "line 2: 3 values for 2 columns"),
        ("model,seconds\nllama3_8b,\n", "line 2: seconds must be a finite number"),
        ('model,seconds\n"llama3_8b,1\n', "cannot read rows from"),
    ],
)
def test_files_that_are_no_table_of_steps(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        measured_steps(written(tmp_path, text))
    assert "steps.csv" in str(caught.value)


def test_rows_of_another_type(tmp_path: Path) -> None:
    for rows in (None, 3, {"seconds": [1.0]}, [1.0, 2.0]):
        with pytest.raises(ArgumentTypeError, match="rows must be the path of a CSV file"):
            measured_steps(rows)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="rows has no measured step"):
        measured_steps([])
    with pytest.raises(ArgumentError, match="cannot read rows from"):
        measured_steps(tmp_path / "missing.csv")
    with pytest.raises(UnknownNameError, match="row 0: unknown column 'second'"):
        measured_steps([{"second": 1.0}])
