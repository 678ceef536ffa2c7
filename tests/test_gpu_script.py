"""``make gpu``: its steps, tiny and on CPU workers; how they end; archives; refusals."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref, c_int
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu.py")])
    yield importlib.import_module("gpu")
    for name in [n for n in sys.modules if n.startswith("on_gpu") or n in ("gpu", "_machine")]:
        del sys.modules[name]


def _part(name: str) -> ModuleType:
    return importlib.import_module(f"on_gpu.{name}")


# Steps


def test_a_dry_run_runs_every_step(script: ModuleType, tmp_path: Path) -> None:
    """Its archive holds what a reader wants to see."""
    steps, outcomes, packing = _part("steps"), _part("outcomes"), _part("packing")
    ran, packed, found = (tmp_path / name for name in ("ran", "packed", "found"))
    ran.mkdir()
    packed.mkdir()
    for name in (steps.WARM_UP, *steps.DRY):
        assert script.run_here(name, ran, dry=True) == 0, (ran / f"{name}.txt").read_text()
        outcomes.Outcome(name, "passed", 1.0, "", is_dry=True).save(ran)
    packing.pack((steps.WARM_UP, *steps.DRY), ran, packed)
    assert {file.name for file in packed.iterdir()} == {"gpu.tar.gz", "summary.txt"}
    assert script.main(["--unpack", str(packed / "gpu.tar.gz"), "--out", str(found)]) == 0
    page = (found / "README.md").read_text()
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        assert re.search(rf"\| 2 \| {name} \| True \| True \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", page)
        assert re.search(rf"\| 2 \| {name} \| True \| [\d.e-]+ \|", page)  # gradients
    for figure in re.findall(r"\((figures/[^)]*)\)", page):
        assert (found / figure).is_file()
        assert (found / figure).with_suffix(".pdf").is_file()
    assert {file.stem for file in (found / "figures").iterdir()} >= {
        "overlay-2-slices-graph", "overlap-gpipe", "gpipe-ablation",
    }  # fmt: skip
    kinds = {"errors", "gradients", "overlap", "gpipe", "host", "peers", "soak", "data-sheet"}
    assert kinds <= {file.stem for file in found.glob("*.csv")}


def test_a_step_that_raises_says_where(script: ModuleType, tmp_path: Path) -> None:
    """And one that misses a target is told apart."""
    module = _part("host")

    def misses(bench: object, report: Any) -> None:
        report.check(False, "too slow")
        report.end()

    for call, code, said in ((misses, 3, "MISSED too slow"), (None, 1, "TypeError")):
        module.host = call  # type: ignore[attr-defined]
        assert script.run_here("host", tmp_path, dry=True) == code
        assert said in (tmp_path / "host.txt").read_text()


def test_gradients_are_checked_before_times(script: ModuleType, tmp_path: Path) -> None:
    """A validation that is cut has compared them."""
    module, report = _part("validation"), _part("report").Report(tmp_path / "said.txt", dry=True)
    calls: list[str] = []

    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module.gradient_error = lambda *a, **_: calls.append(a[1]) or 0.0  # type: ignore[attr-defined]
    module.validate = cut  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        module.validation(_part("bench").Bench(tmp_path, dry=True), report, 2)
    assert calls == ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"]
    assert len(re.findall("^ok .*limit", report.path.read_text(), re.MULTILINE)) == 5


def test_memory_is_drawn_from_its_files(script: ModuleType, tmp_path: Path) -> None:
    """As the step leaves them on a GPU."""
    import pipesim as ps

    costs = ps.Costs(forward=1e-3, backward=2e-3, activation_bytes=1 << 20, parameter_bytes=1 << 22)
    predicted = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4)), costs)
    for name in ("timeline", "predicted"):
        predicted.save(tmp_path / f"gpipe-{name}.csv")
    costs.save(tmp_path / "gpipe-costs.json")
    rows = "gpu,time,nbytes\ncuda:0,0.0,8388608.0\ncuda:0,0.004,16777216.0\n"
    (tmp_path / "gpipe-allocated.csv").write_text(rows)
    assert _part("figures").draw_memory(tmp_path, "gpipe", tmp_path / "drawn")
    assert (tmp_path / "drawn.png").is_file()
    assert _part("memory")._rise(predicted) == predicted.memory().groupby("device")[
        "nbytes"].agg(lambda x: x.max() - x.iloc[0]).sum()  # fmt: skip
    assert not _part("figures").draw_memory(tmp_path, "1f1b", tmp_path / "drawn")


# How steps end

PASSES = "print('fine')"
MISSES = """
import sys
print("ok     a\\nMISSED error of 7 %", file=open(sys.argv[1] + "/host.txt", "w"))
raise SystemExit(3)
"""
FAILS = "raise ValueError('bad')"
IS_KILLED = "import os; print('half way', flush=True); os.kill(os.getpid(), 9)"
HANGS = """
import threading, time
def asleep():
    time.sleep(60)
