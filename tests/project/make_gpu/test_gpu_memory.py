"""Step ``memory`` of ``make gpu``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from gpu_modules import part


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_script")
@pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")
def test_messages_are_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each schedule, as they pass between the same slices."""
    calibration = importlib.import_module("pipeexec.profiling.calibration")
    measure, pairs_of_calls = calibration.measure_transfers, []

    def counted(pipeline: Any, pairs: Any, **options: Any) -> Any:
        pairs_of_calls.append(tuple(pairs))
        return measure(pipeline, pairs, **options)

    monkeypatch.setattr(calibration, "measure_transfers", counted)
    report = part("report").Report(tmp_path / "text.txt", dry=True)
    part("memory").memory(part("bench").Bench(tmp_path, dry=True), report)
    assert "1f1b: no GPU whose allocator could be asked" in report.path.read_text()
    assert len(pairs_of_calls) == len(set(pairs_of_calls)) > 0
