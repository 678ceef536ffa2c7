"""Warnings of a sweep's rows: collected where a row runs, and shown once each where it was called.

Workers are other processes, whose warnings would be printed again by each of them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pipesim.errors import PipeWarning

#: Category and text of a warning.
RowWarning = tuple[type[Warning], str]


@contextmanager
def row_warnings(collected: list[RowWarning]) -> Iterator[None]:
    """Append our warnings of the block to a list when it ends; those of others are shown.

    Beside other threads, with which Python's list of filters is shared, all are shown.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PipeWarning)
        yield
    for one in caught:
        if issubclass(one.category, PipeWarning):
            collected.append((one.category, str(one.message)))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def show_row_warnings(collected: Iterable[RowWarning], stacklevel: int) -> None:
    """Warn once of each text, with the stack level of the caller's caller and so on."""
    for category, text in dict.fromkeys(collected):
        warnings.warn(text, category, stacklevel=stacklevel + 1)
