"""The form of a batch of a split model: nested as the sample was."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

from pipeexec.nesting import call_arguments, leaves
from pipesim.errors import ArgumentError


def sample_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a model, without the cache of a transformer."""
    args, kwargs = call_arguments(batch)
    return args, kwargs | _without_cache(model, kwargs)


def ordered_batch(
    model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], batch: Any
) -> Any:
    """Return a batch that is nested as the sample was, with keyword arguments in its order.

    Parameters
    ----------
    model
        The model that was split.
    sample
        Arguments of the call with the sample.
    batch
        The batch.
    """
    args, kwargs = sample_arguments(model, batch)
    kwargs = {name: kwargs[name] for name in sample[1] if name in kwargs} | kwargs
    rows = leaves((args, kwargs)), leaves(sample)
    if [path for path, _ in rows[0]] != [path for path, _ in rows[1]]:
        raise ArgumentError(
            f"the batch is nested as {_outline(args, kwargs)}, the sample was "
            f"{_outline(*sample)}; give it in the same form"
        )
    for (path, value), (_, expected) in zip(*rows, strict=True):
        if isinstance(value, Tensor) != isinstance(expected, Tensor) or (
            not isinstance(value, Tensor) and value != expected
        ):
            raise ArgumentError(
                "the batch differs from the sample of px.split: "
                f"{_place(path, batch)} is {_describe(value)}, in the sample it was "
                f"{_describe(expected)}; values that are no tensors are those of the sample: split "
                "again with a sample of these values"
            )
    if isinstance(batch, Mapping):
        return kwargs
    return args if isinstance(batch, tuple) else batch


def _without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the argument that switches off a transformer's cache of keys and values, if any."""
    takes = "use_cache" in signature(model.forward).parameters and "use_cache" not in kwargs
    return {"use_cache": False} if takes else {}


def _describe(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"{value!r:.60}"


def _place(path: str, batch: Any) -> str:
    """Return the path in the inputs of a value that has a path in the call's arguments."""
    n_first = 1 if isinstance(batch, tuple | Mapping) else 2
    return "inputs" + path[n_first * len("[0]") :]


def _outline(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return names and types of arguments."""
    parts = [type(x).__name__ for x in args]
    parts += [f"{name}={type(x).__name__}" for name, x in kwargs.items()]
    return f"({', '.join(parts)})"
