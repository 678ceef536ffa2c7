"""Shapes and types of the outputs of stages, determined once, before the first step.

A stage runs on tensors without data (torch's meta device) if it can, otherwise on zeros. Its
buffers and the process's random numbers are the same afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeexec.devices.thread_settings import current_autocast
from pipeexec.nesting import Arguments, with_tensors
from pipesim.errors import ExecutionError


class Entry(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Signature = tuple[Entry, ...]


def signature(values: Sequence[Tensor]) -> Signature:
    """Return the shapes and types of tensors."""
    return tuple(Entry(tuple(value.shape), value.dtype) for value in values)


def from_json(entries: Sequence[Sequence[Any]]) -> Signature:
    """Return a signature from shapes and names of types, as `to_json` returns them."""
    return tuple(Entry(tuple(shape), getattr(torch, name)) for shape, name in entries)


def to_json(entries: Signature) -> list[tuple[list[int], str]]:
    """Return the shapes and names of types of a signature, which `from_json` reads."""
    return [(list(e.shape), str(e.dtype).removeprefix("torch.")) for e in entries]


def output_signature(
    module: nn.Module,
    inputs: Signature,
    device: torch.device,
    index: int,
    arguments: Arguments | None = None,
) -> Signature:
    """Return the signature of a stage's output for inputs of a signature.

    ``arguments`` are positional and keyword arguments in which the inputs replace the tensors.

    A module that one process alone cannot run, such as `EmbeddingStage`, has a method
    ``output_signature`` that returns it. A stage that raises, or does not return tensors, causes an
    ExecutionError.
    """
    declared = getattr(module, "output_signature", None)
    if callable(declared):
        output_entries: Signature = declared(inputs)
        return output_entries
    try:
        # Under autocast, tensors without data would keep their types.
        output = _run_on_meta(module, inputs, arguments) if current_autocast() is None else None
    except Exception:  # a module may need data anywhere
        output = None
    if output is None:
        output = _run_on_zeros(module, inputs, device, index, arguments)
    outputs = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(value, Tensor) for value in outputs):
        raise ExecutionError(
            f"the output of stage {index} must be a tensor or a tuple of tensors, got "
            f"{type(output).__name__}; return the tensors in a tuple, or let pipeexec.split cut "
            "the model, whose stages pass on nested values"
        )
    return signature(outputs)


def _run_on_meta(module: nn.Module, inputs: Signature, arguments: Arguments | None) -> Any:
    meta = torch.device("meta")
    tensors = (*module.named_parameters(), *module.named_buffers())
    with torch.no_grad(), meta:  # tensors that the module makes have no data either
        weights = {name: torch.empty_like(x, device=meta) for name, x in tensors}
        args, kwargs = _zero_arguments(inputs, meta, arguments)
        return functional_call(module, weights, args, kwargs)


def _zero_arguments(
    inputs: Signature, device: torch.device, arguments: Arguments | None
) -> Arguments:
    """Return positional and keyword arguments whose tensors are zeros."""
    zeros = [torch.zeros(entry.shape, dtype=entry.dtype, device=device) for entry in inputs]
    if arguments is None:
        return tuple(zeros), {}
    result: Arguments = with_tensors(arguments, zeros)
    return result


def _run_on_zeros(
    module: nn.Module,
    inputs: Signature,
    device: torch.device,
    index: int,
    arguments: Arguments | None,
) -> Any:
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), torch.no_grad():
            # Copies, as the stage may change or replace its buffers.
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            args, kwargs = _zero_arguments(inputs, device, arguments)
            if buffers:
                return functional_call(module, buffers, args, kwargs)
            return module(*args, **kwargs)
    except Exception as error:
        raise ExecutionError(
            f"stage {index} failed on zeros of {', '.join(map(str, inputs))}, with which its "
            f"output's shape is found: {type(error).__name__}: {error}"
        ) from error


def check_values(values: Sequence[Tensor | None], agreed: Signature, what: str) -> None:
    """Raise `ExecutionError` unless tensors have the agreed signature; a None matches any entry."""
    entries = [None if v is None else Entry(tuple(v.shape), v.dtype) for v in values]
    if len(entries) != len(agreed) or any(
        a is not None and a != b for a, b in zip(entries, agreed, strict=True)
    ):
        raise ExecutionError(
            f"{what} is {', '.join(map(str, entries)) or 'nothing'}, but "
            f"{', '.join(map(str, agreed)) or 'nothing'} was agreed on before the first step; "
            "give batches of one shape (drop a smaller last one), or make another pipeline with "
            "`with_graph` for another shape"
        )
