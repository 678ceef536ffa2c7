"""`split`: cut a model into stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from numbers import Integral
from typing import Any, Literal, get_args

from torch import Tensor, nn

from pipeexec.data_parallel.compiled_modules import check_not_compiled
from pipeexec.nesting import call_arguments, leaves, tensors_in
from pipeexec.splitting import Balance
from pipeexec.splitting.borders import (
    Route,
    Skeleton,
    outer_parameters,
    routes,
    stage_edges,
    state_owners,
)
from pipeexec.splitting.cuts import Balancing, Cuts, first_calls
from pipeexec.splitting.data_flow import Mode
from pipeexec.splitting.deferred_init import DeferredModel, deferred, give_values
from pipeexec.splitting.sample_forward import (
    SampleForward,
    exported_forward,
    graph_forward,
    sample_forward,
)
from pipeexec.splitting.split_facts import (
    Shared,
    SplitFacts,
    copies,
    shared_parameters,
    tied_groups,
)
from pipeexec.splitting.split_stage import SplitStage, check_hooks
from pipeexec.splitting.stages import Stages
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_list,
    check_name,
    check_type,
    number,
)
from pipesim.scheduling.placement import Edges
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import in_bytes


def sample_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a model, without the cache of a transformer."""
    args, kwargs = call_arguments(batch)
    if "use_cache" in signature(model.forward).parameters and "use_cache" not in kwargs:
        kwargs = kwargs | {"use_cache": False}
    return args, kwargs


def ordered_batch(
    model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], batch: Any
) -> Any:
    """Return a batch that is nested as the sample was, with keyword arguments in its order."""
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


#: What is cut: the calls of a model's modules, or the graph of its operations.
Way = Literal["modules", "graph"]


