"""Tables, figures and a page from the results of steps; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from on_gpu.about import PEERS
from on_gpu.figures import draw_ablation, draw_memory, draw_overlap, draw_overlays
from on_gpu.outcomes import Outcome, outcomes_in, write_summary
from on_gpu.packing import SUMMARY
from on_gpu.report import records_of
from on_gpu.sources import commit, digest
from on_gpu.steps import STEPS, WARM_UP

__all__ = ["publish"]

FIGURES, PAGE = "figures", "README.md"


def publish(folder: Path) -> None:
    """Write summary, tables, figures and ``README.md`` of a folder of results."""
    outcomes = outcomes_in(folder)
    write_summary(outcomes, folder / SUMMARY)
    tables = {kind: pd.DataFrame(rows) for kind, rows in _records(folder).items()}
    for kind, table in tables.items():
        table.to_csv(folder / f"{kind.replace(' ', '-')}.csv", index=False)
    figures = list(_figures(folder, folder / FIGURES))
    text = "\n".join(_page(folder, outcomes, tables, figures))
    (folder / PAGE).write_text(text + "\n")


def _records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each kind of table, step after step."""
    records: dict[str, list[dict[str, Any]]] = {}
    for step in (WARM_UP, *STEPS):
        for row in records_of(folder / f"{step}.jsonl"):
            records.setdefault(row.pop("kind"), []).append({"step": step, **row})
    return records


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
    figures: Iterable[tuple[str, str]],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the page."""
    yield "# Results of `make gpu`\n"
    page = "docs/how_to/validate_a_gpu_run.md"
    yield f"Made by `make gpu` and `make gpu-unpack`; [{page}](../../{page}) explains.\n"
    yield f"```\n{(folder / SUMMARY).read_text().rstrip()}\n```"
    for ran in dict.fromkeys(tables["sources"]["digest"]) if "sources" in tables else ():
        origin = f"commit {commit()}" if ran == digest() else "not those of this checkout"
        yield f"\nSources `{ran}` ({origin})."
    if "errors" in tables:
        yield "\n## Makespan: data sheet, calibrated, measured\n"
        yield ("Milliseconds. `data sheet`: predicted from nominal rates alone; nothing measured "
               "enters. `calibrated`: predicted from calibration steps. `error`: calibrated over "
               "measured, minus 1: median of the steps, then their mean with its 95 % interval, "
               "which says nothing of another calibration. `host`: seconds in which the host "
               "issued a step, or launched its graph, over its makespan.\n")  # fmt: skip
        yield _markdown(_errors(tables["errors"]))
    for kind, title in _TITLES.items():
        if kind in tables:
            yield f"\n## {title}\n"
            if kind == "peers":
                yield f"{PEERS}\n"
            yield _markdown(tables[kind].drop(columns="step").map(_text))
    for number, (name, caption) in enumerate(figures):
        yield ("\n## Figures\n" if number == 0 else "")
        yield f"![{caption}]({FIGURES}/{name}.png)"


#: Kinds of records and headings, in the order of the page.
_TITLES = {
    "gradients": "Gradients against the unsplit model's, relative to the largest of a parameter",
    "overlap": "Copies beside compute: share of SENDs' time hidden, and makespan (s)",
    "gpipe": "The GPipe module's mechanisms (s)",
    "host": "Host time a task (us), stages that do nothing",
    "peers": "Steps of other runtimes on the same streams (s)",
    "memory": "Memory of the GPU (bytes)",
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
    return pd.DataFrame({
        "slices": table["slices"], "schedule": table["schedule"],
        "CUDA graph": table["cuda_graph"], "overlap": table["overlap"],
        "data sheet": scale("data_sheet"), "calibrated": scale("predicted"),
        "measured": scale("measured"), "error": table["error"].map("{:+.1%}".format),
        "mean error (95 %)": interval, "steps": table["n_steps"],
        "host": table["host_share"].map("{:.2f}".format),
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
