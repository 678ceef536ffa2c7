"""`RaisingParser`: a parser of the command line that raises our own errors."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pipesim._version import __version__
from pipesim.errors import ArgumentError


class RaisingParser(argparse.ArgumentParser):
    """A parser that raises `ArgumentError`, so that all mistakes are reported alike."""

    def error(self, message: str) -> NoReturn:
        """Raise `ArgumentError` with the message, and the command that prints the help."""
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the name of the command and the version, and exits."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"{parser.prog} {__version__}",
        help="print the version and exit",
    )
