"""Every notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Folders of settings, which would otherwise be the user's.
SETTINGS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


def test_there_are_notebooks() -> None:
    """Without this, a moved folder would leave nothing to run and nothing to fail."""
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell raises in a folder without files and settings."""
    import nbclient  # takes a second, which a run without notebooks does without
    import nbformat

    for name in SETTINGS:
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    work = tmp_path / "work"
    work.mkdir()
    nbclient.NotebookClient(
        nbformat.read(notebook, as_version=4),
        timeout=300,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(work)}},
    ).execute()
