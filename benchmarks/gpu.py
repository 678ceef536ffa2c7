"""Everything that needs a GPU, in steps: validation, timelines, host time, peers, memory, tests.

Each step is a process of its own with a time limit. It checks what must be right before it times
anything, and writes each result as soon as it is known, so that a step that fails, hangs or leaves
the GPU unusable costs nothing but itself. ``make gpu`` calls this; ``make gpu-first`` and ``make
gpu-second`` do with ``--call``, for a GPU that is at hand for a quarter of an hour.
docs/how_to/validate_a_gpu_run.md has the steps, the plan of the two calls, and the files that they
write to ``results/gpu/``.

Needs torch with CUDA, and no network. With ``--dry-run`` the same steps run tiny on CPU workers.
The exit status is 2 if nothing was run, and 1 if a step failed, was cut, did not run, or missed a
target.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from time import perf_counter

from _machine import ROOT, header
from on_gpu.clocks import SUFFIX as CLOCKS
from on_gpu.clocks import sampled_clocks
from on_gpu.outcomes import Outcome, outcomes_in, write_summary
from on_gpu.packing import SUMMARY, UnpackError, pack, remove, unpack
from on_gpu.process import Ended, print_stacks_when_asked, run_process
from on_gpu.report import MARKS, Missed, Report
from on_gpu.requirements import (
    Gpu,
    find_gpu,
    gpu_problems,
    gpu_remarks,
    package_problems,
    path_problems,
    torch_cuda,
)
from on_gpu.steps import CALLS, STEPS, WARM_UP, chosen, next_step, step_called

OUT = ROOT / "results" / "gpu"
#: Exit status of a step that missed a target.
_MISSED = 3
#: Seconds under which a step is not begun, and those kept for the end of the command: on a GPU,
#: and in a dry run, whose steps are short.
_LEAST, _RESERVE = (10.0, 1.0), (5.0, 1.0)
#: Seconds between two lines of output while a step runs.
_BEAT = 10.0


class Runner:
    """Runs steps, one process each, and keeps summary and archive up to date.

    Parameters
    ----------
    names
        The steps, in order. If the limit is too near for all, those of least worth wait.
    out
        Folder of the results.
    pack_to
        Folder of the archive; None for none.
    limit
        Seconds that all steps together may take; None for no limit.
    gpu
        The GPU, None in a dry run.
    site
        Folder of packages that this Python lacks.
    brief
        Whether steps leave out rows and rounds.
    """

    def __init__(
        self, names: Sequence[str], out: Path, pack_to: Path | None, limit: float | None,
        gpu: Gpu | None, site: Path | None, brief: bool = True,
    ) -> None:  # fmt: skip
        self.names, self.out, self.pack_to, self.limit = [WARM_UP, *names], out, pack_to, limit
        self.brief = brief
        self.gpu, self.environment = gpu, environment_of_steps(site)
        self.begin = perf_counter()
        self._kept: dict[str, None] = {}  # steps whose results are this run's

    def run(self) -> list[Outcome]:
        """Run the steps and return their outcomes."""
        outcomes: list[Outcome] = []
        waiting = list(self.names)
        try:
            while waiting:
                name = WARM_UP if WARM_UP in waiting else next_step(waiting, self._left())
                waiting.remove(name)
                outcomes.append(outcome := self._step(name))
                self._keep(outcome)
                print(outcome.line(), flush=True)
        finally:
            self._pack()  # whatever the step under way has written, if this was interrupted
        return outcomes

    def _left(self) -> float:
        """Return the seconds that are left for steps."""
        if self.limit is None:
            return math.inf
        return self.limit - _RESERVE[self.gpu is None] - (perf_counter() - self.begin)

    def _step(self, name: str) -> Outcome:
        limit, left = step_called(name).limit, self._left()
        if left < min(_LEAST[self.gpu is None], limit):
            return self._outcome(name, "not run", 0.0, f"LIMIT={self.limit:g} s was reached")
        seconds = min(limit, left)
        remove(name, self.out)
        self._keep(self._outcome(name, "cut", 0.0, "it was under way when this was written"))
        command = command_of(name, self.out, self.gpu is None, self.brief)
        environment = dict(self.environment)
        if self.gpu is not None and (variable := step_called(name).variable):
            environment[variable] = "1"
        beat = _Beat(name)

        def meanwhile(passed: float, line: str) -> None:
            self._pack()
            beat(passed, line)

        with nullcontext() if self.gpu is None else sampled_clocks(self.out / f"{name}{CLOCKS}"):
            ended = run_process(
                command, self.out / f"{name}.log", seconds, environment, ROOT, meanwhile,
                beat.stopping, answers=bool(step_called(name).module),
            )  # fmt: skip
        status, remark = status_of(ended, self.out / f"{name}.txt")
        return self._outcome(name, status, ended.seconds, remark)

    def _outcome(self, name: str, status: str, seconds: float, remark: str) -> Outcome:
        now = datetime.datetime.now().isoformat(timespec="seconds")
        hardware = "" if self.gpu is None else str(self.gpu)
        return Outcome(name, status, seconds, remark, hardware, self.gpu is None, now)

    def _keep(self, outcome: Outcome) -> None:
        """Save an outcome; a step that is not run leaves its results of an earlier run."""
        if outcome.status != "not run" or not (self.out / f"{outcome.step}.json").is_file():
            outcome.save(self.out)
            self._kept[outcome.step] = None
        write_summary(outcomes_in(self.out), self.out / SUMMARY)
        self._pack()

    def _pack(self) -> None:
        if self.pack_to is not None:
            pack(self._kept, self.out, self.pack_to)


class _Beat:
    """Prints how long a step has run, and in what, every ten seconds: a silent command looks hung.

    Parameters
    ----------
    name
        The step.
    """

    def __init__(self, name: str) -> None:
        self.name, self.due = name, _BEAT

    def __call__(self, passed: float, line: str) -> None:
        if passed >= self.due:
            self._print("", passed, line)
            self.due = passed + _BEAT

    def stopping(self, passed: float, line: str) -> None:
        """Print that the step is stopped, which may take as long as a beat."""
        self._print("stopping", passed, line)

    def _print(self, status: str, passed: float, line: str) -> None:
        print(f"{self.name:<14} {status:<8} {passed:6.1f} s  {line[:120]}", flush=True)


def environment_of_steps(site: Path | None = None) -> dict[str, str]:
    """Return the environment of the processes: a queue of the GPU for each stream.

    Python keeps its bytecode: without it, every process takes seconds more to load.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(site or ""), os.environ.get("PYTHONPATH", "")]
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # the most there are; read when CUDA starts
        "MPLBACKEND": "Agg",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **{name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def status_of(ended: Ended, report: Path) -> tuple[str, str]:
    """Return status and remark of a step, from the end of its process and its report."""
    if ended.code is None:
        return "cut", f"stopped after {ended.seconds:.0f} s in: {ended.last_line}"
    if ended.code < 0:
        return "failed", f"ended by {signal.Signals(-ended.code).name} in: {ended.last_line}"
    lines = report.read_text().splitlines() if report.is_file() else []
    reached, missed = (
        [x[len(mark) :].strip() for x in lines if x.startswith(mark)] for mark in MARKS
    )
    if ended.code == _MISSED and missed:
        return (
            "missed",
            f"{len(missed)} of {len(reached) + len(missed)} targets, first: {missed[0]}",
        )
    if ended.code:
        return "failed", ended.last_line
    return "passed", f"{len(reached)} targets met" if reached else ended.last_line


def run_here(name: str, out: Path, dry: bool, brief: bool = True) -> int:
    """Run a step in this process; return its exit status."""
    from on_gpu.bench import Bench

    step = step_called(name)
    report = Report(out / f"{name}.txt", [*header(["torch", "numpy"]), ""], dry=dry)
    try:
        call: Callable[..., None] = getattr(importlib.import_module(step.module), step.function)
        call(Bench(out / name, dry, brief=brief), report, *step.arguments)
        report.end()
    except Missed as missed:
        report.add(str(missed))
        return _MISSED
    except BaseException:
        report.add(traceback.format_exc())
        return 1
    return 0


def command_of(name: str, out: Path, dry: bool, brief: bool = True) -> list[str]:
    """Return the command of a step's process."""
    if step_called(name).module:
        script = str(Path(__file__).resolve())
        command = [sys.executable, script, "--step", name, "--out", str(out)]
        return command + ["--dry-run"] * dry + ["--full"] * (not brief)
    # A node of AccumulateGrad on another stream than its gradient's makes streams wait.
    stale = "error:The AccumulateGrad node's stream does not match:UserWarning"
    return [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider",
            "-o", "addopts=-ra", "-W", stale, "--tb", "short", "--durations", "10",
            *cuda_tests()]  # fmt: skip


def cuda_tests() -> list[str]:
    """Return the files with tests that are marked ``cuda``."""
    return [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.cuda" in file.read_text()
    ]


def install(wheels: Path, site: Path) -> str | None:
    """Install wheels into a folder; return a line if that fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
               "--no-compile", "--disable-pip-version-check", "--target", str(site),
               *map(str, sorted(wheels.glob("*.whl")))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    why = lines[-1] if lines else f"status {done.returncode}"
    return f"WHEELS={wheels} cannot be installed: {why}" if done.returncode else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run steps, or one in this process, or unpack the results of some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="STEPS", help=f"in this order; of {','.join(STEPS)}")
    parser.add_argument("--call", choices=list(CALLS), help="the first or the second short call")
    parser.add_argument("--full", action="store_true", help="all rows and rounds")
    parser.add_argument("--pack", type=Path, help="folder of gpu.tar.gz and summary.txt")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for all steps together")
    parser.add_argument("--wheels", type=Path, help="folder of packages that this Python lacks")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPU workers")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="a gpu.tar.gz, into --out")
    parser.add_argument("--out", type=Path, help=f"folder of the results; {OUT} by default")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.step is not None:
        print_stacks_when_asked()
        return run_here(options.step, options.out, options.dry_run, not options.full)
    if options.unpack is not None:
        return _unpack(options.unpack, options.out or OUT)
    with ExitStack() as stack:
        folder = lambda prefix: Path(  # noqa: E731
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        )
        return _run(options, folder)


def _run(options: argparse.Namespace, folder: Callable[[str], Path]) -> int:
    """Check what is required, then run the steps; ``folder`` makes temporary ones."""
    problems, names, gpu, site = [], [], None, None
    out = (options.out or (folder("gpu-dry-run-") if options.dry_run else OUT)).resolve()
    try:
        names = chosen(options.only, options.dry_run)
        if options.call is not None and options.only is None:
            names = steps_of_call(options.call, out)
    except ValueError as error:
        problems.append(str(error))
    limit = options.limit
    if limit is None and options.call is not None:
        limit = CALLS[options.call].limit
    problems += path_problems([("OUT", out), ("PACK", options.pack)], limit, options.wheels)
    if options.wheels is not None and not problems:
        site = folder("gpu-wheels-")
        problems += filter(None, [install(options.wheels, site)])
    missing = package_problems(names)
    problems += missing
    if not options.dry_run:
        gpu = find_gpu()
        problems += [gpu] if isinstance(gpu, str) else (
            gpu_problems(gpu, names, torch_cuda()) if not missing else [])  # fmt: skip
    if problems:
        print("\n".join(f"make gpu: {problem}" for problem in problems), file=sys.stderr)
        return 2
    for remark in () if gpu is None else gpu_remarks(gpu):
        print(remark, flush=True)
    return _run_steps(Runner(names, out, options.pack, limit, gpu, site, not options.full))


def steps_of_call(call: str, out: Path) -> list[str]:
    """Return the steps of a call; of the second one, with those that ``out`` says to repeat.

    These are the steps of the first call that failed, were cut or were not reached, in the order of
    their worth.
    """
    names = list(CALLS[call].names)
    if call == "first":
        return names
    repeated = [
        outcome.step
        for outcome in outcomes_in(out, CALLS["first"].names)
        if outcome.status not in ("passed", "missed")
    ]
    return names + sorted(repeated, key=lambda name: -step_called(name).worth)


def _run_steps(runner: Runner) -> int:
    """Run steps; draw the figures, unless whoever unpacks the archive will."""
    print(runner.gpu or "a dry run on CPU workers: nothing is measured on a GPU", flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a step that is stopped writes no memory
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an interrupt: ends the step
    outcomes = runner.run()
    if runner.pack_to is None:
        _publish(runner.out)
    else:
        print(f"packed in {runner.pack_to}")
    return int(any(outcome.status != "passed" for outcome in outcomes))


def _unpack(file: Path, out: Path) -> int:
    try:
        outcomes = unpack(file, out)
    except UnpackError as error:
        print(f"make gpu-unpack: {error}", file=sys.stderr)
        return 2
    _publish(out)
    for line in (outcome.line() for outcome in outcomes):
        print(line)
    print(f"unpacked to {out}")
    return 0


def _publish(out: Path) -> None:
    sys.path.insert(0, str(ROOT))  # pipesim and pipeexec need not be installed
    from on_gpu.publishing import publish

    publish(out)


if __name__ == "__main__":
    sys.exit(main())
