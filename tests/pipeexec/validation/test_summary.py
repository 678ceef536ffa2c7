"""Text and HTML of a validation: origin, makespans and errors, from steps made by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from html_cells import cells_of

import pipeexec as px
import pipesim as ps
from pipeexec.run_directory import environment
from pipeexec.validation import Validation
from pipeexec.validation.accuracy import Row

EVIL = '"><script>alert(1)</script>'
RECORD: dict[str, Any] = {
    "command": "pipeexec validate --devices 2",
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"machine": "x86_64", "cpu": "Some CPU", "cores": 8, "gpus": ["H100", "H100"]},
}


def row(name: str = "1f1b", makespans: tuple[float, ...] = (8.0, 10.0, 12.0)) -> Row:
    """Return a row whose prediction is 9 s."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    timeline = ps.simulate(graph, ps.Costs(1, 2)).with_name(name)
    zeros = (0.0,) * len(makespans)
    return Row(timeline, timeline, makespans, makespans, (0.0, 0.0), zeros)


def validation(n_rows: int = 1, **fields: Any) -> Validation:
    rows = {f"graph {k}": row() for k in range(n_rows)}
    return Validation(rows, ps.Costs(1, 2), **fields)


def test_a_validation_prints_its_makespans_and_errors() -> None:
    """9 s against a median of 10 s; the worst step took 12 s."""
    assert repr(validation(record=RECORD)).splitlines() == [
        "<Validation of 1 graph",
        "  command: pipeexec validate --devices 2",
        "  date: 2026-01-02T03:04:05+00:00",
        "  hardware: Some CPU, 8 cores, 2 x H100",
        "  graph    predicted  measured   error  worst step  steps",
        "  graph 0     9.00 s    10.0 s  −10.0%      −25.0%      3>",  # noqa: RUF001
    ]


def test_a_validation_shows_a_table() -> None:
    html = validation(record=RECORD, notes=("Links are imposed.",))._repr_html_()
    assert cells_of(html) == [
        ["graph", "predicted", "measured", "error", "worst step", "steps"],
        ["graph 0", "9.00 s", "10.0 s", "−10.0%", "−25.0%", "3"],  # noqa: RUF001
    ]
    for text in ("pipeexec validate --devices 2", "2 x H100", "Links are imposed."):
        assert text in html


def test_many_graphs_are_cut() -> None:
    text, html = repr(validation(40)), validation(40)._repr_html_()
    assert text.count("graph ") == 8 + 1  # and the head
    assert text.endswith("and 32 more (see .table)>")
    assert len(cells_of(html)) == 1 + 32
    assert "Not shown: 8 more graphs (see .table)." in html


def test_a_validation_without_rows_or_record() -> None:
    assert repr(validation(0)) == "<Validation of 0 graphs>"
    assert "hardware" not in validation()._repr_html_()


def test_a_loaded_run_has_its_origin(tmp_path: Path) -> None:
    """Command, date and hardware are those of the process that saved it."""
    validation().save(tmp_path / "run", record={"command": "a\nb", "seed": 3}, figures=False)
    loaded = px.load_run(tmp_path / "run")
    assert set(loaded.record) == {"command", "date", "versions", "hardware", "seed"}
    assert loaded.record["hardware"] == environment()["hardware"]
    age = datetime.now(UTC) - datetime.fromisoformat(loaded.record["date"])
    assert timedelta(0) <= age < timedelta(minutes=10)
    assert "command: a b\n" in repr(loaded)
    assert repr(loaded).splitlines()[-1] == repr(validation()).splitlines()[-1]


def test_names_and_records_are_escaped() -> None:
    """Of graphs, commands, processors and GPUs; and entries of unexpected kinds."""
    hardware = {"cpu": EVIL, "cores": EVIL, "gpus": [EVIL, 3]}
    record = {"command": EVIL, "date": EVIL, "hardware": hardware}
    shown = replace(validation(record=record, notes=(EVIL,)), rows={EVIL: row()})
    html = shown._repr_html_()
    assert "<script>" not in html
    assert html.count("&lt;script&gt;") == 7
    odd = validation(record={"command": None, "hardware": ["none"]})
    assert "hardware" not in repr(odd)
    assert "processor" in repr(validation(record={"hardware": {"gpus": 3}}))


def test_long_commands_are_cut() -> None:
    lines = repr(validation(record={"command": "x" * 1000})).splitlines()
    assert max(map(len, lines)) < 250
