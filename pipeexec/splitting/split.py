"""`split`: cut a model into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.splitting.borders import borders, check_flow, outer_parameters
from pipeexec.splitting.cuts import Balance, Cuts, first_calls
from pipeexec.splitting.data_flow import DataFlow, follow
from pipeexec.splitting.deferred_init import deferred, give_values
from pipeexec.splitting.module_calls import UncutModules, uncut_modules
from pipeexec.splitting.nested_values import call_arguments, tensors_of
from pipeexec.splitting.split_stage import Skeleton, SplitStage
from pipeexec.splitting.stages import Stages
from pipeexec.splitting.stand_in import on_meta, to_meta, with_zeros
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    check_count,
    check_function,
    check_list,
    check_type,
)

__all__ = ["split"]


def split(
    model: nn.Module | Callable[[], nn.Module],
    stages: Cuts,
    *,
    sample: Any,
    balance: Balance = "blocks",
    only: Sequence[int] | None = None,
) -> Stages:
    """Cut a model into stages.

    One forward of the sample shows which modules call each other and which values they pass on. The
    elements of lists of modules, of which each takes an output of the one before, are *blocks*; so
    are the blocks of transformers and of ResNets. Stages are cut between them, never inside. Each
    stage runs the model's own forward. In it, modules of other stages are replaced by stand-ins,
    which return the values that the stage receives. So masks, positions and other arguments reach
    the stages that need them, and values that skip stages pass through the stages between.

    Parameters
    ----------
    model
        The model. Its parameters become those of the stages; nothing is copied. Or a function
        without arguments that makes the model. It is called with tensors that have no data, and
        each stage then gets the parameters that the model would have, from the same random numbers,
        so that the whole model is never in memory.
    stages
        Number of stages; or blocks of each stage, such as ``[7, 8, 8, 7]``; or names of the modules
        with which stages begin; or a layout string of Megatron-LM, such as ``"Et*3|(t*4|)*2t*3L"``.
    sample
        A batch: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors
        may be of any size, of later batches too. Other values hold for all batches.
    balance
        What a number of stages has equally much of: ``"blocks"``, the first ones one more; or
        ``"parameters"``, such that the largest stage has as few as possible.
    only
        Numbers of the stages of this process; the others are None. By default all.

    Returns
    -------
    Stages
        A sequence of modules for `pipeexec.Pipeline`.

    Raises
    ------
    ArgumentError
        - If there are fewer blocks than stages, and for numbers, names and layouts that do not fit.
        - For a name of a module inside a block.
        - If a module keeps tensors that another stage reads, such as a cache of keys and values.
        - If random numbers are drawn outside of modules, and several stages need the result.
    ExecutionError
        If the model's forward fails on the sample.

    Notes
    -----
    Stages with a common parameter, such as a tied embedding, share it. `pipeexec.Pipeline` refuses
    them so far.

    The forward of the sample shows all values that later forwards need only if these take the same
    way. Numbers that are read from tensors, such as ``int(mask.sum())``, are equal on all stages.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> stages = split(model, 2, sample=torch.ones(4, 8))
    >>> stages.modules, stages.check(torch.ones(4, 8))
    ((('0', '2'), ('3',)), 0.0)
    """
    source = None
    if not isinstance(model, nn.Module):
        check_function("model", model, "model(), a function that makes an nn.Module")
        source = deferred(model)
        model = check_type("model()", source.model, nn.Module)
    args, kwargs = call_arguments(sample)
    if not tensors_of((args, kwargs)):
        raise ArgumentError(
            f"sample has no tensor, got {type(sample).__name__}; give a batch as the model takes "
            "it: a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        )
    kwargs |= _without_cache(model, kwargs)
    uncut, flow = _traced(model, args, kwargs, has_data=source is None)
    names = [call.name for call in flow.calls]
    starts = first_calls(model, names, uncut.blocks, stages, balance)
    calls = [range(a, b) for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]
    check_flow(flow, calls)
    skeleton = Skeleton(model, tuple(names), frozenset(uncut.names), (args, kwargs))
    received = borders(flow, calls, skeleton.n_inputs)
    chosen = _checked_stages(only, len(calls))
    parts = [
        SplitStage(
            skeleton, own, received[k], received[k + 1] if k + 1 < len(calls) else None,
            outer_parameters(flow, own, is_last=k + 1 == len(calls)),
        ) if k in chosen else None
        for k, own in enumerate(calls)
    ]  # fmt: skip
    if source is not None:
        give_values(parts, source)
    modules = [tuple(dict.fromkeys(names[k] for k in own)) for own in calls]
    return Stages(model, parts, modules, partial(_tensors, skeleton))


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_data: bool
) -> tuple[UncutModules, DataFlow]:
    """Return the modules that are not cut, and the data flow between them.

    A model without data runs without, or on zeros if its forward reads values, as of masks.
    """
    if not has_data:
        with suppress(Exception):  # a forward may read values anywhere
            return _traced(
                on_meta(model).train(model.training), *to_meta((args, kwargs)), has_data=True
            )
        model = with_zeros(model)
    try:
        uncut = uncut_modules(model, args, kwargs)
        return uncut, follow(model, uncut.names, args, kwargs)
    except Exception as error:  # of the user's code
        raise ExecutionError(
            f"the forward of {type(model).__name__} fails on the sample: "
            f"{type(error).__name__}: {error!s:.300}"
        ) from error


def _checked_stages(only: Sequence[int] | None, n: int) -> set[int]:
    """Return the numbers of the stages to make."""
    if only is None:
        return set(range(n))
    chosen = {check_count("only", k, 0) for k in check_list("only", only, "numbers of stages")}
    if not chosen or max(chosen) >= n:
        raise ArgumentError(f"only={only!r:.60} must name stages of 0 to {n - 1}")
    return chosen


def _without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the argument that switches off a transformer's cache of keys and values, if any."""
    takes = "use_cache" in signature(model.forward).parameters and "use_cache" not in kwargs
    return {"use_cache": False} if takes else {}


def _tensors(skeleton: Skeleton, batch: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a batch that is nested as the sample was."""
    args, kwargs = call_arguments(batch)
    kwargs |= _without_cache(skeleton.model, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != skeleton.spec:
        raise ArgumentError(
            f"the batch is nested as {_outline(args, kwargs)}, the sample was "
            f"{_outline(*skeleton.arguments)}; give it in the same form"
        )
    for value, expected in zip(leaves, skeleton.leaves, strict=True):
        if isinstance(value, Tensor) != isinstance(expected, Tensor) or (
            not isinstance(value, Tensor) and value != expected
        ):
            raise ArgumentError(
                f"the batch has {value!r:.60} where the sample had {expected!r:.60}; values that "
                "are no tensors are those of the sample: split again with a sample of these values"
            )
    return tuple(x for x in leaves if isinstance(x, Tensor))


def _outline(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return names and types of arguments."""
    parts = [type(x).__name__ for x in args]
    parts += [f"{name}={type(x).__name__}" for name, x in kwargs.items()]
    return f"({', '.join(parts)})"
