"""Archives of ``make gpu``: what is kept, whatever happens to steps, and how it is unpacked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_modules import FAILS, HANGS, IS_KILLED, MISSES, PASSES, part


def _runner(
    gpu_script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    limit: float | None = None,
    changes: Mapping[str, str] | None = None,
) -> Any:
    """Return a runner of steps that pass, fail, are killed, hang and pass, but for ``changes``."""
    codes = {"warm-up": PASSES, "environment": PASSES, "overlap": FAILS, "gpipe": IS_KILLED,
             "host": PASSES, "memory": HANGS, "soak": PASSES, **(changes or {})}  # fmt: skip

    def command(name: str, out: Path, dry: bool, brief: bool) -> list[str]:
        report = f"open({str(out / f'{name}.txt')!r}, 'w').write('measured');"
        return [sys.executable, "-c", report + codes[name], str(out)]

    monkeypatch.setattr(gpu_script, "command_of", command)
    monkeypatch.setattr(gpu_script, "ROOT", folder)
    steps = part("steps")
    for name in codes:
        short = steps.step_called(name)._replace(limit=1.0 if codes[name] == HANGS else 30.0)
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
    lines = [line.split()[:2] for line in summary.splitlines() if line[:1].islower()][1:]
    assert sorted(lines) == sorted(map(list, wanted.items()))
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


def test_an_archive_is_written_while_a_step_runs(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the step waits for the archive that has what it has written."""
    archive = str(tmp_path / "packed" / "gpu.tar.gz")
    waits = f"""
import tarfile, time
for _ in range(100):
    with tarfile.open({archive!r}) as archive:
        if "host.txt" in archive.getnames():
            raise SystemExit(0)
    time.sleep(0.1)
raise SystemExit("it was not packed")
"""
    runner = _runner(gpu_script, monkeypatch, tmp_path, changes={"host": waits})
    runner.names = ["warm-up", "host"]
    monkeypatch.setattr(part("process"), "_INTERVAL", 0.1)
    assert [(o.status, o.remark) for o in runner.run()] == [("passed", "fine"), ("passed", "")]


#: A command whose steps say that they run. The first word that it is given is its folder, the
#: second one the step that does not end, and the third one a step that is never begun.
_COMMAND = """
import sys, time
from pathlib import Path
import gpu
from on_gpu import process

folder, endless, unbegun = Path(sys.argv[1]), *sys.argv[2:]
process._INTERVAL = 0.1

def command(name, out, dry, brief):
    wait = "while os.getppid() == parent: time.sleep(0.05)" if name == endless else ""
    code = f"import os, time; parent = os.getppid(); print('{name} runs', flush=True)\\n{wait}"
    return [sys.executable, "-S", "-c", code]

def step(name, own=gpu.Runner._step):
    while name == unbegun:
        time.sleep(1.0)
    return own(runner, name)

gpu.command_of = command
runner = gpu.Runner(["host", "memory", "soak"], folder / "out", folder, None, None, None)
runner._step = step
runner.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endless", "unbegun", "ended"),
    [("warm-up", "", []), ("host", "", ["warm-up"]), ("", "soak", ["warm-up", "host", "memory"])],
    ids=["in the warm-up", "in a step", "between steps"],
)
def test_a_command_that_is_killed_leaves_a_page(
    gpu_script: ModuleType, tmp_path: Path, endless: str, unbegun: str, ended: list[str]
) -> None:
    """With all steps that ended, and the one that was under way and its output until then."""
    (tmp_path / "out").mkdir()
    archive, unpacked = tmp_path / "gpu.tar.gz", tmp_path / "unpacked"
    environment = gpu_script.environment_of_steps()
    command = [sys.executable, "-c", _COMMAND, str(tmp_path), endless, unbegun]
    wanted = {endless or ended[-1]: f"{endless or ended[-1]} runs"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for name in ended:
                assert process.stdout.readline().split()[:2] == [name, "passed"]
            give_up = time.perf_counter() + 60
            while wanted.items() - _logs(archive).items():
                assert time.perf_counter() < give_up
                time.sleep(0.02)
        finally:
            process.kill()
    assert gpu_script.main(["--unpack", str(archive), "--out", str(unpacked)]) == 0
    wanted = dict.fromkeys(ended, "passed") | ({endless: "cut"} if endless else {})
    assert {o.step: o.status for o in part("outcomes").outcomes_in(unpacked)} == wanted
    page = (unpacked / "README.md").read_text()
    for name, status in wanted.items():
        assert re.search(rf"^{name} +{status} ", page, re.MULTILINE)
        assert (unpacked / f"{name}.log").read_text() == f"{name} runs\n"
    failures = page.split("## What failed")[1].split("## Steps")[0].strip()
    under_way = f"- `{endless}` cut: it was under way when this was written"
    assert failures == (under_way if endless else "Nothing.")


def _logs(archive: Path) -> dict[str, str]:
    """Return what each step of an archive has printed; it is whole at any time."""
    if not archive.is_file():
        return {}
    with tarfile.open(archive) as members:
        logs = {name[:-4]: members.extractfile(name) for name in members.getnames()
                if name.endswith(".log")}  # fmt: skip
        return {name: log.read().decode().strip() for name, log in logs.items() if log is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("warm-up", FAILS, "failed"),
        ("warm-up", HANGS, "cut"),
        ("environment", FAILS, "failed"),
        ("environment", MISSES.replace("host", "environment"), "missed"),
    ],
    ids=["a warm-up that fails", "a warm-up that hangs", "an environment that fails",
         "an environment that misses"],
)  # fmt: skip
def test_a_first_step_that_does_not_pass_ends_nothing(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    code: str, status: str,
) -> None:  # fmt: skip
    """All others run, in their order."""
    runner = _runner(gpu_script, monkeypatch, tmp_path, changes={name: code})
    runner.names = ["warm-up", "environment", "host", "soak"]
    assert [(o.step, o.status) for o in runner.run()] == [
        (x, status if x == name else "passed") for x in runner.names
    ]


def test_a_step_says_that_it_runs_and_that_it_is_stopped(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With the last line of its output."""
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    runner.names = ["warm-up", "memory"]
    monkeypatch.setattr(part("process"), "_INTERVAL", 0.1)
    monkeypatch.setattr(gpu_script, "_BEAT", 0.3)
    runner.run()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    assert 1 <= sum(bool(re.fullmatch(r"memory +0\.\d s +(slow)?", line)) for line in lines) <= 3
    assert re.fullmatch(r"memory +stopping +\d+\.\d s +slow", lines[-2])
    assert lines[-1].split()[1] == "cut"


