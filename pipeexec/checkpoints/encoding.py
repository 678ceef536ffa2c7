"""Values of objects as JSON, with tensors kept apart.

A value that JSON has not is an object with the key ``$``, its kind::

    {"$": "tensor", "key": "scheduler.values"}      the tensor is in a file of tensors
    {"$": "tuple", "items": [1, 2]}
    {"$": "Counter", "items": [[30, 1], [60, 1]]}   pairs of key and value

Decoding makes values of these kinds alone. Nothing else is constructed, and nothing is called.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesim.errors import ArgumentError

_KIND = "$"
#: Classes of mappings that are made again, by name.
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON can hold it; put its tensors into ``tensors``.

    An object with a ``state_dict`` counts as what that returns.

    Parameters
    ----------
    name
        Name of the value, for keys of tensors and for messages.
    """
    try:
        return _encoded(value, name, tensors)
    except RecursionError as error:
        raise ArgumentError(
            f"{name!r} is nested too deeply, or contains itself; give plain values"
        ) from error


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, str) or type(value) in (bool, int, float):
        return value
    if isinstance(value, Tensor):
        return {_KIND: "tensor", "key": _keep(value.detach(), name, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        array = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        return {_KIND: "array", "key": _keep(array, name, tensors)}
    if isinstance(value, np.generic):
        return _encoded(value.item(), name, tensors)
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, name, tensors)
    if isinstance(value, list | tuple):
        items = [_encoded(x, f"{name}.{k}", tensors) for k, x in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, int | float):  # of a subclass, such as an enumeration
        return _encoded(int(value) if isinstance(value, int) else float(value), name, tensors)
    if callable(state_dict := getattr(value, "state_dict", None)):
        return _encoded(state_dict(), name, tensors)
    raise ArgumentError(
        f"{name!r} is a {type(value).__name__}, which a checkpoint cannot hold; give an object "
        "with state_dict() and load_state_dict(), tensors, or numbers, texts, lists and dicts"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put a tensor into ``tensors`` under a name that is not there yet; return the name."""
    key, number = name, 1
    while key in tensors:
        number += 1
        key = f"{name}#{number}"
    tensors[key] = tensor
    return key


def _encoded_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    is_plain = type(value) is dict and all(isinstance(key, str) for key in value)
    if is_plain and _KIND not in value:
        return {key: _encoded(x, f"{name}.{key}", tensors) for key, x in value.items()}
    kind = type(value).__name__
    items = [
        [_encoded(key, name, tensors), _encoded(x, f"{name}.{key}", tensors)]
        for key, x in value.items()
    ]
    return {_KIND: kind if kind in _MAPPINGS else "dict", "items": items}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` has encoded.

    Raises
    ------
    ValueError
        For a value that `encode` does not make, and a tensor that is missing.
    """
    if isinstance(value, list):
        return [decode(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(x, tensors) for key, x in value.items()}
    try:
        return _decoded(value, tensors)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(value)[:80]} is no value of a checkpoint") from error


def _decoded(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    kind = value[_KIND]
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        return tensors[value["key"]].numpy()
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    items = [decode(x, tensors) for x in value["items"]]
    return tuple(items) if kind == "tuple" else _MAPPINGS[kind](items)


def tensor_keys(value: Any) -> list[str]:
    """Return the keys of the tensors of an encoded value."""
    if isinstance(value, list):
        return [key for x in value for key in tensor_keys(x)]
    if not isinstance(value, dict):
        return []
    if value.get(_KIND) in ("tensor", "array"):
        return [str(value.get("key"))]
    return [key for x in value.values() for key in tensor_keys(x)]
