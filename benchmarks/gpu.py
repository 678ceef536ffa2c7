"""Everything that needs a GPU, in one go: tests, validation, timelines, host time, peers, memory.

Each step is a process of its own with a time limit, and has written what it found before it ends:
a step that fails, hangs or leaves the GPU unusable costs nothing but itself. Results go to
``results/gpu/``: for each step ``STEP.txt`` and the log of its process, figures, run directories,
and ``summary.txt`` with one line a step.

``python benchmarks/gpu.py`` needs torch with CUDA and no network; ``make gpu`` calls it. Without a
GPU, or with ``--dry-run``, the same code runs tiny on CPU workers and writes to a folder that is
removed again. The exit status is 1 if a step failed, ran out of time, or missed a target.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from _machine import ROOT, header

OUT = ROOT / "results" / "gpu"
#: Seconds that all steps together may take.
LIMIT = 465.0
#: What pipesim and pipeexec import, and the tests.
PACKAGES = (
    "torch", "numpy", "pandas", "matplotlib", "numba", "joblib", "cloudpickle", "simpy", "tqdm",
    "pytest", "hypothesis",
)  # fmt: skip
_MISSED = 3  # exit status of a step that missed a target


class Step(NamedTuple):
    """A module and function that take a Bench and a Report, their arguments, and seconds."""

    module: str
    function: str
    seconds: float
    arguments: tuple[int, ...] = ()


#: In the order in which they run: first what all else stands on. None stands for pytest.
STEPS: dict[str, Step | None] = {
    "environment": Step("on_gpu.environment", "environment", 45),
    "validation-2": Step("on_gpu.validation", "validation", 60, (2,)),
    "validation-4": Step("on_gpu.validation", "validation", 100, (4,)),
    "validation-8": Step("on_gpu.validation", "validation", 120, (8,)),
    "tests": None,
    "host": Step("on_gpu.host", "host", 30),
    "overlap": Step("on_gpu.overlap", "overlap", 40),
    "peers": Step("on_gpu.peers", "peers", 30),
    "gpipe": Step("on_gpu.gpipe", "gpipe", 40),
    "memory": Step("on_gpu.memory", "memory", 35),
    "soak": Step("on_gpu.soak", "soak", 45),
}
_SECONDS_OF_TESTS = 110.0
#: In a dry run there are two workers.
_DRY = tuple(name for name in STEPS if name not in ("validation-4", "validation-8", "tests"))


class Outcome(NamedTuple):
    """How a step ended."""

    step: str
    status: str
    seconds: float
    said: str


def missing_packages() -> list[str]:
    """Return which of `PACKAGES` this Python lacks."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def has_gpu() -> bool:
    """Return whether the driver counts a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def environment_of_steps() -> dict[str, str]:
    """Return the environment of the processes: a queue of the GPU for each stream."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # the most there are; read when CUDA starts
        "PYTHONUNBUFFERED": "1",
        "MPLBACKEND": "Agg",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run_process(name: str, command: Sequence[str], seconds: float, out: Path) -> Outcome:
    """Run a step in a process of its own, whose output is in ``NAME.log``, for so long at most."""
    start = perf_counter()
    log = out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment_of_steps(), cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = perf_counter() - start
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip() if lines else ""
    if code is None:
        return Outcome(name, "too late", took, f"stopped after {seconds:.0f} s in: {said}")
    status = {0: "ok", _MISSED: "missed"}.get(code, "failed")
    return Outcome(name, status, took, said)


def run_here(name: str, out: Path, dry: bool) -> int:
    """Run a step in this process; return its exit status."""
    from on_gpu.bench import Bench
    from on_gpu.report import Missed, Report

    step = STEPS[name]
    assert step is not None
    report = Report(out / f"{name}.txt", [*header(["torch", "numpy"]), ""])
    try:
        call: Callable[..., None] = getattr(importlib.import_module(step.module), step.function)
        call(Bench(out, dry), report, *step.arguments)
        report.end()
    except Missed as missed:
        report.say(str(missed))
        return _MISSED
    except BaseException:
        report.say(traceback.format_exc())
        return 1
    return 0


def command_of(name: str, out: Path) -> list[str]:
    """Return the command of a step's process."""
    if STEPS[name] is not None:
        script = str(Path(__file__).resolve())
        return [sys.executable, script, "--step", name, "--out", str(out)]
    tests = ["tests/test_cuda.py", "tests/test_executor.py"]
    return [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", "--tb",
            "short", *tests]  # fmt: skip


def run_all(names: Sequence[str], out: Path, dry: bool) -> list[Outcome]:
    """Run steps one after the other, and keep the summary up to date."""
    begin, outcomes = perf_counter(), []
    for name in names:
        step = STEPS[name]
        left = LIMIT - (perf_counter() - begin)
        seconds = min(_SECONDS_OF_TESTS if step is None else step.seconds, left)
        if dry:
            start = perf_counter()
            status = {0: "ok", _MISSED: "missed"}.get(run_here(name, out, dry), "failed")
            outcome = Outcome(name, status, perf_counter() - start, "")
        elif seconds < 10:
            outcome = Outcome(name, "not run", 0.0, "no time was left")
        else:
            outcome = run_process(name, command_of(name, out), seconds, out)
        outcomes.append(outcome)
        lines = summary(outcomes)
        (out / "summary.txt").write_text("\n".join([*header(["torch"]), "", *lines]) + "\n")
        print(lines[-1], flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line a step."""
    return [f"{o.step:<14} {o.status:<9} {o.seconds:6.1f} s  {o.said[:160]}" for o in outcomes]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps, or some, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPU workers")
    parser.add_argument("--only", help="names of steps, with commas between")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--step", choices=[n for n, s in STEPS.items() if s is not None],
                        help=argparse.SUPPRESS)  # fmt: skip
    options = parser.parse_args(argv)
    if options.step is not None:
        return run_here(options.step, options.out, options.dry_run)
    lacking = missing_packages()
    if lacking:
        words = " ".join(lacking)
        print(f"{sys.executable} lacks {words}. Where there is a network: python3 -m pip download "
              f"--no-deps -d wheels {words}; then here: make gpu WHEELS=wheels",
              file=sys.stderr)  # fmt: skip
        return 1
    dry = options.dry_run or not has_gpu()
    names = options.only.split(",") if options.only else list(_DRY if dry else STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    folder = Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if dry else options.out
    print("a dry run on CPU workers: nothing is measured" if dry else f"writing {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        outcomes = run_all(names, folder, dry)
    finally:
        if dry:
            shutil.rmtree(folder, ignore_errors=True)
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
