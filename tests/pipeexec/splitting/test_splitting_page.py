"""The code of docs/how_to/split_a_model.md runs, and prints what the page says."""

from __future__ import annotations

import re

import pytest
import torch
from places import ROOT


@pytest.mark.slow
def test_code_of_the_page(capsys):
    text = (ROOT / "docs/how_to/split_a_model.md").read_text()
    names = {}
    torch.manual_seed(0)
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, "splitting.md", "exec"), names)  # noqa: S102 - our own text
        if "stages.tied_stages" in code:
            assert names["stages"].tied == (((0, "model.embed.weight"), (2, "model.head.weight")),)
            assert names["stages"].tied_stages == ((0, 2),)
    difference, *report, stages = capsys.readouterr().out.splitlines()
    assert float(difference) < 1e-6
    assert report[0] == "3 stages of Language, by blocks of blocks"
    assert stages == "[True, False, True]"
