"""Typed columns of a page: numbers as bytes, where each column lies, and those of task graphs.

Integers are stored as differences from the value before, zigzag-coded, the low bytes of all values
first. Floats are stored as a table of few values, as decimal fractions, or as they are; each of
these gives back equal doubles. `pipesim/plot/page/program/data/columns.js` reads them.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.plot.figure_style import shades
from pipesim.plot.palette import chunks, text_colours

#: Place and encoding of a column, as JSON.
Spec = dict[str, Any]
Floats = NDArray[np.float64]
#: Integers beyond this are no exact doubles.
_EXACT = 2.0**53
#: Digits after the point that decimal fractions may have.
_DIGITS = (0, 3, 6, 9, 12)
#: Columns of at most so many values, and of a quarter as many different ones, get a table.
_MAX_TABLE = 65536


class ColumnWriter:
    """Columns of numbers, written one after the other into one block of bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def packed(self, text: bytes = b"") -> bytes:
        """Return a text and all columns, compressed in the zlib format.

        Before compression, the first four bytes are the length of the text, lowest byte first.
        """
        return zlib.compress(b"".join([len(text).to_bytes(4, "little"), text, *self._parts]), 9)

    def integers(self, values: NDArray[Any]) -> Spec:
        """Add integers below 2^52 and above -2^52; return their place."""
        values = np.asarray(values, dtype=np.int64)
        if len(values) and (values == values[0]).all():
            return {"type": "constant", "n": len(values), "value": int(values[0])}
        difference = np.diff(values, prepend=0)
        code = (difference << 1) ^ (difference >> 63)
        width = max(1, (int(code.max(initial=0)).bit_length() + 7) // 8)
        planes = code.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T
        return {"type": "integers", "n": len(values), "width": width, **self._add(planes)}

    def flags(self, values: NDArray[Any]) -> Spec:
        """Add numbers from 0 to 255; return their place."""
        return {"type": "bytes", "n": len(values), **self._add(values.astype(np.uint8))}

    def floats(self, values: NDArray[Any]) -> Spec:
        """Add doubles, which are read as equal doubles; return their place."""
        values = np.asarray(values, dtype=np.float64)
        if len(values) > 64 and len(values) <= _MAX_TABLE * 64:
            table, index = np.unique(values, return_inverse=True)
            if len(table) <= min(_MAX_TABLE, len(values) // 4):
                return {
                    "type": "table",
                    "values": self.floats(table),
                    "index": self.integers(index.ravel()),
                }
        missing = np.isnan(values)
        digits = decimal_digits(values[~missing])
        if digits is None:
            return {"type": "floats", "n": len(values), **self._add(float_planes(values))}
        spec = {
            "type": "decimals",
            "digits": digits,
            "integers": self.integers(ticks_of(np.where(missing, 0.0, values), digits)),
        }
        if missing.any():
            spec["missing"] = self.integers(np.flatnonzero(missing))
        return spec

    def _add(self, values: NDArray[np.uint8]) -> Spec:
        """Add bytes; return where they begin."""
        data = np.ascontiguousarray(values).tobytes()
        place = {"offset": self._size}
        self._parts.append(data)
        self._size += len(data)
        return place


def float_planes(values: Floats) -> NDArray[np.uint8]:
    """Return the bytes of doubles, those of the same place together; shape ``(8, n)``."""
    planes: NDArray[np.uint8] = values.astype("<f8").view(np.uint8).reshape(-1, 8).T
    return planes


def ticks_of(values: Floats, digits: int) -> NDArray[np.int64]:
    """Return values in units of ``10 ** -digits``, rounded to integers."""
    return np.rint(values * 10.0**digits).astype(np.int64)


def decimal_digits(values: Floats) -> int | None:
    """Return the digits after the point with which all values are exact; None if none are.

    A value is exact if the double nearest to its integer over a power of ten is the value itself.
    """
    if not len(values):
        return 0
    largest = float(np.abs(values).max())
    for digits in _DIGITS:
        scale = 10.0**digits
        if largest * scale >= _EXACT / 4:
            return None
        if (np.rint(values * scale) / scale == values).all():
            return digits
    return None


def graph_columns(writer: ColumnWriter, graph: TaskGraph) -> Spec:
    """Add the tasks of a graph, and all that they wait for; return their places."""
    kinds = graph.kinds
    names = sorted({name for _, name in graph.streams})
    number = {name: k for k, name in enumerate(names)}
    needs = graph.dependencies
    paired = np.flatnonzero(graph.pair >= 0)
    partial = graph.partial_dependency
    spec: Spec = {
        "name": graph.name,
        "n": len(graph),
        "n_devices": graph.n_devices,
        "n_stages": graph.n_stages,
        "n_microbatches": graph.n_microbatches,
        "n_replicas": graph.n_replicas,
        "rendezvous": graph.rendezvous,
        "kinds": {
            name: writer.integers(getattr(kinds, name))
            for name in ("op", "device", "stage", "replica", "overlapped", "peer_stage", "part")
        },
        "look": _looks(writer, graph),
        "stream_of_kind": writer.integers(graph.stream_of_kind),
        "stream_names": names,
        "stream_device": writer.integers(np.array([device for device, _ in graph.streams])),
        "stream_name": writer.integers(np.array([number[name] for _, name in graph.streams])),
        "kind": writer.integers(graph.kind),
        "microbatch": writer.integers(graph.microbatch),
        "n_needs": writer.integers(np.diff(needs.ptr)),
        "needs_back": writer.integers(needs.rows - needs.values),
        "paired": writer.integers(paired),
        "pair_back": writer.integers(paired - graph.pair[paired]),
        "host": writer.integers(graph.host),
    }
    if len(graph.collectives):
        spec["n_members"] = writer.integers(np.diff(graph.collectives.ptr))
        spec["members"] = writer.integers(graph.collectives.values)
    if len(partial) and (partial >= 0).any():
        spec["partial"] = writer.integers(partial)
    return spec


def _looks(writer: ColumnWriter, graph: TaskGraph) -> Spec:
    """Add the colour of each kind, and of text on it; return their places."""
    kinds = graph.kinds
    if not len(kinds):
        return {"fill": [], "text": [], "of_kind": writer.integers(kinds.op)}
    colours, index = np.unique(
        shades(kinds.op, chunks(kinds.device, kinds.stage)),
        axis=0,
        return_inverse=True,
    )
    return {
        "fill": [
            "#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in colours
        ],
        "text": text_colours(colours),
        "of_kind": writer.integers(index.ravel()),
    }