threading.Thread(target=asleep).start()
print("slow")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (PASSES, "passed", "fine"),
        (MISSES, "missed", "1 of 2 targets, first: error of 7 %"),
        (FAILS, "failed", "ValueError: bad"),
        (IS_KILLED, "failed", "ended by SIGKILL in: half way"),
        (HANGS, "cut", "stopped after 1 s in: slow"),
    ],
)
def test_a_step_is_a_process_of_its_own(
    script: ModuleType, tmp_path: Path, code: str, status: str, said: str
) -> None:
    """However it ends, its log is there; one that hangs leaves the stack of every thread."""
    log, seconds = tmp_path / "host.log", 0.7 if code == HANGS else 30.0
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = _part("process").run_process(
        command, log, seconds, script.environment_of_steps(), tmp_path
    )
    assert script.status_of(ended, tmp_path / "host.txt") == (status, said)
    if code == HANGS:
        assert "in asleep" in log.read_text()
        assert "Current thread" in log.read_text()


def test_a_process_that_ignores_signals_is_killed(script: ModuleType, tmp_path: Path) -> None:
    """With the children that it has."""
    child = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    _part("process")._STACKS = 0.5  # type: ignore[attr-defined]
    start = time.perf_counter()
    run_process: Callable[..., Any] = _part("process").run_process
    ended = run_process([sys.executable, "-c", code], tmp_path / "log", 0.5, {}, tmp_path)
    assert ended.code is None
    assert time.perf_counter() - start < 8


def _runner(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, limit: float | None = None
) -> Any:
    """Return a runner of steps that pass, fail, are killed, hang and pass."""
    codes = {"warm-up": PASSES, "environment": PASSES, "overlap": FAILS, "gpipe": IS_KILLED,
             "host": PASSES, "memory": HANGS, "soak": PASSES}  # fmt: skip

    def command(name: str, out: Path, dry: bool) -> list[str]:
        report = f"open({str(out / f'{name}.txt')!r}, 'w').write('measured');"
        return [sys.executable, "-c", report + codes[name]]

    monkeypatch.setattr(script, "command_of", command)
    monkeypatch.setattr(script, "ROOT", folder)
    steps = _part("steps")
    for name in codes:
        short = steps.step_called(name)._replace(limit=1.0 if name == "memory" else 30.0)
        kept = steps._PREPARATION if name in steps._PREPARATION else steps.STEPS
        monkeypatch.setitem(kept, name, short)
    (folder / "packed").mkdir(parents=True)
    (folder / "out").mkdir()
    names = [name for name in codes if name != "warm-up"]
    return script.Runner(names, folder / "out", folder / "packed", limit, None, None)


