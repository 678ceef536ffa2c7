"""Run directories: what a validation leaves behind, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pipesim.errors import ArgumentError, RunDirectoryError

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
    if path.exists() and not (path / RECORD).is_file():
        raise RunDirectoryError(
            f"{path} exists and is no run directory (it has no {RECORD}); choose another name, "
            "or remove it"
        )
    try:
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

    If the block raises, nothing is left, and an older run at ``path`` stays as it was.
    """
    check_writable(path)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder
        files = {
            file.relative_to(folder).as_posix(): _checksum(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        whole = {**record, **environment(), "files": files}
        whole["checksum"] = _checksum_of_record(whole)
        (folder / RECORD).write_text(json.dumps(whole, indent=2) + "\n")
        folder.chmod(0o755)
        _rename(folder, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error}") from error
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
    try:
        record = json.loads((path / RECORD).read_text())
        files = dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} is no whole run directory: cannot read {RECORD}: {error}"
        ) from error
    if record.get("checksum") != _checksum_of_record(record):
        raise RunDirectoryError(
            f"{path / RECORD} is not what was written: it was edited since; run again, or copy the "
            "directory anew"
        )
    for name, checksum in files.items():
        file = path / name
        if not file.is_file():
            raise RunDirectoryError(f"{path} lacks {name}; the run directory was truncated")
        if _checksum(file) != checksum:
            raise RunDirectoryError(
                f"{file} is not what was written: it was truncated or edited since; run again, or "
                "copy the directory anew"
            )
    return dict(record)


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _checksum_of_record(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "checksum"})
    return hashlib.sha256(text.encode()).hexdigest()


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
