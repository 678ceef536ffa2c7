"""The program at the top of docs/how_to/train.md runs; the other code of the page is Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

import pipeexec as px

CODE = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs/how_to/train.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
def test_first_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the model trained."""
    monkeypatch.chdir(tmp_path)
    program, *others = CODE
    for code in others:
        compile(code, "training.md", "exec")
    names: dict[str, Any] = {}
    exec(compile(program, "training.md", "exec"), names)  # noqa: S102 - our own text
    run = names["run"]
    assert run.n_steps == 20
    assert names["output"].shape == (5, 64)
    state = px.read_checkpoint(px.latest_checkpoint("results/run/checkpoints"))["model"]
    model = names["model"].state_dict()
    assert state.keys() == model.keys()
    assert all(torch.equal(state[name], model[name]) for name in model)
