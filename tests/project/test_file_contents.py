"""Contents of files at the level of users: JSON, CSV, checksums, and traces of ours."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from written import BASE, COSTS, READERS, TIMELINE, WRITERS, sweep

import pipesim as ps
from pipeexec.cli import main as pipeexec_main
from pipesim.cli import main
from pipesim.errors import (
    ArgumentError,
    CostsError,
    NetworkError,
    PipeError,
    TimelineError,
)

pytestmark = pytest.mark.usefixtures("no_hang")


# JSON, TOML and CSV.


def test_keys_that_are_there_twice(tmp_path: Path) -> None:
    """The last one would win."""
    path = tmp_path / "x.json"
    path.write_text('{"forward": 1, "backward": 2, "forward": 3}')
    with pytest.raises(CostsError, match="key 'forward' is there twice; give it once"):
        ps.Costs.load(path)
    path.write_text('{"forward": 1, "network": {"latency": 1, "latency": 2}}')
    with pytest.raises(CostsError, match="key 'latency' is there twice"):
        ps.Costs.load(path)
    TIMELINE.to_chrome(path)
    path.write_text(path.read_text().replace('"dur":', '"dur": 5, "dur":', 1))
    with pytest.raises(TimelineError, match="key 'dur' is there twice"):
        ps.Timeline.from_chrome(path)
    row = '{"digest": "a", "makespan": 1, "makespan": 2}'
    path.write_text(row + "\n")
    with pytest.raises(ArgumentError, match=r"line 1 is no row .*key 'makespan' is there twice"):
        sweep(path)


@pytest.mark.parametrize("name", ["Costs.load", "Timeline.from_chrome", "sweep", "--config"])
def test_deep_nesting(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if name == "--config":
        path.write_text("x = " + "[" * 100_000 + "]" * 100_000)
        assert main(["simulate", *BASE, name, str(path)]) == 2
        assert "is nested too deeply" in capsys.readouterr().err
        return
    path.write_text('{"digest":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(PipeError, match=r"x.* nested too deeply"):
        (READERS | WRITERS)[name](path)


@pytest.mark.parametrize("text", ["1_0", "\u0661\u0660", "1_0.5", "1e1_0"])
def test_numbers_in_files_are_plain(text: str, tmp_path: Path) -> None:
    """Python's underscores and digits of other scripts are no numbers."""
    path = tmp_path / "x.csv"
    path.write_text(f"forward,backward\n{text},1\n")
    with pytest.raises(CostsError, match="line 2, column 'forward': must be finite seconds"):
        ps.Layers.read(path)
    path.write_text(f"source,target,latency,bandwidth\n0,1,{text},1\n")
    with pytest.raises(NetworkError, match="line 2, column latency: must be finite"):
        ps.Network.from_csv(path)
    for column in ("start", "device", "microbatch"):
        rows = TIMELINE.frame.astype(object)
        rows.loc[rows.index[0], column] = text
        rows.to_csv(path, index=False)
        with pytest.raises(TimelineError, match=f"line 2: {column} is no number but '{text}'"):
            ps.Timeline.load(path)


