"""Every notebook runs from top to bottom."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from places import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Folders of settings, which would otherwise be the user's.
SETTINGS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
#: What a kernel runs that is forked where matplotlib is loaded already: its figures go into cells.
#: Scripts that a notebook starts as ranks are forked too. Calibrations time few messages. Figures
#: are drawn once, small: a tight box would draw them twice.
KERNEL = """
import os, runpy
from few_messages import few_messages
from forked import fork_scripts
fork_scripts()
few = few_messages()
few.__enter__()
os.chdir({folder!r})
import matplotlib
from IPython.core import pylabtools
matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
print_figure = pylabtools.print_figure
def print_small_figure(fig, fmt="png", bbox_inches=None, base64=False, **_):
    return print_figure(fig, fmt, None, base64, dpi=20)
pylabtools.print_figure = print_small_figure
runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""


class ForkedKernel(Forked):
    """A kernel as jupyter_client sees it: as `subprocess.Popen` in a process group of its own."""

    stdout = stderr = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        while os.getpgid(self.pid) != self.pid:  # signals are sent to the group
            time.sleep(1e-3)


def test_there_are_notebooks() -> None:
    """Without this, a moved folder would leave nothing to run and nothing to fail."""
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell raises in a folder without files and settings.

    The kernel is forked from a process that has loaded torch and pandas, which takes seconds.
    """
    import nbclient  # takes a second, which a run without notebooks does without
    import nbformat
    from jupyter_client.provisioning import local_provisioner

    def launch(command: list[str], *, env: dict[str, str], **_: Any) -> ForkedKernel:
        options = command[command.index("ipykernel_launcher") + 1 :]
        return ForkedKernel([str(script), *options], env, tmp_path / "kernel.log")

    for name in SETTINGS:
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    work, script = tmp_path / "work", tmp_path / "kernel.py"
    work.mkdir()
    script.write_text(KERNEL.format(folder=str(work)))
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)
    done = nbclient.NotebookClient(
        nbformat.read(notebook, as_version=4),
        timeout=300,  # seconds a cell
        kernel_name="python3",
    ).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    shown = {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}
    draws = any("plt." in cell.source or "plot.figure" in cell.source for cell in cells)
    assert "image/png" in shown or not draws
