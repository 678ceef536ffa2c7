"""Run notebooks from top to bottom, one after the other: ``run_notebooks.py FOLDER NOTEBOOK...``.

A process of its own, beside the tests, most of which use one core. ``FOLDER`` gets a file a
notebook, named like it: empty, or what was wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import nbclient
import nbformat


def run(path: Path, folder: str) -> str:
    """Run a notebook where there are no files; return what was wrong."""
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=300,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
    )
    try:
        client.execute()
    except Exception:
        return traceback.format_exc()
    return ""


def main(outcomes: Path, paths: list[Path]) -> None:
    """Run all, without settings of the user's."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            os.environ[name] = str(Path(folder) / name.lower())
            Path(os.environ[name]).mkdir()
        for path in paths:
            work = Path(folder) / path.stem
            work.mkdir()
            part = outcomes / f"{path.stem}.part"
            part.write_text(run(path, str(work)))
            part.rename(outcomes / path.stem)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