@pytest.mark.parametrize(
    "option",
    [
        ("--devices", "1_0"),
        ("--forward", "1_0"),
        ("--latency", "\u0663"),
        ("--forward", "1e-0_3"),
        ("--skips", "\u0660-\u0661"),
    ],
)
def test_numbers_of_the_command_are_plain(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *BASE, *option]) == 2
    assert repr(option[1]) in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--steps", "1_0"), ("--timeout", "6_0"), ("--balance", "\u0662,1")]
)
def test_numbers_of_pipeexec_are_plain(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeexec_main(["validate", *option]) == 2
    assert f"{option[0]}: " in capsys.readouterr().err


def test_columns_that_are_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = TIMELINE.frame
    rows.insert(0, "start", rows["start"] * 2, allow_duplicates=True)
    rows.to_csv(path, index=False)
    with pytest.raises(TimelineError, match="column 'start' occurs twice; give it once"):
        ps.Timeline.load(path)
    path.write_text("layer,layer,forward,backward\na,b,1,1\n")
    with pytest.raises(CostsError, match="column 'layer' occurs twice"):
        ps.Layers.read(path)
    path.write_text("a,b\n1,2,3\n")
    with pytest.raises(TimelineError, match="line 2: 3 values for 2 columns"):
        ps.Timeline.load(path)


# Checksums.


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_costs_that_were_changed(tmp_path: Path) -> None:
    """Refused, with what to do; a blank more changes nothing, and neither does no checksum."""
    path = tmp_path / "costs.json"
    COSTS.save(path)
    changed(path, ":", " :\n")
    assert ps.Costs.load(path) == COSTS
    changed(path, "0.001", "0.003")
    with pytest.raises(CostsError, match=r'does not match; .* delete the line "checksum"'):
        ps.Costs.load(path)
    COSTS.save(path)
    lines = path.read_text().replace("0.001", "0.003", 1).splitlines()
    path.write_text("\n".join(line for line in lines if "checksum" not in line))
    assert ps.Costs.load(path).forward == 0.003


def test_a_timeline_that_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    TIMELINE.save(path)
    whole = path.read_text()
    path.write_bytes(whole.replace("\n", "\r\n").encode())
    assert (ps.Timeline.load(path).end == TIMELINE.end).all()
    rows = pd.read_csv(path)
    assert rows["checksum"].notna().tolist() == [True] + [False] * (len(TIMELINE) - 1)
    path.write_text(whole)
    changed(path, "0.001", "0.0009")
    with pytest.raises(TimelineError, match=r"t\.csv .*does not match; .* empty its column 'check"):
        ps.Timeline.load(path)
    rows = pd.read_csv(path)
    rows.drop(columns="checksum").to_csv(path, index=False)
    assert ps.Timeline.load(path).end[0] == 0.0009
    rows.assign(checksum="").to_csv(path, index=False)
    assert ps.Timeline.load(path).end[0] == 0.0009


def test_a_trace_that_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    TIMELINE.to_chrome(path)
    changed(path, '"dur": 1000.0', '"dur": 999.0')
    with pytest.raises(TimelineError, match=r'does not match; .* delete "pipesim_checksum"'):
        ps.Timeline.from_chrome(path)
    content = json.loads(path.read_text())
    del content["otherData"]
    path.write_text(json.dumps(content))
    with pytest.raises(TimelineError, match=r'does not match; .* and "pipesimTimelines"'):
        ps.Timeline.from_chrome(path)
    del content["pipesimTimelines"]
    path.write_text(json.dumps(content))
    assert ps.Timeline.from_chrome(path).makespan > 0


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "null": lambda row: row.update(makespan=None),
    "missing": lambda row: row.pop("makespan"),
    "NaN": lambda row: row.update(makespan=float("nan")),
    "edited": lambda row: row.update(makespan=999.0),
    "text": lambda row: row.update(makespan="x"),
    "list": lambda row: row.update(peak_memory=[1]),
    "part of a task": lambda row: row.update(n_tasks=1.5),
    "true": lambda row: row.update(makespan=True),
    "negative": lambda row: row.update(makespan=-1.0),
    "error": lambda row: row.update(error=5),
    "again": lambda row: row.update(again="no"),
    "digest": lambda row: row.update(digest=[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_rows_of_sweeps_that_were_changed(edit: str, checked: bool, tmp_path: Path) -> None:
    """By file and line; without a checksum, as older versions wrote them, only what is wrong."""
    path = tmp_path / "rows.jsonl"
    sweep(path)
    row = json.loads(path.read_text())
    EDITS[edit](row)
    if not checked:
        del row["checksum"]
    path.write_text(json.dumps(row) + "\n")
    if edit == "edited" and not checked:
        assert sweep(path)["makespan"].tolist() == [999.0]
        return
    with pytest.raises(ArgumentError, match=r"rows\.jsonl, line 1.*remove the line to have its ro"):
        sweep(path)


def test_older_rows_of_sweeps(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    table = sweep(path)
    row = json.loads(path.read_text())
    del row["checksum"]
    path.write_text(json.dumps(row) + "\n")
    pd.testing.assert_frame_equal(sweep(path), table)


# Traces of ours.


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
def test_own_traces_need_no_pattern(name: str, tmp_path: Path) -> None:
    """Read back as they were written; from the events alone, to a nanosecond."""
    graph = ps.lower(ps.schedule(name, 2, 4))
    costs = ps.Costs(1e-3, input_grad=1e-3, weight_grad=1e-3, backward=2e-3, optimizer_step=1e-3,
                     output_bytes=8, network=ps.Network(1e-4))  # fmt: skip
    timeline = ps.simulate(graph, costs)
    for file in ("x.json", "x.json.gz"):
        timeline.to_chrome(tmp_path / file)
        back = ps.Timeline.from_chrome(tmp_path / file)
        assert len(back) == len(timeline)
        assert back.end.tolist() == timeline.end.tolist()
        path = tmp_path / "events.json"
        data = (tmp_path / file).read_bytes()
        content = json.loads(gzip.decompress(data) if file.endswith("gz") else data)
        del content["otherData"], content["pipesimTimelines"]
        path.write_text(json.dumps(content))
        back = ps.Timeline.from_chrome(path)
        assert back.makespan == pytest.approx(timeline.makespan, abs=2e-9)
        assert back.graph.n_stages == graph.n_stages
