"""The code of docs/how_to/project_from_one_device.md runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from places import ROOT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
def test_code_of_the_page() -> None:
    """The plan is for the profiled micro-batch; the stages are those that were predicted."""
    names: dict[str, Any] = {}
    text = (ROOT / "docs/how_to/project_from_one_device.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "projection.md", "exec"), names)  # noqa: S102 - our own text
    assert len(names["stages"]) == 4
    assert names["timeline"].fits
    assert set(names["plans"].table["microbatch_size"]) == {512}
