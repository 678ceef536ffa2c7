"""Progress bars: lines of a terminal, or in a notebook outputs that are emptied at the end."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from tqdm import std


def in_notebook() -> bool:
    """Return whether a kernel of Jupyter runs this code."""
    module = sys.modules.get("IPython")
    return module is not None and hasattr(module.get_ipython(), "kernel")


class NotebookBar(std.tqdm):  # type: ignore[type-arg]  # generic for type checkers alone
    """A bar in an output of a cell.

    Bars of ``tqdm.notebook`` are widgets, of which a saved notebook keeps the first text.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The file gets moves of the cursor, which an output has not.
        super().__init__(*arguments, **{**options, "file": io.StringIO(), "leave": False})

    @staticmethod
    def status_printer(file: object) -> Callable[[str], None]:
        """Return a function that shows a text in place of the one before."""
        from IPython.display import display

        handle = None

        def show(text: str) -> None:
            nonlocal handle
            data = {"text/plain": text} if text else {}
            if handle is not None:
                handle.update(data, raw=True)
            elif text:
                handle = display(data, raw=True, display_id=True)

        return show


def tqdm(*arguments: Any, **options: Any) -> std.tqdm[Any]:
    """Return a progress bar with the arguments of ``tqdm.tqdm``, for a terminal or a notebook."""
    kind: type[std.tqdm[Any]] = NotebookBar if in_notebook() else std.tqdm
    return kind(*arguments, **options)
