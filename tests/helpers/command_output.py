"""Run the command ``pipesim`` and read its output."""

from __future__ import annotations

import pytest

import pipesim as ps
import pipesim.plot.paper_figure
import pipesim.sweeps.settings
from pipesim.cli import main

SHAPE = ["--devices", "4", "--microbatches", "8"]
BASE = [*SHAPE, "--forward", "1e-3", "--backward", "2e-3"]
SLOW = [*BASE, "--latency", "2e-3", "--bandwidth", "1e9", "--output-bytes", "1e6"]
SLOW_COSTS = ps.Costs(
    forward=1e-3, backward=2e-3, output_bytes=1e6, network=ps.Network(latency=2e-3, bandwidth=1e9)
)


def rows(text: str) -> list[list[str]]:
    """Return the words of each line that has any."""
    return [line.split() for line in text.splitlines() if line.strip()]


def succeed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run the command, which must succeed, and return what it printed."""
    assert main([str(arg) for arg in args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def fail(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run the command, which must fail with one line on stderr, and return that line."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith("pipesim: error: ")
    return err


def same_times(a: ps.Timeline, b: ps.Timeline) -> bool:
    """Tell whether the same tasks start and end at the same times."""
    columns = ["op", "stage", "microbatch"]
    frames = [t.frame.sort_values(columns).reset_index(drop=True) for t in (a, b)]
    return frames[0].drop(columns="stream").equals(frames[1].drop(columns="stream"))
