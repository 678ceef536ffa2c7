"""Format numbers and tables that the command prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from pipesim.analysis.idle import CAUSES
from pipesim.analysis.idle_gaps import Cause
from pipesim.utils.units import format_numbers

if TYPE_CHECKING:
    import pandas as pd


GIB = 2.0**30
_YES_NO = {True: "yes", False: "no"}


def known_result_columns(table: pd.DataFrame, own: Collection[str] = ()) -> dict[str, list[str]]:
    """Return limits, fits, tokens a second, MFU and gaps as text, where a table has them.

    ``own`` names columns of the table that are settings, and so are shown already.
    """
    forms: dict[str, tuple[str, Callable[[pd.Series[Any]], list[str]]]] = {
        "memory_limit": ("limit (GiB)", lambda column: format_numbers(column, GIB)),
        "fits": ("fits", lambda column: [_YES_NO.get(x, "-") for x in column]),
        "tokens_per_second": ("tokens/s", format_numbers),
        "mfu": ("MFU", lambda column: ["-" if x != x else f"{x:.1%}" for x in column]),
        "gap": ("gap", lambda column: ["-" if x != x else f"{x:.1%}" for x in column]),
    }
    return {
        head: form(table[name].astype(object).fillna(math.nan))
        for name, (head, form) in forms.items()
        if name in table and name not in own
    }


def cause_columns(
    table: pd.DataFrame, format_column: Callable[[pd.Series[float]], list[str]]
) -> dict[str, list[str]]:
    """Return the columns of a table of idle time as text, for each cause that occurs."""
    return {
        str(cause): format_column(table[name])
        for cause, name in zip(Cause, CAUSES, strict=True)
        if (table[name] != 0).any()
    }