def test_an_archive_has_all_that_was_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happened to steps before and behind."""
    wanted = {"warm-up": "passed", "environment": "passed", "overlap": "failed", "gpipe": "failed",
              "host": "passed", "memory": "cut", "soak": "passed"}  # fmt: skip
    runner = _runner(script, monkeypatch, tmp_path)
    assert {o.step: o.status for o in runner.run()} == wanted
    assert script.main(["--unpack", str(tmp_path / "packed" / "gpu.tar.gz"), "--out",
                        str(tmp_path / "found")]) == 0  # fmt: skip
    summary = (tmp_path / "found" / "summary.txt").read_text()
    assert [line.split()[:2] for line in summary.splitlines() if line[:1].islower()][1:] == [
        list(item) for item in wanted.items()
    ]
    for name in wanted:
        assert (tmp_path / "found" / f"{name}.txt").read_text() == "measured"


def test_an_archive_is_whole_while_a_step_runs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a command that is killed leaves what was measured until then."""
    runner = _runner(script, monkeypatch, tmp_path)
    seen: list[list[str]] = []
    step = runner._step

    def looking(name: str) -> Any:
        outcome = step(name)
        with tarfile.open(tmp_path / "packed" / "gpu.tar.gz") as archive:
            seen.append(archive.getnames())
        summary = (tmp_path / "packed" / "summary.txt").read_text()
        assert f"{name:<14} cut" in summary
        return outcome

    monkeypatch.setattr(runner, "_step", looking)
    runner.names = ["warm-up", "environment", "host"]
    runner.run()
    assert {"warm-up.txt", "warm-up.log", "environment.txt", "host.json"} <= set(seen[-1])


