"""Save the state of a training as a checkpoint, and continue from one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeexec.checkpoints.encoding import decode, encode
from pipeexec.checkpoints.load import load_checkpoint
from pipeexec.checkpoints.save import save_checkpoint
from pipeexec.executor.pipeline import Pipeline
from pipeexec.training.batch_source import BatchSource
from pipeexec.training.random_states import random_states, restore_random_states
from pipesim.errors import ArgumentError, CheckpointError

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

    Raises
    ------
    CheckpointError
        If `train` has not saved it, or with other objects.
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
