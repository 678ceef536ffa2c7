"""Run directories: what a validation leaves behind, written whole or not at all."""

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
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pipeexec.run_lock import run_lock
from pipesim.errors import ArgumentError, RunDirectoryError
from pipesim.utils.atomic_write import check_path, read_bytes, read_text
from pipesim.utils.texts import CHECKSUM, checksum, parse_json

__all__ = [
    "RECORD",
    "check_writable",
    "checked_record",
    "environment",
    "read_record",
    "write_directory",
]

#: Says how everything else came to be, and holds the checksum of every file, itself included.
RECORD = "run.json"


def environment() -> dict[str, Any]:
    """Return versions and hardware, for the record."""
    names = ("pipesim", "torch", "numpy", "pandas", "simpy", "matplotlib")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": {
            "python": platform.python_version(),
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
    """Return the version of a package; one that runs from its checkout need not be installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_writable(path: Path) -> None:
    """Raise unless a run directory can be written at ``path``, replacing an older run there.

    Raises
    ------
    RunDirectoryError
        If the folder cannot be made or written in, or if ``path`` holds something else.
    """
    try:
        if path.exists() and not (path / RECORD).is_file():
            raise RunDirectoryError(
                f"{path} exists and is no run directory (it has no {RECORD}); choose another name, "
                "or remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write results in {path.parent}: {error.strerror}; choose another folder"
        ) from error


def checked_record(record: object) -> dict[str, Any]:
    """Return what a user adds to the record of a run: a mapping, or None for nothing.

    Raises
    ------
    ArgumentError
        For anything else.
    """
    if record is None:
        return {}
    if not isinstance(record, Mapping):
        raise ArgumentError(
            f"record must be a mapping of names to values, got {record!r:.60} "
            f"({type(record).__name__}); give such as {{'seed': 0}}"
        )
    return dict(record)


@contextmanager
def write_directory(path: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end add the record and rename it to ``path``.

    If the block raises, nothing is left, and an older run at ``path`` stays as it was. Meanwhile no
    other process can write there.

    Raises
    ------
    RunDirectoryError
        If it cannot be written, something else is there, or another process is writing it.
    """
    path = check_path("path", path, "write")
    check_writable(path)
    with run_lock(path):
        yield from _written(path, record)


def _written(path: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Do what `write_directory` does, while no other process does."""
    folder = path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}")
    try:
        folder.mkdir()  # with the mode of the process, which tempfile's folders have not
        yield folder
        files = {
            file.relative_to(folder).as_posix(): _checksum(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        whole = {**record, **environment(), "files": files}
        whole[CHECKSUM] = checksum(whole)
        (folder / RECORD).write_text(json.dumps(whole, indent=2) + "\n")
        _rename(folder, path)
    except (OSError, ArgumentError) as error:  # of the system, or of a file in the folder
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise RunDirectoryError(
            f"cannot write {path}: {cause.strerror or cause}; make room, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, path: Path) -> None:
    """Rename ``folder`` to ``path``; put an older run there back if that fails."""
    if not path.exists():
        os.replace(folder, path)
        return
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    old = aside / path.name
    try:
        os.replace(path, old)
        os.replace(folder, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a run directory, once every file is there and as it was written.

    Raises
    ------
    RunDirectoryError
        Naming the file that is missing, truncated or edited.
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
            f"{path / RECORD} is not what was written: it was edited since; run again, or copy the "
            "directory anew"
        )
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise RunDirectoryError(f"{path} lacks {name}; the run directory was truncated")
        if _checksum(file) != expected:
            raise RunDirectoryError(
                f"{file} is not what was written: it was truncated or edited since; run again, or "
                "copy the directory anew"
            )
    return dict(record)


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
