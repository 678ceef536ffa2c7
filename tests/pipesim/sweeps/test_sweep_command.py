"""The command ``pipesim sweep``: its table, its file of settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from small_sweeps import RESULTS, sweep

from pipesim.cli import main

FLAGS = ["--devices", "2", "--forward", "1e-3", "--backward", "2e-3", "--jobs", "1"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the requested rows, appends them to a file, and resumes from it."""
    out, csv = tmp_path / "rows.jsonl", tmp_path / "table.csv"
    flags = [*FLAGS, "--grid", "microbatches=4,0", "--grid", "recompute=always"]
    for _ in range(2):
        arguments = ["sweep", "gpipe", "1f1b", *flags, "--out", str(out), "--csv", str(csv)]
        assert main(arguments) == 0
        printed, err = capsys.readouterr()
        assert err == ""
        assert [line.split() for line in printed.splitlines()] == [
            ["schedule", "n_microbatches", "recompute", "makespan", "(ms)", "bubble",
             "micro-batches/s", "peak", "memory", "(GiB)"],
            ["gpipe", "4", "always", "19.000", "15.8%", "210.53", "-"],
            ["gpipe", "0", "always", "-", "-", "-", "-"],
            ["1f1b", "4", "always", "19.000", "15.8%", "210.53", "-"],
            ["1f1b", "0", "always", "-", "-", "-", "-"],
            *[f"row {row}: n_microbatches must be at least 1, got 0".split() for row in (1, 3)],
        ]  # fmt: skip
        assert len(out.read_text().splitlines()) == 4
    assert list(pd.read_csv(csv).columns) == ["schedule", "n_microbatches", "recompute", *RESULTS]


CONFIG = """
devices = 2
[costs]
forward = 1e-3
backward = 2e-3
[grid]
schedule = ["gpipe", "1f1b"]
microbatches = [4, 8]
latency = [0.0, 1e-3]
"""


def test_command_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid of the command line overrides the file's, key by key."""
    config, csv = tmp_path / "sweep.toml", tmp_path / "table.csv"
    config.write_text(CONFIG)
    arguments = ["sweep", "--config", str(config), "--jobs", "1", "--csv", str(csv)]
    assert main([*arguments, "--grid", "microbatches=2"]) == 0
    table = pd.read_csv(csv)
    grid = {"schedule": ["gpipe", "1f1b"], "n_microbatches": [2], "latency": [0.0, 1e-3]}
    again = sweep(grid, base={"n_devices": 2, "forward": 1e-3, "backward": 2e-3})
    pd.testing.assert_frame_equal(
        table.drop(columns=["seconds", "error"]),
        again.drop(columns=["seconds", "error"]),
        check_dtype=False,
    )
    assert main(["sweep", "1f1b", *arguments[1:]]) == 0
    assert pd.read_csv(csv)["schedule"].tolist() == ["1f1b"] * 4
    capsys.readouterr()
    assert main(["compare", "gpipe", "--config", str(config)]) == 2
    assert "unknown key 'grid'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpip", *FLAGS, "--grid", "microbatches=1,2"], "did you mean 'gpipe'?"),
        (["gpipe", *FLAGS, "--grid", "n_microbatch=1,2"], "did you mean 'n_microbatches'?"),
        (["gpipe", *FLAGS, "--grid", "recompute=never"], "microbatches is missing"),
        (["gpipe", *FLAGS, "--grid", "microbatches"], "is not of the form KEY=VALUE"),
        (["gpipe", *FLAGS, "--grid", "microbatches=1", "--jobs", "none"], "n_jobs must be"),
        (["gpipe", *FLAGS, "--grid", "microbatches=1", "--out", "/no/file"], "cannot write"),
        ([*FLAGS, "--grid", "microbatches=1"], "no schedule is named"),
        (
            ["--config", "bad.toml", *FLAGS],
            "grid: schedule must be a list of names, got [['gpipe']]",
        ),
        (["gpipe", *FLAGS, "--plot", "a.pdf"], "unrecognized argument --plot"),
    ],
)
def test_command_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text('microbatches = 2\n[grid]\nschedule = [["gpipe"]]\n')
    assert main(["sweep", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
