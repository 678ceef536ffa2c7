"""The folder of a checkpoint: its manifest, its files of tensors, and its name.

The manifest is a JSON file with the size and SHA-256 of every file, and one of itself. So a file
that was cut, edited or lost is named before anything is loaded.

Tensors are in safetensors, which have no code, written by `torch.distributed.checkpoint`. A folder
has one file a stage, and an index of its keys, as Hugging Face's models have::

    model/model-00001-of-00002.safetensors
    model/model-00002-of-00002.safetensors
    model/model.safetensors.index.json

`torch.distributed.checkpoint`'s `HuggingFaceStorageReader` reads the folder, and so does
``from_pretrained`` of a model with these keys. Each process writes its own files, and reads the
keys that it needs. Only files that the manifest lists are read here: a copy of a shard beside them
has the same keys.

A folder is written under another name, and renamed when it is whole::

    run/step-100                     a checkpoint
    run/.step-100.0123456789ab.part  one that is being written, or whose process was killed
    run/.step-100.0123456789ab.old   the older one of this name, while the new one takes its place

A process may be killed between the two renames that replace a checkpoint. Then both are whole, and
none has the name. `present` returns the older one, and the next `save_checkpoint` restores its
name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeexec.run_directory import environment
from pipeexec.run_lock import run_lock
from pipesim.errors import CheckpointError, PipeError, RunDirectoryError
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path, read_bytes, read_text
from pipesim.utils.texts import CHECKSUM, checksum, parse_json

MANIFEST = "checkpoint.json"
#: Folders of tensors: parameters and buffers, state of optimizers, rows of sharded embeddings,
#: tensors of other objects.
FOLDERS = ("model", "optimizer", "rows", "objects")
_FORMAT, _VERSION = "pipeexec checkpoint", 1
_FILE = re.compile(rf"({'|'.join(FOLDERS)})/model[-.0-9a-z]*\.(safetensors|json)")
#: Beginning of each manifest, by which a damaged one is recognised.
_START = json.dumps({"format": _FORMAT})[:-1].encode()


def _is_count(value: object, limit: int = 2**63) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_dict_of(kind: type, value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(x, kind) for x in value.values())


def _has_specs(value: Any) -> bool:
    """Return whether each folder has the shape and the type of each tensor by its key."""
    return _is_dict_of(dict, value) and all(
        isinstance(spec, list)
        and len(spec) == 2
        and isinstance(spec[0], list)
        and all(map(_is_count, spec[0]))
        and isinstance(spec[1], str)
        for folder in FOLDERS
        for spec in value.get(folder, {"": None}).values()
    )


def _has_rows(value: Any) -> bool:
    """Return whether there are the facts of `pipeexec.checkpoints.contents` by prefixes."""
    return _is_dict_of(dict, value) and all(
        isinstance(x.get("n_rows"), list)
        and all(map(_is_count, [*x["n_rows"], x.get("dim"), x.get("n_ranks")]))
        and isinstance(x.get("columns"), list)
        for x in value.values()
    )


#: Values of a manifest: whether one is valid, and the valid ones. All are checked before any is
#: used: a load that fails half-way would leave a model of two states.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "saved": (lambda x: type(x) in (int, float) and 0 <= x < 1e15, "seconds since 1970"),
    "n_steps": (_is_count, "a whole number from 0 to 2**63 - 1"),
    "seed": (lambda x: _is_count(x, 2**64), "a whole number from 0 to 2**64 - 1"),
    "tensors": (_has_specs, "shape and type of each tensor"),
    "others": (lambda x: isinstance(x, dict), "an object"),
    "optimizer": (
        lambda x: x is None or (isinstance(x, dict) and {"state", "param_groups"} <= x.keys()),
        "null, or an object with 'state' and 'param_groups'",
    ),
    "rows": (_has_rows, "an object with n_rows, dim, n_ranks and columns of each embedding"),
    "random": (
        lambda x: isinstance(x, list) and bool(x) and all(_is_dict_of(str, y) for y in x),
        "the states of each process",
    ),
    "objects": (lambda x: isinstance(x, dict), "an object"),
    "files": (lambda x: _is_dict_of(dict, x), "an object with facts about each file"),
}


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, and sync it."""
    whole = {"format": _FORMAT, "version": _VERSION, **content, **environment()}
    whole[CHECKSUM] = checksum(whole)
    _write_synced(folder / MANIFEST, json.dumps(whole) + "\n")


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose files `check_files` checks."""
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists():
        raise CheckpointError(
            f"{folder} is no whole checkpoint: it has no {MANIFEST}; give a folder that "
            "save_checkpoint has written"
        )
    text = read_text(path, "the manifest", CheckpointError)
    try:
        manifest = parse_json(text)
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise ValueError("it is that of no checkpoint")
        if manifest.get(CHECKSUM) != checksum(manifest):
            raise ValueError("its checksum does not match: it was cut or edited")
        if manifest.get("version") != _VERSION:
            raise ValueError(f"its version is {manifest.get('version')!r}, allowed is {_VERSION}")
        for key, (is_valid, allowed) in _VALUES.items():
            if not is_valid(value := manifest.get(key)):
                raise ValueError(f"it has no valid {key!r}: got {value!r:.60}, allowed: {allowed}")
        for name in manifest["files"]:
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
    except ValueError as error:
        raise CheckpointError(
            f"cannot read the manifest {path}: {error}; give another checkpoint"
        ) from error
    return manifest


def foreign_files(folder: Path) -> list[str]:
    """Return the names of files in the folder of a checkpoint that `save_checkpoint` did not write.

    Of a checkpoint with a damaged manifest, they are files of other names than those of tensors.
    """
    is_own: Callable[[str], object] = _FILE.fullmatch
    try:
        is_own = read_manifest(folder)["files"].__contains__
    except CheckpointError:
        head = read_bytes(folder / MANIFEST, "the manifest", CheckpointError, first=len(_START))
        if head not in (_START, b""):
            raise
    files = (x for x in folder.rglob("*") if x.is_symlink() or not x.is_dir())
    names = [x.relative_to(folder).as_posix() for x in files]
    return sorted(name for name in names if name != MANIFEST and not is_own(name))


def file_facts(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the bytes and the SHA-256 of files."""
    facts = {}
    for name in names:
        path = folder / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise CheckpointError(f"{path} is no regular file; give another checkpoint")
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                facts[name] = {"bytes": os.fstat(handle).st_size, "sha256": digest}
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror}; give another checkpoint"
            ) from error
    return facts


