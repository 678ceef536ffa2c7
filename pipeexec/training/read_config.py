"""`read_config`: read the TOML file of a training, and check its keys and their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipesim.errors import ArgumentError, PipeError, UnknownNameError, suggestion
from pipesim.utils.files import check_path, read_toml

# Sections and keys, with their types and defaults.


@dataclass(frozen=True)
class Key:
    """A key of a section."""

    what: str  # the allowed values, in words; an article first
    accepts: Callable[[Any], bool]  # whether a value is one of them
    default: Any = None
    required: bool = False


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def _count(default: int | None = None) -> Key:
    return Key("a whole number of at least 1", _is_count, default)


def _text(what: str, default: str | None = None, *, required: bool = False) -> Key:
    return Key(what, _is_text, default, required)


def _choice(*choices: str, default: str | None = None) -> Key:
    names = ", ".join(map(repr, choices))
    return Key(f"one of {names}", lambda value: value in choices, default)


_FUNCTION = "the name of a function, such as 'package.module:function'"
_POSITIVE = Key("a number above 0", lambda x: _is_number(x) and x > 0)

#: Keys of each section. Other keys of model, optimizer, scheduler, and of data with a factory are
#: arguments of the function that the section names.
SECTIONS: Mapping[str, Mapping[str, Key]] = MappingProxyType(
    {
        "model": {
            "name": _text("the name of a demo model"),
            "factory": _text(_FUNCTION),
            "loss": _text(_FUNCTION),
        },
        "data": {
            "text": Key("a list of files or patterns, such as ['texts/*.txt']", _are(_is_text)),
            "factory": _text(_FUNCTION),
            "batch_size": _count(),
            "context": _count(),
            "held_out": Key("a share, at least 0 and below 1",
                            lambda x: _is_number(x) and 0 <= x < 1, 0.1),
            "evaluation_batches": _count(),
        },
        "pipeline": {
            "stages": _count(),
            "schedule": _text("the name of a schedule, or a CSV file", "1f1b"),
            "microbatches": _count(8),
            "recompute": _choice("never", "always", "except_last", default="never"),
            "devices": Key("a list of names, such as ['cuda:0', 'cuda:1']", _are(_is_text)),
            "replicas": _count(1),
            "balance": _text("a balance of px.split, such as 'parameters'"),
            "split": Key("blocks of each stage, names of modules, or a layout",
                         lambda x: _is_text(x) or _are(_is_count)(x) or _are(_is_text)(x)),
        },
        "optimizer": {
            "name": _text("the name of an optimizer of torch.optim", "AdamW"),
            "decay_dimensions": _count(),
            "max_grad_norm": _POSITIVE,
        },
        "scheduler": {
            "name": _text("the name of a scheduler of torch.optim.lr_scheduler"),
            "warm_up": _count(),
        },
        "training": {
            "directory": _text("a folder", required=True),
            "steps": _count(),
            "epochs": _count(),
            "evaluate_every": _count(),
            "checkpoint_every": _count(),
            "keep": _count(3),
            "autocast": _choice("bfloat16", "float16"),
            "seed": Key("a whole number of at least 0", lambda x: type(x) is int and x >= 0, 0),
            "predict": Key("true or false", lambda x: isinstance(x, bool), True),
            "timelines": Key("a list of steps, from 1", lambda x: x == [] or _are(_is_count)(x)),
        },
    }
)  # fmt: skip


# The file.


@dataclass(frozen=True)
class Config:
    """The content of a TOML file; all sections are there, with the defaults of missing keys."""

    path: Path
    sections: Mapping[str, Mapping[str, Any]]  # values of the known keys
    # Values of other keys: arguments of the model, data, optimizer or scheduler.
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
    content = read_toml(path, "the configuration (docs/how_to/train.md)")
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
        sections[name] = {key: _value_of_key(path, name, key, keys[key], values) for key in keys}
        arguments[name] = {key: value for key, value in values.items() if key not in keys}
        takes_arguments = name in ("model", "optimizer", "scheduler")
        if name == "data":
            takes_arguments = sections[name]["factory"] is not None
        if arguments[name] and not takes_arguments:
            key = next(iter(arguments[name]))
            raise UnknownNameError(
                f"{path}: [{name}] has unknown key {key!r}{suggestion(key, keys)} "
                f"(known: {', '.join(keys)})"
            )
    return Config(path, sections, arguments)


def _value_of_key(path: Path, section: str, name: str, key: Key, content: Mapping[str, Any]) -> Any:
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
