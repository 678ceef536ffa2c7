"""Folders of checkpoints: written under another name, and renamed when they are whole.

::

    run/step-100                     a checkpoint
    run/.step-100.0123456789ab.part  one that is being written, or whose process was killed
    run/.step-100.0123456789ab.old   the older one of this name, while the new one takes its place

A process may be killed between the two renames that replace a checkpoint. Then both are whole, and
none has the name. `present` returns the older one, and the next `save_checkpoint` restores its
name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeexec.checkpoints.manifest import (
    MANIFEST,
    check_files,
    foreign_files,
    read_manifest,
)
from pipeexec.checkpoints.tensor_files import sync_folder
from pipeexec.run_lock import run_lock
from pipesim.errors import CheckpointError, PipeError, RunDirectoryError
from pipesim.utils.files import check_path

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
