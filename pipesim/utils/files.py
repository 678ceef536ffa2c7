"""Users' paths, and files: read completely if memory allows, written whole or not at all.

Only regular files are read and replaced. Reading a pipe would wait for its other end, and a device
may never end. Writing would replace either by a file.
"""

from __future__ import annotations

import difflib
import errno
import gzip
import io
import os
import re
import secrets
import stat
import tomllib
import zlib
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipesim.errors import ArgumentError, ArgumentTypeError, CapacityError, PipeError
from pipesim.utils.host_memory import available_memory
from pipesim.utils.texts import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Bytes of memory that a byte of a file may need: parsed JSON needs about this many.
_PER_BYTE = 16
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: First bytes of a compressed file.
GZIP = b"\x1f\x8b"
#: Names of the temporary files of `write_whole`, which a killed process leaves.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)
#: Most names of a folder that the name of a missing file is compared with.
_NAMES = 1000


def check_path(name: str, value: object, verb: str = "read", needs: str = "") -> Path:
    """Return the path of a user's argument ``name``; ``verb`` is ``"read"`` or ``"write"``.

    ``needs`` replaces ``"<name> must be"`` in the message.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"{needs or f'{name} must be'} a path, got {value!r:.60}; give a str or a pathlib.Path"
        )
    try:
        reason = "embedded null character" if b"\0" in os.fsencode(text) else ""
    except UnicodeEncodeError as error:
        reason = f"no file's name can have {text[error.start]!a}"
    if reason:
        raise ArgumentError(f"cannot {verb} {text}: {reason}; give another {name}")
    return Path(text)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for a path that the system refuses."""
    with suppress(OSError):  # such as a name that is too long: reading the file then reports it
        return path.is_dir()
    return False


def read_bytes(path: Path, kind: str, error: type[PipeError], *, first: int | None = None) -> bytes:
    """Return the content of a regular file, or its ``first`` bytes.

    ``kind`` names the content in messages, with its preposition, if any: ``"costs from"``.
    ``error`` is raised if the file cannot be read, `CapacityError` if it does not fit in memory.
    """
    try:
        _check_regular(os.stat(path))
        # If a pipe has replaced the file meanwhile, O_NONBLOCK avoids waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            _check_regular(os.fstat(handle))
            return _bounded(file, path, kind) if first is None else file.read(first)
    except OSError as cause:
        near = _near(path) or "; check the path" if isinstance(cause, FileNotFoundError) else ""
        raise error(f"cannot read {kind} {path}: {cause.strerror or cause}{near}") from cause


def read_text(path: Path, kind: str, error: type[PipeError]) -> str:
    """Return the UTF-8 text of a regular file, without a byte-order mark; as `read_bytes`."""
    try:
        return read_bytes(path, kind, error).decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"cannot read {kind} {path}: {cause}; give a file of UTF-8 text") from cause


def read_json(path: Path, kind: str, error: type[PipeError]) -> Any:
    """Return the value of a regular JSON file; as `read_bytes`, and as `parse_json`."""
    text = read_text(path, kind, error)
    try:
        return parse_json(text)
    except ValueError as cause:
        raise error(f"cannot read {kind} {path}: {cause}") from cause


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Return the tables of a regular TOML file; as `read_bytes`."""
    text = read_text(path, kind, ArgumentError)
    try:
        return tomllib.loads(text)
    except RecursionError as cause:
        raise ArgumentError(f"cannot read {kind} {path}: it is nested too deeply") from cause
    except ValueError as cause:
        raise ArgumentError(f"cannot read {kind} {path}: {cause}") from cause


def gunzip(data: bytes, path: Path, kind: str, error: type[PipeError]) -> bytes:
    """Decompress ``data`` if it is compressed; the limit is that of `read_bytes`."""
    if not data.startswith(GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _bounded(file, path, kind)
    except (OSError, EOFError, zlib.error) as cause:
        raise error(f"cannot read {kind} {path}: {cause}; it was cut or damaged") from cause


def _bounded(file: IO[bytes] | gzip.GzipFile, path: Path, kind: str) -> bytes:
    """Read to the end; raise `CapacityError` if the content does not fit in memory."""
    limit = available_memory() // _PER_BYTE
    parts, room = [], limit + 1
    while room and (part := file.read(min(room, 1 << 24))):
        parts.append(part)
        room -= len(part)
    if not room:
        check_content(limit + 1, path, kind)
    return b"".join(parts)


def check_content(nbytes: int, path: Path, kind: str) -> None:
    """Raise `CapacityError` if content does not fit in memory; readers that decompress call it."""
    limit = available_memory() // _PER_BYTE
    if nbytes > limit:
        raise CapacityError(
            f"cannot read {kind} {path}: it has more than {limit / 1e6:.4g} MB, and reading takes "
            f"up to {_PER_BYTE} times its size in memory; give a smaller file, or run where there "
            "is more memory"
        )


def _check_regular(state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(
                errno.EISDIR, f"{os.strerror(errno.EISDIR)}; give a readable file"
            )
        kind = _KINDS.get(stat.S_IFMT(state.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}; give a regular file")


def _near(path: Path) -> str:
    """Return a hint with the name in the folder that is nearest to a missing file's."""
    with suppress(OSError):
        # Stems are compared: a common suffix alone makes names alike.
        names = {file.stem: file.name for file in islice(path.parent.iterdir(), _NAMES)}
        nearest = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.6)
        return f"; did you mean {names[nearest[0]]!r}?" if nearest else ""
    return ""


def check_target(path: Path) -> Path:
    """Return the file to write for ``path``: the path itself, or the target of its link."""
    with write_errors(path):
        try:
            state = os.stat(path)
        except FileNotFoundError:
            return Path(os.path.realpath(path))
        if not stat.S_ISREG(state.st_mode):
            raise ArgumentError(
                f"cannot write {path}: it is a folder, a device or a pipe; name a regular file, or "
                "one that does not exist yet"
            )
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return Path(os.path.realpath(path))


def check_no_others(folder: Path, pattern: str, own: Collection[str], reader: str) -> None:
    """Raise for a file that a reader would take for one of those to be written.

    ``pattern`` is that of the names that the reader takes. Files that are ``own`` may exist.
    """
    with write_errors(folder):
        names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name not in own and re.fullmatch(pattern, name)]
    if others:
        raise ArgumentError(
            f"{folder} has {others[0]!r}, of another timeline, which {reader} would read too; "
            "remove it, or choose another name"
        )


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system while writing ``path`` into one that names the path."""
    try:
        yield
    except OSError as error:
        no_room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room, or name a file on another disk" if no_room else (
            "name a file in a folder that can be written")  # fmt: skip
        reason = error.strerror or str(error) or type(error).__name__
        raise ArgumentError(f"cannot write {path}: {reason}; {advice}") from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary file in the same folder, then rename it to ``path``.

    A link stays a link: its target is replaced. An existing file keeps its mode; a new one gets
    the mode of the process (``umask``).
    """
    target = check_target(path)
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.part")
    with write_errors(path):
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            write(temporary)
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all; as `write_whole`."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8", newline="\n"))
