"""Every notebook runs from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
#: The one that takes longest goes first, so that it does not run alone in the end.
ORDER = sorted(NOTEBOOKS, key=lambda path: path.stem != "04_data_parallel")


def test_there_are_notebooks() -> None:
    """Without this, a moved folder would leave nothing to run and nothing to fail."""
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[object]]]:
    """Run all notebooks, two at a time, where there are no files and no settings of the user's."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield {path: pool.submit(run, path, tmp_path_factory.mktemp("work")) for path in ORDER}
        pool.shutdown(cancel_futures=True)


def run(path: Path, folder: Path) -> None:
    """Run a notebook from top to bottom."""
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=300,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, ended: dict[Path, Future[object]]) -> None:
    """No cell raises."""
    ended[path].result()
