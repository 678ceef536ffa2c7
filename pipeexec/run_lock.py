"""Names of runs, and the lock that keeps two runs from writing one directory."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pipesim.errors import ArgumentError, RunDirectoryError

#: End of the name of a run that an error stopped.
PARTIAL = "-partial"
#: Largest length of a file name, and of the part that temporary names and locks add (bytes).
_LONGEST, _TEMPORARY = 255, 32
#: Control characters, slashes, and surrogates, which Python decodes from bytes that are not UTF-8.
_NO_NAME = re.compile(r"[\x00-\x1f\x7f/\ud800-\udfff]")


class _Owner(NamedTuple):
    """Thread that has locked a directory, and the handle of the lock's file."""

    thread: int
    handle: int


#: Owners of locked directories, by device and inode of the parent, and the name.
_OWNERS: dict[tuple[int, int, str], _Owner] = {}


def _leave_locks_to_parent() -> None:
    """Close the locks in a forked child, such as a worker of a DataLoader.

    A lock ends when all processes have closed its file. Other programs do not inherit it.
    """
    for owner in _OWNERS.values():
        os.close(owner.handle)
    _OWNERS.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def check_run_name(name: object) -> str:
    """Return the name of a run, if it is a folder name without parents."""
    name = _check_name("name", name, _LONGEST - _TEMPORARY)
    if name.endswith(PARTIAL):
        raise ArgumentError(
            f"name {name!r} ends with {PARTIAL!r}, as the directory that an error of another run "
            "leaves; choose another name"
        )
    return name


def check_file_names(label: str, names: Iterable[str], reserved: Iterable[str] = ()) -> None:
    """Raise unless all names are valid file names, all different, and none is reserved."""
    taken_names = set(reserved)
    for name in names:
        if _check_name(label, name, _LONGEST) in taken_names:
            raise ArgumentError(
                f"{label} {name!r} is taken by another file of the run directory; choose another"
            )
        taken_names.add(name)


def _check_name(label: str, name: object, longest: int) -> str:
    """Return a name, if it is a file name without a folder."""
    if not isinstance(name, str):
        raise ArgumentError(f"{label} must be a text, got {name!r}")
    if name in ("", ".", "..") or _NO_NAME.search(name):
        raise ArgumentError(
            f"{label} {name!r} is no name of a folder; give a name without '/' and "
            "control characters, and its parent folder by --results"
        )
    if len(os.fsencode(name)) > longest:
        raise ArgumentError(f"{label} {name[:20] + '...'!r} has more than {longest} bytes")
    return name


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Lock a run directory: no other process or thread can write it while the block runs.

    The lock (``flock``) is a hidden file in the parent folder, which must exist. The system
    releases it when the process has ended, also after a crash. Processes that it has started, such
    as workers of a DataLoader, do not have the lock. The same thread may enter a block of the same
    path again. `RunDirectoryError` is raised if another process or thread has the lock, or the file
    system does not support locks.
    """
    parent = path.parent.stat()
    key = parent.st_dev, parent.st_ino, path.name
    if key in _OWNERS:
        if _OWNERS[key].thread != threading.get_ident():
            raise RunDirectoryError(
                f"another thread is writing {path}; wait for its end, or choose another name"
            )
        yield
        return
    file = path.parent / f".{path.name}.lock"
    handle = _lock_file(file, path)
    _OWNERS[key] = _Owner(threading.get_ident(), handle)
    try:
        yield
    finally:
        if _OWNERS.pop(key, None) is not None:  # a child that was forked in the block has no lock
            with suppress(OSError):
                file.unlink()
            os.close(handle)


def _lock_file(file: Path, path: Path) -> int:
    """Lock a file and return its handle; try again if its former owner has just removed it."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write results in {path.parent}: {error.strerror}; choose another folder"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_name(handle, file):
                with suppress(OSError):  # a full disk: the text is only for error messages
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BlockingIOError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise RunDirectoryError(
                f"{owner} is writing {path}; wait for its end, or choose another name"
            ) from error
        except OSError as error:  # a network file system may have no locks
            os.close(handle)
            raise RunDirectoryError(
                f"cannot lock {file}: {error.strerror}; its file system may not support locks "
                "(flock), which keep two runs from writing at the same time; choose a folder on "
                "another file system"
            ) from error
        os.close(handle)  # the former owner has removed the file


def _has_name(handle: int, file: Path) -> bool:
    """Return whether the open file of a handle still has the name ``file``."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
