"""The calls that `pipesim.demo` prints."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest

import pipesim as ps


@pytest.mark.slow
def test_they_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They print an explanation, and write a figure and a page."""
    ps.demo()
    text = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    exec(text, {})  # noqa: S102  # our own
    assert "a step" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"step.png", "step.html"}
