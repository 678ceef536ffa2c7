"""One archive of the results of steps, rewritten after each step, and its way back."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from on_gpu.clocks import SUFFIX as CLOCKS
from on_gpu.outcomes import Outcome, outcomes_in, write_summary
from on_gpu.steps import STEPS, WARM_UP

ARCHIVE, SUMMARY = "gpu.tar.gz", "summary.txt"
_SUFFIXES = (".json", ".jsonl", ".log", ".txt", CLOCKS)


class UnpackError(Exception):
    """An archive cannot be unpacked; one line."""


def files_of(step: str, folder: Path) -> Iterator[Path]:
    """Yield the files of a step: ``STEP.txt`` and the like, and those in the folder ``STEP``."""
    for suffix in _SUFFIXES:
        if (file := folder / f"{step}{suffix}").is_file():
            yield file
    yield from (file for file in sorted((folder / step).rglob("*")) if file.is_file())


def remove(step: str, folder: Path) -> None:
    """Remove the files of a step."""
    for suffix in _SUFFIXES:
        (folder / f"{step}{suffix}").unlink(missing_ok=True)
    shutil.rmtree(folder / step, ignore_errors=True)


def pack(steps: Iterable[str], folder: Path, to: Path) -> None:
    """Write the files of steps to an archive in ``to``, and their summary beside it.

    Both are written whole or not at all.
    """
    steps = list(steps)
    unfinished = to / f".{ARCHIVE}.tmp"
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
        for step in steps:
            for file in files_of(step, folder):
                try:
                    archive.add(file, file.relative_to(folder).as_posix())
                except FileNotFoundError:  # a step is under way, and renames what it writes
                    continue
    unfinished.replace(to / ARCHIVE)
    write_summary(outcomes_in(folder, steps), to / SUMMARY)


def unpack(file: Path, folder: Path) -> list[Outcome]:
    """Put the results of an archive into a folder, in place of older ones of the same steps.

    A step that was not run leaves older results as they are.

    Raises
    ------
    UnpackError
        If the file is no such archive, or is of a dry run where the folder has measured results,
        or the other way round.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-unpack-") as name:
        unpacked = Path(name)
        try:
            with tarfile.open(file, "r:gz") as archive:
                archive.extractall(unpacked, filter="data")
        except (OSError, tarfile.TarError, EOFError) as error:
            raise UnpackError(
                f"{file} cannot be unpacked: {error}; give the {ARCHIVE} that make gpu wrote"
            ) from error
        outcomes = outcomes_in(unpacked)
        steps = [step for step in (WARM_UP, *STEPS) if any(files_of(step, unpacked))]
        if not steps:
            raise UnpackError(f"{file} holds no results of make gpu")
        was_dry = {outcome.is_dry for outcome in outcomes_in(folder)}
        is_dry = any(outcome.is_dry for outcome in outcomes)
        if was_dry and was_dry != {is_dry}:
            kinds = ["a dry run", "measured results"]
            new, old = kinds if is_dry else reversed(kinds)
            raise UnpackError(f"{file} holds {new}, and {folder} {old}; give OUT=another folder")
        folder.mkdir(parents=True, exist_ok=True)
        kept = {outcome.step for outcome in outcomes_in(folder)}
        not_run = {outcome.step for outcome in outcomes if outcome.status == "not run"}
        for step in (step for step in steps if step not in not_run & kept):
            remove(step, folder)
            for source in list(files_of(step, unpacked)):
                target = folder / source.relative_to(unpacked)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
    return outcomes_in(folder)