def check_files(folder: Path, manifest: Mapping[str, Any], part: int = 0, n_parts: int = 1) -> None:
    """Compare files with the manifest; of several processes, each compares one part."""
    for name in sorted(manifest["files"])[part::n_parts]:
        (facts,) = file_facts(folder, [name]).values()
        expected = manifest["files"][name]
        if facts != expected:
            raise CheckpointError(
                f"{folder / name} does not match its checksum, with {facts['bytes']} bytes of "
                f"{expected.get('bytes')!r}: it was cut or edited; give another checkpoint"
            )


#: Shape and type of a tensor, as the manifest has them.
TensorSpec = tuple[Sequence[int], str]


def file_name(number: int, n_files: int) -> str:
    """Return the name of a file, with numbers from 1 on."""
    return f"model-{number:05d}-of-{n_files:05d}.safetensors"


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, int], n_files: int
) -> None:
    """Write tensors of this process to files of a folder, and sync these.

    ``numbers`` has the number of the file of each key; no other process writes these files.
    ``n_files`` counts those of all processes.
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
    _write_synced(folder / "model.safetensors.index.json", json.dumps(content, indent=2))


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
    """Return tensors of a folder of a checkpoint, on the CPU, from the files of its manifest."""
    specs = {key: manifest["tensors"][part][key] for key in keys}
    tensors: dict[str, Tensor] = {}
    for name in sorted(manifest["files"]):
        file = folder / name
        if not name.startswith(f"{part}/") or file.suffix != ".safetensors":
            continue
        if len(tensors) == len(specs):
            break
        try:
            with safe_open(str(file), framework="pt") as content:
                for key in specs.keys() & content.keys() - tensors.keys():
                    # A tensor of safetensors is a view of the file, which may change later.
                    tensors[key] = _checked(file, key, content.get_tensor(key), specs[key]).clone()
        except (SafetensorError, OSError) as error:
            reason = f"{error!s:.300}; give another checkpoint"
            raise CheckpointError(f"cannot read {file}: {reason}") from error
    if missing := [key for key in specs if key not in tensors]:
        raise CheckpointError(
            f"no file of {folder / part} that the manifest lists has the tensor {missing[0]!r}; "
            "give another checkpoint"
        )
    return {key: tensors[key] for key in specs}


def _checked(file: Path, key: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor of a file, if it has the shape and the type of the manifest."""
    shape, dtype = tuple(spec[0]), getattr(torch, spec[1].removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{spec[1]!r} is no type of tensors; save the checkpoint again")
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise CheckpointError(
            f"{key!r} has shape {tuple(tensor.shape)} and type {tensor.dtype} in {file}, and shape "
            f"{shape} and type {dtype} in the manifest; give another checkpoint"
        )
    return tensor


_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{12}\.(part|old)", re.DOTALL)
#: Files of `pipeexec.run_lock`.
_LOCK = re.compile(r"\..+\.lock", re.DOTALL)


def new_folder(path: Path) -> Path:
    """Make an empty folder beside ``path``, in which to write it."""
    folder = _sibling(path, "part")
    folder.mkdir()  # with the umask of the process, unlike tempfile's folders
    return folder


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{kind}")


def check_free(path: Path) -> None:
    """Raise `CheckpointError` unless a checkpoint can take ``path`` without a loss.

    Nothing is there, or a checkpoint without files of others. Names of temporary folders and of
    locks are refused: the next save removes such folders.
    """
    if _LEFTOVER.fullmatch(path.name) or _LOCK.fullmatch(path.name):
        raise CheckpointError(
            f"path {path} has the name of a temporary file, which a later save_checkpoint removes; "
            "choose another name, such as step-100"
        )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"path {path} is no folder; choose another name")
    if path.is_dir() and not (path / MANIFEST).exists():
        raise CheckpointError(
            f"path {path} exists and is no checkpoint (it has no {MANIFEST}); choose another name"
        )
    if path.is_dir():
        try:
            foreign = foreign_files(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"path {path} exists and is no checkpoint ({error}); choose another name"
            ) from error
        if foreign:
            raise CheckpointError(
                f"the checkpoint {path} has the file {foreign[0]!r}, which save_checkpoint did not "
                "write and would remove; move it elsewhere, or choose another name"
            )


