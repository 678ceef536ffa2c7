"""Measured timelines of public runs on GPUs: replayed, and later steps predicted from earlier ones.

The tables are in ``tests/published/timelines``, with their sources. For each run:

- *Replay*: `ps.replay` of each step over the measured makespan. Of whole steps, and of the pipeline
  of each replica alone, from its first F to its last backward.
- *Prediction*: the seconds of each task are its median over the first half of the steps; the second
  half is predicted. Time between tasks in which a device waited for nothing is part of the later
  task. *Drift* is the error of the median makespan of the first half.
- *By lengths*: sequences of different lengths make micro-batches take different times. The seconds
  of an operation are a line over those of the micro-batch's F on the first stage, fitted to the
  first half (repeated medians, Siegel 1982), if that explains half of their spread. The F of the
  predicted step then give its lengths.
- *Errors by operation*: mean seconds in the first half over those in the second half.
- *Lengths*: spread of the seconds of F on the first stage, over their mean.
- *Explained by*: change of the makespan without messages, without time between tasks, and with the
  mean seconds of all replicas in place of their own (stragglers).

No run was published with two schedules, so none is predicted from another one's costs.

``python benchmarks/published_timelines.py`` prints the tables and writes them, and the gallery's
figure of one of the runs. With ``FILE ...`` it prints the same of other tables, with the columns
step, replica, stage, op, microbatch, start and duration.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _machine import ROOT, publish, table

import pipesim as ps
from pipesim.analysis.replay import replay_costs
from pipesim.costs import CostTable, TaskCosts

OUT = ROOT / "results" / "benchmarks" / "published_timelines.txt"
FIGURE = ROOT / "docs" / "gallery" / "real_runs" / "plot_eight_gpus.py"
TABLES = ROOT / "tests" / "published" / "timelines"
#: An all-reduce between the GPUs of one stage, which has no operation of ours.
OPS = {"layernorm-grads-all-reduce": None}
#: Columns that tell operations apart, and tasks.
KIND = ["replica", "stage", "op", "part"]
TASK = [*KIND, "microbatch"]
#: Least share of the squared spread that the length of a micro-batch must explain.
EXPLAINED = 0.5
COMPUTE = [ps.Op.F, ps.Op.B]


@dataclass(frozen=True)
class Run:
    """A table of a run: what it is of, and its steps that warm up."""

    name: str
    file: str | Path
    warm_up: int = 0

    def rows(self) -> pd.DataFrame:
        """Return the rows of all steps that count."""
        path = TABLES / self.file
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
        steps = np.sort(frame["step"].unique())[self.warm_up :]
        return frame[frame["step"].isin(steps)]


RUNS = (
    Run("8 GPUs, 4 stages, 2 replicas", "megatron_8gpu_pp4_dp2.csv.gz"),
    Run("64 GPUs, 4 stages, 4 replicas", "megatron_64gpu_pp4_dp4.csv.gz"),
    Run("8 MI300X, 8 stages", "primus_8_mi300x_pp8.csv.gz", warm_up=1),
)


def timelines(rows: pd.DataFrame, gaps: str = "stages") -> list[ps.Timeline]:
    """Return all steps of a table."""
    return [ps.Timeline.from_table(part, ops=OPS, gaps=gaps) for _, part in rows.groupby("step")]


def pipelines(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the F and B of each replica."""
    compute = rows[rows["op"].isin([op.name for op in COMPUTE])]
    for _, part in compute.groupby("replica"):
        yield part


def seconds(timeline: ps.Timeline) -> pd.DataFrame:
    """Return the seconds and the latency of each task, and ``first``: its F on the first stage."""
    graph, costs = timeline.graph, replay_costs(timeline)
    frame = pd.DataFrame(
        {name: getattr(graph, name) for name in TASK}
        | {"duration": costs.table.duration, "latency": costs.table.latency}
    )
    firsts = frame[(frame["op"] == ps.Op.F) & (frame["stage"] == 0)]
    lengths = firsts.set_index(["replica", "microbatch"])["duration"]
    return frame.join(lengths.rename("first"), on=["replica", "microbatch"])


Predictor = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


def medians(earlier: pd.DataFrame, tasks: pd.DataFrame) -> pd.DataFrame:
    """Return the median seconds and latency of each task."""
    return tasks[TASK].join(earlier.groupby(TASK)[["duration", "latency"]].median(), on=TASK)


def by_lengths(earlier: pd.DataFrame, tasks: pd.DataFrame) -> pd.DataFrame:
    """Return `medians`, but seconds of F and B by a line over those of the first stage's F."""
    from scipy import stats  # takes a second, which those that import this file do without

    predicted = medians(earlier, tasks)
    for kind, own in earlier[earlier["op"].isin(COMPUTE)].groupby(KIND):
        slope, intercept = stats.siegelslopes(own["duration"], own["first"])
        spread = stats.median_abs_deviation(own["duration"])
        rest = stats.median_abs_deviation(own["duration"] - slope * own["first"])
        if rest**2 > (1 - EXPLAINED) * spread**2:
            continue
        rows = (tasks[KIND] == list(kind)).all(axis=1).to_numpy()
        predicted.loc[rows, "duration"] = intercept + slope * tasks.loc[rows, "first"].to_numpy()
    return predicted


