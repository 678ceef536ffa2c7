"""`read_config`: read the TOML file of a training, and check its keys and their types."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeexec.training.config.sections import SECTIONS, Key
from pipesim.errors import ArgumentError, PipeError, UnknownNameError, suggestion
from pipesim.utils.files import check_path, read_text


@dataclass(frozen=True)
class Config:
    """The content of a TOML file; all sections are there, with the defaults of missing keys.

    Attributes
    ----------
    path
        The file.
    sections
        Values of the known keys, by section.
    arguments
        Values of other keys, by section: arguments of the model, data, optimizer or scheduler.
    """

    path: Path
    sections: Mapping[str, Mapping[str, Any]]
    arguments: Mapping[str, Mapping[str, Any]]

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self.sections[section]

    def record(self) -> dict[str, Any]:
        """Return what identifies the training: all that changes its losses, but for rounding.

        The pipeline may change, and the training may become longer.
        """
        names = ("model", "data", "optimizer", "scheduler")
        values = {
            name: {k: v for k, v in self.sections[name].items() if v is not None}
            | dict(self.arguments[name])
            for name in names
        }
        training = self.sections["training"]
        return {**values, "training": {k: training[k] for k in ("seed", "autocast") if training[k]}}

    def argument_error(self, section: str, name: str, names: list[str], what: str) -> PipeError:
        """Return the error of an argument that a function does not take."""
        return UnknownNameError(
            f"{self.path}: [{section}] {name!r} is no argument of {what}"
            f"{suggestion(name, names)} (known: {', '.join(names) or 'none'})"
        )

    @contextmanager
    def errors(self, section: str) -> Iterator[None]:
        """Name the file and the section in errors of a block."""
        try:
            yield
        except ArgumentError as error:
            start = f"{self.path}: [{section}] "
            text = str(error)
            raise ArgumentError(text if text.startswith(start) else start + text) from error


def read_config(path: Path | str) -> Config:
    """Read and check the TOML file of a training."""
    path = check_path("config", path)
    text = read_text(path, "the configuration", ArgumentError)
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ArgumentError(f"{path} is no TOML: {error}; see docs/how_to/train.md") from error
    for name, section in content.items():
        if name not in SECTIONS:
            raise UnknownNameError(
                f"{path}: unknown section [{name}]{suggestion(name, SECTIONS)} (known: "
                f"{', '.join(SECTIONS)})"
            )
        if not isinstance(section, dict):
            raise ArgumentError(f"{path}: {name} must be a section; write [{name}]")
    sections: dict[str, dict[str, Any]] = {}
    arguments: dict[str, dict[str, Any]] = {}
    for name, keys in SECTIONS.items():
        values = content.get(name, {})
        sections[name] = {key: _value(path, name, key, keys[key], values) for key in keys}
        arguments[name] = {key: value for key, value in values.items() if key not in keys}
        if unknown := [key for key in arguments[name] if not _takes_arguments(name, sections)]:
            raise UnknownNameError(
                f"{path}: [{name}] has unknown key {unknown[0]!r}"
                f"{suggestion(unknown[0], keys)} (known: {', '.join(keys)})"
            )
    return Config(path, sections, arguments)


def _takes_arguments(section: str, sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether other keys of a section are arguments of the function that it names."""
    if section == "data":
        return sections["data"]["factory"] is not None
    return section in ("model", "optimizer", "scheduler")


def _value(path: Path, section: str, name: str, key: Key, content: Mapping[str, Any]) -> Any:
    """Return the value of a key, or its default."""
    if name not in content:
        if key.required:
            raise ArgumentError(f"{path}: [{section}] lacks {name}, {key.what}; add it")
        return key.default
    value = content[name]
    if not key.accepts(value):
        shown = "true" if value is True else "false" if value is False else repr(value)
        raise ArgumentError(
            f"{path}: [{section}] {name} must be {key.what}, got {shown:.60} "
            f"({type(value).__name__})"
        )
    return value
