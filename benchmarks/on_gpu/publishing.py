"""Tables, figures and a page from the results of steps; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from on_gpu.about import PEERS
from on_gpu.clocks import SUFFIX as CLOCKS
from on_gpu.clocks import clocks_between
from on_gpu.figures import draw_ablation, draw_memory, draw_overlap, draw_overlays
from on_gpu.outcomes import Outcome, outcomes_in, write_summary
from on_gpu.packing import SUMMARY
from on_gpu.report import MARKS, records_of
from on_gpu.sources import commit, digest
from on_gpu.steps import PREMISES, STEPS, WARM_UP
from on_gpu.utilization import ABOUT, readable, utilization

FIGURES, PAGE = "figures", "README.md"


def publish(folder: Path) -> None:
    """Write summary, tables, figures and ``README.md`` of a folder of results."""
    outcomes = outcomes_in(folder)
    write_summary(outcomes, folder / SUMMARY)
    tables = {kind: pd.DataFrame(rows) for kind, rows in _records(folder).items()}
    if "errors" in tables:
        tables["errors"]["remark"] = _remarks(tables)
    if not (use := utilization(folder)).empty:
        tables["utilization"] = use
    for kind, table in tables.items():
        table.to_csv(folder / f"{kind.replace(' ', '-')}.csv", index=False)
    figures = list(_figures(folder, folder / FIGURES))
    text = "\n".join(_page(folder, outcomes, tables, figures))
    (folder / PAGE).write_text(text + "\n")


def _records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each kind of table, step after step, with the GPU's clocks meanwhile."""
    records: dict[str, list[dict[str, Any]]] = {}
    for step in (WARM_UP, *STEPS):
        for row in records_of(folder / f"{step}.jsonl"):
            kind, began, ended = row.pop("kind"), row.pop("began"), row.pop("ended")
            clocks = clocks_between(folder / f"{step}{CLOCKS}", began, ended)
            records.setdefault(kind, []).append({"step": step, **row, **clocks})
    return records


