"""Tables as text, with aligned columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def align_columns(columns: Mapping[str, Sequence[str]], align: str = ">") -> str:
    """Return a table as text: its first column aligned left, the others by ``align``.

    ``align`` is one of ``<`` and ``>`` for all other columns, or one for each.
    """
    widths = [max(map(len, [head, *cells])) for head, cells in columns.items()]
    aligns = ["<", *(align * (len(widths) - 1) if len(align) == 1 else align)]
    return "\n".join(
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths, strict=True)).rstrip()
        for row in [tuple(columns), *zip(*columns.values(), strict=True)]
    )
