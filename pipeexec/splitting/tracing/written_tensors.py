"""Tensors that operations change, and their storages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeexec.nesting import tensors_in

__all__ = ["storage_of", "written_tensors"]


def written_tensors(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the arguments that an operation changes."""
    arguments = function._schema.arguments
    values = dict(zip((x.name for x in arguments), args, strict=False)) | kwargs
    if function._schema.name == "aten::native_batch_norm" and values["training"]:
        return tensors_in([values["running_mean"], values["running_var"]])  # schema lacks it
    if not function._schema.is_mutable:
        return ()
    changed = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return tensors_in([values.get(name) for name in changed])


def storage_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, which all its views share."""
    number: int = tensor.untyped_storage()._cdata
    return number
