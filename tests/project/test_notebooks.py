"""Every notebook runs from top to bottom, and has the outputs of today's code."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from pathlib import Path
from types import ModuleType
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
        '["naive"] * 3, ["gpipe", "1f1b", "eager_1f1b"], ': "",
        '[["zb_h1", "zb_h2"], ["zb_1p", "zb_2p"]]': '[["zb_h1", "zb_1p"]]',
        '[["interleaved_1f1b", "looped_bfs"], ["interleaved_zb", "."]]': '[["looped_bfs"]]',
        '[["hanayo", "zbv"], ["v_half", "v_min"], ["dualpipev", "."]]': '[["hanayo", "zbv"]]',
        ", 8, row.m": ", 2, row.m",
    },
    "03_gpipe_module": {
        "range(5)": "range(2)",
        "timeout=0.5": "timeout=0.1",
        "bandwidth=60e6": "bandwidth=600e6",
        "    4,\n    with_bytes": "    3,\n    with_bytes",
    },
    "04_data_parallel": {
        "SAMPLES = 2, 256": "SAMPLES = 2, 16",
        "scaled(1 / 300)": "scaled(1 / 3000)",
        "n_steps=5": "n_steps=2",
        "N_ROUNDS = 512, 3, 6": "N_ROUNDS = 64, 3, 2",
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
        "BATCH = 64, 256": "BATCH = 64, 16",
        "graph_of(4, 4)": "graph_of(4, 2)",
        'costs_of(4, "balanced", placement=graph)': "best.costs",
        '(5, {"n_chunks": 5})': '(2, {"n_chunks": 2})',
        "((8, 1), (8, 2), (8, 4), (4, 2), (4, 4), (4, 8), (2, 4), (2, 8))": "((8, 1), (4, 4))",
        "16, 32, n_chunks=8": "16, 16, n_chunks=8",
        "causes.max() > 0.01": "causes.max() > 0.02",
    },
    "07_plan": {
        '"global_batch": 128': '"global_batch": 64',
        '"n_chunks": [1, 2, 5]': '"n_chunks": [1, 2]',
        "seconds=3": "seconds=1",
    },
    "09_train": {
        "LENGTH, WIDTH = 32, 24, 48": "LENGTH, WIDTH = 32, 12, 16",
        "n_steps=3": "n_steps=1",
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


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return the tool that stores outputs."""
    path = ROOT / "tools" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_notebook_lists_the_others() -> None:
    """With a time, and a picture of each that has one; a moved folder would leave none to list."""
    first, *others = NOTEBOOKS
    text = first.read_text()
    assert others
    assert re.findall(r"\]\((\w+\.ipynb)\) \| \d+ s \|", text) == [path.name for path in others]
    pictures = {path.name for path in (ROOT / "notebooks" / "pictures").iterdir()}
    assert pictures == set(re.findall(r"\(pictures/([\w.]+)\)", text))


def test_stored_files_are_small() -> None:
    """A browser of the repository shows them."""
    sizes = {path.stem: path.stat().st_size for path in NOTEBOOKS}
    assert max(sizes.values()) < 320e3, sizes
    assert sum(sizes.values()) < 2e6, sizes


def test_varying_cells_are_those_that_use_measured_variables(tool: ModuleType) -> None:
    import nbformat

    sources = [
        "a = f()",
        "import a",
        "b = 1\na",
        "b",
        "b = 2",
        "b",
        "def g():\n    return a",
        "g()",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    assert tool.varying_cells(cells, {0}) == {0, 2, 6, 7}
    assert tool.varying_cells(cells, set()) == set()


def test_differences_are_named(tool: ModuleType) -> None:
    """Of text, of the number of outputs, and of code; of varying cells, of headings."""
    from nbformat import v4

    def notebook(*texts: str) -> Any:
        outputs = [v4.new_output("stream", text=text) for text in texts]
        document = v4.new_notebook(cells=[v4.new_code_cell("f()", outputs=outputs)])
        document.metadata[tool.DIGEST] = tool.digest(document)
        return document

    stored = notebook("1")
    assert list(tool.differences(stored, notebook("1"), set())) == []
    assert list(tool.differences(stored, notebook("2"), {0})) == []
    [text] = tool.differences(stored, notebook("2"), set())
    assert "code cell 0 ('f()' ...)" in text
    [word] = tool.differences(notebook("loss 1"), notebook("error 1"), {0})
    assert "[['loss']]" in word
    [number] = tool.differences(stored, notebook(), {0})
    assert "executed []" in number
    stored.cells[0].source = "g()"
    [code] = tool.differences(stored, notebook("1"), set())
    assert "changed" in code


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    notebook: Path, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell raises in a folder without files and settings; outputs are those that are stored.

    Of cells that measure, that have other code here, or that use variables of such cells, only
    columns of tables, first words of texts, and the number of figures are compared.

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
    stored = nbformat.read(notebook, as_version=4)
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
    cells = tool.code_cells(done)
    pairs = zip(cells, tool.code_cells(stored), strict=True)
    smaller = {k for k, (cell, other) in enumerate(pairs) if cell.source != other.source}
    varying = tool.varying_cells(cells, smaller | tool.measured_cells(cells))
    different = "\n".join(tool.differences(stored, done, varying))
    assert not different, f"{different}\nStore them again: {tool.STORE} {notebook.stem}"
    shown = {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}
    draws = any("plt." in cell.source or "plot.figure" in cell.source for cell in cells)
    assert "image/png" in shown or not draws
