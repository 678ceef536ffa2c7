"""The directory of a training: its record, its lock, and the folders of its checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeexec.checkpoints.directory import newest
from pipeexec.run_directory import command, environment
from pipeexec.run_lock import run_lock
from pipeexec.training.training_run import EVALUATIONS, LOG
from pipesim.errors import RunDirectoryError
from pipesim.utils.files import TEMPORARY, read_json, write_errors, write_text
from pipesim.utils.texts import CHECKSUM, checksum, checksum_mismatch

#: File with the command, the versions and what identifies the training.
RECORD = "training.json"
_IDENTITY = "training"
_CHECKPOINTS, _STEPS = "checkpoints", "steps"
#: Files with the costs and the timeline of the prediction.
COSTS, PREDICTED = "costs.json", "predicted.csv"
#: All names in the directory of a training.
_FILES = {RECORD, LOG, EVALUATIONS, COSTS, PREDICTED, _CHECKPOINTS, _STEPS}
#: Names of the checkpoints that a training saves; it continues from no other one.
_CHECKPOINT = re.compile(r"step-[0-9]{8,}")


@contextmanager
def open_directory(path: Path, identity: Mapping[str, Any], *, resume: bool) -> Iterator[None]:
    """Lock the directory of a training in a block; make it, or check that it is of this training.

    Parameters
    ----------
    identity
        What may not change when a training is continued; JSON can hold it.
    resume
        Whether to continue a training; otherwise its files are deleted.

    Raises
    ------
    RunDirectoryError
        If another process trains in it, it is of another training (the first difference is named),
        or it has files but no record of a training.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.exists()  # fails for a name that is too long
    except OSError as error:
        raise RunDirectoryError(
            f"cannot make the directory {path}: {error.strerror}; choose another one"
        ) from error
    with run_lock(path):
        _prepare(path, identity, resume=resume)
        yield


def _prepare(path: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Make the directory of a training, or check it."""
    content = {"command": command(), **environment(), _IDENTITY: dict(identity)}
    content = json.loads(json.dumps(content, default=str))
    with write_errors(path):
        is_new = not path.exists() or not any(path.iterdir())
    if not is_new and not (path / RECORD).is_file():
        raise RunDirectoryError(
            f"{path} exists and is no directory of a training (it has no {RECORD}); choose another "
            "one, or remove it"
        )
    if not is_new and not resume:
        _record(path)
        names = {x.name for x in path.iterdir() if not TEMPORARY.fullmatch(x.name)}
        if foreign := sorted(names - _FILES):
            raise RunDirectoryError(
                f"{path} has {foreign[0]!r}, which no training has written and which would be "
                "removed; move it elsewhere, or train in another directory"
            )
        with write_errors(path):
            shutil.rmtree(path)
        is_new = True
    if not is_new:
        _check_identity(path, content[_IDENTITY])
        return
    with write_errors(path):
        path.mkdir(exist_ok=True)
    content[CHECKSUM] = checksum(content)
    write_text(path / RECORD, json.dumps(content, indent=2) + "\n")


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Raise unless the record of a directory has an identity, naming the first difference."""
    record = _record(path)
    if record.get(CHECKSUM) != checksum(record):
        raise RunDirectoryError(checksum_mismatch(path / RECORD, "restore it"))
    before, now = _flat(record[_IDENTITY]), _flat(identity)
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, "not given"), now.get(name, "not given")
        if old != new:
            raise RunDirectoryError(
                f"{path} is of another training: {name} is {old!r:.80} there, and {new!r:.80} now; "
                "give the same, or train in another directory"
            )


def _record(path: Path) -> dict[str, Any]:
    record = read_json(path / RECORD, "the record", RunDirectoryError)
    if not isinstance(record, dict) or not isinstance(record.get(_IDENTITY), dict):
        raise RunDirectoryError(f"{path / RECORD} is no record of a training; restore it")
    return record


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with their keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def checkpoint_path(directory: Path, n_steps: int) -> Path:
    """Return the path of the checkpoint after a number of steps."""
    return directory / _CHECKPOINTS / f"step-{n_steps:08}"


def latest(directory: Path) -> Path | None:
    """Return the newest whole checkpoint of a training; None if there is none."""
    return newest(directory / _CHECKPOINTS, _CHECKPOINT)


def step_folder(directory: Path, step: int) -> Path:
    """Make the folder for the timeline of a step, and return it."""
    path = directory / _STEPS / f"step-{step:08}"
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path
