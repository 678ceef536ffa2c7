"""Timelines as Parquet files and Arrow tables: exact, and refused where they are damaged."""

from __future__ import annotations

import hashlib
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_timelines import KINDS, same, timeline_of_kind
from strategies import cases

import pipesim as ps
from pipesim.errors import ArgumentError, CapacityError, TimelineError
from pipesim.timeline import arrow_tables
from pipesim.timeline.tables import to_rows
from pipesim.utils import files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.parquet"


@pytest.mark.parametrize("kind", [*KINDS, "failed"])
def test_round_trip_of_each_kind(kind: str, path: Path) -> None:
    """Columns, settings, and the wiring of the graph; and a file of the same bytes again."""
    timeline = timeline_of_kind(kind)
    timeline.save(path)
    loaded = ps.Timeline.load(path, costs=timeline.costs)
    assert loaded.name == "mine"
    assert loaded.costs is timeline.costs
    assert same(timeline, loaded)
    (rows, settings), (rows_again, settings_again) = to_rows(timeline), to_rows(loaded)
    assert settings == settings_again
    pd.testing.assert_frame_equal(rows, rows_again, check_exact=True, check_dtype=False)
    assert loaded.makespan == timeline.makespan
    assert loaded.start.flags.writeable  # or else kernels would be compiled once more for it
    written = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == written


