"""Paths and files at the level of users: what is read, what is written, and what is refused."""

from __future__ import annotations

import gzip
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from written import BASE, COSTS, DIRECTORIES, ENDINGS, READERS, ROW, WRITERS, sweep

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model
from pipeexec.run_directory import write_directory
from pipesim.cli import main
from pipesim.errors import (
    ArgumentError,
    CapacityError,
    PipeError,
    RunDirectoryError,
)

pytestmark = pytest.mark.usefixtures("no_hang")

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
    monkeypatch.setattr("pipesim.utils.files.available_memory", lambda: 16_000)
    (tmp_path / "x").write_bytes(b" " * 1001)
    with pytest.raises(CapacityError, match=rf"{tmp_path / 'x'}: it has more than 0.001 MB"):
        READERS[name](tmp_path / "x")


def test_too_large_once_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.utils.files.available_memory", lambda: 16 * 2**20)
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
