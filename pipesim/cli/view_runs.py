"""Read run directories of `pipeexec`: each prediction over its measured step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesim.analysis.compare import Comparison
from pipesim.costs.costs import Costs
from pipesim.errors import PipeError, RunDirectoryError
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import read_json

#: Records of a run and of a training.
_RECORDS = ("run.json", "training.json")
_MEASURED, _PREDICTED, _COSTS = "timeline.csv", "predicted.csv", "costs.json"
#: Places of measured timelines in a run directory: of the run, of its rows, of steps of a training.
_PLACES = (_MEASURED, f"*/{_MEASURED}", f"*/*/{_MEASURED}")
#: Files of a training that are shown.
_TRAINING = re.compile(r"(steps/step-[0-9]{8,}/)?timeline\.csv|predicted\.csv|costs\.json")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, or one of its folders with a timeline."""
    return any((folder / name).is_file() for name in (*_RECORDS, _MEASURED))


def read_run(folder: Path, costs: Costs | None) -> dict[str, Timeline | Comparison]:
    """Return the timelines of a run by name, in the order of its record; it names their files.

    The name of a timeline in the folder itself is "". A timeline is compared with the prediction
    of its row, or else of its run. Without ``costs`` both have the costs of the run, if any.

    Raises
    ------
    RunDirectoryError
        For a run without timelines, a record that cannot be read, and a prediction of other tasks.
    TimelineError
        For a timeline that cannot be read.
    """
    is_listed = _listed_files(folder)
    files = [x for place in _PLACES for x in sorted(folder.glob(place)) if is_listed(x)]
    if not files:
        raise RunDirectoryError(
            f"{folder} is a run directory without timelines: neither it nor a folder in it has "
            f"{_MEASURED}; pipeexec run and pipeexec validate write them"
        )
    names = _row_names(folder)
    order = {name: rank for rank, name in enumerate(names)}
    files.sort(key=lambda file: order.get(_place(file, folder), len(order)))
    return {
        names.get(_place(file, folder), _place(file, folder)): _read_row(
            file, folder, costs, is_listed
        )
        for file in files
    }


def _place(file: Path, folder: Path) -> str:
    """Return the folder of a timeline within its run; "" for the run itself."""
    place = file.parent.relative_to(folder).as_posix()
    return "" if place == "." else place


def _listed_files(folder: Path) -> Callable[[Path], bool]:
    """Return whether a file belongs to the run of a folder: others beside its files are not read.

    The record of a run lists its files. Those of a training have fixed names.
    """
    root = _places_of_files(folder, folder)[-1]
    prefix = "" if root == folder else f"{folder.resolve().relative_to(root).as_posix()}/"
    files = _record(root).get("files")

    def is_listed(file: Path) -> bool:
        name = (
            file.relative_to(root).as_posix()
            if file.is_relative_to(root)
            else f"{prefix}{file.relative_to(folder).as_posix()}"
        )
        if isinstance(files, dict):
            return name in files
        return not (root / _RECORDS[1]).is_file() or _TRAINING.fullmatch(name) is not None

    return is_listed


def _record(folder: Path) -> Mapping[str, Any]:
    """Return the record of a run; an empty one for a folder without."""
    record = folder / _RECORDS[0]
    content = read_json(record, "the record", RunDirectoryError) if record.is_file() else None
    return content if isinstance(content, dict) else {}


def _row_names(folder: Path) -> dict[str, str]:
    """Return the name of each row by its folder, in the order of the record of a run."""
    rows = _record(folder).get("rows")
    if not isinstance(rows, dict):
        return {}
    # `pipeexec.validation.run_files` writes folders of these names.
    return {name.replace("/", "-").replace(" ", "-"): name for name in rows}


def _read_row(
    file: Path, folder: Path, costs: Costs | None, is_listed: Callable[[Path], bool]
) -> Timeline | Comparison:
    """Return a measured timeline, compared with its prediction if there is one."""
    places = _places_of_files(file.parent, folder)
    if costs is None and (path := _nearest(_COSTS, places, is_listed)):
        costs = Costs.load(path)
    measured = Timeline.load(file, costs=costs)
    path = _nearest(_PREDICTED, places, is_listed)
    if path is None:
        return measured
    predicted = Timeline.load(path, costs=costs)
    try:
        return Comparison(predicted, measured)
    except PipeError as error:
        raise RunDirectoryError(f"cannot compare {path} with {file}: {error}") from error


def _places_of_files(place: Path, folder: Path) -> Sequence[Path]:
    """Return the folders that have files of a timeline, the nearest first.

    They reach from ``place``, the folder of the timeline, up to that of the record, which may be
    above ``folder``; without a record, up to ``folder``.
    """
    above = [place, *place.resolve().parents[:2]] if place == folder else [place, *place.parents]
    for count, parent in enumerate(above[:3], start=1):
        if any((parent / name).is_file() for name in _RECORDS):
            return above[:count]
    return above[: above.index(folder) + 1]


def _nearest(name: str, places: Sequence[Path], is_listed: Callable[[Path], bool]) -> Path | None:
    """Return the first file of a name in folders that belongs to the run, or None."""
    files = [place / name for place in places]
    return next((file for file in files if file.is_file() and is_listed(file)), None)
