"""The README's code and command lines run as they stand there, and pages' code for processes."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from places import ROOT
from ranks import Ranks
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split
from pipeexec.distributed import Processes
from pipesim.cli import main

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
#: Programs of pages that every process of a run executes.
JOINED = [
    code
    for page in PAGES
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    if "px.join" in code
]
COMMANDS = re.findall(r"^(pipesim .*)$", README, re.MULTILINE)


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 2
    assert JOINED


@pytest.mark.parametrize("name", ["README.md", "docs/explanation/the_idea_in_200_lines.md"])
def test_number_of_schedules(name: str) -> None:
    """Each page that counts the schedules has their number."""
    counts = re.findall(r"(\d+) schedules\b", (ROOT / name).read_text())
    assert counts == [str(len(ps.schedules()))]


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize("code", PYTHON)
@pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")
def test_code(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the text leaves to the reader (stages, batch, loss) are those of a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    workload = build_model("gpt", layers=2, width=16, sequence=16)
    inputs, targets = workload.make_batch(8, 0)
    run(code, {
        "stages": split(workload.layers, 2),
        "inputs": inputs,
        "targets": targets,
        "loss": workload.loss,
        "model": nn.Sequential(*workload.layers),
        "loader": [(inputs, targets)] * 2,
    })  # fmt: skip


def run(code: str, names: dict[str, Any]) -> None:
    """Run code of a page, which knows these names."""
    exec(compile(code, "page.md", "exec"), names)  # noqa: S102 - our own text


def joined(processes: Processes, code: str, folder: str) -> None:
    """Run a program that joins the other processes, which this one has done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(px, "join", lambda timeout: nullcontext(processes))
        run(code, {})


@pytest.mark.parametrize("code", JOINED)
def test_code_of_several_processes(code: str, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(joined, code=code, folder=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0
