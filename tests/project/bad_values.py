"""Values that are wrong for most parameters, and whether an annotation allows one."""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

#: By name, because a generator is used up by one call.
VALUES: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e308": lambda: 1e308,
    "10**12": lambda: 10**12,
    "10**30": lambda: 10**30,
    "10**400": lambda: 10**400,
    "1j": lambda: 1j,
    "Fraction": lambda: Fraction(-1, 3),
    "''": lambda: "",
    "'x'": lambda: "x",
    "NUL": lambda: "\0",
    "newline": lambda: "a\nb",
    "long": lambda: "x" * 100_000,
    "b'x'": lambda: b"x",
    "[]": list,
    "[None]": lambda: [None],
    "['x']": lambda: ["x"],
    "[nan]": lambda: [float("nan")],
    "[[1], [1, 2]]": lambda: [[1], [1, 2]],
    "{}": dict,
    "{None: None}": lambda: {None: None},
    "()": lambda: (),
    "object()": lambda: object(),
    "lambda": lambda: lambda *_, **__: None,
    "class": lambda: Path,
    "module": lambda: os,
    "float32": lambda: np.float32(1),
    "int64": lambda: np.int64(-1),
    "array": lambda: np.array([1, 2]),
    "empty array": lambda: np.empty((0, 3)),
    "object array": lambda: np.array([None, "x"], dtype=object),
    "generator": lambda: (x for x in [1, None]),
    "set": lambda: {1, "x"},
}
#: For callables whose one call takes long: a value of each type.
SELDOM = ("None", "-1", "nan", "10**30", "'x'", "[None]", "{None: None}", "object()", "lambda")
#: For parameters that take a path, besides the values.
PATHS = ("folder", "fifo", "link to fifo", "missing folder", "NUL in path", "too long", "binary")


def make_paths(folder: Path) -> dict[str, Path | str]:
    """Make the paths of `PATHS` in a folder; devices are left alone, for root could lose them."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "fifo")
    (folder / "binary").write_bytes(bytes(range(256)))
    paths = [
        folder / "folder",
        folder / "fifo",
        folder / "link",
        folder / "missing" / "file.csv",
        f"{folder}/\0.csv",
        folder / ("x" * 300),
        folder / "binary",
    ]
    return dict(zip(PATHS, paths, strict=True))


def _number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def _sequence(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


#: A word of an annotation, and which values are of that type. What is not here is a class of ours
#: or torch's, of which no bad value is.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "None": lambda v: v is None,
    **dict.fromkeys(("bool", "Merged"), lambda v: isinstance(v, bool)),
    "int": lambda v: isinstance(v, numbers.Integral) and not isinstance(v, bool),
    **dict.fromkeys(("Bytes", "float"), _number),
    **dict.fromkeys(
        ("Buckets", "Count", "OptionalSize", "Prefetch", "PrefetchArgument", "Size", "Whole"),
        lambda v: isinstance(v, int) and not isinstance(v, bool),
    ),
    **dict.fromkeys(
        ("Amount", "Bandwidth", "Fraction", "Inches", "NotNegative", "Positive", "Seconds"), _number
    ),
    "str": lambda v: isinstance(v, str),
    "Path": lambda v: isinstance(v, str | Path),
    "Callable": callable,
    "Any": lambda _: True,
    "object": lambda _: True,
    "Mapping": lambda v: isinstance(v, Mapping),
    "dict": lambda v: isinstance(v, Mapping),
    **dict.fromkeys(
        ("Sequence", "Iterable", "NDArray", "tuple", "list", "Ints", "Floats"), _sequence
    ),
    "ArrayLike": lambda v: _number(v) or _sequence(v),
    "PerStage": lambda v: _number(v) or _sequence(v),
    "Split": lambda v: _number(v) or _sequence(v),
    "Literal": lambda v: isinstance(v, str),
    **dict.fromkeys(
        ("Recompute", "LayerRecompute", "GradSync", "Layout", "Versions"),
        lambda v: isinstance(v, str),
    ),
    "Priority": callable,
    "Loss": callable,
    "Optimizers": callable,
}
#: Of the right type for a number or a sequence, and yet right nowhere.
_NEVER = {"nan", "-inf", "-1", "int64", "Fraction", "[None]", "[nan]", "['x']",
          "[[1], [1, 2]]", "{None: None}", "object array", "generator", "set"}  # fmt: skip


def allowed_by(annotation: str, name: str, value: object) -> bool:
    """Return whether a value is of an annotation's type, and not one that is wrong everywhere.

    Brackets say what is inside, which is not looked at.
    """
    annotation = re.sub(r"Annotated\[([\w.]+)", r"\1 | Annotated[", annotation)
    outer = re.sub(r"\[.*?\]+", "", annotation)
    words = set(re.findall(r"[\w.]+", outer))
    if words & {"Any", "object"}:
        return True
    return name not in _NEVER and any(_TYPES[w](value) for w in words if w in _TYPES)
