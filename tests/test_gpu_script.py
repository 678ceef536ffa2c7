"""``benchmarks/gpu.py``: its steps, tiny and on CPU workers, and what it does if they fail."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_cuda import FakeGpu
from torch import nn

import pipesim as ps

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
    assert "gradients, zb_h1, torch.distributed.pipelining: " in said
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


SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])


def torch_runtime(schedule: str, devices: list[Any]) -> Any:
    """Return torch's runtime of linear layers, a stage a device."""
    module = importlib.import_module("on_gpu.torch_runtime")
    streams = importlib.import_module("on_gpu.streams").compute_streams(devices)
    n, m = len(devices), 4
    graph = ps.lower(ps.schedule(schedule, n, m), step="none")
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8) for _ in range(n)]
    batch = torch.rand(m, 8), torch.randint(8, (m,))
    return module.TorchRuntime(graph, stages, streams, torch.device("cpu"), batch)


@SCHEDULES
def test_torchs_runtime_runs_our_schedule(script: ModuleType, schedule: str) -> None:
    """In the order that it is given, which is that of each device; other orders are found."""
    module = importlib.import_module("on_gpu.torch_runtime")
    with module.one_process():
        runtime = torch_runtime(schedule, ["cpu"] * 3)
        runtime.step()
    runtime.check_order()
    for stage, order in enumerate(ps.schedule(schedule, 3, 4).orders):
        ran = [action for action in runtime.ran if action.startswith(str(stage))]
        assert ran == [str(action) for action in order]
    runtime.order.reverse()
    with pytest.raises(RuntimeError, match="was given"):
        runtime.check_order()


def sanitized_steps(patch: pytest.MonkeyPatch, spoil: str | None, schedule: str) -> Any:
    """Run torch's runtime on the stand-in for CUDA; return what was found."""
    sanitizing = pytest.importorskip("sanitizing")
    module = importlib.import_module("on_gpu.torch_runtime")
    if spoil is not None:
        patch.setattr(module, spoil, lambda *_: nullcontext())
    with sanitizing.sanitized(patch) as watch, module.one_process():
        runtime = torch_runtime(schedule, [FakeGpu(index) for index in range(3)])
        for _ in range(2):
            runtime.step()
    return watch


@SCHEDULES
def test_torchs_runtime_does_not_race(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """On a stream a stage, as on slices."""
    watch = sanitized_steps(monkeypatch, None, schedule)
    assert not watch.races, watch.races
    assert not watch.freed, watch.freed
    assert watch.n_kept


@pytest.mark.parametrize("spoil", ["joined", "on_stream"])
def test_races_of_torchs_runtime_would_be_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    assert sanitized_steps(monkeypatch, spoil, "zb_h1").races


def test_the_ablation_is_drawn_from_its_run_directory(script: ModuleType, tmp_path: Path) -> None:
    """And a gain over the row above is in the table of each but the first."""
    assert script.run_here("gpipe", tmp_path, dry=True) == 0
    draw = importlib.import_module("on_gpu.figures").draw_ablation
    for path in draw(tmp_path / "gpipe", tmp_path / "ablation"):
        assert path.stat().st_size > 10_000
    rows = [json.loads(line) for line in (tmp_path / "gpipe.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == ["none", "+ dependency", "+ streams", "+ portals"]
    for above, row in pairwise(rows):
        gain = above["predicted"] / row["predicted"]
        assert row["gain_predicted"] == pytest.approx(gain)


def test_intervals_of_ratios(script: ModuleType) -> None:
    """By order statistics: of 20 values the 6th and the 15th."""
    ratio = importlib.import_module("on_gpu.turns").ratio
    assert ratio(range(1, 21), [2.0] * 20) == (5.25, 3.0, 7.5)
