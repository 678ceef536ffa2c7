"""Warnings, advice and the first line of the command ``pipesim`` for models on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_output import fail

from pipesim.cli import main

CONFIG = """\
devices = 2
microbatches = 4
schedule = ["1f1b", "gpipe"]
[costs.transformer]
model = "gpt2_xl"
gpu = "h100_sxm"
microbatch_size = 1
partition = "even"
tensor_parallel = 5
recompute = "full"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(CONFIG)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[str, list[str]]:
    """Return the output and the lines on stderr of a command that succeeds."""
    assert main([str(arg) for arg in args]) == 0
    out, err = capsys.readouterr()
    return out, err.splitlines()


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_warning_is_one_line_without_code(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two schedules warn alike: once is enough. Its advice is what the file can have."""
    jobs = ["--jobs", 1] if command == "sweep" else []
    out, (warning,) = run(capsys, command, "--config", config, *jobs)
    assert warning.startswith("pipesim: warning: tensor_parallel=5, but the network has no nodes")
    assert 'network = { preset = "dgx_h100" } in [costs]' in warning
    assert "gpipe" in out


def test_warnings_of_workers_are_shown_once(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of other processes too, whose own stderr is that of the command."""
    assert main(["sweep", "--config", str(config), "--jobs", "2"]) == 0
    err = capfd.readouterr().err
    assert err.count("the network has no nodes") == 1
    assert "CostsWarning" not in err


def test_the_first_line_has_gpus_and_recomputed_layers(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(capsys, "simulate", "1f1b", "--config", config)
    assert out.splitlines()[0] == (
        "1f1b: 2 devices of 5 GPUs (10 GPUs), 2 stages, 4 micro-batches, "
        "recompute full in backwards, never as tasks"
    )


@pytest.mark.parametrize(
    ("line", "table"),
    [
        ('model = "gpt2_xl"', "[costs.transformer]"),
        ("transformer = { n_layers = 4 }", "[costs]"),
        ("forward = 1.0", "[costs]"),
        ("latency = 1.0", "[costs.network]"),
    ],
)
def test_a_key_outside_its_table(
    line: str, table: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"{line}\n{CONFIG}")
    assert f"; it belongs in {table}" in fail(capsys, "compare", "--config", config)
