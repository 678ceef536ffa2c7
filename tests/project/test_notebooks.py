"""Every notebook runs from top to bottom."""

from __future__ import annotations

import time
from pathlib import Path
from subprocess import Popen

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    """Without this, a moved folder would leave nothing to run and nothing to fail."""
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, notebooks: tuple[Popen[bytes], Path]) -> None:
    """No cell raises."""
    process, outcomes = notebooks
    outcome = outcomes / notebook.stem
    while not outcome.exists() and process.poll() is None:
        time.sleep(0.1)
    assert outcome.exists(), f"run_notebooks.py ended with status {process.returncode}"
    assert outcome.read_text() == ""
