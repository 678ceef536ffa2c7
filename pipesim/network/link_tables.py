"""Links of many pairs, read from a CSV file or from square arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, number
from pipesim.network.links import MAX_DEVICE, Link
from pipesim.utils.files import read_text
from pipesim.utils.texts import csv_rows, parse_float, parse_floats

COLUMNS = ("source", "target", "latency", "bandwidth", "link")
Pair = tuple[int, int]


def read_links(path: Path) -> tuple[Link, ...]:
    """Return the links of a CSV file; see `pipesim.Network.from_csv`.

    Raises
    ------
    NetworkError
        Naming file, line and column.
    """
    table = _Table(path)
    a, b = table.devices("source"), table.devices("target")
    latency, bandwidth = table.latencies(), table.bandwidths()
    table.refuse("target", a == b, "another device than source")
    table.refuse_repeated(a, b)
    rows = zip(a.tolist(), b.tolist(), latency.tolist(), bandwidth.tolist(), strict=True)
    if "link" not in table.columns:
        return tuple([Link.unchecked(lag, speed, ((i, j),)) for i, j, lag, speed in rows])
    shared: dict[str, tuple[int, float, float, list[Pair]]] = {}
    for row, (i, j, lag, speed) in enumerate(rows):
        name = table.columns["link"][row].strip() or f"\0{row}"
        first = shared.setdefault(name, (row, lag, speed, []))
        if first[1:3] != (lag, speed):
            raise NetworkError(
                f"{table.where(row, 'link')}: {name!r} has latency {first[1]} and bandwidth "
                f"{first[2]} in line {table.lines[first[0]]}, but {lag} and {speed} here; "
                f"a link has one of each"
            )
        first[3].append((i, j))
    return tuple(Link(lag, speed, tuple(pairs)) for _, lag, speed, pairs in shared.values())


class _Table:
    """The cells of a CSV file by column, and the line of each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[int] = []
        rows = csv_rows(read_text(path, "links from", NetworkError))
        try:
            header = [name.strip() for name in next(rows, (0, []))[1]]
            cells = self._cells(header, rows)
        except NetworkError:
            raise
        except ValueError as error:
            raise NetworkError(f"cannot read links from {path}: {error}") from error
        if not cells:
            raise NetworkError(f"{path} names no links; add a row such as 0,1,2e-6,25e9")
        self.columns = {name: cells[k :: len(header)] for k, name in enumerate(header)}

    def _cells(self, header: list[str], rows: Iterator[tuple[int, list[str]]]) -> list[str]:
        """Return all cells below the header in one list.

        One list of texts, instead of a list a row, costs Python's garbage collector no time.
        """
        if header not in (list(COLUMNS), list(COLUMNS[:4])):
            raise NetworkError(
                f"{self.path}, line 1: the columns must be {','.join(COLUMNS[:4])} and maybe "
                f"{COLUMNS[4]}, got {','.join(header)!r}"
            )
        cells: list[str] = []
        for line, row in rows:
            if len(row) == len(header):
                cells += row
                self.lines.append(line)
            elif row:
                raise NetworkError(
                    f"{self.path}, line {line}: {len(row)} values for the "
                    f"{len(header)} columns {','.join(header)}"
                )
        return cells

    def where(self, row: int, column: str) -> str:
        """Return the place of a cell, for messages."""
        return f"{self.path}, line {self.lines[row]}, column {column}"

    def refuse(self, column: str, wrong: NDArray[np.bool_], allowed: str) -> None:
        """Raise `NetworkError` for the first row that ``wrong`` marks, if any."""
        for row in np.flatnonzero(wrong)[:1].tolist():
            text = self.columns[column][row]
            raise NetworkError(f"{self.where(row, column)}: must be {allowed}, got {text!r}")

    def devices(self, column: str) -> NDArray[np.int64]:
        """Return a column of device numbers."""
        values = _numbers(self.columns[column])
        good = (values >= 0) & (values <= MAX_DEVICE) & (values == np.floor(values))
        self.refuse(column, ~good, f"a device number, 0 to {MAX_DEVICE}")
        return values.astype(np.int64)

    def latencies(self) -> NDArray[np.float64]:
        """Return the latency of each row; seconds."""
        values = _numbers(self.columns["latency"])
        self.refuse("latency", ~((values >= 0) & (values < math.inf)), "finite and >= 0 s")
        return values

    def bandwidths(self) -> NDArray[np.float64]:
        """Return the bandwidth of each row; bytes a second."""
        values = _numbers([text if text.strip() else "inf" for text in self.columns["bandwidth"]])
        self.refuse("bandwidth", ~(values > 0), "> 0 bytes/s (inf, or nothing, for pure latency)")
        return values

    def refuse_repeated(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        """Raise `NetworkError` for the first pair that an earlier line names too."""
        order = np.lexsort((b, a))  # stable: of equal pairs, the earlier line is first
        first, repeat = order[:-1], order[1:]
        same = (a[first] == a[repeat]) & (b[first] == b[repeat])
        if same.any():
            row = int(repeat[same].min())
            earlier = int(first[same][repeat[same].argmin()])
            raise NetworkError(
                f"{self.path}, line {self.lines[row]}: pair {(int(a[row]), int(b[row]))} is in "
                f"line {self.lines[earlier]} already; name it once"
            )


def _numbers(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the number in each text; NaN for a text without one."""
    numbers: Sequence[float | None] | None = parse_floats(texts)
    return np.array([*map(parse_float, texts)] if numbers is None else numbers, dtype=np.float64)


def matrix_links(latency: ArrayLike, bandwidth: ArrayLike) -> tuple[Link, ...]:
    """Return one link a pair from square arrays; see `pipesim.Network.from_matrix`.

    Raises
    ------
    NetworkError
        For other shapes, and for values out of range, naming the pair.
    """
    lag, speed = _array("latency", latency), _array("bandwidth", bandwidth)
    n = max(len(lag) if lag.ndim else 0, len(speed) if speed.ndim else 0)
    if {lag.shape, speed.shape} not in ({(n, n)}, {(n, n), ()}):
        raise NetworkError(
            f"latency and bandwidth must be square, one row a sender and one column a receiver, "
            f"got shapes {lag.shape} and {speed.shape}"
        )
    lag, speed = np.broadcast_to(lag, (n, n)), np.broadcast_to(speed, (n, n))
    a, b = np.nonzero(~np.eye(len(lag), dtype=bool))
    _check_pairs("latency", "finite and >= 0 s", lag, (lag >= 0) & (lag < math.inf), a, b)
    _check_pairs("bandwidth", "> 0 bytes/s", speed, speed > 0, a, b)
    rows = zip(a.tolist(), b.tolist(), lag[a, b].tolist(), speed[a, b].tolist(), strict=True)
    return tuple(Link.unchecked(lag_, speed_, ((i, j),)) for i, j, lag_, speed_ in rows)


def _array(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return an array of floats; NaN stands for an object that is no number.

    Raises
    ------
    NetworkError
        For rows of different lengths, and for texts, booleans and other values.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise NetworkError(
            f"latency and bandwidth must be arrays of numbers, {name} is not: {error}"
        ) from error
    if array.dtype.kind == "O" and array.ndim:
        numbers = [math.nan if (x := number(item)) is None else x for item in array.ravel()]
        return np.array(numbers, dtype=np.float64).reshape(array.shape)
    if array.dtype.kind not in "fiu":
        raise NetworkError(
            f"latency and bandwidth must be arrays of numbers, {name} is not: got {values!r:.60}"
        )
    return array.astype(np.float64)


def _check_pairs(
    name: str,
    allowed: str,
    values: NDArray[np.float64],
    good: NDArray[np.bool_],
    a: NDArray[np.int64],
    b: NDArray[np.int64],
) -> None:
    """Raise `NetworkError` for the first pair whose value is out of range."""
    wrong = np.flatnonzero(~good[a, b])
    if len(wrong):
        i, j = int(a[wrong[0]]), int(b[wrong[0]])
        raise NetworkError(f"{name} from {i} to {j} must be {allowed}, got {values[i, j]}")
