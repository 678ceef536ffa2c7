"""Sections and keys of the TOML file of a training, with their types and defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes
    ----------
    what
        The allowed values, in words; an article first.
    accepts
        Whether a value is one of them.
    default
        Value if the key is missing.
    required
        Whether the key may not be missing.
    """

    what: str
    accepts: Callable[[Any], bool]
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
