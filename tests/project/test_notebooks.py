"""Every notebook runs from top to bottom."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from case_choice import EVERY_CASE
from forked import Forked
from places import HELPERS, ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = str(HELPERS / "notebook_kernel.py")
#: Folders of settings, which would otherwise be the user's.
SETTINGS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
#: By notebook, parts of its code and what runs in their place: fewer repetitions, smaller models.
#: They run as they are with ``FAULTS=all``, and for the pages that ``make docs`` makes of them.
SMALLER = {
    "01_first_look": {"width=128, sequence=128": "width=32, sequence=32"},
    "02_schedules": {
        "n_devices=4, n_microbatches=8": "n_devices=2, n_microbatches=4",
        "(4, 8, 12, 16, 24)": "(4, 8)",
        '[["interleaved_1f1b", "looped_bfs"], ["interleaved_zb", "."]]': '[["looped_bfs"]]',
        '[["hanayo", "zbv"], ["v_half", "v_min"], ["dualpipev", "."]]': '[["hanayo", "zbv"]]',
    },
    "03_gpipe_module": {"range(5)": "range(2)", "timeout=0.5": "timeout=0.1"},
    "04_data_parallel": {
        "SAMPLES = 2, 256": "SAMPLES = 2, 64",
        "n_steps=5": "n_steps=2",
        "N_ROUNDS = 512, 3, 6": "N_ROUNDS = 256, 3, 2",
        "high - low > 1e-3": "high - low > 0.1",
        "(8, 16, 64, 256, 1024)": "(8, 16)",
        "scaled(256, 8192": "scaled(16, 8192",
        "scaled(128, ": "scaled(16, ",
        "apart(64, ": "apart(8, ",
        "in (8, 4, 1):": "in (8, 1):",
        "in (1, 2, 4, 8, 16)": "in (1, 2, 4)",
    },
    "05_cluster": {"N_STEPS = 128": "N_STEPS = 16"},
    "06_choose_a_configuration": {
        "BATCH = 64, 256": "BATCH = 64, 32",
        '(5, {"n_chunks": 5})': '(2, {"n_chunks": 2})',
        "((8, 1), (8, 2), (8, 4), (4, 2), (4, 4), (4, 8), (2, 4), (2, 8))": "((8, 1), (4, 4))",
        "16, 32, n_chunks=8": "16, 16, n_chunks=8",
    },
    "07_plan": {
        '"global_batch": 128': '"global_batch": 64',
        '"n_chunks": [1, 2, 5]': '"n_chunks": [1, 2]',
    },
    "09_train": {
        "range(160)": "range(64)",
        "data[:128]": "data[:48]",
        "data[128:]": "data[48:]",
        "n_steps=10": "n_steps=6",
        "n_steps=20": "n_steps=9",
        "[15]": "[8]",
    },
    "11_stragglers": {
        "n_steps=32": "n_steps=2",
        "n_steps=2)": "n_steps=1)",
        "(1.0, 1.5, 2.0)": "(1.0, 2.0)",
    },
}


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
        return ForkedKernel([KERNEL, str(work), *options], env, tmp_path / "kernel.log")

    for name in SETTINGS:
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)
    document = nbformat.read(notebook, as_version=4)
    for old, new in () if EVERY_CASE else SMALLER.get(notebook.stem, {}).items():
        assert any(old in cell.source for cell in document.cells), f"SMALLER: there is no {old!r}"
        for cell in document.cells:
            cell.source = cell.source.replace(old, new)
    done = nbclient.NotebookClient(
        document,
        timeout=300,  # seconds a cell
        kernel_name="python3",
    ).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    shown = {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}
    draws = any("plt." in cell.source or "plot.figure" in cell.source for cell in cells)
    assert "image/png" in shown or not draws