def _remarks(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Return what is to be said of each row of makespans: of its slices, and of the GPU."""
    probes = tables.get("environment", pd.DataFrame(columns=["probe", "met"]))
    lacking = [PREMISES[x] for x in probes["probe"][~probes["met"].astype(bool)] if x in PREMISES]
    remarks = []
    for row in tables["errors"].itertuples():
        texts = [row.note, *(text for text, graphs_alone in lacking
                             if row.cuda_graph or not graphs_alone)]  # fmt: skip
        remarks.append("; ".join(dict.fromkeys(filter(None, texts))))
    return remarks


def _figures(folder: Path, to: Path) -> Iterator[tuple[str, str]]:
    """Draw the figures for which there are results; yield name and caption of each."""
    to.mkdir(exist_ok=True)
    for old in to.iterdir():
        old.unlink()
    for n in (2, 4, 8):
        for kind, words in (("graph", "as one CUDA graph"), ("eager", "task by task")):
            runs = sorted((folder / f"validation-{n}").glob(f"{kind}-on-*"))
            name = f"overlay-{n}-slices-{kind}"
            if runs and draw_overlays(runs, to / name):
                yield name, f"Measured over predicted, {n} slices, {words}"
    if draw_ablation(folder / "gpipe" / "ablation", to / "gpipe-ablation"):
        yield "gpipe-ablation", "Mechanisms of the GPipe module, one after the other"
    for schedule in ("gpipe", "1f1b"):
        if draw_overlap(folder / "overlap", schedule, to / f"overlap-{schedule}"):
            yield f"overlap-{schedule}", f"{schedule}: copies beside compute, and behind it"
        if draw_memory(folder / "memory", schedule, to / f"memory-{schedule}"):
            yield f"memory-{schedule}", f"{schedule}: memory allocated and predicted"


def _page(
    folder: Path, outcomes: list[Outcome], tables: dict[str, pd.DataFrame],
    figures: list[tuple[str, str]],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines: overlay, sentence to quote, table of errors, what failed, then the rest."""
    page = "docs/how_to/validate_a_gpu_run.md"
    yield "# Results of `make gpu`\n"
    overlays = [figure for figure in figures if figure[0].startswith("overlay")]
    yield from (f"{_image(*figure)}\n" for figure in overlays[:1])
    yield quotable(outcomes, tables)
    if "errors" in tables:
        yield "\n## Makespan: data sheet, calibrated, measured\n"
        yield ("Milliseconds. `data sheet`: predicted from nominal rates alone; nothing measured "
               "enters. `calibrated`: predicted from calibration steps. `error`: calibrated over "
               "measured, minus 1: median of the steps, then their mean with its 95 % interval, "
               "which says nothing of another calibration. `bubble`: predicted, then measured. "
               "`host`: seconds in which the host issued a step, or launched its graph, over its "
               "makespan.\n")  # fmt: skip
        yield _markdown(_errors(tables["errors"]))
        yield from (f"\nNoise floor: {text}." for text in _noise(tables))
    if "utilization" in tables:
        yield f"\n## Use of the slices\n\n{ABOUT}\n"
        yield _markdown(readable(tables["utilization"]))
    yield "\n## What failed\n"
    yield from (list(_failures(folder, outcomes)) or ["Nothing."])
    yield f"\n## Steps\n\n[{page}](../../{page}) explains them.\n"
    yield f"```\n{(folder / SUMMARY).read_text().rstrip()}\n```"
    for ran in dict.fromkeys(tables["sources"]["digest"]) if "sources" in tables else ():
        origin = f"commit {commit()}" if ran == digest() else "not those of this checkout"
        yield f"\nSources `{ran}` ({origin})."
    for kind, title in _TITLES.items():
        if kind in tables:
            yield f"\n## {title}\n"
            if kind == "peers":
                yield f"{PEERS}\n"
            yield _markdown(tables[kind].drop(columns="step").map(_text))
    for number, figure in enumerate(x for x in figures if x not in overlays[:1]):
        yield ("\n## Figures\n" if number == 0 else "")
        yield _image(*figure)


def quotable(outcomes: Sequence[Outcome], tables: dict[str, pd.DataFrame]) -> str:
    """Return one sentence on the errors of predictions, with the hardware and the noise floor."""
    hardware = next((x.hardware for x in outcomes if x.hardware), "")
    where = f"On {hardware}" if hardware else "In a dry run on CPU workers, which measures nothing"
    if "errors" not in tables:
        return f"{where}, no makespan was compared with its prediction."
    errors = tables["errors"]
    counts = " and ".join(map(str, sorted(set(errors["slices"]))))
    largest = errors.loc[errors["error"].abs().idxmax()]
    text = (
        f"{where}, in {counts} slices, {len(errors)} rows of {errors['schedule'].nunique()} "
        f"schedules were predicted from calibration steps with a median error of "
        f"{errors['error'].abs().median():.1%}, at most {abs(largest['error']):.1%} "
        f"({largest['schedule']}, {'a CUDA graph' if largest['cuda_graph'] else 'eager'}, "
        f"{largest['dtype']})"
    )
    noise = "; ".join(_noise(tables))
    return f"{text}. {noise[:1].upper()}{noise[1:]}." if noise else f"{text}."


def _noise(tables: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Yield what the same row gave another time."""
    for row in tables["noise"].itertuples() if "noise" in tables else ():
        yield (
            f"the same row ({row.schedule}, {row.slices} slices) measured and calibrated again "
            f"differs by {row.measured_ratio:+.1%}, its error by {row.error_difference:+.1%}"
        )


def _failures(folder: Path, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each target that was missed, and each step that did not end by itself."""
    for outcome in outcomes:
        report = folder / f"{outcome.step}.txt"
        lines = report.read_text(errors="replace").splitlines() if report.is_file() else []
        for line in lines:
            if line.startswith(MARKS[1]):
                yield f"- `{outcome.step}`: {' '.join(line.removeprefix(MARKS[1]).split())[:300]}"
        if outcome.status not in ("passed", "missed"):
            yield f"- `{outcome.step}` {outcome.status}: {outcome.remark[:300]}"


def _image(name: str, caption: str) -> str:
    return f"![{caption}]({FIGURES}/{name}.png)"


#: Kinds of records and headings, in the order of the page.
_TITLES = {
    "instrument": "Makespan by the profiler (CUPTI) and by events (s)",
    "event-cost": "Steps with events that note the time, and without (s)",
    "graph-facts": "Steps captured as CUDA graphs: seconds, bytes of the pool, nodes",
    "features": "Features on slices and on CPU workers: largest difference of a value",
    "gradients": "Gradients against the unsplit model's, relative to the largest of a parameter",
    "overlap": "Copies beside compute: share of SENDs' time hidden, and makespan (s)",
    "gpipe": "The GPipe module's mechanisms (s)",
    "engine-orders": "Orders that torch's engine takes without dependencies, and makespans (s)",
    "host": "Host time a task (us), stages that do nothing",
    "peers": "Steps of other runtimes on the same streams (s)",
    "memory": "Memory of the GPU (bytes)",
    "contention": "What slices share: seconds of one alone, and with all busy",
    "sanitizer": "Steps under torch's CUDA sanitizer",
    "soak": "Hundreds of steps",
    "environment": "Abilities of GPU, driver and torch",
}


def _errors(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of makespans, in milliseconds and per cent."""
    scale: Callable[[str], pd.Series[str]] = lambda name: table[name].map(  # noqa: E731
        lambda seconds: "-" if pd.isna(seconds) else f"{seconds * 1e3:.2f}"
    )
    interval = [
        f"{row.error_mean:+.1%} ({row.error_low:+.1%} to {row.error_high:+.1%})"
        for row in table.itertuples()
    ]
    clocks = {x: table[x].fillna("-") for x in ("SM MHz", "W", "throttled") if x in table}
    bubble = [f"{x.bubble_predicted:.1%}, {x.bubble_measured:.1%}" for x in table.itertuples()]
    return pd.DataFrame({
        "slices": table["slices"], "schedule": table["schedule"],
        "CUDA graph": table["cuda_graph"], "overlap": table["overlap"], "type": table["dtype"],
        "data sheet": scale("data_sheet"), "calibrated": scale("predicted"),
        "measured": scale("measured"), "error": table["error"].map("{:+.1%}".format),
        "mean error (95 %)": interval, "steps": table["n_steps"], "bubble": bubble,
        "host": table["host_share"].map("{:.2f}".format), **clocks, "remark": table["remark"],
    })  # fmt: skip


def _text(value: object) -> str:
    if isinstance(value, float):
        return "-" if pd.isna(value) else f"{value:.4g}"
    return str(value)


def _markdown(table: pd.DataFrame) -> str:
    """Return a table of Markdown."""
    rows = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    rows += [
        [str(value).replace("|", "/") for value in row] for row in table.itertuples(index=False)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
