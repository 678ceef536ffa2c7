"""`Flags`: the flags of a command line by name, each read with a type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pipesim.errors import ArgumentError, check_count, check_list
from pipesim.utils.texts import parse_int


class Flags:
    """Flags with their values, and which of them were read.

    Attributes
    ----------
    values
        Values of each flag, such as ``{"--bf16": [], "--lr": ["1e-4"]}``. Of a flag that is given
        twice, the last one counts, as in argparse.
    """

    def __init__(self, flags: str | Sequence[str]) -> None:
        self.values: dict[str, list[str]] = {}
        self._read: set[str] = set()
        values: list[str] = []
        for word in _words(flags):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                values = self.values[name] = [value] if equals else []
            elif not word.endswith(".py"):  # the script behind the flags of torchrun
                values.append(word)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of flags that were not read, in their order."""
        return tuple(name for name in self.values if name not in self._read)

    def switch(self, name: str) -> bool:
        """Return whether a flag without a value is given."""
        self._read.add(name)
        return name in self.values

    def texts(self, name: str) -> list[str]:
        """Return all values of a flag."""
        self._read.add(name)
        return self.values.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a flag."""
        values = self.texts(name)
        if name not in self.values:
            return default
        if len(values) != 1:
            raise ArgumentError(f"flags: {name} takes one value, got {values!r:.60}")
        return values[0]

    def count(self, name: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return the value of a flag as a whole number."""
        text = self.text(name)
        if name not in self.values:
            return default
        number = parse_int(text)
        return check_count(f"flags: {name}", text if number is None else number, minimum)

    def size(self, name: str) -> int:
        """Return the value of a flag as a whole number of at least 1; by default 1."""
        return self.count(name) or 1


def _words(flags: object) -> list[str]:
    """Return the words of a command line; raise `ArgumentError` for anything else."""
    if isinstance(flags, str):
        try:
            return shlex.split(flags.replace("\\\n", " "))
        except ValueError as error:
            raise ArgumentError(f"flags: the text is no command line: {error}") from error
    words = check_list("flags", flags, "a text, or a list of words")
    for word in words:
        if not isinstance(word, str):
            raise ArgumentError(f"flags must be a text or a list of words, got {word!r:.60} in it")
    return words
