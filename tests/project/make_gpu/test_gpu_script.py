"""Steps of ``make gpu``, tiny and on CPU workers, and how their processes end."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from case_choice import EVERY_CASE
from gpu_modules import FAILS, HANGS, IS_KILLED, MISSES, PASSES, part

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")


# Steps


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages", "empty_figures")
def test_a_dry_run_runs_every_step(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its archive holds what a reader wants to see.

    `validation-4` is as `validation-2`; `features` and `instrument` have tests of their own.
    """
    steps, outcomes, packing = part("steps"), part("outcomes"), part("packing")
    ran, packed, unpacked = (tmp_path / name for name in ("ran", "packed", "found"))
    ran.mkdir()
    packed.mkdir()
    names = [steps.WARM_UP, *steps.DRY]
    # `bfloat16` validates as well, and `test_races` has the steps of `sanitizer`.
    others = () if EVERY_CASE else ("bfloat16", "sanitizer")
    for name in ("validation-4", "features", "instrument", *others):
        names.remove(name)
    for name in names:
        with monkeypatch.context() as patch:
            pairs_of_calls = _counted_calibrations(patch)
            assert gpu_script.run_here(name, ran, dry=True) == 0, (ran / f"{name}.txt").read_text()
        if name == "memory":  # whose schedules share slices, between which messages are timed once
            assert len(pairs_of_calls) == len(set(pairs_of_calls)) > 0
        outcomes.Outcome(name, "passed", 1.0, "", is_dry=True).save(ran)
    assert "1f1b: no GPU whose allocator could be asked" in (ran / "memory.txt").read_text()
    _check_ablation(ran)
    packing.pack(names, ran, packed)
    assert {file.name for file in packed.iterdir()} == {"gpu.tar.gz", "summary.txt"}
    assert gpu_script.main(["--unpack", str(packed / "gpu.tar.gz"), "--out", str(unpacked)]) == 0
    page = (unpacked / "README.md").read_text()
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        assert re.search(rf"\| 2 \| {name} \| False \| True \| float32 \| ([\d.]+ \| ){{3}}", page)
        assert re.search(rf"\| 2 \| {name} \| False \| [\d.e-]+ \|", page)  # gradients
        assert re.search(
            rf"\| 2 \| {name} \| False \| float32 \| [\d.e-]+ \| [\d.]+% ", page
        )  # rates
    for figure in re.findall(r"\((figures/[^)]*)\)", page):
        assert (unpacked / figure).is_file()
        assert (unpacked / figure).with_suffix(".pdf").is_file()
    assert {file.stem for file in (unpacked / "figures").iterdir()} >= {
        "overlay-2-slices-eager", "overlap-gpipe", "gpipe-ablation",
    }  # fmt: skip
    kinds = {"errors", "gradients", "overlap", "gpipe", "host", "peers", "soak", "data-sheet",
             "noise", "utilization"}  # fmt: skip
    assert kinds <= {file.stem for file in unpacked.glob("*.csv")}


