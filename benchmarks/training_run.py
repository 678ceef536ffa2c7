"""A real training run: kill it, continue it, and compare it with one that was not interrupted.

The configuration is that of docs/examples/train_gpt: a byte-level GPT on English text, in two
stages on two cores. Four runs of it train the same number of steps:

1. ``whole``: in one process, without an interruption;
2. ``killed``: ``kill -9`` in the middle, then the same command again;
3. ``interrupted``: Ctrl-C in the middle, then the same command again;
4. ``processes``: under torchrun in two processes, ``kill -9`` of one of them, then again.

The script fails unless all losses are equal to the last bit, in the logs and in the evaluations.
It writes results/training/: the log, the loss curve, and a measured step over its prediction.

``python benchmarks/training_run.py`` takes about 25 minutes on two cores, ``--steps 60 --every 20``
about two. ``--only whole killed`` chooses runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _machine as machine

from pipeexec.training import TrainingRun
from pipesim.plot.paper_figure import save

EXAMPLE = machine.ROOT / "docs" / "examples" / "train_gpt"
RESULTS = machine.ROOT / "results" / "training"
FILES = ("log.csv", "evaluation.csv", "costs.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--folder", type=Path, default=Path("results/training_runs"),
                        help="of the runs' directories")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    losses: dict[str, tuple[list[float], list[float]]] = {}
    lines = [
        f"{'run':12} {'steps':>6} {'first loss':>11} {'last loss':>10} {'evaluation':>10}  equal"
    ]
    for name in options.only:
        run = RUNS[name](Trainer(options.folder, name, options.steps, options.every))
        losses[name] = run.losses, run.evaluations["loss"].tolist()
        is_equal = losses[name] == next(iter(losses.values()))
        lines.append(
            f"{name:12} {run.n_steps:6} {run.losses[0]:11.4f} {run.losses[-1]:10.4f} "
            f"{run.evaluations['loss'].iloc[-1]:10.4f}  {'to the last bit' if is_equal else 'NO'}"
        )
        print(lines[-1], flush=True)
    first = options.folder / options.only[0]
    keep(first, options.out, [*lines, "", TrainingRun.load(first).summary()])
    if any(pair != losses[options.only[0]] for pair in losses.values()):
        sys.exit("losses differ")


class Trainer:
    """Runs the command ``pipeexec train`` for one directory.

    Parameters
    ----------
    folder, name
        The directory of the training, and its name.
    n_steps, every
        Number of steps, and of steps between checkpoints and evaluations.
    """

    def __init__(self, folder: Path, name: str, n_steps: int, every: int) -> None:
        self.directory, self.n_steps = folder.resolve() / name, n_steps
        shutil.rmtree(self.directory, ignore_errors=True)
        source = folder.resolve() / f"{name}_config"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
        self.config = source / "config.toml"
        text = self.config.read_text()
        for key, value in (
            ("directory", f'"{self.directory}"'), ("steps", n_steps), ("T_max", n_steps),
            ("warm_up", max(1, n_steps // 20)), ("evaluate_every", every),
            ("checkpoint_every", every), ("timelines", [min(50, n_steps), n_steps // 2]),
        ):  # fmt: skip
            text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        self.config.write_text(text)

    def start(self, n_processes: int = 1) -> subprocess.Popen[bytes]:
        """Start the command in a session of its own."""
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(n_processes)]
        command = [sys.executable, *(launcher if n_processes > 1 else []), "-m", "pipeexec",
                   "train", str(self.config)]  # fmt: skip
        return subprocess.Popen(
            command, env=machine.pinned(1), start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip

    def wait_for_half(self, process: subprocess.Popen[bytes]) -> None:
        """Return when half of the steps have run, and a few more."""
        while process.poll() is None:
            log = self.directory / "log.csv"
            if log.exists() and log.read_text().count("\n") > self.n_steps // 2 + 5:
                return
            time.sleep(0.05)
        sys.exit(f"{self.directory.name}: exit status {process.returncode} too early")

    def finish(self, n_processes: int = 1) -> TrainingRun:
        """Run the command to its end."""
        status = self.start(n_processes).wait()
        if status:
            sys.exit(f"{self.directory.name}: exit status {status}")
        return TrainingRun.load(self.directory)


def whole(trainer: Trainer) -> TrainingRun:
    return trainer.finish()


def killed(trainer: Trainer) -> TrainingRun:
    process = trainer.start()
    trainer.wait_for_half(process)
    process.kill()
    process.wait()
    return trainer.finish()


def interrupted(trainer: Trainer) -> TrainingRun:
    process = trainer.start()
    trainer.wait_for_half(process)
    process.send_signal(signal.SIGINT)
    if (status := process.wait()) != 130:
        sys.exit(f"after Ctrl-C the exit status is {status}, not 130")
    return trainer.finish()


def processes(trainer: Trainer) -> TrainingRun:
    launcher = trainer.start(2)
    trainer.wait_for_half(launcher)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    if not launcher.wait():
        sys.exit("a process was killed, and torchrun ended well")
    return trainer.finish(2)


RUNS: dict[str, Callable[[Trainer], TrainingRun]] = {
    "whole": whole, "killed": killed, "interrupted": interrupted, "processes": processes,
}  # fmt: skip


def keep(directory: Path, out: Path, lines: Sequence[str]) -> None:
    """Copy small files of a training, and draw its losses."""
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(directory / name, out / name)
    for folder in sorted((directory / "steps").iterdir())[-1:]:
        shutil.copy(folder / "overlay.png", out / "overlay.png")
        shutil.copy(folder / "timeline.csv", out / "timeline.csv")
    figure = Figure(figsize=(7.16, 2.6), layout="constrained")
    TrainingRun.load(directory).plot(ax=figure.add_subplot())
    save(figure, out / "loss.png")
    record = json.loads((directory / "training.json").read_text())
    versions, hardware = record["versions"], record["hardware"]
    lines = [
        f"{hardware['cpu']}, {hardware['cores']} cores; torch {versions['torch']}, Python "
        f"{versions['python']}; {datetime.date.today()}",
        "",
        *lines,
    ]
    (out / "runs.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines, "", f"wrote {out}"]))


if __name__ == "__main__":
    main()
