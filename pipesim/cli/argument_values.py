"""Values of arguments of the command line: numbers, lists, options, and files to write."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from pipesim.errors import ArgumentError
from pipesim.utils.files import check_path, check_target, write_errors
from pipesim.utils.texts import parse_float, parse_int, parse_json

#: Endings of files of figures, and of pages.
FIGURES = (".pdf", ".png", ".svg")
_PAGES = (".html", ".htm")


def parse_value(text: str) -> Any:
    """Parse a number, true or false, or several of them between commas; other texts stay text.

    The code that uses a value checks it. Python also reads ``1_0`` and digits of other scripts as
    numbers; those stay text here.
    """
    if "," in text:
        return [parse_value(part) for part in text.split(",")]
    for parse in (parse_int, parse_float):
        if (value := parse(text)) is not None:
            return value
    return {"true": True, "false": False}.get(text, text)


def parse_option(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, parse_value(value)


def json_object(text: str) -> dict[str, Any]:
    """Parse an object of JSON, such as ``{"pid": 0}``."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no object of JSON, such as {{"pid": 0}}')
    return value


def writable_path(text: str) -> Path:
    """Return a path, if a file can be written there. The check is before the work, not after it."""
    try:
        path = check_path("path", text, "write")
        with write_errors(path):
            tempfile.TemporaryFile(dir=check_target(path).parent).close()
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def figure_path(text: str) -> Path:
    """Return the path of a figure, if its ending is known and it can be written."""
    if not text.lower().endswith(FIGURES):
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(FIGURES)}")
    return writable_path(text)


def page_path(text: str) -> Path:
    """Return the path of an interactive page, if its ending is known and it can be written."""
    if not text.lower().endswith(_PAGES):
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PAGES)}")
    return writable_path(text)
