"""The README's code and command lines run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import matplotlib as mpl
import pytest

from pipeexec.models import build_model, split
from pipesim.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^(pipesim .*)$", README, re.MULTILINE)


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("code", PYTHON)
@pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")
def test_code(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text leaves to the reader (stages, batch, loss) is a small model here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    workload = build_model("gpt", layers=2, width=16, sequence=16)
    inputs, targets = workload.make_batch(8, 0)
    names = {
        "stages": split(workload.layers, 2),
        "inputs": inputs,
        "targets": targets,
        "loss": workload.loss,
    }
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own text


@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0
