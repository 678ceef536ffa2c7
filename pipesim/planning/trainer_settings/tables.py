"""`Tables`: the tables of torchtitan's settings, each value read with a type."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_text
from pipesim.utils.files import read_text

#: Beginning of the names of settings of the pipeline.
PREFIX = "pipeline_parallel_"


class Tables:
    """The tables of the settings, and which of their keys were read."""

    def __init__(self, toml: object) -> None:
        text = read_text(toml, "settings from", ArgumentError) if isinstance(toml, Path) else (
            check_text("toml", toml)
        )  # fmt: skip
        try:
            content = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ArgumentError(
                f"toml: the text is no TOML: {str(error) or 'it is nested too deeply'}; give a "
                "file as pathlib.Path"
            ) from error
        self._values: dict[str, dict[str, Any]] = {}
        for name in ("training", "parallelism", "activation_checkpoint"):
            table = content.get(name, {})
            if not isinstance(table, dict):
                raise ArgumentError(f"toml: {name} must be a table, got {table!r:.60}")
            self._values[name] = table
        self._read: set[tuple[str, str]] = set()

    def get(self, table: str, key: str, default: object) -> Any:
        """Return a value."""
        self._read.add((table, key))
        return self._values[table].get(key, default)

    def count(self, table: str, key: str, default: int, minimum: int = 1) -> int:
        """Return a whole number."""
        return check_count(f"toml: {key}", self.get(table, key, default), minimum)

    def text(self, table: str, key: str, default: str) -> str:
        """Return a text."""
        return check_text(f"toml: {key}", self.get(table, key, default))

    def checked_rest(self) -> tuple[str, ...]:
        """Return the settings that were not read; raise for one that changes the pipeline."""
        rest = [
            (table, key)
            for table, values in self._values.items()
            for key in values
            if (table, key) not in self._read
        ]
        for _, key in rest:
            if key.startswith(PREFIX):
                raise ArgumentError(
                    f"toml: {key} is not understood; leave it out to read the other settings"
                )
        return tuple(f"{table}.{key}" for table, key in rest)