def publish(folder: Path, path: Path) -> None:
    """Rename a whole folder to ``path``, in place of an older checkpoint."""
    old = None
    if path.exists():
        old = _sibling(path, "old")
        os.rename(path, old)
    try:
        os.rename(folder, path)
    except OSError:
        if old is not None:
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _leftovers(folder: Path, kind: str) -> Iterator[tuple[Path, Path]]:
    """Yield the leftovers of a kind, each with the path that it was meant for."""
    for file in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(file.name)
        if match and match[2] == kind and file.is_dir():
            yield file, file.with_name(match[1])


def present(path: Path) -> Path:
    """Return the folder of a checkpoint: ``path``, or an older one that was being replaced."""
    if not path.exists() and path.parent.is_dir():
        olds = [old for old, target in _leftovers(path.parent, "old") if target == path]
        for old in olds:
            if (old / MANIFEST).exists():
                return old
    return path


def restore(path: Path) -> None:
    """Give an older checkpoint that was being replaced its name again."""
    old = present(path)
    if old != path:
        os.rename(old, path)


def remove_leftovers(parent: Path) -> None:
    """Remove folders that killed processes have left; those that are being written stay."""
    for folder, target in [*_leftovers(parent, "part"), *_leftovers(parent, "old")]:
        if folder.name.endswith(".old") and not target.exists():
            continue
        with suppress(RunDirectoryError), run_lock(target):
            shutil.rmtree(folder, ignore_errors=True)


def _saved(folder: Path) -> list[tuple[tuple[float, int], Path, Path]]:
    """Return time and steps, path, and present folder of checkpoints, the newest first."""
    rows: list[tuple[tuple[float, int], Path, Path]] = []
    visible = [(x, x) for x in folder.iterdir() if not _LEFTOVER.fullmatch(x.name)]
    olds = [(old, target) for old, target in _leftovers(folder, "old") if not target.exists()]
    for file, target in [*visible, *olds]:
        with suppress(PipeError, OSError):
            if (file / MANIFEST).is_file():
                manifest: dict[str, Any] = read_manifest(file)
                rows.append(((manifest["saved"], manifest["n_steps"]), target, file))
    return sorted(rows, reverse=True)


def remove_older(path: Path, keep: int) -> None:
    """Remove older checkpoints beside ``path`` whose names differ in the last number alone.

    An earlier number may be of another model or run. A checkpoint with files of others stays.
    """
    name = re.fullmatch(r"(.*?)[0-9]+([^0-9]*)", path.name, re.DOTALL)
    if name is None:
        return
    pattern = re.compile(rf"{re.escape(name[1])}[0-9]+{re.escape(name[2])}")
    rows = [row for row in _saved(path.parent) if pattern.fullmatch(row[1].name)]
    for _, target, folder in [row for row in rows if row[1] != path][max(0, keep - 1) :]:
        if foreign_files(folder):
            continue
        with suppress(RunDirectoryError), run_lock(target):
            old = _sibling(target, "part")  # a name of no checkpoint, if it is removed in part
            os.rename(folder, old)
            shutil.rmtree(old, ignore_errors=True)


@checked_names
def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the path of the newest whole checkpoint of a directory.

    Checkpoints that were cut or edited are passed over.

    Parameters
    ----------
    directory
        Folder in which checkpoints were saved. It need not exist.

    Returns
    -------
    pathlib.Path or None
        The path; None if the directory has no whole checkpoint, or does not exist.

    Raises
    ------
    CheckpointError
        If the folder cannot be read.

    See Also
    --------
    pipeexec.save_checkpoint : Save a checkpoint.
    pipeexec.load_checkpoint : Load a checkpoint into a pipeline.

    Examples
    --------
    >>> import tempfile
    >>> import pipeexec as px
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(px.latest_checkpoint(folder))
    None
    """
    return newest(check_path("directory", directory), re.compile(".*", re.DOTALL))


def newest(folder: Path, name: re.Pattern[str]) -> Path | None:
    """Return the newest whole checkpoint whose name matches; as `latest_checkpoint`."""
    try:
        rows = _saved(folder) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"cannot read {folder}: {error.strerror}; give a folder of checkpoints"
        ) from error
    for _, target, file in rows:
        if name.fullmatch(target.name):
            with suppress(CheckpointError):
                check_files(file, read_manifest(file))
                return target
    return None
