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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeexec.run_directory import environment
from pipesim.errors import CheckpointError
from pipesim.utils.files import read_text
from pipesim.utils.texts import CHECKSUM, checksum, parse_json

__all__ = ["FOLDERS", "MANIFEST", "check_files", "file_facts", "read_manifest", "write_manifest"]

MANIFEST = "checkpoint.json"
#: Folders of tensors: parameters and buffers, state of optimizers, rows of sharded embeddings,
#: tensors of other objects.
FOLDERS = ("model", "optimizer", "rows", "objects")
_FORMAT, _VERSION = "pipeexec checkpoint", 1
_FILE = re.compile(rf"({'|'.join(FOLDERS)})/model[-.0-9a-z]*\.(safetensors|json)")
#: Values of a manifest, and their types.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "saved": (int, float), "n_steps": int, "seed": int, "tensors": dict, "others": dict,
    "optimizer": (dict, type(None)), "rows": dict, "random": list, "objects": dict, "files": dict,
}  # fmt: skip


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
        for key, kind in _TYPES.items():
            if not isinstance(manifest.get(key), kind):
                raise ValueError(f"it has no valid {key!r}")
        for name in manifest["files"]:
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
    except ValueError as error:
        raise CheckpointError(
            f"cannot read the manifest {path}: {error}; give another checkpoint"
        ) from error
    return manifest


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
