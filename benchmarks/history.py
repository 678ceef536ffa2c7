"""Speeds of this version and of older ones: ``benchmarks/history.csv``, and a plot of it.

``python benchmarks/history.py`` measures HEAD and appends it. ``--commits v0.1.0 HEAD~100``
measures these, each in a temporary checkout, with today's Python and packages, as asv does. Commits
that the file has are not measured again. ``--plot-only`` draws ``results/benchmarks/history.png``
and ``.pdf``: milliseconds of each measure, times the pace of the machine at the last version over
that at the measured one. A row of the file is a measure of a commit. ``pace`` is the seconds of an
addition in a Python loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import _machine as machine
import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd

import pipesim.plot as plot

HISTORY = machine.ROOT / "benchmarks" / "history.csv"
FIGURE = machine.ROOT / "results" / "benchmarks" / "history.png"
SPEEDS = Path(__file__).with_name("_history_speeds.py")


def git(*arguments: str) -> str:
    """Return what git prints."""
    ran = subprocess.run(
        ["git", *arguments], cwd=machine.ROOT, check=True, capture_output=True, text=True
    )
    return ran.stdout.strip()


def measure(commit: str) -> pd.DataFrame:
    """Return a row for each measure of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**machine.pinned(1), "PYTHONPATH": folder}
        git("worktree", "add", "--detach", folder, commit)
        try:
            compiled = [sys.executable, "-m", "compileall", "-q", "pipesim", "pipeexec"]
            subprocess.run(compiled, cwd=folder, check=True, env=environment)
            ran = subprocess.run(
                [sys.executable, str(SPEEDS)], cwd=folder, capture_output=True, text=True,
                env=environment, timeout=600,
            )  # fmt: skip
        finally:
            git("worktree", "remove", "--force", folder)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        sys.exit(f"{commit}: {ran.stderr.strip()[-500:]}")
    print("".join(f"  {line}\n" for line in lines if line.startswith("#")), end="")
    speeds = json.loads(lines[-1])
    return pd.DataFrame(
        {
            "commit": git("rev-parse", "--short=10", commit),
            "date": git("show", "--no-patch", "--format=%cI", commit),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "measure": list(speeds["seconds"]),
            "seconds": list(speeds["seconds"].values()),
            "pace": speeds["pace"],
        }
    )


def draw(table: pd.DataFrame) -> None:
    """Draw a panel for each measure, over the commits in the order of their dates."""
    order = table.drop_duplicates("commit").sort_values("date")["commit"].tolist()
    pace = table.set_index("commit").loc[order[-1], "pace"].iloc[0]
    table = table.assign(ms=1e3 * table["seconds"] / table["pace"] * pace)
    wide = table.pivot(index="commit", columns="measure", values="ms").reindex(order)
    rows = math.ceil(len(wide.columns) / 3)
    with plt.rc_context(plot.paper_style(columns=2, height=1.3 * rows + 0.6)):
        figure, axes = plt.subplots(rows, 3, sharex=True, layout="constrained", squeeze=False)
        for ax, name in itertools.zip_longest(axes.flat, wide):
            if name is None:
                ax.set_axis_off()
                continue
            ax.plot(range(len(order)), wide[name], marker="o", markersize=3)
            ax.set_title(name, loc="left", fontsize=7)
            ax.set_ylim(0, 1.15 * wide[name].max())
            ax.set_xticks(range(len(order)), [commit[:7] for commit in order], rotation=90)
        figure.supylabel("ms, at the pace of the last version", fontsize=8)
        for suffix in (".png", ".pdf"):
            figure.savefig(FIGURE.with_suffix(suffix), dpi=200)


def main() -> None:
    """Measure what is new, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", nargs="+", default=["HEAD"], metavar="COMMIT")
    parser.add_argument("--plot-only", action="store_true")
    arguments = parser.parse_args()
    mpl.use("agg")
    table = pd.read_csv(HISTORY) if HISTORY.exists() else pd.DataFrame({"commit": []})
    for commit in [] if arguments.plot_only else arguments.commits:
        name = git("rev-parse", "--short=10", commit)
        if name in set(table["commit"]):
            continue
        print(name, git("show", "--no-patch", "--format=%cs %s", commit), flush=True)
        table = pd.concat([table, measure(commit)], ignore_index=True).sort_values(
            ["date", "measure"], kind="stable"
        )
        table.to_csv(HISTORY, index=False, float_format="%.6g")
    draw(table)


if __name__ == "__main__":
    main()
