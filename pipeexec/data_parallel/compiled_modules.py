"""Find compiled modules, unwrap them, and compile copies of stages as the first."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipesim.errors import ArgumentError

#: Attribute in which a compiled module holds the module that was compiled.
WRAPPED = "_orig_mod"


def compiled_backends(module: nn.Module) -> list[object]:
    """Return the backend of each part of a module that is compiled; None where torch hides it."""
    return [
        _backend(part._compiled_call_impl if _in_place(part) else part)
        for part in module.modules()
        if _in_place(part) or _is_wrapper(part)
    ]


def check_not_compiled(model: nn.Module) -> None:
    """Raise `ArgumentError` if a model to split, or one of its parts, is compiled or scripted."""
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{repr(name) if name else 'the model'} is a ScriptModule, which cannot be cut: "
                "give the nn.Module that it was made from"
            )
        if _in_place(part) or _is_wrapper(part):
            raise ArgumentError(
                f"{repr(name) if name else 'the model'} is compiled, and the copies that stages "
                "have of modules would not be: split the model first, then compile each stage "
                "with stage.compile()"
            )


def compile_copy(stage: nn.Module, replica: nn.Module, index: int) -> None:
    """Compile a copy of a stage as the stage is: copies lose what was compiled in place."""
    if not any(map(_in_place, stage.modules())):
        return
    options = getattr(stage, "compile_options", None)
    if options is None:
        raise ArgumentError(
            f"stage {index} has modules that compile() was called on, and copies of it, as each "
            "path of a bidirectional placement needs, and each further replica in one process, "
            "would not be compiled: give torch.compile(stage) instead"
        )
    replica.compile(**options)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and `torch.compile`."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif _is_wrapper(module):
            module = module.get_submodule(WRAPPED)
        else:
            return module


def _backend(compiled: Any) -> object:
    """Return the backend of what `torch.compile` returned, which no public name tells."""
    try:
        context = inspect.getclosurevars(compiled.get_compiler_config).nonlocals["self"]
        backend = context.callback
    except (AttributeError, KeyError):
        return None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", None)


def _in_place(module: nn.Module) -> bool:
    """Return whether `torch.nn.Module.compile` was called on a module."""
    return module._compiled_call_impl is not None


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a wrapper that `torch.compile` has returned."""
    compiler: ModuleType | None = sys.modules.get("torch._dynamo.eval_frame")  # loads slowly
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