def test_no_silence_is_longer_than_fifteen_seconds(gpu_script: ModuleType) -> None:
    """Neither while a step runs nor while it is stopped, and with it the reader of clocks."""
    process, clocks = part("process"), part("clocks")
    assert gpu_script._BEAT + process._INTERVAL <= 15
    assert process._ASKED + process._STACKS + process._KILLED + 3 * clocks._END <= 15


@pytest.mark.slow
def test_a_reader_of_clocks_that_does_not_end_is_killed(
    gpu_script: ModuleType, tmp_path: Path
) -> None:
    """As ``nvidia-smi`` may hang where the GPU does."""
    code = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("1980, 2619", flush=True)
time.sleep(20)
"""
    file = tmp_path / "host.clocks.csv"
    with part("clocks").sampled_clocks(file, [sys.executable, "-c", code]):
        give_up = time.perf_counter() + 30
        while not (file.is_file() and "1980,2619" in file.read_text()):
            assert time.perf_counter() < give_up
            time.sleep(0.02)
        start = time.perf_counter()
    assert time.perf_counter() - start < 15


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


def test_steps_of_least_worth_wait_for_the_others(gpu_script: ModuleType) -> None:
    """As long as the estimates say that there is too little time for all; order stays."""
    steps = part("steps")
    names = ["host", "sanitizer", "validation-2"]
    seconds = {name: steps.step_called(name).estimate for name in names}
    assert steps.next_step(names, sum(seconds.values())) == "host"
    assert steps.next_step(names, sum(seconds.values()) - 1) == "host"  # without the sanitizer
    assert steps.next_step(names, seconds["host"] + seconds["validation-2"] - 1) == "validation-2"
    assert steps.next_step(["sanitizer"], 1.0) == "sanitizer"


def test_a_limit_costs_the_step_of_least_worth(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs last, if time is left after all."""
    runner = _runner(gpu_script, monkeypatch, tmp_path, limit=70.0)
    runner.names = ["warm-up", "soak", "host", "environment"]
    assert [o.step for o in runner.run()] == ["warm-up", "host", "environment", "soak"]
    assert sum(part("steps").step_called(name).estimate for name in runner.names) > 70


