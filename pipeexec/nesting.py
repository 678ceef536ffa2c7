"""Nested values of a batch: their leaves with paths, and the same nesting with other leaves.

Tuples, named tuples, lists, mappings (dicts, `collections.UserDict`, transformers'
``BatchEncoding``), dataclasses and classes that torch's pytree knows hold other values. Everything
else is a leaf. A path is an expression of Python, such as ``inputs['mask'][0]``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Leaf(NamedTuple):
    """A value that holds no others, and its path."""

    path: str
    value: Any


class _Node(NamedTuple):
    """Values inside another one, their paths relative to it, and how to make it anew of others."""

    paths: Sequence[str]
    values: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def leaves(value: Any, path: str = "") -> list[Leaf]:
    """Return the leaves of a nested value, in order; ``path`` is that of the value itself."""
    return list(_leaves(value, path))


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(leaf for _, leaf in _leaves(value, "") if isinstance(leaf, Tensor))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with the results of a function in place of its leaves."""
    node = _node(value)
    return function(value) if node is None else node.rebuild([mapped(function, x) for x in node[1]])


def with_tensors(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """Return a nested value with other tensors, in order."""
    rest = iter(tensors)
    return mapped(lambda x: next(rest) if isinstance(x, Tensor) else x, value)


def own_tensors(value: Any) -> Any:
    """Return a nested value with copies of its tensors, which a caller may write to."""
    return mapped(lambda x: x.clone() if isinstance(x, Tensor) else x, value)


def call_arguments(batch: Any) -> Arguments:
    """Return a batch as positional and keyword arguments: a mapping has keywords."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple) else (batch,)), {}


def _leaves(value: Any, path: str) -> Iterator[Leaf]:
    node = _node(value)
    if node is None:
        yield Leaf(path, value)
        return
    for suffix, child in zip(node.paths, node.values, strict=True):
        yield from _leaves(child, path + suffix)


def _node(value: Any) -> _Node | None:
    """Return the values inside one, or None for a leaf."""
    if value is None or isinstance(value, (Tensor, str, int, float, torch.Size, PackedSequence)):
        return None
    if isinstance(value, Mapping):
        return _mapping(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return _Node(
            [f".{name}" for name in fields],
            [getattr(value, name) for name in fields],
            lambda values: dataclasses.replace(value, **dict(zip(fields, values, strict=True))),
        )
    if isinstance(value, (tuple, list)):
        make: Any = type(value)
        names = getattr(value, "_fields", None)
        paths = [f".{x}" for x in names] if names else [f"[{k}]" for k in range(len(value))]
        return _Node(paths, value, lambda values: make(*values) if names else make(values))
    if type(value) in pytree.SUPPORTED_NODES:
        values, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
        paths = [f"[{k}]" for k in range(len(values))]
        return _Node(paths, values, lambda values: pytree.tree_unflatten(values, spec))
    return None


def _mapping(value: Mapping[Any, Any]) -> _Node:
    keys = list(value)

    def rebuild(values: Sequence[Any]) -> Any:
        if type(value) is dict:
            return dict(zip(keys, values, strict=True))
        result: Any = copy.copy(value)  # with its attributes, such as those of a BatchEncoding
        for key, x in zip(keys, values, strict=True):
            result[key] = x
        return result

    return _Node([f"[{key!r}]" for key in keys], list(value.values()), rebuild)
