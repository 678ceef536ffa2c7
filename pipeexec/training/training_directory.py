"""The directory of a training: its record, its lock, and its checkpoints."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeexec.checkpoints.contents import decode, encode
from pipeexec.checkpoints.directory import newest
from pipeexec.checkpoints.load import load_checkpoint
from pipeexec.checkpoints.save import save_checkpoint
from pipeexec.executor.pipeline import Pipeline
from pipeexec.run_directory import command, environment
from pipeexec.run_lock import run_lock
from pipeexec.training.batch_source import BatchSource, random_states, restore_random_states
from pipeexec.training.training_run import EVALUATIONS, LOG
from pipesim.errors import ArgumentError, CheckpointError, RunDirectoryError
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

    ``identity`` may not change when a training is continued. Without ``resume``, files of an
    earlier training are deleted.
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


# State of a training in a checkpoint.

_LOADER = "loader"
#: Object of a checkpoint: the place of each process in its batches.
_PLACES = "processes"


def save_training(
    n_steps: int,
    pipeline: Pipeline,
    source: BatchSource,
    objects: Mapping[str, Any],
    path: Path,
    keep: int,
) -> None:
    """Save a training after ``n_steps``, with objects by name; all processes call this.

    Each process has its own place and random states: loaders of replicas may be unlike.
    """
    place = source.state_dict()
    place[_LOADER] = None if place[_LOADER] is None else _as_json(place[_LOADER])
    own = {"n_steps": n_steps, "place": place, "random": random_states(source.loader)}
    places = [own] if pipeline.processes is None else pipeline.processes.share(own)
    save_checkpoint(pipeline, path, keep=keep, processes=places, **objects)


def load_training(
    pipeline: Pipeline, source: BatchSource, objects: Mapping[str, Any], path: Path
) -> int:
    """Continue from a checkpoint; return its number of steps. All processes call this.

    A process that did not exist before continues as rank 0 did.
    """
    saved = load_checkpoint(pipeline, path)
    names = saved.keys() - {_PLACES}
    for name in sorted(names ^ objects.keys()):
        now, before = ("no", "one") if name in names else ("one", "none")
        raise CheckpointError(
            f"this training has {now} {name!r}, the checkpoint {path} {before}; give the same, or "
            "train in another directory"
        )
    for name, value in objects.items():
        try:
            value.load_state_dict(saved[name])
        except (ArgumentError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{name!r} of {path} does not fit: {error!s:.300}") from error
    rank = 0 if pipeline.processes is None else pipeline.processes.rank
    try:
        places = saved[_PLACES]
        own = places[rank if rank < len(places) else 0]
        place = dict(own["place"])
        place[_LOADER] = None if place[_LOADER] is None else _from_json(place[_LOADER])
        source.load_state_dict(place)
        restore_random_states(own["random"], source.loader)
        return int(own["n_steps"])
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} has no place in the batches: px.train has not saved it; take its weights by "
            "px.load_checkpoint, and train in another directory"
        ) from error


def _as_json(value: Any) -> dict[str, Any]:
    """Return the state of a loader as JSON can hold it, with its tensors as text."""
    tensors: dict[str, Tensor] = {}
    encoded = encode(value, _LOADER, tensors)
    return {"value": encoded, "tensors": {key: _tensor_text(x) for key, x in tensors.items()}}


def _tensor_text(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), base64.b64encode(data).decode()]


def _from_json(value: Mapping[str, Any]) -> Any:
    """Return the state of a loader from `_as_json`."""
    tensors = {}
    for key, (name, shape, text) in value["tensors"].items():
        data = torch.frombuffer(
            bytearray(base64.b64decode(text)) or bytearray(1), dtype=torch.uint8
        )
        tensors[key] = data[: len(data) * bool(text)].view(getattr(torch, name)).reshape(shape)
    return decode(value["value"], tensors)