def _counted_calibrations(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list that gets the pairs of devices of each calibration of messages."""
    calibration = importlib.import_module("pipeexec.profiling.calibration")
    measure, pairs_of_calls = calibration.measure_transfers, []

    def counted(pipeline: Any, pairs: Any, **options: Any) -> Any:
        pairs_of_calls.append(tuple(pairs))
        return measure(pipeline, pairs, **options)

    patch.setattr(calibration, "measure_transfers", counted)
    return pairs_of_calls


def _check_ablation(ran: Path) -> None:
    """Rows of the ablation have gains over the row above; the figure names them."""
    *rows, orders = map(json.loads, (ran / "gpipe.jsonl").read_text().splitlines())
    assert (orders["kind"], orders["steps"]) == ("engine-orders", 3)
    assert 1 <= orders["orders"] <= 3
    assert [row["row"] for row in rows] == ["none", "+ dependency", "+ streams", "+ portals"]
    for above, row in pairwise(rows):
        for kind in ("predicted", "measured"):
            assert row[f"gain_{kind}"] == pytest.approx(above[kind] / row[kind])
    figures, drawn = part("figures"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "overlay", lambda comparisons: drawn.extend(comparisons))
        patch.setattr(figures, "_save", lambda figure, to: None)
        figures.draw_ablation(ran / "gpipe" / "ablation", ran / "ablation")
    assert drawn == [
        "none",
        *(
            f"{row['row']}: {row['gain_measured']:.2f}x (predicted {row['gain_predicted']:.2f}x)"
            for row in rows[1:]
        ),
    ]


def test_a_step_that_raises_says_where(gpu_script: ModuleType, tmp_path: Path) -> None:
    """And one that misses a target is told apart."""
    module = part("host")

    def misses(bench: object, report: Any) -> None:
        report.check(False, "too slow")
        report.end()

    for call, code, text in ((misses, 3, "MISSED too slow"), (None, 1, "TypeError")):
        module.host = call  # type: ignore[attr-defined]
        assert gpu_script.run_here("host", tmp_path, dry=True) == code
        assert text in (tmp_path / "host.txt").read_text()


def test_gradients_are_checked_before_times(gpu_script: ModuleType, tmp_path: Path) -> None:
    """A validation that is cut has compared them."""
    module, report = part("validation"), part("report").Report(tmp_path / "said.txt", dry=True)
    calls: list[str] = []

    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module.gradient_error = lambda *a, **_: calls.append(a[1]) or 0.0  # type: ignore[attr-defined]
    module.validate = cut  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        module.validation(part("bench").Bench(tmp_path, dry=True), report, 2)
    assert calls == ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"]
    assert len(re.findall("^ok .*limit", report.path.read_text(), re.MULTILINE)) == 5


@pytest.mark.slow
def test_memory_is_drawn_from_its_files(gpu_script: ModuleType, tmp_path: Path) -> None:
    """As the step leaves them on a GPU."""
    import pipesim as ps

    costs = ps.Costs(forward=1e-3, backward=2e-3, activation_bytes=1 << 20, parameter_bytes=1 << 22)
    predicted = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4)), costs)
    for name in ("timeline", "predicted"):
        predicted.save(tmp_path / f"gpipe-{name}.csv")
    costs.save(tmp_path / "gpipe-costs.json")
    rows = "gpu,time,nbytes\ncuda:0,0.0,8388608.0\ncuda:0,0.004,16777216.0\n"
    (tmp_path / "gpipe-allocated.csv").write_text(rows)
    assert part("figures").draw_memory(tmp_path, "gpipe", tmp_path / "drawn")
    assert (tmp_path / "drawn.png").is_file()
    assert part("memory")._rise(predicted) == predicted.memory().groupby("device")[
        "nbytes"].agg(lambda x: x.max() - x.iloc[0]).sum()  # fmt: skip
    assert not part("figures").draw_memory(tmp_path, "1f1b", tmp_path / "drawn")


# How steps end


@pytest.mark.parametrize(
    ("code", "status", "remark"),
    [
        (PASSES, "passed", "fine"),
        (MISSES, "missed", "1 of 2 targets, first: error of 7 %"),
        (FAILS, "failed", "ValueError: bad"),
        (IS_KILLED, "failed", "ended by SIGKILL in: half way"),
        (HANGS, "cut", "stopped after 1 s in: slow"),
    ],
)
def test_a_step_is_a_process_of_its_own(
    gpu_script: ModuleType, tmp_path: Path, code: str, status: str, remark: str
) -> None:
    """However it ends, its log is there; one that hangs leaves the stack of every thread."""
    log, seconds = tmp_path / "host.log", 0.7 if code == HANGS else 30.0
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = part("process").run_process(
        command, log, seconds, gpu_script.environment_of_steps(), tmp_path
    )
    assert gpu_script.status_of(ended, tmp_path / "host.txt") == (status, remark)
    if code == HANGS:
        assert "in asleep" in log.read_text()
        assert "Current thread" in log.read_text()


@pytest.mark.slow
def test_a_process_that_runs_shows_its_stacks(gpu_script: ModuleType, tmp_path: Path) -> None:
    """Its threads change while they are shown, at which the fault handler may crash."""
    code = """
import threading
from on_gpu.process import print_stacks_when_asked
print_stacks_when_asked()
def busy():
    while True:
        sum(range(10))
threading.Thread(target=busy, name="worker", daemon=True).start()
print("runs")
busy()
"""
    log = tmp_path / "log"
    part("process")._ASKED = 0.5  # type: ignore[attr-defined]
    ended = part("process").run_process(
        [sys.executable, "-c", code], log, 0.7, gpu_script.environment_of_steps(), tmp_path,
        answers=True,
    )  # fmt: skip
    assert (ended.code, ended.last_line) == (None, "runs")
    shown = log.read_text().partition("Fatal Python error")[0]
    assert re.search("thread worker:\n(.*\n)* .*in busy", shown)
    assert re.search("thread MainThread:\n(.*\n)* .*in busy", shown)


def test_a_process_that_ignores_signals_is_killed(gpu_script: ModuleType, tmp_path: Path) -> None:
    """With the children that it has."""
    child = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    part("process")._STACKS = 0.5  # type: ignore[attr-defined]
    start = time.perf_counter()
    run_process: Callable[..., Any] = part("process").run_process
    ended = run_process([sys.executable, "-c", code], tmp_path / "log", 0.5, {}, tmp_path)
    assert ended.code is None
    assert time.perf_counter() - start < 30


def test_gradients_that_are_nan_are_no_small_error(gpu_script: ModuleType) -> None:
    """Wherever they are."""
    import torch

    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    largest_error = part("gradients").largest_error
    assert largest_error([good, good * 1.5], [good, good]) == 0.5
    for actual in ([good, bad], [bad, good]):
        assert not largest_error(actual, [good, good]) <= 1e-4
