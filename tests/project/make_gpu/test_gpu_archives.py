"""Archives of ``make gpu``: what is kept, whatever happens to steps, and how it is unpacked."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_modules import FAILS, HANGS, IS_KILLED, PASSES, part


def _runner(
    gpu_script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    limit: float | None = None,
) -> Any:
    """Return a runner of steps that pass, fail, are killed, hang and pass."""
    codes = {"warm-up": PASSES, "environment": PASSES, "overlap": FAILS, "gpipe": IS_KILLED,
             "host": PASSES, "memory": HANGS, "soak": PASSES}  # fmt: skip

    def command(name: str, out: Path, dry: bool) -> list[str]:
        report = f"open({str(out / f'{name}.txt')!r}, 'w').write('measured');"
        return [sys.executable, "-c", report + codes[name]]

    monkeypatch.setattr(gpu_script, "command_of", command)
    monkeypatch.setattr(gpu_script, "ROOT", folder)
    steps = part("steps")
    for name in codes:
        short = steps.step_called(name)._replace(limit=1.0 if name == "memory" else 30.0)
        kept = steps._PREPARATION if name in steps._PREPARATION else steps.STEPS
        monkeypatch.setitem(kept, name, short)
    (folder / "packed").mkdir(parents=True)
    (folder / "out").mkdir()
    names = [name for name in codes if name != "warm-up"]
    return gpu_script.Runner(names, folder / "out", folder / "packed", limit, None, None)


@pytest.mark.slow
def test_an_archive_has_all_that_was_measured(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happened to steps before and behind."""
    wanted = {"warm-up": "passed", "environment": "passed", "overlap": "failed", "gpipe": "failed",
              "host": "passed", "memory": "cut", "soak": "passed"}  # fmt: skip
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    assert {o.step: o.status for o in runner.run()} == wanted
    assert gpu_script.main(["--unpack", str(tmp_path / "packed" / "gpu.tar.gz"), "--out",
                        str(tmp_path / "found")]) == 0  # fmt: skip
    summary = (tmp_path / "found" / "summary.txt").read_text()
    assert [line.split()[:2] for line in summary.splitlines() if line[:1].islower()][1:] == [
        list(item) for item in wanted.items()
    ]
    for name in wanted:
        assert (tmp_path / "found" / f"{name}.txt").read_text() == "measured"


