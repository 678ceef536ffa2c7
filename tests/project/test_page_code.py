"""Every block of Python in the documentation is run: by the site's build or by a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from pipeexec.training.read_config import read_config

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("[!_]*/*.md")])
FRONT_MATTER = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
#: First line of a block that only a GPU can run.
NEEDS_GPU = "# Needs a GPU.\n"
#: The fence of a block, its language with a directive's braces, and its content.
BLOCK = re.compile(r"^(`{3,}|~{3,}|:{3,})[ ]*([^\s`:]*)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
#: Names of Python that no test looks for.
OTHER_NAMES = ("py", "python3", "pycon", "ipython", "{code-block}", "{python}")


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the blocks of a page in these languages, without the lines of tags."""
    matches = BLOCK.findall(page.read_text())
    return [code for _, language, code in matches if language in languages]


def is_run(code: str) -> bool:
    """Tell whether a block of Python has a test that runs it, or is one for GPUs.

    `test_readme.py` runs those with ``px.join``.
    """
    return "with px.join(" in code or code.startswith(NEEDS_GPU)


def test_python_is_run() -> None:
    """A block that nothing runs is to become a ``{code-cell}``."""
    for page in PAGES:
        unrun = [code for code in blocks(page, "python") if not is_run(code)]
        assert unrun + blocks(page, *OTHER_NAMES) == [], page


def test_cells_are_run() -> None:
    """The build runs the cells of pages with this front matter alone."""
    pages = [page for page in PAGES if blocks(page, "{code-cell}")]
    assert [page for page in pages if not page.read_text().startswith(FRONT_MATTER)] == []


def test_python_compiles() -> None:
    for page in PAGES:
        for code in blocks(page, "{code-cell}", "python"):
            without_tags = re.sub(r"\A:tags:.*\n", "", code)
            compile(re.sub(r"^[!%].*$", "", without_tags, flags=re.MULTILINE), page, "exec")


@pytest.mark.parametrize("page", sorted(DOCS.glob("reference/*.md")), ids=lambda page: page.stem)
def test_cells_of_the_reference(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cells take less than a second, and call inner functions that a change may move."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in blocks(page, "{code-cell}"):
        exec(re.sub(r"\A:tags:.*\n", "", cell), names)  # noqa: S102 - our own pages


def test_configurations(tmp_path: Path) -> None:
    """A block of TOML has sections and keys that ``pipeexec train`` reads."""
    path = tmp_path / "train.toml"
    for page in PAGES:
        for text in blocks(page, "toml"):
            path.write_text(text)
            assert read_config(path).path == path, page


def test_blocks_are_found(tmp_path: Path) -> None:
    """One of each kind; a page with a block that nothing runs is seen."""
    assert sum(bool(blocks(page, "{code-cell}")) for page in PAGES) > 20
    assert any(code.startswith(NEEDS_GPU) for page in PAGES for code in blocks(page, "python"))
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nps.simulate(graph)\n```\n\n```\nmake demo\n```\n")
    assert blocks(page, "python") == ["ps.simulate(graph)\n"]
    assert not is_run(*blocks(page, "python"))
