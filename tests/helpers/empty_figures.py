"""Figures that are saved as empty files, for tests that look at nothing but names of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet


@contextmanager
def empty_figures() -> Iterator[None]:
    """Draw each figure once, without pixels, which raises what drawing would raise.

    Panels keep the sizes that they have before a layout, which takes as long as pixels. The tests
    of `pipesim.plot` lay figures out and read their files.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawn: WeakSet[Figure] = WeakSet()

    def save(figure: Figure, file: Path, **_: Any) -> None:
        if figure not in drawn:
            figure.draw_without_rendering()
            drawn.add(figure)
        Path(file).touch()

    with (
        mock.patch.object(Figure, "savefig", save),
        mock.patch.object(ConstrainedLayoutEngine, "execute", return_value=None),
    ):
        yield
