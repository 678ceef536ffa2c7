"""`RaisingParser`: a parser of the command line that raises our own errors."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pipesim.errors import ArgumentError

__all__ = ["RaisingParser"]


class RaisingParser(argparse.ArgumentParser):
    """A parser that raises `ArgumentError`, so that all mistakes are reported alike."""

    def error(self, message: str) -> NoReturn:
        """Raise `ArgumentError` with the message, and the command that prints the help."""
        raise ArgumentError(f"{message} (see {self.prog} --help)")
