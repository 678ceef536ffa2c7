"""Each script of ``docs/examples`` prints what its docstring says."""

from __future__ import annotations

import ast
import runpy
import textwrap
from pathlib import Path

import pytest
import torch
from places import ROOT

SCRIPTS = sorted((ROOT / "docs/examples").glob("*.py"))


def test_scripts() -> None:
    assert SCRIPTS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_prints_what_it_says(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    _, _, expected = docstring.partition("Prints::\n")
    n_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(n_threads)
        torch._dynamo.reset()
    assert capsys.readouterr().out.strip() == textwrap.dedent(expected).strip()
