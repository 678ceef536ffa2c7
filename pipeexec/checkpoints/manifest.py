"""The manifest of a checkpoint: a JSON file with the contents of the other files.

It has the size and SHA-256 of every file, and one of itself. So a file that was cut, edited or lost
is named before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeexec.run_directory import environment
from pipesim.errors import CheckpointError
from pipesim.utils.files import read_bytes, read_text
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
    """Return whether there are the facts of `pipeexec.checkpoints.rows` by prefixes."""
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
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps(whole) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose files `check_files` checks.

    Raises
    ------
    CheckpointError
        If it is missing, was changed, or has another format.
    """
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

    Raises
    ------
    CheckpointError
        If the manifest is none of a checkpoint. It may be damaged: then files of other names than
        those of tensors are foreign.
    """
    is_own: Callable[[str], object] = _FILE.fullmatch
    try:
        is_own = read_manifest(folder)["files"].__contains__
    except CheckpointError:
        head = read_bytes(folder / MANIFEST, "the manifest", CheckpointError, first=len(_START))
        if head not in (_START, b""):
            raise
    names = [x.relative_to(folder).as_posix() for x in folder.rglob("*") if _is_no_folder(x)]
    return sorted(name for name in names if name != MANIFEST and not is_own(name))


def _is_no_folder(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def file_facts(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the bytes and the SHA-256 of files.

    Raises
    ------
    CheckpointError
        If one is missing or cannot be read.
    """
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
    """Compare files with the manifest; of several processes, each compares one part.

    Raises
    ------
    CheckpointError
        Names the first file that is missing, or whose size or checksum differs.
    """
    for name in sorted(manifest["files"])[part::n_parts]:
        (facts,) = file_facts(folder, [name]).values()
        expected = manifest["files"][name]
        if facts != expected:
            raise CheckpointError(
                f"{folder / name} does not match its checksum, with {facts['bytes']} bytes of "
                f"{expected.get('bytes')!r}: it was cut or edited; give another checkpoint"
            )
