"""Modules of JavaScript that run without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from javascript import run_module


def test_bytes_in_and_out(tmp_path: Path) -> None:
    """It imports from a folder, reads bytes and prints bytes."""
    (tmp_path / "double.js").write_text("export const double = (x) => 2 * x;")
    source = """
    import { double } from "./double.js";
    console.log(JSON.stringify((await new Response(Deno.stdin.readable).json()).map(double)));
    """
    assert run_module(source, b"[1, 0.1]", folder=tmp_path) == b"[2,0.2]\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("throw new Error('bad')", "Error: bad"),
        ("Deno.readTextFileSync('/etc/passwd')", "Requires read access"),
        ("await fetch('http://127.0.0.1/')", "Requires net access"),
    ],
)
def test_a_module_that_fails(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_module(source, folder=tmp_path)
