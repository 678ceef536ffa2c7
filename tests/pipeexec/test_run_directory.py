"""Run directories: written whole or not at all, and read only if they are as written."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ranks import running

from pipeexec import run_directory
from pipeexec.run_directory import RECORD, check_writable, read_record, write_directory
from pipeexec.run_lock import check_file_names, check_run_name, run_lock
from pipesim.errors import ArgumentError, PipeError, RunDirectoryError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with two files, one of them in a folder."""
    return write(tmp_path / "results" / "run")


def write(path: Path, text: str = "first") -> Path:
    with write_directory(path, {"seed": 3, "loss": float("nan")}) as to:
        (to / "costs.json").write_text(text)
        (to / "row").mkdir()
        (to / "row" / "timeline.csv").write_text("1,2\n")
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_run_is_read_back(run: Path) -> None:
    record = read_record(run)
    assert record["seed"] == 3
    assert set(record["files"]) == {"costs.json", "row/timeline.csv"}
    assert set(everything(run)) == {"costs.json", "row/timeline.csv", RECORD}
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_the_record_says_on_what_it_ran(run: Path) -> None:
    record = read_record(run)
    assert {"python", "pipesim", "torch", "numpy"} <= record["versions"].keys()
    assert {"machine", "cpu", "cores", "gpus"} == record["hardware"].keys()


def test_a_directory_can_be_read_by_others(run: Path) -> None:
    """Temporary folders cannot."""
    assert run.stat().st_mode & 0o777 == 0o755


def test_an_older_run_is_replaced(run: Path) -> None:
    write(run, "second")
    assert (run / "costs.json").read_text() == "second"
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    read_record(run)


def test_files_of_others_stay(run: Path) -> None:
    """A folder with any run.json is no run directory; nor is a run to which files were added."""
    (run / "row" / "notes").write_text("precious")
    with pytest.raises(RunDirectoryError, match=r"no run has written its file 'row/notes'\); ch"):
        write(run)
    (run / "row" / "notes").unlink()
    write(run, "second")
    for text in ("mine", '{"files": {}}', "[]"):
        (run / RECORD).write_text(text)
        with pytest.raises(RunDirectoryError, match=r"its run\.json is that of something else"):
            write(run)
    assert (run / "costs.json").read_text() == "second"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError, PipeError])
