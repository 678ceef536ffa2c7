"""Paths and files at the level of users: what is read, what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import pipeexec as px
import pipesim as ps
from pipeexec.cli import main as pipeexec_main
from pipeexec.models import build_model
from pipeexec.run_directory import write_directory
from pipesim.cli import main
from pipesim.errors import (
    ArgumentError,
    CapacityError,
    CostsError,
    NetworkError,
    PipeError,
    RunDirectoryError,
    TimelineError,
)
from pipesim.plot import save as save_figure

SCHEDULE = ps.schedule("1f1b", 2, 2)
GRAPH = ps.lower(SCHEDULE)
COSTS = ps.Costs(1e-3, 2e-3, output_bytes=8, network=ps.Network(1e-3))
TIMELINE = ps.simulate(GRAPH, COSTS)
ROW = {"schedule": "1f1b", "n_devices": 2, "n_microbatches": 2, "forward": 1, "backward": 2}
BASE = ["1f1b", "--devices", "2", "--microbatches", "2", "--forward", "1", "--backward", "2"]


def sweep(path: Any) -> pd.DataFrame:
    return ps.sweep([ROW], path=path, n_jobs=1, progress=False)


WRITERS: dict[str, Callable[[Any], Any]] = {
    "Schedule.save": SCHEDULE.save,
    "TaskGraph.save_torch_csv": GRAPH.save_torch_csv,
    "Costs.save": COSTS.save,
    "Timeline.save": TIMELINE.save,
    "Timeline.to_chrome": TIMELINE.to_chrome,
    "trace.save": lambda path: ps.trace.save(path, TIMELINE),
    "plot.save": lambda path: save_figure(TIMELINE.plot(), path),
    "sweep": sweep,
}
#: Endings that some writers insist on.
ENDINGS = {"Timeline.to_chrome": ".json", "trace.save": ".json", "plot.save": ".svg"}
READERS: dict[str, Callable[[Any], Any]] = {
    "Schedule.load": ps.Schedule.load,
    "Costs.load": ps.Costs.load,
    "Timeline.load": ps.Timeline.load,
    "Timeline.from_chrome": ps.Timeline.from_chrome,
    "Network.from_csv": ps.Network.from_csv,
    "Layers.read": ps.Layers.read,
}
DIRECTORIES: dict[str, Callable[[Any], Any]] = {
    "hta.save": lambda path: ps.hta.save(path, TIMELINE),
    "load_run": px.load_run,
    "Profile.load": px.Profile.load,
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail, rather than wait, where a file is waited for."""

    def impatient(*_: object) -> None:
        raise AssertionError("waited for a file")

    before = signal.signal(signal.SIGALRM, impatient)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Paths.


