"""Every notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    """Without this, a moved folder would leave nothing to run and nothing to fail."""
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell raises, started where there are no files and no settings of the user's."""
    work = tmp_path / "work"
    work.mkdir()
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=300,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(work)}},
    )
    client.execute()