@checked_names
def split(
    model: nn.Module | Callable[[], nn.Module],
    stages: Cuts,
    *,
    sample: Any,
    balance: Balance = "blocks",
    memory_limit: float | str | None = None,
    optimizer_bytes: float = 2.0,
    only: Sequence[int] | None = None,
    way: Way = "modules",
    chain: bool = True,
    check: bool = True,
) -> Stages:
    """Cut a model into stages.

    One forward of the sample shows which modules call each other and which values they pass on. The
    elements of lists of modules, of which each takes an output of the one before, are *blocks*; so
    are the blocks of transformers and of ResNets. Stages are cut between blocks, never inside.

    Each stage runs the model's own forward. In it, modules of other stages are replaced by
    stand-ins, which return the values that the stage receives. So masks, positions and other
    arguments reach the stages that need them, and values that skip stages pass through the stages
    between, if these are a chain.

    A model without such a list is cut between the modules of Hugging Face's ``base_model_pp_plan``,
    between calls of one module, or between its largest modules. If it calls fewer than two modules,
    a graph of torch.export is cut. That graph holds for the present mode of the model, and for
    shapes of the sample but for the number of samples. `Stages.report` says which way was taken.

    Parameters
    ----------
    model
        The model. Its parameters become those of the stages, not copies of them; see the notes for
        tied parameters. Or a function without arguments that makes the model. It is called with
        tensors that have no data, so that the whole model is never in memory. Each stage then gets
        the parameters that the model would have, from the same random numbers.
    stages
        Number of stages; or blocks of each stage, such as ``[7, 8, 8, 7]``; or names of the modules
        with which stages begin; or a layout string of Megatron-LM, such as ``"Et*3|(t*4|)*2t*3L"``.
    sample
        A batch: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors
        may be of any size, of later batches too. Those that require gradients get them, for stages
        of a pipeline before those of the split. Other values hold for all batches.
    balance
        Quantity that is divided equally among a number of stages. Of all but blocks, the stage with
        the most has as little as possible:

        - ``"blocks"``: the first stages may have one more;
        - ``"parameters"``: their number;
        - ``"time"``: seconds of forward and backward of the modules, measured on the sample in this
          thread, without parallel threads; for a model from a function, FLOPs of the forward;
        - ``"memory"``: bytes as those of ``memory_limit``.
    memory_limit
        Bytes that a stage may need, such as ``8e9`` or ``"8GiB"``: for parameters, buffers,
        gradients and optimizer state, and for the tensors that autograd saves in its modules for
        the sample, as if it were a micro-batch. The other activations of a schedule are not
        counted. With a number of stages, cuts are chosen that fit.
    optimizer_bytes
        Bytes of optimizer state for each byte of trained parameters, at most 1000: 2 for Adam, 0
        for SGD.
    only
        Numbers of the stages of this process; the others are None. By default all. With an empty
        list no stage is made; the result tells where the model is cut.
    way
        What is cut:

        - ``"modules"``: the model's own forward, between calls of its modules;
        - ``"graph"``: the graph of torch.export, at the same places. Stages run its operations, and
          none of the model's code. It takes some models that the first way refuses, such as those
          that draw random numbers between their blocks. It has the present mode of the model, and
          the shapes of the sample but for the number of samples.
    chain
        Whether each stage takes the output of the one before. With False, stages may be a graph:
        ``Stages.edges`` lead from each stage to those that need its values, for
        ``Placement(..., edges=stages.edges)``. So a vision tower is beside the embedding of words,
        if stages begin with its first module and with the first layer of the language model. It
        needs ``way="modules"``.
    check
        Whether to compare the stages with the model for the sample, in training and in evaluation
        mode: outputs, loss, gradients and buffers. It takes some six forwards and backwards of the
        sample. Without data, or without all stages, there is no check. See ``Stages.differences``.

    Returns
    -------
    Stages
        A sequence of modules for `pipeexec.Pipeline`.

    Raises
    ------
    ExecutionError
        - If the model's forward fails on the sample, or, to measure it, its backward.
        - If the stages differ from the model.
        - If a function that makes the model fails, or does what cannot be done without data: it
          takes the memory of a tensor, as ``numpy()`` does, or leaves a parameter without values.

    See Also
    --------
    pipeexec.Stages : The stages, and checks of them.
    pipeexec.Pipeline : Run the stages on devices.
    pipeexec.project : Profile the blocks of a model, to choose a split.
    pipesim.lower : Its ``tied`` sums gradients of parameters in several stages.

    Notes
    -----
    A parameter that several stages need, such as an embedding that is also the head, stays that of
    the model in the first of them. The others have copies of it; see ``Stages.tied``. A step adds
    the gradients of all copies, so that they stay equal, if the graph has
    ``tied=stages.tied_stages`` in `pipesim.lower`. So it is with modules that several stages call.

    The forward of the sample shows all values that later forwards need only if these take the same
    way. Numbers that are read from tensors, such as ``int(mask.sum())``, are equal on all stages.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> stages = px.split(model, 2, sample=torch.ones(4, 8))
    >>> stages.modules, stages.check(torch.ones(4, 8))
    ((('0', '2'), ('3',)), 0.0)
    """
    model, source = _checked_model(model)
    limit: float | None = in_bytes("memory_limit", memory_limit)
    if limit is not None:
        _check_range("memory_limit", limit, 1e30)
    _check_range("optimizer_bytes", optimizer_bytes, 1000.0)
    arguments = args, kwargs = sample_arguments(model, sample)
    if not tensors_in(arguments):
        raise ArgumentError(
            f"sample has no tensor, got {type(sample).__name__}; give a batch as the model takes "
            "it: a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        )
    is_whole = isinstance(stages, Integral) and stages == 1
    has_all = check_type("check", check, bool) and source is None and only is None
    check_flag("chain", chain)
    check_name("way", way, get_args(Way))
    if way == "graph" and not chain:
        raise ArgumentError(
            "stages of way='graph' are a chain; give way='modules' with chain=False, or leave chain"
        )
    has_advice = has_all and chain and way != "graph"
    refusals = partial(_graph_advice, None if not has_advice else partial(
        split, model, stages, sample=sample, balance=balance, memory_limit=memory_limit,
        optimizer_bytes=optimizer_bytes, way="graph",
    ))  # fmt: skip
    with refusals():
        if way == "graph" and not is_whole:
            if source is not None:
                raise ArgumentError("way='graph' needs a model with data; give the model itself")
            forward = graph_forward(model, args, kwargs)
        else:
            forward = _forward_to_cut(
                model, args, kwargs, has_data=source is None, is_whole=is_whole
            )
    uncut, names = forward.uncut, [call.name for call in forward.flow.calls]
    weights = cache(
        partial(forward.weights, has_data=source is None, optimizer_bytes=optimizer_bytes)
    )
    starts = first_calls(names, uncut.blocks, stages, Balancing(balance, limit, weights))
    calls = [range(a, b) for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]
    with refusals():
        forward = forward.for_stages(calls)
        chosen = _checked_stages(only, len(calls))
        edges = () if chain else stage_edges(forward.flow, calls)
        result, refused = _stages(model, forward, calls, edges, chosen, source, sample)
        if check and source is None and None not in result and len(result) > 1:
            result._check_all_modes(refused, must_compare=way == "graph")
    return result


@contextmanager
def _graph_advice(split_graph: Callable[[], Stages] | None) -> Iterator[None]:
    """Add to a refusal that the model's graph can be cut, if it can be."""
    try:
        yield
    except (ArgumentError, ExecutionError) as error:
        if split_graph is not None and _is_equal(split_graph):
            raise type(error)(f"{error}; or give way='graph', which can cut this model") from error
        raise


def _is_equal(split_graph: Callable[[], Stages]) -> bool:
    """Return whether a split succeeds, and its stages were compared with the model."""
    try:
        return bool(split_graph().differences)
    except Exception:  # whatever torch.export or the user's code raises
        return False


def _stages(
    model: nn.Module,
    forward: SampleForward,
    calls: Sequence[range],
    edges: Edges,
    chosen: set[int],
    source: DeferredModel | None,
    sample: Any,
) -> tuple[Stages, dict[Mode, str]]:
    """Return the stages of these calls, of which the chosen ones are made, and refused modes."""
    flow, uncut, names = forward.flow, forward.uncut, [call.name for call in forward.flow.calls]
    arguments = sample_arguments(model, sample)
    body = model if source is not None else forward.model
    if len(calls) > 1:
        check_hooks(body, names, calls)
    refused = forward.refused | _refused_for_state(forward, calls)
    skeleton = Skeleton(
        body, frozenset(uncut.names), flow, forward.empty, forward.carried, refused, arguments
    )
    outer = outer_parameters(flow, calls)
    used = {id(p) for name in set(names) for p in body.get_submodule(name).parameters()}
    unused = {name for name, p in body.named_parameters() if id(p) not in used}
    outer[0] |= unused.difference(*outer)  # the first stage keeps them for checkpoints
    shared = shared_parameters(body, flow, calls, outer)
    values = routes(flow, calls, skeleton.n_inputs, edges)
    parts = _make_stages(skeleton, forward, calls, values, outer, shared, chosen, source)
    tied, ordered = tuple(tied_groups(shared)), partial(ordered_batch, model, arguments)
    draws = tuple(place for x, place in flow.places.items() if x.kind == "random")
    facts = SplitFacts(values, edges, ordered, tied, draws)
    for index, stage in enumerate(parts):
        if stage is not None:
            stage.number, stage.facts = index, facts
    stages = Stages(
        model,
        parts,
        [tuple(dict.fromkeys(names[k] for k in own)) for own in calls],
        facts,
        tuple(name for name in names if name in uncut.blocks or not uncut.blocks),
        way=uncut.way,
        ways_failed=uncut.ways_failed,
        sample=sample,
    )
    return stages, refused


def _checked_model(
    model: nn.Module | Callable[[], nn.Module],
) -> tuple[nn.Module, DeferredModel | None]:
    """Return a model, and its source if a function makes it."""
    source = None
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ArgumentTypeError(
                f"model must be an nn.Module, or a function that makes one, got {model!r:.60} "
                f"({type(model).__name__})"
            )
        source = deferred(model)
        model = check_type("model()", source.model, nn.Module)
    check_not_compiled(model)
    return model, source


def _forward_to_cut(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_data: bool,
    is_whole: bool,
) -> SampleForward:
    """Return the forward of the sample, or that of an exported graph for functions alone."""
    forward = sample_forward(model, args, kwargs, has_data=has_data)
    if has_data and not is_whole and len(forward.flow.calls) < 2:
        forward = exported_forward(forward)
    if not forward.flow.calls:
        failed = dict(forward.uncut.ways_failed).get("torch.export", "no data")
        raise ArgumentError(
            f"{type(model).__name__} cannot be cut: its forward calls no module that has "
            f"parameters, and torch.export does not help ({failed:.150}); let modules have "
            "parameters, such as nn.Linear"
        )
    return forward


def _refused_for_state(forward: SampleForward, calls: Sequence[range]) -> dict[Mode, str]:
    """Return the modes in which modules of several stages change state, and which modules."""
    refused = {}
    stages: dict[str, set[int]] = defaultdict(set)
    tensors: dict[int, set[int]] = defaultdict(set)  # stages by the ids of modules and buffers
    modules = {name: list(forward.model.get_submodule(name).modules()) for name in forward.empty}
    state = {name: [*parts, *(b for x in parts for b in x._buffers.values() if b is not None)]
             for name, parts in modules.items()}  # fmt: skip
    for stage, own in enumerate(calls):
        for call in forward.flow.calls[own.start : own.stop]:
            for part in state[call.name]:
                tensors[id(part)].add(stage)
    for name, parts in state.items():
        stages[name] = set().union(*(tensors[id(x)] for x in parts))
    for mode, names in forward.stateful.items():
        for name in sorted(names & stages.keys()):
            if len(stages[name]) > 1:
                refused[mode] = (
                    f"stages {' and '.join(map(str, sorted(stages[name])))} call {name!r}, which "
                    "changes buffers or attributes of its own, and each would have others; cut so "
                    "that one stage has all its calls, or make a module of its own for each call"
                )
                if mode == Mode(forward.model.training, grad=True):
                    raise ArgumentError(refused[mode])
    return refused


def _make_stages(
    skeleton: Skeleton,
    forward: SampleForward,
    calls: Sequence[range],
    values: Sequence[Route],
    outer: Sequence[frozenset[str]],
    shared: list[Shared],
    chosen: set[int],
    source: DeferredModel | None,
) -> list[SplitStage | None]:
    """Return the chosen stages, with their parameters."""
    owners = state_owners(forward.flow, calls)
    stateful = frozenset().union(*forward.stateful.values())
    copied = [copies(shared, k) if k in chosen else {} for k in range(len(calls))]
    parts = [
        SplitStage(
            skeleton, own, values[k], outer[k], copied[k],
            {name: owner == k for name, owner in owners.items()}, stateful, forward.once,
        )
        if k in chosen
        else None
        for k, own in enumerate(calls)
    ]  # fmt: skip
    if source is not None and chosen:
        give_values(parts, source)
    return parts


def _check_range(name: str, value: float, most: float) -> None:
    """Raise unless a value is a number from 0 to the most."""
    nbytes = number(value)
    if nbytes is None or not 0 <= nbytes <= most:
        raise ArgumentError(f"{name} must be bytes, a number of 0 to {most:g}, got {value!r:.60}")


def _checked_stages(only: Sequence[int] | None, n: int) -> set[int]:
    if only is None:
        return set(range(n))
    chosen = {check_count("only", k, 0) for k in check_list("only", only, "numbers of stages")}
    if max(chosen, default=0) >= n:
        raise ArgumentError(f"only={only!r:.60} must name stages of 0 to {n - 1}")
    return chosen