def test_an_interrupt_leaves_what_was_written(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends the step that is under way; results of a step that was not reached stay."""
    runner = _runner(gpu_script, monkeypatch, tmp_path)
    outcome = part("outcomes").Outcome("soak", "passed", 1.0, "of another day")
    outcome.save(tmp_path / "out")
    runner.names = ["warm-up", "memory", "soak"]
    monkeypatch.setattr(part("process"), "_INTERVAL", 0.3)
    packs, log = runner._pack, tmp_path / "out" / "memory.log"

    def pack() -> None:
        packs()
        if log.is_file() and "slow" in log.read_text():  # while the step memory runs
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_pack", pack)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    with tarfile.open(tmp_path / "packed" / "gpu.tar.gz") as archive:
        names = archive.getnames()
    assert {"warm-up.txt", "memory.txt", "memory.log", "memory.json"} <= set(names)
    assert "soak.json" not in names
    assert [o.remark for o in part("outcomes").outcomes_in(tmp_path / "out")][-1] == outcome.remark


def _errors(cuda_graph: bool) -> dict[str, Any]:
    """Return a row of the table of errors."""
    zeros = ("error", "error_mean", "error_low", "error_high", "host_share", "bubble_predicted",
             "bubble_measured")  # fmt: skip
    return {
        "slices": 2, "schedule": "gpipe", "cuda_graph": cuda_graph, "overlap": True,
        "dtype": "float32", "data_sheet": None, "predicted": 1e-3, "measured": 1e-3, "note": "",
        **dict.fromkeys(zeros, 0.0), "n_steps": 3,
    }  # fmt: skip


def _write_rows(folder: Path, step: str, kind: str, rows: list[dict[str, Any]]) -> None:
    """Add rows of a table to the results of a step."""
    with (folder / f"{step}.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps({"kind": kind, **row, "began": 10.0, "ended": 20.0}) + "\n")


def test_the_page_begins_with_what_matters_most(
    gpu_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlay, sentence to quote, errors and noise floor, what failed; other figures come last."""
    publishing = part("publishing")
    figures = [("gpipe-ablation", "b"), ("overlay-2-slices-graph", "a"), ("overlay-4-slices", "c")]
    monkeypatch.setattr(publishing, "_figures", lambda *_: iter(figures))
    noise = {"schedule": "1f1b", "slices": 2, "measured_ratio": 0.01, "error_difference": 0.02}
    _write_rows(tmp_path, "validation-2", "errors", [_errors(cuda_graph=True)])
    _write_rows(tmp_path, "validation-2", "noise", [noise])
    for step, status in (("validation-2", "missed"), ("host", "failed")):
        part("outcomes").Outcome(step, status, 1.0, "ValueError: bad", "H100").save(tmp_path)
    (tmp_path / "validation-2.txt").write_text("ok     one\nMISSED gpipe: error of 7 %\n")
    publishing.publish(tmp_path)
    page = (tmp_path / "README.md").read_text()
    order = [
        "# Results of `make gpu`", "![a](figures/overlay-2-slices-graph.png)",
        "On H100, in 2 slices, 1 rows of 1 schedules were predicted", "## Makespan",
        "| 2 | gpipe | True |", "Noise floor: the same row (1f1b, 2 slices)", "## What failed",
        "- `validation-2`: gpipe: error of 7 %", "- `host` failed: ValueError: bad", "## Steps",
        "![b](", "![c](",
    ]  # fmt: skip
    assert sorted(order, key=page.index) == order
    assert page.index("![a](") == page.index("![")
    assert page.count("![") == 3


@pytest.mark.parametrize("lacks", ["slices are green contexts",
                                   "a captured step stays on its slices"])  # fmt: skip
def test_a_premise_that_fails_marks_rows(
    gpu_script: ModuleType, tmp_path: Path, lacks: str
) -> None:
    """And ends nothing: rows of makespans say on the page what they rest on."""
    out, errors = tmp_path / "out", [_errors(cuda_graph) for cuda_graph in (True, False)]
    out.mkdir()
    probes = [{"probe": name, "met": name != lacks} for name in part("steps").PREMISES]
    for step, kind, rows in (("validation-2", "errors", errors), ("environment",) * 2 + (probes,)):
        _write_rows(out, step, kind, rows)
        status = "missed" if step == "environment" else "passed"
        part("outcomes").Outcome(step, status, 1.0, "", is_dry=True).save(out)
    (out / "environment.txt").write_text(f"MISSED {lacks}: no: 1 SM\n")
    clocks = "time,sm_mhz,memory_mhz,watts,celsius,reasons,used_mib\n" + "".join(
        f"{second},{mhz},2619,{watts},50,{reason},9\n"
        for second, mhz, watts, reason in (
            (9, 345, 80, "0x1"), (11, 1980, 300, "0x0"), (12, 1700, 690, "0x4"),
            (13, 1980, 400, "0x0"),
            (14, "[N/A]", "[N/A]", ""), (21, 345, 90, "0x1"),
        )
    )  # fmt: skip
    (out / "validation-2.clocks.csv").write_text(clocks + "15,19")
    part("publishing").publish(out)
    page = (out / "README.md").read_text()
    text, graphs_alone = part("steps").PREMISES[lacks]
    lines = [line for line in page.splitlines() if line.startswith("| 2 | gpipe")]
    assert [line.endswith(f"| {text} |") for line in lines] == [True, not graphs_alone]
    assert all("| 1980 | 400 | 0x4 |" in line for line in lines)
    assert f"- `environment`: {lacks}: no: 1 SM" in page
    assert page.index("median error of 0.0%") < page.index("## What failed")


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