def makespan(timeline: ps.Timeline, costs: pd.DataFrame) -> float:
    """Return the simulated makespan of a timeline's graph at the costs of its tasks."""
    graph = timeline.graph
    columns = {name: np.zeros(len(graph)) for name in ("launch", "nbytes")}
    chosen = CostTable(
        duration=costs["duration"].to_numpy(),
        latency=costs["latency"].to_numpy(),
        links=np.arange(len(graph))[:, None],
        share=np.ones(len(graph)),
        **columns,
    )
    return ps.simulate(graph, TaskCosts.of_tasks(chosen, None, np.zeros(len(graph)))).makespan


def halves(steps: Sequence[ps.Timeline]) -> tuple[Sequence[ps.Timeline], Sequence[ps.Timeline]]:
    """Return the first and the second half of the steps."""
    return steps[: len(steps) // 2], steps[len(steps) // 2 :]


def predictions(steps: Sequence[ps.Timeline], predictor: Predictor) -> list[float]:
    """Return the error of each step of the second half."""
    first, second = halves(steps)
    earlier = pd.concat([seconds(step) for step in first], ignore_index=True)
    return [
        makespan(step, predictor(earlier, seconds(step))) / step.makespan - 1 for step in second
    ]


def drifts(steps: Sequence[ps.Timeline], _: Predictor) -> list[float]:
    """Return the error of the median makespan of the first half, for each step of the second."""
    first, second = halves(steps)
    usual = float(np.median([step.makespan for step in first]))
    return [usual / step.makespan - 1 for step in second]


def replays(steps: Sequence[ps.Timeline]) -> list[float]:
    """Return the error of the replay of each step."""
    return [ps.replay(step).makespan / step.makespan - 1 for step in steps]


def _row(name: str, errors: Sequence[float]) -> list[str]:
    worst = max(errors, key=abs)
    values = (np.mean(errors), np.mean(np.abs(errors)), np.std(errors), worst)
    return [name, str(len(errors)), *(f"{x:+.2%}" if k != 2 else f"{x:.2%}"
                                      for k, x in enumerate(values))]  # fmt: skip


def _by_operation(steps: Sequence[ps.Timeline]) -> list[str]:
    """Return the errors of the mean seconds of each operation."""
    first, second = (
        pd.concat([seconds(step) for step in half]).groupby("op")["duration"].mean()
        for half in halves(steps)
    )
    errors = (first / second - 1).dropna()
    return [f"{ps.Op(op).name} {error:+.1%}" for op, error in errors.items()]


def _spread(steps: Sequence[ps.Timeline]) -> float:
    """Return the spread of the seconds of F on the first stage, over their mean."""
    firsts = pd.concat([seconds(step) for step in steps]).groupby("replica")["first"]
    return float((firsts.std() / firsts.mean()).mean())


def _explained(rows: pd.DataFrame) -> list[str]:
    """Return the changes of the mean makespan without what takes time beside F and B."""
    steps, kept = timelines(rows, "charge"), timelines(rows, "keep")
    own = np.mean([step.makespan for step in steps])
    without: dict[str, list[float]] = {"messages": [], "gaps": [], "stragglers": []}
    for step, recorded in zip(steps, kept, strict=True):
        tasks = seconds(step)
        sends = tasks["op"].isin([ps.Op.SEND_F, ps.Op.SEND_B])
        free = tasks.assign(latency=0.0, duration=tasks["duration"].where(~sends, 0.0))
        without["messages"].append(makespan(step, free))
        without["gaps"].append(makespan(recorded, seconds(recorded)))
        equal = tasks.groupby(["stage", "op", "part", "microbatch"])["duration"].transform("mean")
        without["stragglers"].append(makespan(step, tasks.assign(duration=equal)))
    return [f"{name} {np.mean(values) / own - 1:+.2%}" for name, values in without.items()]


def report(run: Run) -> list[str]:
    """Return the lines of a run."""
    rows = run.rows()
    whole = timelines(rows)
    parts = list(pipelines(rows))
    lines = [
        _row("replay, whole steps", replays(whole)),
        _row("replay, pipelines", [x for part in parts for x in replays(timelines(part))]),
    ]
    charged = timelines(rows, "charge")
    charged_parts = [timelines(part, "charge") for part in parts]
    for name, errors_of, predictor in (
        ("drift", drifts, medians),
        ("prediction", predictions, medians),
        ("by lengths", predictions, by_lengths),
    ):
        lines.append(_row(f"{name}, whole steps", errors_of(charged, predictor)))
        errors = [x for steps in charged_parts for x in errors_of(steps, predictor)]
        lines.append(_row(f"{name}, pipelines", errors))
    schedules = ", ".join(sorted({step.name for step in whole}))
    return [
        f"{run.name}: {len(whole)} steps of {whole[0].graph.n_microbatches} micro-batches, "
        f"schedule {schedules}",
        "",
        *table(["", "steps", "mean", "mean size", "spread", "worst"], lines, 1),
        "",
        "seconds, first half over second: " + ", ".join(_by_operation(whole)),
        "makespan without: " + ", ".join(_explained(rows)),
        f"F of the first stage differ by {_spread(whole):.1%}",
        "",
    ]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.tables:
        for path in args.tables:
            print(*report(Run(path.name, path.absolute())), sep="\n")
        return
    lines = [line for run in RUNS for line in report(run)]
    publish(["# python benchmarks/published_timelines.py", "", *lines[:-1]], args.out)
    with contextlib.chdir(FIGURE.parent):
        runpy.run_path(FIGURE.name)
    plt.savefig(args.out.with_suffix(".png"), dpi=200)


if __name__ == "__main__":
    main()
