"""A vocabulary that is divided over all devices trains as whole matrices: the how-to's program."""

from __future__ import annotations

import re
from typing import Any

import pytest
from places import ROOT

import pipesim as ps

PAGE = ROOT / "docs" / "how_to" / "divide_the_vocabulary.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_the_program_of_the_how_to() -> None:
    """Its last cells assert that loss and all gradients are those of the unsplit model."""
    cells = re.findall(r"```\{code-cell\}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    train, check = (cell for cell in cells if "torch" in cell)
    assert "assert_close" in check
    names: dict[str, Any] = {"ps": ps}
    exec(train, names)  # noqa: S102 - our own page
    exec(check, names)  # noqa: S102
    # Three devices, and a vocabulary that they do not share evenly.
    exec(  # noqa: S102
        train.replace("p, rows, width = 2, 5, 16", "p, rows, width = 3, 4, 16")
        .replace("torch.randn(p * rows, width)", "torch.randn(p * rows - 1, width)")
        .replace("torch.randint(p * rows, ", "torch.randint(p * rows - 1, ")
        .replace("1: tokens}", "1: tokens, 2: tokens}"),
        names,
    )
    exec(check, names)  # noqa: S102