@pytest.mark.parametrize("replaces", [False, True])
def test_an_interrupted_write_leaves_nothing(
    error: type[BaseException], replaces: bool, tmp_path: Path
) -> None:
    """And an older run as it was."""
    path = tmp_path / "run"
    if replaces:
        write(path)
    before = everything(tmp_path)

    def interrupted() -> None:
        with write_directory(path, {}) as to:
            (to / "half").write_text("of it")
            raise error("stop")

    with pytest.raises(RunDirectoryError if error is OSError else error):
        interrupted()
    assert everything(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["run"] if replaces else [])


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_rename_that_fails_keeps_the_old_run(
    failing: int, error: BaseException, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old run is set aside first, and put back."""
    before, rename, calls = everything(run.parent), os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == failing:
            raise error
        rename(source, target)

    monkeypatch.setattr(run_directory.os, "replace", replace)
    with pytest.raises((RunDirectoryError, KeyboardInterrupt)):
        write(run, "second")
    assert everything(run.parent) == before
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_what_cannot_be_written_is_told(run: Path) -> None:
    """As when the disk is full."""

    def full() -> None:
        with write_directory(run, {}):
            raise OSError(28, "No space left on device")

    with pytest.raises(RunDirectoryError, match=r"cannot write .*run: .*No space left on device"):
        full()


# Where a run may be written


def test_a_folder_that_is_there_or_can_be_made_is_writable(tmp_path: Path) -> None:
    """Looking leaves nothing but the parents."""
    check_writable(tmp_path / "a" / "b" / "run")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["file/run", "file/deeper/run"])
def test_a_parent_that_is_no_folder(path: str, tmp_path: Path) -> None:
    """A file: not even root can write into that."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write results in .*choose another fold"):
        check_writable(tmp_path / path)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_parent_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(RunDirectoryError, match="Permission denied"):
        check_writable(tmp_path / "locked" / "run")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_something_else_is_not_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Even an empty folder, whose purpose is unknown."""
    path = tmp_path / "mine"
    make(path)
    for call in (check_writable, write):
        with pytest.raises(RunDirectoryError, match=r"mine exists and is no run directory \(it h"):
            call(path)
    assert path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_run_is_written_by_one(tmp_path: Path) -> None:
    """Another that begins meanwhile is refused, in another process too; the first is whole."""
    path, script = tmp_path / "results" / "run", tmp_path / "script.py"
    path.parent.mkdir()
    script.write_text(
        "import sys, pathlib; from pipeexec.run_lock import run_lock\n"
        "with run_lock(pathlib.Path(sys.argv[1])): print('locked', flush=True); input()"
    )
    log = tmp_path / "0.log"
    log.touch()
    with running([[str(script), str(path)]], tmp_path) as (other,):
        while "locked\n" not in log.read_text():
            assert other.poll() is None, log.read_text()
            time.sleep(1e-2)
        with pytest.raises(RunDirectoryError, match=rf"process {other.pid} on .* is writing .*run"):
            write(path)
    write(path, "second")
    assert [file.name for file in path.parent.iterdir()] == ["run"]
    read_record(path)


OWNER = """
import os, pathlib, subprocess, sys, time
from pipeexec.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1])):
    if sys.argv[2] == "forked":
        if os.fork():
            time.sleep(1000)
        child = os.getpid()  # printed by the child, which has closed its copy of the lock
    else:
        child = subprocess.Popen(["sleep", "1000"], close_fds=False).pid
    print(child, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forked", "another program"])
def test_a_lock_ends_with_its_process(kind: str, tmp_path: Path) -> None:
    """Also after SIGKILL, while a process that it has started still runs."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run"), kind],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        with (
            pytest.raises(RunDirectoryError, match=f"process {owner.pid} on"),
            run_lock(tmp_path / "run"),
        ):
            pass
        owner.kill()
        owner.wait()
        os.kill(child, 0)  # still there
        with run_lock(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_longest_names(tmp_path: Path) -> None:
    """Files of 255 bytes; the folder of a run is shorter, for its lock and temporary names."""
    for check, longest in (check_run_name, 223), (lambda x: check_file_names("file", [x]), 255):
        name = "ä" + "n" * (longest - 2)
        check(name)
        (tmp_path / name).touch()
        with pytest.raises(ArgumentError, match=f"has more than {longest} bytes"):
            check(name + "n")


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    """It can neither enter the block as the owner, nor remove the lock at its end."""
    with ExitStack() as stack:
        stack.enter_context(run_lock(tmp_path / "run"))
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(RunDirectoryError), run_lock(tmp_path / "run"):
                    pass
                stack.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / ".run.lock").exists()


def test_a_lock_that_its_owner_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of a file without a name is none: it is taken again."""
    honest, locks = fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        honest(handle, how)
        if not locks:
            (tmp_path / ".run.lock").unlink()
        locks.append(handle)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path / "run"), run_lock(tmp_path / "run"):
        assert len(locks) == 2
        assert (tmp_path / ".run.lock").exists()
    assert list(tmp_path.iterdir()) == []


# Runs that are not as written


@pytest.mark.parametrize("name", ["costs.json", "row/timeline.csv", RECORD])
def test_a_missing_file_is_named(name: str, run: Path) -> None:
    (run / name).unlink()
    with pytest.raises(RunDirectoryError, match=name):
        read_record(run)


@pytest.mark.parametrize("name", ["costs.json", "row/timeline.csv", RECORD])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_truncated_file_is_named(name: str, cut: int, run: Path) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: cut if name == RECORD else cut - 4])
    with pytest.raises(RunDirectoryError, match=name):
        read_record(run)


@pytest.mark.parametrize("name", ["costs.json", "row/timeline.csv"])
def test_an_edited_file_is_named(name: str, run: Path) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content.replace(b"1", b"2").replace(b"f", b"F"))
    with pytest.raises(RunDirectoryError, match=f"{name} does not match its checksum"):
        read_record(run)


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: record | {"seed": 4},
        lambda record: record | {"files": {}},
        lambda record: {k: v for k, v in record.items() if k != "seed"},
        lambda record: {k: v for k, v in record.items() if k != "files"},
        lambda record: {k: v for k, v in record.items() if k != "checksum"},
        lambda record: record | {"files": "text"},
        lambda record: record | {"files": 3},
        lambda record: list(record),
        lambda record: None,
    ],
)
def test_an_edited_record_is_named(edit: Callable[[dict[str, Any]], Any], run: Path) -> None:
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps(edit(record)))
    with pytest.raises(RunDirectoryError, match=RECORD):
        read_record(run)


def test_a_record_that_is_only_laid_out_anew_is_the_same(run: Path) -> None:
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps(record, indent=8))
    assert read_record(run)["seed"] == 3


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null"])
def test_a_record_that_is_none(content: bytes, run: Path) -> None:
    (run / RECORD).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"no whole run directory: cannot read {RECORD}"):
        read_record(run)


@pytest.mark.parametrize("path", ["absent", "file"])
def test_a_path_that_is_no_directory(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=f"{path} is no whole run directory"):
        read_record(tmp_path / path)
