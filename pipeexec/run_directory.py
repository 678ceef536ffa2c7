"""Run directories: the files of a validation, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeexec.run_lock import run_lock
from pipesim._version import __version__
from pipesim.errors import ArgumentError, RunDirectoryError
from pipesim.utils.files import check_path, read_bytes, read_text
from pipesim.utils.texts import CHECKSUM, checksum, parse_json

#: File with the command, date (UTC), versions and hardware of a run, and the checksum of every
#: file, also of itself.
RECORD = "run.json"


def environment() -> dict[str, Any]:
    """Return versions of packages, and the hardware, for the record."""
    import torch  # here, so that directories are checked without loading it

    names = ("torch", "numpy", "pandas", "simpy", "matplotlib")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": {
            "python": platform.python_version(),
            "pipesim": __version__,
            **{name: _version(name) for name in names},
        },
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "gpus": gpus,
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_writable(path: Path) -> None:
    """Raise unless a run directory can be written at ``path``; it may replace an older run."""
    try:
        if path.exists():
            _check_only_a_run(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write results in {path.parent}: {error.strerror}; choose another folder"
        ) from error


def _check_only_a_run(path: Path) -> None:
    """Raise `RunDirectoryError` unless all files of a folder are those that a run has written."""
    problem = f"it has no {RECORD}"
    if (path / RECORD).is_file():
        problem = f"its {RECORD} is that of something else, or damaged"
        with suppress(RunDirectoryError, ValueError):
            record = parse_json(read_text(path / RECORD, "the record", RunDirectoryError))
            if isinstance(record, dict) and CHECKSUM in record and isinstance(
                files := record.get("files"), dict
            ):  # fmt: skip
                names = {x.relative_to(path).as_posix() for x in path.rglob("*") if not x.is_dir()}
                foreign = sorted(names - files.keys() - {RECORD})
                if not foreign:
                    return
                problem = f"no run has written its file {foreign[0]!r}"
    raise RunDirectoryError(
        f"{path} exists and is no run directory ({problem}); choose another name, or remove it"
    )


def checked_record(record: object) -> dict[str, Any]:
    """Return the user's additions to the record of a run, as a dict."""
    if record is None:
        return {}
    if not isinstance(record, Mapping):
        raise ArgumentError(
            f"record must be a mapping of names to values, got {record!r:.60} "
            f"({type(record).__name__}); give for example {{'seed': 0}}"
        )
    return dict(record)


@contextmanager
def write_directory(path: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end, add the record and rename the folder to ``path``.

    If the block raises, the folder is removed, and an older run at ``path`` does not change. No
    other process can write to ``path`` during the block. It raises `RunDirectoryError` if the
    folder cannot be written, ``path`` exists and is no run directory, or another process is writing
    it.
    """
    path = check_path("path", path, "write")
    check_writable(path)
    with run_lock(path):
        yield from _write_files(path, record)


def _write_files(path: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Write a directory as `write_directory` does; the caller holds the lock."""
    folder = path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}")
    try:
        folder.mkdir()  # with the umask of the process, unlike tempfile's folders
        yield folder
        files = {
            file.relative_to(folder).as_posix(): _checksum(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        date = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"date": date, **record, **environment(), "files": files}
        content[CHECKSUM] = checksum(content)
        (folder / RECORD).write_text(json.dumps(content, indent=2) + "\n")
        _rename(folder, path)
    except (OSError, ArgumentError) as error:  # from the system, or about a file in the folder
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise RunDirectoryError(
            f"cannot write {path}: {cause.strerror or cause}; make room, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, path: Path) -> None:
    """Rename ``folder`` to ``path``; if this fails, restore the older run at ``path``."""
    if not path.exists():
        os.replace(folder, path)
        return
    spare = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    old = spare / path.name
    try:
        os.replace(path, old)
        os.replace(folder, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise
    finally:
        shutil.rmtree(spare, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a run directory, after a check of every file's checksum.

    It raises `RunDirectoryError` if a file is missing, truncated or edited; the message names it.
    """
    path = check_path("path", path)
    try:
        record = parse_json(read_text(path / RECORD, "the record", RunDirectoryError))
        files = dict(record["files"])
    except (RunDirectoryError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} is no whole run directory: cannot read {RECORD}: {error}"
        ) from error
    if record.get(CHECKSUM) != checksum(record):
        raise RunDirectoryError(
            f"{path / RECORD} does not match its checksum: it was edited; run again, or copy the "
            "directory again"
        )
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise RunDirectoryError(f"{path} lacks {name}; the run directory was truncated")
        if _checksum(file) != expected:
            raise RunDirectoryError(
                f"{file} does not match its checksum: it was truncated or edited; run again, or "
                "copy the directory again"
            )
    return dict(record)


def listed_file(path: Path, record: Mapping[str, Any], name: str) -> Path:
    """Return the path of a file of a run directory, whose record `read_record` has returned.

    It raises `RunDirectoryError` if the record does not list the file: no run has written it, and
    nothing has checked it.
    """
    if name not in record["files"]:
        raise RunDirectoryError(
            f"the {RECORD} of {path} lists no {name}; give the directory of a run that writes it"
        )
    return path / name


def _checksum(file: Path) -> str:
    return hashlib.sha256(read_bytes(file, "file", RunDirectoryError)).hexdigest()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def command() -> str:
    """Return the command line of this process."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
