"""Speeds of this version and of older ones: ``benchmarks/history.csv``, and a plot of it.

``python benchmarks/history.py`` measures HEAD and appends it. ``--commits v0.1.0 HEAD~100``
measures these, each in a temporary checkout, with today's Python and packages, as asv does. Commits
that the file has are not measured again. ``--plot-only`` draws ``results/benchmarks/history.png``
and ``.pdf``: seconds of each measure, divided by the pace of the machine meanwhile, relative to the
last version. A row is a measure of a commit. ``pace`` is the seconds of an addition in a Python
loop.
"""

from __future__ import annotations

import argparse
import json
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
        git("worktree", "add", "--detach", folder, commit)
        try:
            ran = subprocess.run(
                [sys.executable, str(SPEEDS)], cwd=folder, capture_output=True, text=True,
                env={**machine.pinned(1), "PYTHONPATH": folder}, timeout=600,
            )  # fmt: skip
        finally:
            git("worktree", "remove", "--force", folder)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        sys.exit(f"{commit}: {ran.stderr.strip()[-500:]}")
    print("\n".join(f"  {line}" for line in lines if line.startswith("#")))
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
    """Draw each measure over the commits, in the order of their dates."""
    order = table.drop_duplicates("commit").sort_values("date")["commit"].tolist()
    seconds = (
        (table["seconds"] / table["pace"]).groupby([table["measure"], table["commit"]]).median()
    )
    wide = seconds.unstack("measure").reindex(order)
    relative = wide / wide.ffill().iloc[-1]
    with plt.rc_context(plot.paper_style(columns=2, height=3.2)):
        figure, ax = plt.subplots(layout="constrained")
        relative.index = range(1, len(relative) + 1)
        for name in relative:
            ax.plot(relative[name].dropna(), label=name, markersize=3)
        ax.set(xlabel="version", ylabel="seconds, relative to the last version", yscale="log")
        ax.set_xticks(list(relative.index), order, rotation=90)
        ax.yaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside right center")
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
