"""Elements and cells of the HTML that notebooks show."""

from __future__ import annotations

from xml.etree import ElementTree


def parsed(html: str) -> ElementTree.Element:
    """Return the elements of HTML, which must be well-formed."""
    return ElementTree.fromstring(f"<div>{html}</div>")


def cells_of(html: str) -> list[list[str]]:
    """Return the texts of all tables' cells, row by row."""
    return [[cell.text or "" for cell in row] for row in parsed(html).iter("tr")]


def tables_of(html: str) -> list[list[list[str]]]:
    """Return the texts of each table's cells, row by row."""
    return [
        [[cell.text or "" for cell in row] for row in table.iter("tr")]
        for table in parsed(html).iter("table")
    ]
