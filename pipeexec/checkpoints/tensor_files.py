"""Files of tensors: safetensors, which have no code, written by `torch.distributed.checkpoint`.

A folder has one file a stage, and an index of its keys, as Hugging Face's models have::

    model/model-00001-of-00002.safetensors
    model/model-00002-of-00002.safetensors
    model/model.safetensors.index.json

`torch.distributed.checkpoint`'s `HuggingFaceStorageReader` reads the folder, and so does
``from_pretrained`` of a model with these keys. Each process writes its own files, and reads the
keys that it needs. Only files that the manifest lists are read here: a copy of a shard beside them
has the same keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipesim.errors import CheckpointError

#: Shape and type of a tensor, as the manifest has them.
TensorSpec = tuple[Sequence[int], str]


def file_name(number: int, n_files: int) -> str:
    """Return the name of a file, with numbers from 1 on."""
    return f"model-{number:05d}-of-{n_files:05d}.safetensors"


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, int], n_files: int
) -> None:
    """Write tensors of this process to files of a folder, and sync these.

    Parameters
    ----------
    tensors
        On any device.
    numbers
        Number of the file of each key; no other process writes these files.
    n_files
        Files of all processes.

    Raises
    ------
    CheckpointError
        If the system refuses to write.
    """
    if not tensors:
        return
    from pipeexec.checkpoints.torch_files import write_files  # it loads slowly

    for number in sorted({numbers[key] for key in tensors}):
        part = {key: x for key, x in tensors.items() if numbers[key] == number}
        write_files(folder, _separate(part), numbers, n_files)  # one file is in memory at a time


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, none of which share memory, as safetensors need them."""
    storages: set[int] = set()
    separate: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() > value.nbytes:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        separate[key] = value
    return separate


def write_index(folder: Path, files: Mapping[str, str], n_bytes: int) -> None:
    """Write the index of a folder: the file of each key, as Hugging Face's models have it."""
    content = {"metadata": {"total_size": n_bytes}, "weight_map": dict(files)}
    with open(folder / "model.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Let the system write the names of a folder's files to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(
    folder: Path, part: str, manifest: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, Tensor]:
    """Return tensors of a folder of a checkpoint, on the CPU, from the files of its manifest.

    Raises
    ------
    CheckpointError
        If a file cannot be read, or a tensor is not there in its shape and type.
    """
    specs = {key: manifest["tensors"][part][key] for key in keys}
    tensors: dict[str, Tensor] = {}
    for name in sorted(manifest["files"]):
        file = folder / name
        if not name.startswith(f"{part}/") or file.suffix != ".safetensors":
            continue
        if len(tensors) == len(specs):
            break
        with _read_errors(file), safe_open(str(file), framework="pt") as content:
            for key in specs.keys() & content.keys() - tensors.keys():
                # A tensor of safetensors is a view of the file, which may change later.
                tensors[key] = _checked(file, key, content.get_tensor(key), specs[key]).clone()
    if missing := [key for key in specs if key not in tensors]:
        raise CheckpointError(
            f"no file of {folder / part} that the manifest lists has the tensor {missing[0]!r}; "
            "give another checkpoint"
        )
    return {key: tensors[key] for key in specs}


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = f"{error!s:.300}; give another checkpoint"
        raise CheckpointError(f"cannot read {file}: {reason}") from error


def _checked(file: Path, key: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor of a file, if it has the shape and the type of the manifest."""
    shape, dtype = tuple(spec[0]), _dtype(spec[1])
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise CheckpointError(
            f"{key!r} has shape {tuple(tensor.shape)} and type {tensor.dtype} in {file}, and shape "
            f"{shape} and type {dtype} in the manifest; give another checkpoint"
        )
    return tensor


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no type of tensors; save the checkpoint again")
    return dtype