def test_an_archive_is_whole_while_a_step_runs(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a command that is killed leaves what was measured until then."""
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    contents: list[list[str]] = []
    step = runner._step

    def looking(name: str) -> Any:
        outcome = step(name)
        with tarfile.open(tmp_path / "packed" / "gpu.tar.gz") as archive:
            contents.append(archive.getnames())
        summary = (tmp_path / "packed" / "summary.txt").read_text()
        assert f"{name:<14} cut" in summary
        return outcome

    monkeypatch.setattr(runner, "_step", looking)
    runner.names = ["warm-up", "environment", "host"]
    runner.run()
    assert {"warm-up.txt", "warm-up.log", "environment.txt", "host.json"} <= set(contents[-1])


def test_a_limit_cuts_what_is_under_way(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps for which no time is left say so."""
    runner = _runner(gpu_script, monkeypatch, tmp_path, limit=1000.0)
    monkeypatch.setattr(gpu_script, "_LEAST", (0.5, 0.5))
    runner.names = ["warm-up", "memory", "soak"]
    step = runner._step

    def short(name: str) -> Any:
        if name == "memory":
            runner.begin = time.perf_counter() - 1000 + gpu_script._RESERVE[True] + 0.6
        return step(name)

    monkeypatch.setattr(runner, "_step", short)
    results = {o.step: (o.status, o.remark) for o in runner.run()}
    assert results["memory"] == ("cut", "stopped after 1 s in: slow")
    assert results["soak"] == ("not run", "LIMIT=1000 s was reached")


def test_nothing_is_run_on_a_gpu_that_cannot_be_used(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the warm-up shows, or the probes of the environment."""
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    runner.names = ["overlap", "environment"]
    monkeypatch.setattr(gpu_script, "WARM_UP", "overlap")
    results = [(o.status, o.remark) for o in runner.run()]
    assert results == [("failed", "ValueError: bad"), ("not run", "the step overlap did not pass")]


def test_an_interrupt_leaves_what_was_written(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends the step that is under way; results of a step that was not reached stay."""
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    outcome = part("outcomes").Outcome("soak", "passed", 1.0, "of another day")
    outcome.save(tmp_path / "out")
    runner.names = ["warm-up", "memory", "soak"]
    monkeypatch.setattr(part("process"), "_INTERVAL", 0.3)
    packs = runner._pack
    calls: list[int] = []

    def pack() -> None:
        packs()
        calls.append(1)
        if len(calls) == 4:  # while the step memory runs
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_pack", pack)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    with tarfile.open(tmp_path / "packed" / "gpu.tar.gz") as archive:
        names = archive.getnames()
    assert {"warm-up.txt", "memory.txt", "memory.log", "memory.json"} <= set(names)
    assert "soak.json" not in names
    assert [o.remark for o in part("outcomes").outcomes_in(tmp_path / "out")][-1] == outcome.remark


@pytest.mark.parametrize("is_green", [True, False])
def test_figures_of_slices_need_slices(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_green: bool
) -> None:
    """The step `environment` probes what figures rest on; where it lacks, no time is spent."""
    probe = {"kind": "environment", "probe": "slices are green contexts", "met": is_green}
    other = {"kind": "environment", "probe": "streams run side by side", "met": False}
    lines = "\n".join(map(json.dumps, (other, probe)))
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    records = tmp_path / "out" / "environment.jsonl"
    code = f"open({str(records)!r}, 'w').write({lines!r})"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(gpu_script, "command_of", lambda *_: command)
    runner.names = ["environment", "host"]
    last = runner.run()[-1]
    assert last.status == ("passed" if is_green else "not run")
    assert last.remark == ("" if is_green else "the GPU lacks: slices are green contexts")


def test_results_of_one_step_replace_only_its_own(gpu_script: ModuleType, tmp_path: Path) -> None:
    """Archives of several commands are unpacked into one folder."""
    outcomes, packing = part("outcomes"), part("packing")
    for number, steps in enumerate((("environment", "host"), ("host",))):
        folder = tmp_path / str(number)
        (folder / "host").mkdir(parents=True)
        for step in steps:
            outcomes.Outcome(step, "passed", float(number), f"run {number}").save(folder)
        (folder / "host" / f"{number}.csv").write_text("")
        packing.pack(steps, folder, folder)
        packing.unpack(folder / "gpu.tar.gz", tmp_path / "all")
    outcomes.Outcome("environment", "not run", 0.0, "no time").save(tmp_path / "1")
    packing.pack(["environment"], tmp_path / "1", tmp_path / "1")
    packing.unpack(tmp_path / "1" / "gpu.tar.gz", tmp_path / "all")
    remarks = {o.step: o.remark for o in outcomes.outcomes_in(tmp_path / "all")}
    assert remarks == {"environment": "run 0", "host": "run 1"}
    assert [file.name for file in (tmp_path / "all" / "host").iterdir()] == ["1.csv"]


def test_files_that_are_no_archive_are_refused(
    gpu_script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are a dry run's results put in the place of measured ones."""
    outcomes, packing = part("outcomes"), part("packing")
    text, empty = tmp_path / "a.txt", tmp_path / "b.tar.gz"
    text.write_text("no archive")
    with tarfile.open(empty, "w:gz") as archive:
        archive.add(text, "elsewhere.txt")
    evil = tmp_path / "c.tar.gz"
    with tarfile.open(evil, "w:gz") as archive:
        archive.add(text, "../../host.txt")
    measured, dry = tmp_path / "measured", tmp_path / "dry"
    for folder, is_dry in ((measured, False), (dry, True)):
        folder.mkdir()
        outcomes.Outcome("host", "passed", 1.0, "", is_dry=is_dry).save(folder)
    packing.pack(["host"], dry, dry)
    for file, message in (
        (tmp_path / "none", "No such file"), (text, "cannot be unpacked: .*; give the gpu.tar.gz"),
        (empty, "holds no results of make gpu"),
        (evil, "cannot be unpacked: .*; give the gpu.tar.gz"),
        (dry / "gpu.tar.gz", "holds a dry run, and .* measured results; give OUT="),
    ):  # fmt: skip
        assert gpu_script.main(["--unpack", str(file), "--out", str(measured)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert re.search(message, lines[0])
