"""Reports of the steps of `benchmarks/gpu.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

#: Beginnings of the lines that say of a target that it was met, and that it was missed.
MARKS = ("ok", "MISSED")


def records_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows that a report recorded; none if there is no such file."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the step was cut while it wrote
            continue
    return rows


class Missed(Exception):
    """A target was missed; everything ran."""


class Report:
    """Text and figures of a step, in their files as soon as they are known, and its targets.

    Parameters
    ----------
    path
        The text file; figures go to a file of the same name that ends in ``.jsonl``, one JSON
        object a line.
    head
        The first lines of the text.
    dry
        Whether this is a dry run, whose times mean nothing.
    """

    def __init__(self, path: Path, head: Sequence[str] = (), *, dry: bool = False) -> None:
        self.path, self.records, self.dry = path, path.with_suffix(".jsonl"), dry
        self.missed: list[str] = []
        self._began = time()
        path.write_text("".join(f"{line}\n" for line in head))
        self.records.write_text("")

    def add(self, line: str = "") -> None:
        """Add a line of text."""
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def begin(self) -> None:
        """Note that what the next rows tell is measured from now on."""
        self._began = time()

    def record(self, kind: str, **values: Any) -> None:
        """Add a row of the table ``kind``, with the time in which it was measured."""
        times = {"began": self._began, "ended": time()}  # seconds since 1970, as for clocks
        with self.records.open("a") as file:
            file.write(json.dumps({"kind": kind, **values, **times}) + "\n")

    def check(self, is_met: bool, line: str) -> None:
        """Add a line of text that says whether a target was met."""
        self.add(f"{MARKS[not is_met]:<6} {line}")
        if not is_met:
            self.missed.append(line)

    def time(self, is_met: bool, line: str) -> None:
        """Do the same for a target that depends on times; a dry run has none."""
        if self.dry:
            self.add(f"{'':<6} {line}")
        else:
            self.check(is_met, line)

    def end(self) -> None:
        """Raise `Missed` if a target was missed."""
        if self.missed:
            raise Missed(f"{len(self.missed)} targets missed, first: {self.missed[0]}")