@pytest.mark.parametrize("path", [None, 5, b"x.csv", 1.5, ["x"], "a\0b", "\ud800"])
@pytest.mark.parametrize("name", [*WRITERS, *READERS, *DIRECTORIES])
def test_what_is_no_path(
    name: str, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name, with what was given."""
    if (name, path) in (("sweep", None), ("Timeline.from_chrome", ["x"])):
        return  # no file; several files
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"path|director|embedded null|file's name") as caught:
        (WRITERS | READERS | DIRECTORIES)[name](path)
    if not isinstance(path, str):
        assert repr(path) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "loop"])
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    """Neither waiting nor reading without end."""
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    with pytest.raises(PipeError, match=str(path)):
        READERS[name](path)


@pytest.mark.parametrize("flag", ["--costs", "--config"])
def test_only_regular_files_are_read_by_the_command(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "x")
    assert main(["simulate", *BASE, flag, str(tmp_path / "x")]) == 2
    assert "it is a pipe; give a regular file" in capsys.readouterr().err


def test_the_text_of_a_model_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ArgumentError, match=r"cannot read the text .*it is a pipe"):
        build_model("gpt", text=tmp_path / "x")


def test_a_pipe_in_a_run_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunDirectoryError, match=r"run\.json: it is a pipe"):
        px.load_run(tmp_path)


# Writing.


def target(name: str, folder: Path) -> Path:
    return folder / f"mine{ENDINGS.get(name, '.csv')}"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_is_not_replaced(name: str, kind: str, tmp_path: Path) -> None:
    """The error names the path that was given, and nothing else is left."""
    path = target(name, tmp_path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.mkdir()
    before = path.stat()
    with pytest.raises(ArgumentError, match=f"cannot write {path}: it is a folder, a device or a"):
        WRITERS[name](path)
    assert path.stat().st_ino == before.st_ino
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(name: str, dangling: bool, tmp_path: Path) -> None:
    """The file that it leads to gets the content."""
    path, real = target(name, tmp_path), tmp_path / "elsewhere" / "real"
    real.parent.mkdir()
    path.symlink_to("elsewhere/real")
    if not dangling:
        real.touch()
    WRITERS[name](path)
    assert path.is_symlink()
    assert real.stat().st_size > 0
    assert not real.is_symlink()
    assert [file.name for file in real.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("name", WRITERS)
def test_modes(name: str, tmp_path: Path) -> None:
    """New files have the mode that the process gives; others keep theirs."""
    path = target(name, tmp_path)
    before = os.umask(0o077)
    try:
        WRITERS[name](path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        os.umask(0o022)
        WRITERS[name](path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
        WRITERS[name](path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_modes_of_run_directories(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with write_directory(tmp_path / "run", {}) as folder:
            COSTS.save(folder / "costs.json")
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE(x.stat().st_mode) for x in (tmp_path / "run", tmp_path / "run/costs.json")
    ]
    assert modes == [0o750, 0o640]


@pytest.mark.parametrize("name", WRITERS)
def test_no_room(name: str, tmp_path: Path) -> None:
    """The user's path is named; the old file stays, and nothing is left beside it."""
    path = target(name, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ArgumentError, match=f"cannot write {path}: File too large; make room"):
            WRITERS[name](path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.csv"] * (name == "sweep")


@pytest.mark.parametrize("name", WRITERS)
def test_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        path = target(name, tmp_path / folder)
        with pytest.raises(ArgumentError, match=f"cannot write {path}: No.*name a file in a"):
            WRITERS[name](path)


def test_a_row_of_a_sweep_that_did_not_fit_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ArgumentError, match="make room"):
            sweep(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 100
    assert sweep(path)["makespan"].tolist() == [9.0]
    assert len(pd.read_json(path, lines=True)) == 1


# Memory.


@pytest.mark.parametrize("name", READERS)
def test_too_large(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of more than memory has room for is not read to its end."""
    monkeypatch.setattr("pipesim.files.available_memory", lambda: 16_000)
    (tmp_path / "x").write_bytes(b" " * 1001)
    with pytest.raises(CapacityError, match=rf"{tmp_path / 'x'}: it has more than 0.001 MB"):
        READERS[name](tmp_path / "x")


def test_too_large_once_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.files.available_memory", lambda: 16 * 2**20)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(2**22)))
    with pytest.raises(CapacityError, match=r"x\.json\.gz: it has more than"):
        ps.Timeline.from_chrome(tmp_path / "x.json.gz")


def test_limits_of_the_process(tmp_path: Path) -> None:
    """A limit of the address space (``ulimit -v``) is one of memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "x").write_bytes(b" " * 2**23)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, limits[1]))
    try:
        with pytest.raises(CapacityError, match="x: it has more than"):
            ps.Costs.load(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_schedule_named_by_what_is_no_path() -> None:
    """A name with a slash is that of a file."""
    with pytest.raises(ArgumentError, match="embedded null character"):
        ps.sweep([{**ROW, "schedule": "a/b\0"}], n_jobs=1, progress=False)


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
    "given",
    [
        ("--devices", "1_0"),
        ("--forward", "1_0"),
        ("--latency", "\u0663"),
        ("--forward", "1e-0_3"),
        ("--skips", "\u0660-\u0661"),
    ],
)
def test_numbers_of_the_command_are_plain(
    given: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *BASE, *given]) == 2
    assert repr(given[1]) in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [("--steps", "1_0"), ("--timeout", "6_0"), ("--balance", "\u0662,1")]
)
def test_numbers_of_pipeexec_are_plain(
    given: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeexec_main(["validate", *given]) == 2
    assert f"{given[0]}: " in capsys.readouterr().err


def test_columns_that_are_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = TIMELINE.frame
    rows.insert(0, "start", rows["start"] * 2, allow_duplicates=True)
    rows.to_csv(path, index=False)
    with pytest.raises(TimelineError, match="column 'start' is there twice; give it once"):
        ps.Timeline.load(path)
    path.write_text("layer,layer,forward,backward\na,b,1,1\n")
    with pytest.raises(CostsError, match="column 'layer' is there twice"):
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
    """Read back as they were written, to a nanosecond."""
    graph = ps.lower(ps.schedule(name, 2, 4))
    costs = ps.Costs(1e-3, input_grad=1e-3, weight_grad=1e-3, backward=2e-3, optimizer_step=1e-3,
                     output_bytes=8, network=ps.Network(1e-4))  # fmt: skip
    timeline = ps.simulate(graph, costs)
    for file in ("x.json", "x.json.gz"):
        timeline.to_chrome(tmp_path / file)
        back = ps.Timeline.from_chrome(tmp_path / file)
        assert len(back) == len(timeline)
        assert back.makespan == pytest.approx(timeline.makespan, abs=2e-9)
        assert back.graph.n_stages == graph.n_stages
