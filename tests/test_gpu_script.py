"""``benchmarks/gpu.py``: its steps, tiny and on CPU workers, and what it does if they fail."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "gpu.py")])
    yield importlib.import_module("gpu")
    for name in [n for n in sys.modules if n.startswith("on_gpu") or n in ("gpu", "_machine")]:
        del sys.modules[name]


def test_a_dry_run_runs_every_step(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writes nothing where results are."""
    assert script.main(["--dry-run", "--out", str(tmp_path / "results")]) == 0
    said = capsys.readouterr().out
    for name in script._DRY:
        assert f"{name:<14} ok" in said
    assert "zbv as a CUDA graph" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('fine')", "ok", "fine"),
        ("raise SystemExit(3)", "missed", ""),
        ("raise ValueError('bad')", "failed", "ValueError: bad"),
        ("import time; print('slow'); time.sleep(60)", "too late", "stopped after 1 s in: slow"),
    ],
)
def test_a_step_is_a_process_of_its_own(
    script: ModuleType, tmp_path: Path, code: str, status: str, said: str
) -> None:
    """However it ends, its log is there and the others run."""
    seconds = 1.0 if "60" in code else 30.0
    outcome = script.run_process("step", [sys.executable, "-c", code], seconds, tmp_path)
    assert (outcome.status, outcome.said) == (status, said)
    assert (tmp_path / "step.log").is_file()


def test_what_is_missing_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PACKAGES", ("numpy", "no_such_package"))
    assert script.main(["--dry-run"]) == 1
    assert "lacks no_such_package" in capsys.readouterr().err


def test_a_step_that_raises_says_where(script: ModuleType, tmp_path: Path) -> None:
    """And one that misses a target is told apart."""
    module = importlib.import_module("on_gpu.host")

    def misses(bench: object, report: object) -> None:
        report.check(False, "too slow")  # type: ignore[attr-defined]
        report.end()  # type: ignore[attr-defined]

    for call, code, said in ((misses, 3, "MISSED too slow"), (None, 1, "TypeError")):
        module.host = call  # type: ignore[attr-defined]
        assert script.run_here("host", tmp_path, dry=True) == code
        assert said in (tmp_path / "host.txt").read_text()


def test_no_two_steps_need_more_time_than_there_is(script: ModuleType) -> None:
    """The validations, on which most depends, fit in whatever the first step takes."""
    first = [s.seconds for name, s in script.STEPS.items() if s and name[:4] in ("envi", "vali")]
    assert sum(first) < script.LIMIT < 480