def test_a_limit_cuts_what_is_under_way(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps for which no time is left say so."""
    runner = _runner(script, monkeypatch, tmp_path, limit=1000.0)
    monkeypatch.setattr(script, "_LEAST", 0.5)
    runner.names = ["warm-up", "memory", "soak"]
    step = runner._step

    def short(name: str) -> Any:
        if name == "memory":
            runner.begin = time.perf_counter() - 1000 + script._RESERVE + 0.6
        return step(name)

    monkeypatch.setattr(runner, "_step", short)
    found = {o.step: (o.status, o.remark) for o in runner.run()}
    assert found["memory"] == ("cut", "stopped after 1 s in: slow")
    assert found["soak"] == ("not run", "LIMIT=1000 s was reached")


def test_nothing_is_run_on_a_gpu_that_cannot_be_used(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the warm-up shows, or the probes of the environment."""
    runner = _runner(script, monkeypatch, tmp_path)
    runner.names = ["overlap", "environment"]
    monkeypatch.setattr(script, "WARM_UP", "overlap")
    found = [(o.status, o.remark) for o in runner.run()]
    assert found == [("failed", "ValueError: bad"), ("not run", "the step overlap did not pass")]


def test_an_interrupt_leaves_what_was_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends the step that is under way; results of a step that was not reached stay."""
    runner = _runner(script, monkeypatch, tmp_path)
    outcome = _part("outcomes").Outcome("soak", "passed", 1.0, "of another day")
    outcome.save(tmp_path / "out")
    runner.names = ["warm-up", "memory", "soak"]
    monkeypatch.setattr(_part("process"), "_INTERVAL", 0.3)
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
    assert [o.remark for o in _part("outcomes").outcomes_in(tmp_path / "out")][-1] == outcome.remark


@pytest.mark.parametrize("met", [True, False])
def test_figures_of_slices_need_slices(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: bool
) -> None:
    """The step `environment` probes what figures rest on; where it lacks, no time is spent."""
    probe = {"kind": "environment", "probe": "slices are green contexts", "met": met}
    other = {"kind": "environment", "probe": "streams run side by side", "met": False}
    lines = "\n".join(map(json.dumps, (other, probe)))
    runner = _runner(script, monkeypatch, tmp_path)
    records = tmp_path / "out" / "environment.jsonl"
    code = f"open({str(records)!r}, 'w').write({lines!r})"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(script, "command_of", lambda *_: command)
    runner.names = ["environment", "host"]
    last = runner.run()[-1]
    assert last.status == ("passed" if met else "not run")
    assert last.remark == ("" if met else "the GPU lacks: slices are green contexts")


def test_results_of_one_step_replace_only_its_own(script: ModuleType, tmp_path: Path) -> None:
    """Archives of several commands are unpacked into one folder."""
    outcomes, packing = _part("outcomes"), _part("packing")
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
    found = {o.step: o.remark for o in outcomes.outcomes_in(tmp_path / "all")}
    assert found == {"environment": "run 0", "host": "run 1"}
    assert [file.name for file in (tmp_path / "all" / "host").iterdir()] == ["1.csv"]


def test_files_that_are_no_archive_are_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are a dry run's results put in the place of measured ones."""
    outcomes, packing = _part("outcomes"), _part("packing")
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
    for file, said in (
        (tmp_path / "none", "No such file"), (text, "cannot be unpacked: .*; give the gpu.tar.gz"),
        (empty, "holds no results of make gpu"),
        (evil, "cannot be unpacked: .*; give the gpu.tar.gz"),
        (dry / "gpu.tar.gz", "holds a dry run, and .* measured results; give OUT="),
    ):  # fmt: skip
        assert script.main(["--unpack", str(file), "--out", str(measured)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert re.search(said, lines[0])


# Requirements


def _driver(found: Mapping[Any, Any]) -> Any:
    """Return a stand-in for libcuda: an H100 with a driver of CUDA 13.0, but for what is given."""
    values = {"count": 1, "version": 13000, 16: 132, 75: 9, "init": 0, "green": True, **found}

    def put(key: Any) -> Callable[..., int]:
        def call(to: Any, *_: Any) -> int:
            to._obj.value = values[key]
            return 0

        return call

    def attribute(to: Any, which: int, _: Any) -> int:
        return put(which)(to)

    library = SimpleNamespace(
        cuInit=lambda flags: values["init"], cuDeviceGetCount=put("count"),
        cuDriverGetVersion=put("version"), cuDeviceGet=lambda to, index: 0,
        cuDeviceGetName=lambda to, *_: setattr(to, "value", b"NVIDIA H100 80GB HBM3"),
        cuDeviceGetAttribute=attribute,
    )  # fmt: skip
    if values["green"]:
        library.cuGreenCtxCreate = None
    assert byref(c_int())._obj.value == 0  # what `put` relies on
    return library


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        ({}, "13.0", None),
        ({"version": 12080}, "12.8", None),
        ({"init": 100}, "13.0", "no GPU: the driver answers cuInit with error 100; make gpu DRY"),
        ({"count": 0}, "13.0", "no GPU: the driver counts 0.*make gpu DRY_RUN=1"),
        ({"version": 12080}, "13.0", r"too old: torch, built for CUDA 13.0, need one of CUDA 13.0"),
        ({"version": 12020}, "12.1", r"too old: green contexts, .* CUDA 12.4, it is of 12.2"),
        ({"green": False}, "13.0", "no green contexts"),
        ({16: 46}, "13.0", "validation-8 needs 8 slices of 8 SMs, .* has 46 SMs; .*ONLY="),
        ({}, None, "torch was built without CUDA"),
    ],
)
def test_a_gpu_that_does_not_do_is_named(
    script: ModuleType, driver: dict[Any, Any], cuda: str | None, said: str | None
) -> None:
    """In one line, before torch is loaded."""
    requirements = _part("requirements")
    gpu = requirements.find_gpu(_driver(driver))
    problems = [gpu] if isinstance(gpu, str) else requirements.gpu_problems(
        gpu, ["validation-8"], cuda)  # fmt: skip
    assert len(problems) == (said is not None)
    if said is not None:
        assert re.search(said, problems[0])


def test_the_fewest_sms_of_a_slice_are_those_of_green_contexts(script: ModuleType) -> None:
    """They stand twice, as requirements are checked without loading torch."""
    from pipeexec import green

    fewest = {major: each[0] for major, each in green._GRANULARITY.items()}
    assert fewest == _part("requirements")._FEWEST
    assert green._SINCE_HOPPER[0] == 8


def test_two_slices_fit_where_eight_do_not(script: ModuleType) -> None:
    requirements = _part("requirements")
    gpu = requirements.find_gpu(_driver({16: 46}))
    assert requirements.gpu_problems(gpu, ["validation-2"], "13.0") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "validation-3"], r"ONLY: step 'validation-3' does not exist; there are env"),
        (["--only", " , "], "ONLY names no step"),
        (["--dry-run", "--only", "tests"], "step 'tests' is not run on CPU workers"),
        (["--dry-run", "--pack", "/proc/packed"], "PACK=/proc/packed cannot be written: "),
        (["--dry-run", "--limit", "0"], "LIMIT must be a positive number of seconds, got 0"),
        (["--dry-run", "--limit", "nan"], "LIMIT must be a positive number"),
        (["--dry-run", "--wheels", "/nowhere"], "WHEELS=/nowhere holds no wheels"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    options: list[str], said: str,
) -> None:  # fmt: skip
    """In one line; nothing is run, and nothing is written."""
    monkeypatch.setattr(
        script, "find_gpu", lambda: _part("requirements").Gpu("", 132, 9, 13000, True)
    )
    monkeypatch.setattr(script, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(script, "OUT", Path("/proc/none" if "--dry-run" in options else "/tmp"))
    monkeypatch.setattr(script, "Runner", None)
    assert script.main(options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(said, lines[0])


def test_packages_and_pythons_that_do_not_do_are_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = _part("requirements")
    (line,) = requirements.package_problems(("numpy", "no_such_package"))
    assert "lacks no_such_package: " in line
    assert "WHEELS=wheels" in line
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    (line,) = requirements.package_problems(("no_such_package",))
    assert re.search(r"Python 3.11 or newer is needed, .* is 3.9; give PYTHON=", line)


def test_a_wheel_that_cannot_be_installed_is_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thing-1.0-py3-none-any.whl").write_text("no wheel")
    assert script.main(["--dry-run", "--wheels", str(tmp_path)]) == 2
    assert re.search(r"make gpu: WHEELS=.* cannot be installed: ", capsys.readouterr().err)


def test_options_of_make_are_those_of_its_command_line() -> None:
    """A machine may have variables of these names for other purposes."""
    names = dict.fromkeys(("OUT", "ONLY", "PACK", "LIMIT", "WHEELS"), "elsewhere")
    done = subprocess.run(
        ["make", "-n", "gpu", "PACK=here"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, **names},
    )  # fmt: skip
    assert '--pack "here"' in done.stdout
    assert "elsewhere" not in done.stdout


# The plan


def test_the_plan_of_the_docs_is_the_steps(script: ModuleType) -> None:
    """Each step is in one of three commands, whose estimates leave room below 9 minutes."""
    steps = _part("steps")
    text = (ROOT / "docs" / "cuda.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) s \| (\d+) s \|", text, re.MULTILINE)
    assert {name: (float(a), float(b)) for name, a, b in rows} == {
        name: (s.estimate, s.limit) for name, s in (*steps._PREPARATION.items(),
                                                    *steps.STEPS.items())
    }  # fmt: skip
    commands = [only.split(",") for only in re.findall(r"^make gpu ONLY=(\S+) .*LIMIT=540", text,
                                                       re.MULTILINE)]  # fmt: skip
    assert sorted(itertools.chain(*commands)) == sorted(steps.STEPS)
    assert len(commands) == 3
    for names in commands:
        assert names == steps.chosen(",".join(names), dry=False)
        assert sum(steps.step_called(n).estimate for n in (steps.WARM_UP, *names)) < 0.8 * 540