@pytest.mark.slow
@given(case=cases(), data=st.data())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[ps.TaskGraph, ps.Costs],
    data: st.DataObject,
) -> None:
    """The file has all bits of any times, as the CSV has."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    delays = data.draw(st.lists(st.floats(0, 1e9), min_size=1, max_size=9))
    moved = np.resize(delays, len(graph))
    timeline = ps.Timeline(graph, timeline.start + moved, timeline.end + moved, timeline.nbytes)
    folder = tmp_path_factory.mktemp("timeline")
    timeline.save(folder / "x.parquet")
    timeline.save(folder / "x.csv")
    loaded = ps.Timeline.load(folder / "x.parquet")
    assert same(timeline, loaded)
    loaded.save(folder / "y.csv")
    assert (folder / "y.csv").read_bytes() == (folder / "x.csv").read_bytes()


def test_cut_anywhere(path: Path) -> None:
    timeline_of_kind("plain").save(path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TimelineError, match=r"mine\.parquet is no whole timeline: it"):
            ps.Timeline.load(path)


def test_any_changed_byte(path: Path) -> None:
    """A changed time is noticed, and so is a byte that no reader looks at."""
    timeline_of_kind("plain").save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(TimelineError, match=r"mine\.parquet"):
            ps.Timeline.load(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"device,stream\n", b"PAR1" * 99])
def test_no_parquet(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(TimelineError, match=r"mine\.parquet is no whole timeline"):
        ps.Timeline.load(path)


def test_files_of_other_programs(path: Path) -> None:
    """A table without our metadata lacks the settings of its graph."""
    pq.write_table(pa.table(timeline_of_kind("plain")), path)
    with pytest.raises(TimelineError, match=r"no Timeline\.save wrote this Parquet file, or ano"):
        ps.Timeline.load(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(TimelineError, match="write changed tables as CSV"):
        ps.Timeline.load(path)


def rewritten(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Write a file of ours whose columns or settings were changed before its checksum."""

    def changed(timeline: ps.Timeline) -> tuple[pd.DataFrame, dict[str, str]]:
        rows, settings = to_rows(timeline)
        settings |= changes.pop("settings", {})
        rows = rows.iloc[: changes.pop("n_rows", len(rows))]
        return rows.assign(**changes).drop(columns=[k for k in changes if changes[k] is None]), (
            settings
        )

    with monkeypatch.context() as context:
        context.setattr(arrow_tables, "to_rows", changed)
        timeline_of_kind("plain").save(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": None}, "column 'stage' is missing"),
        ({"n_rows": 0}, "it has no rows"),
        ({"n_rows": 90}, r"0F7|1F|is missing|STEP"),
        ({"op": "X"}, r"task 0 \(.*\) names an unknown op"),
        ({"stream": "side"}, r"task 0 \(.*\) names an unknown stream"),
        ({"end": -1.0}, r"task 0 \(.*\) ends before it starts"),
        ({"start": "soon"}, "column 'start' has type string, allowed is double, once"),
        ({"op": 1.0}, "column 'op' has type double, allowed is string"),
        ({"device": 99999}, "has no valid device"),
        ({"settings": {"hosts": "9"}}, "host"),
        ({"settings": {"rendezvous": "maybe"}}, "unknown rendezvous 'maybe'"),
        ({"settings": {"n_batches": "x"}}, "n_batches is no number but 'x'"),
        ({"settings": {"surprise": "x"}}, "has no valid settings"),
        ({"settings": {"hosts": 1}}, "has no valid settings"),
    ],
)
def test_impossible_content(
    changes: dict[str, Any], message: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file of ours cannot have is refused even with a checksum that matches."""
    if changes in ({"start": "soon"}, {"op": 1.0}):
        others = ("end", "nbytes", "issued", *({"op": 1, "start": 1} if "op" in changes else ()))
        monkeypatch.setattr("pipesim.timeline.arrow_tables.SECONDS_AND_BYTES", others)
        rewritten(path, monkeypatch, **changes)
        monkeypatch.undo()
    else:
        rewritten(path, monkeypatch, **changes)
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.load(path)


def repeated(path: Path, n: int, **values: Any) -> None:
    """Write a Parquet file of a few hundred kilobytes at most with ``n`` rows, in two groups."""
    table = arrow_tables.arrow_table(timeline_of_kind("plain"))
    fields = {field.name: field.type for field in table.schema}
    columns = {}
    for name, kind in fields.items():
        value = pa.array([values.get(name, table.column(name)[0].as_py())])
        if pa.types.is_dictionary(kind):
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), value)
        else:
            columns[name] = pa.array(np.full(n, value[0].as_py())).cast(kind)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, compression="zstd") as writer:
        for _ in range(2):
            writer.write_table(pa.table(columns), row_group_size=n)
        metadata = {"sha256": arrow_tables._NO_DIGEST, "settings": {}}
        writer.add_key_value_metadata({"pipesim": json.dumps(metadata)})
    data = bytes(sink.getvalue())
    digest = hashlib.sha256(data).hexdigest()
    path.write_bytes(data.replace(arrow_tables._NO_DIGEST.encode(), digest.encode()))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "values"), [(200_000, {}), (2000, {"op": "F" * 100_000})])
def test_few_bytes_that_are_many(
    n: int, values: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the rows, or the texts of a row, are in memory; with a right checksum."""
    repeated(path, n, **values)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(files, "available_memory", lambda: 4 * 10**8)
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(
        CapacityError, match=r"a timeline from .*mine\.parquet: it has more than 25"
    ):
        ps.Timeline.load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 10**7
    assert pa.total_allocated_bytes() - before < 2 * 10**7
    monkeypatch.setattr(files, "available_memory", lambda: 10**12)
    if not values:
        with pytest.raises(TimelineError, match="no whole timeline"):
            ps.Timeline.load(path)


@pytest.mark.parametrize(("n", "values"), [(50_000, {}), (1, {"op": "F" * 10_000_000})])
def test_nothing_is_decoded_that_is_too_large(
    n: int, values: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows, or one row of many bytes."""
    repeated(path, n, **values)
    monkeypatch.setattr(files, "available_memory", lambda: 10**8)
    monkeypatch.setattr(pq, "ParquetFile", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(CapacityError, match=r"it has more than 6\.25 MB, and reading takes"):
        ps.Timeline.load(path)


def test_memory_that_runs_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline_of_kind("plain").save(path)

    def full(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(pq, "ParquetFile", full)
    with pytest.raises(CapacityError, match=r"mine\.parquet: it does not fit in memory; give a s"):
        ps.Timeline.load(path)


def test_the_stream_of_arrow() -> None:
    """Programs that know the protocol, such as pyarrow, read a timeline itself."""
    timeline = timeline_of_kind("plain")
    table = pa.table(timeline)
    assert table.num_rows == len(timeline)
    assert table.column("start").to_numpy().tolist() == timeline.start.tolist()
    assert table.column("op").to_pylist() == timeline.frame["op"].tolist()
    assert table.schema.field("device").type == pa.int32()
    frame = pd.DataFrame.from_arrow(timeline) if hasattr(pd.DataFrame, "from_arrow") else None
    assert frame is None or frame["end"].tolist() == timeline.end.tolist()


def test_a_requested_schema() -> None:
    """The reader may ask for other types of the same columns."""
    timeline = timeline_of_kind("plain")
    schema = pa.table(timeline).schema
    index = schema.get_field_index("device")
    wanted = schema.set(index, pa.field("device", pa.int64()))
    table = pa.RecordBatchReader.from_stream(timeline, schema=wanted).read_all()
    assert table.column("device").to_pylist() == timeline.graph.device.tolist()
    assert table.schema.field("device").type == pa.int64()


@pytest.mark.parametrize("use", ["save", "load", "stream"])
def test_without_pyarrow(use: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = timeline_of_kind("plain")
    timeline.save(path)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = {
        "save": lambda: timeline.save(path),
        "load": lambda: ps.Timeline.load(path),
        "stream": timeline.__arrow_c_stream__,
    }
    with pytest.raises(ArgumentError, match=r"needs pyarrow, .* pip install 'pipesim\[parquet\]'"):
        calls[use]()


def test_a_name_in_capitals(tmp_path: Path) -> None:
    timeline = timeline_of_kind("plain")
    timeline.save(tmp_path / "X.PARQUET")
    assert (tmp_path / "X.PARQUET").read_bytes()[:4] == b"PAR1"
    assert same(timeline, ps.Timeline.load(str(tmp_path / "X.PARQUET")))
