"""`Border`: values that pass from stage to stage; `Skeleton`: facts that all stages share.

The borders, and the stage of each state of the model, follow from the data flow of a forward.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.nesting import Arguments, leaves, tensors_in, with_tensors
from pipeexec.splitting.data_flow import DataFlow, Mode, Source, Sources
from pipeexec.splitting.model_state import same_python_draws
from pipeexec.splitting.stand_in import run_without_data
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.scheduling.placement import Edges, checked_edges, entry_stages, stage_pairs


class Border(NamedTuple):
    """Values that pass from one stage to the next: origins of the tensors, in order.

    Of the model's inputs with the numbers in ``shapes``, the shape alone passes; see `shape_alone`.
    """

    whole: tuple[Source, ...]
    shapes: tuple[int, ...] = ()


def shape_alone(tensor: Tensor) -> Tensor:
    """Return a tensor without data that tells a shape: this shape, and a last dimension of 0."""
    return tensor.new_empty((*tensor.shape, 0))


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return shapes of the tensors in arguments, and the other values."""
    values = (*args, *kwargs.values())
    if not all(x is None or isinstance(x, (Tensor, bool, int, float, str)) for x in values):
        values = tuple(leaf.value for leaf in leaves((args, kwargs)))
    return tuple(x.shape if isinstance(x, Tensor) else x for x in values)


class Skeleton:
    """Facts about a model that all its stages share.

    Parameters
    ----------
    uncut, flow
        Modules that are not cut, and the data flow between their calls.
    empty
        Each module that is called, without data.
    carried
        Numbers of the calls whose results only tell their own shapes.
    refused
        Modes in which stages cannot run, and why.
    arguments
        Those of the sample.
    """

    def __init__(
        self,
        model: nn.Module,
        uncut: frozenset[str],
        flow: DataFlow,
        empty: Mapping[str, nn.Module],
        carried: frozenset[int],
        refused: Mapping[Mode, str],
        arguments: Arguments,
    ) -> None:
        self.model, self.uncut, self.flow, self.carried = model, uncut, flow, carried
        self.refused, self.arguments = refused, arguments
        self.names = tuple(call.name for call in flow.calls)
        self.dtypes = tuple(x.dtype for x in tensors_in(arguments))
        #: Numbers of the inputs that get a gradient: those that require one in the sample.
        self.trained = {k for k, x in enumerate(tensors_in(arguments)) if x.requires_grad}
        self.empty, self._is_training = empty, model.training
        # Values that need no gradient, whichever parameters are trained later.
        trains = not torch.is_inference_mode_enabled() and all(
            x.requires_grad for x in model.parameters() if x.is_floating_point()
        )
        self.constant = frozenset(
            Source("output", number, position)
            for number, call in enumerate(flow.calls if trains else ())
            for position in call.constant
        )
        self._other_mode: dict[str, nn.Module] = {}
        # Results of calls by number, mode and form of the arguments; all stages may add some.
        self._results: dict[Any, Any] = {}
        for number, (arguments_before, result) in enumerate(flow.records):
            with suppress(TypeError):  # an argument that has no hash
                self._results[number, model.training, _form(*arguments_before)] = result

    def __deepcopy__(self, _: dict[int, Any]) -> Skeleton:
        return self  # nothing changes; copies of stages do not copy the model

    @property
    def n_inputs(self) -> int:
        """Number of tensors of the arguments."""
        return len(self.dtypes)

    def empty_result(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        """Return the result of a call without data; for arguments of one form, computed once."""
        if number in self.carried:
            return self.flow.records[number].result
        form = _form(args, kwargs)
        key = number, training, form
        try:
            return self._results[key]
        except KeyError:
            self._results[key] = self._empty_result(number, training, args, kwargs)
            return self._results[key]
        except TypeError:  # an argument that has no hash
            return self._empty_result(number, training, args, kwargs)

    def _empty_result(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        """Compute the result of a call without data.

        Floating-point arguments have the types that they had in the sample: without data, autocast
        has no effect.
        """
        types = [x.dtype for x in tensors_in(self.flow.records[number].arguments)]
        tensors = [
            x.to("meta", dtype if x.is_floating_point() else x.dtype)
            for x, dtype in zip(tensors_in((args, kwargs)), types, strict=True)
        ]
        args, kwargs = with_tensors((args, kwargs), tensors)
        try:
            with same_python_draws():
                return run_without_data(self._module(self.names[number], training), args, kwargs)
        except Exception as error:  # of the user's code
            raise ExecutionError(
                f"the shape of what {self.names[number]!r} of another stage returns is not known: "
                f"without data, its forward fails ({type(error).__name__}: "
                f"{str(error).strip():.200}), which that of the sample did not; split with such a "
                "sample"
            ) from error

    def _module(self, name: str, training: bool) -> nn.Module:
        if training == self._is_training:
            return self.empty[name]
        if name not in self._other_mode:
            self._other_mode[name] = copy.deepcopy(self.empty[name]).train(training)
        return self._other_mode[name]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """Return the arguments with other tensors."""
        arguments: Arguments = with_tensors(self.arguments, tensors)
        return arguments


def _needs(flow: DataFlow, calls: Sequence[range]) -> list[Sources]:
    """Return the origins of the values that each stage needs.

    They are those of its calls, of values that the forward reads before the last of them, of the
    state that it keeps, and of the output of the last stage. If the forward reads values, other
    batches may take another way: then the stage needs all integers, which cannot be NaN.
    """
    owners, result = state_owners(flow, calls), []
    for stage, own in enumerate(calls):
        is_last = stage == len(calls) - 1
        needs = flow.output if is_last else frozenset()
        reads = [x.sources for x in flow.reads if is_last or x.before <= own[-1]]
        if reads:
            integers = (x for x in flow.integers if x.number <= own[-1] or x.kind == "input")
            reads.append(frozenset(integers))
        state = (x.sources | {x.source} for x in flow.state if owners[x.module] == stage)
        result.append(needs.union(*reads, *state, *(flow.calls[k].needs for k in own)))
    return result


def state_owners(flow: DataFlow, calls: Sequence[range]) -> dict[str, int]:
    """Return the stage that changes the state of each module outside of calls.

    It is the first one whose code changes all of it.
    """
    before: dict[str, int] = {}
    for write in flow.state:
        before[write.module] = max(before.get(write.module, 0), write.before)
    return {
        module: next((k for k, own in enumerate(calls) if number <= own[-1]), len(calls) - 1)
        for module, number in before.items()
    }


def outer_parameters(flow: DataFlow, calls: Sequence[range]) -> list[frozenset[str]]:
    """Return the parameters that each stage needs outside of calls."""
    return [
        frozenset(x.name for x in needs if x.kind == "parameter") for needs in _needs(flow, calls)
    ]


def check_flow(flow: DataFlow, calls: Sequence[range]) -> None:
    """Raise if stages need values that do not pass from module to module."""
    drawn: dict[Source, int] = {}
    all_needs = _needs(flow, calls)
    for stage, (own, needs) in enumerate(zip(calls, all_needs, strict=True)):
        for source in sorted(needs):
            if source.kind == "inside" and source.number not in own:
                name, place = flow.calls[source.number].name, _place(flow, source)
                raise ArgumentError(
                    f"stage {stage} reads a tensor, {place}, that {name!r} of another stage "
                    "computes and does not return, such as a cache; switch that off, let "
                    f"{name!r} return it, or {_one_stage(flow, {source}, source.number)}"
                )
            if source.kind == "parameter":
                _check_parameter(source, stage, {flow.calls[k].name for k in own}, flow)
            if source.kind == "random" and drawn.setdefault(source, stage) != stage:
                raise ArgumentError(
                    f"stages {drawn[source]} and {stage} both need the result of "
                    f"{source.name}, which the forward calls outside of its blocks, "
                    f"{_place(flow, source)}; they would draw different numbers. Call it in the "
                    "forward of a module, such as nn.Dropout in place of F.dropout"
                )
        _check_aliases(flow, calls, stage, needs)
    _check_state(flow, calls, all_needs)


def _place(flow: DataFlow, source: Source) -> str:
    """Return where the forward first uses a source, as text."""
    return f"at {flow.places[source]}" if source in flow.places else "for the model's output"


def _check_parameter(source: Source, stage: int, own: set[str], flow: DataFlow) -> None:
    """Raise if a stage reads a parameter of a module inside a block of another stage."""
    name = source.name
    rows = ((k, x.name) for k, x in enumerate(flow.calls) if name.startswith(f"{x.name}."))
    first, owner = next(rows, (0, None))
    if owner is not None and owner not in own and "." in name.removeprefix(f"{owner}."):
        raise ArgumentError(
            f"stage {stage} reads {name!r}, {_place(flow, source)}, a parameter inside of "
            f"{owner!r} of another stage; read it in {owner!r} and return the result, or "
            f"{_one_stage(flow, {source}, first)}"
        )


def _check_aliases(flow: DataFlow, calls: Sequence[range], stage: int, needs: Sources) -> None:
    """Raise if a stage receives values that shared memory to which the forward writes."""
    received = {x for x in needs if x.kind == "input" or _is_earlier(x, calls[stage])}
    for aliases in flow.aliases if stage else ():
        if received & aliases.sources:
            names = " and ".join(
                dict.fromkeys(_described(x, flow) for x in sorted(aliases.sources))
            )
            first = min(0 if x.kind == "input" else x.number for x in aliases.sources)
            raise ArgumentError(
                f"the forward writes in place, at {aliases.place}, to memory of {names} that other "
                f"tensors share, and stage {stage} receives them as tensors of their own; write to "
                f"a clone(), or {_one_stage(flow, aliases.sources, first)}"
            )


def _one_stage(flow: DataFlow, sources: Set[Source], first: int) -> str:
    """Return which modules a stage must have, from a call on, to have all uses of values."""
    name = repr(flow.calls[first].name)
    if flow.output & sources or any(x.sources & sources for x in flow.reads):
        return f"cut so that one stage has {name} and all modules after it"
    last = max((k for k, x in enumerate(flow.calls) if x.needs & sources), default=first)
    return f"cut so that one stage has {name} to {flow.calls[last].name!r}"


def _is_earlier(source: Source, own: range) -> bool:
    return source.kind in ("output", "argument") and source.number < own.start


def _described(source: Source, flow: DataFlow) -> str:
    """Return the name of a value for a message."""
    if source.kind == "input":
        return f"argument {source.number} of the model"
    name = repr(flow.calls[source.number].name)
    return f"the output of {name}" if source.kind == "output" else f"an argument of {name}"


def _check_state(flow: DataFlow, calls: Sequence[range], all_needs: Sequence[Sources]) -> None:
    """Raise if a parameter or buffer that changes outside of calls has several stages."""
    owners = state_owners(flow, calls)
    for write in flow.state:
        source, place = write.source, write.place
        if source.kind == "parameter" and len(calls) > 1:
            raise ArgumentError(
                f"the forward changes the parameter {source.name!r} outside of its blocks, at "
                f"{place}, but all micro-batches of a step need one value; change it between "
                "steps, outside of the forward"
            )
        users = [k for k, needs in enumerate(all_needs) if source in needs]
        if users != [owners[write.module]]:
            numbers = " and ".join(map(str, users))
            raise ArgumentError(
                f"the forward changes {source.name!r} outside of its blocks, at {place}, and "
                f"stages {numbers} need it; change it and read it in one block, or cut so that one "
                "stage does both"
            )


class Route(NamedTuple):
    """Values that a stage receives, in order, and those that it sends; None for the last stage.

    It receives those of each stage with an edge to it, or, without one, inputs of the model.
    """

    receives: tuple[Border, ...]
    sends: Border | None


def stage_edges(flow: DataFlow, calls: Sequence[range]) -> Edges:
    """Return the edges between stages: from each to those that need a value of it.

    There is no edge where other stages pass the value on. A stage that no other one needs gets an
    edge to the last. Empty for a chain.
    """
    all_needs, n = _needs(flow, calls), len(calls)
    before: list[set[int]] = []  # stages from which there is a way to each stage
    edges: list[tuple[int, int]] = []
    for stage, needs in enumerate(all_needs):
        numbers = {x.number for x in needs if _is_earlier(x, calls[stage])}
        sources = {k for k in range(stage) if numbers.intersection(calls[k])}
        if stage == n - 1:
            sources |= set(range(stage)).difference(source for source, _ in edges)
        passed = set[int]().union(*(before[k] for k in sources))
        edges += [(source, stage) for source in sorted(sources - passed)]
        before.append(sources | passed)
    return checked_edges(edges, n)


def routes(flow: DataFlow, calls: Sequence[range], n_inputs: int, edges: Edges) -> list[Route]:
    """Return the values that each stage receives and sends; a first stage alone takes all inputs.

    If several stages before a stage have a value, the first of them sends it.
    """
    n, all_needs = len(calls), _needs(flow, calls)
    before: list[list[int]] = [[] for _ in calls]
    for source, target in stage_pairs(edges, n).tolist():
        before[target].append(source)
    ancestors: list[set[int]] = []  # each stage, and those from which there is a way to it
    for stage, sources in enumerate(before):
        ancestors.append({stage}.union(*(ancestors[k] for k in sources)))
    sent: list[set[Source]] = [set() for _ in calls]  # values that stages after each one need
    received: list[set[Source]] = [set() for _ in calls]
    for stage in reversed(range(n)):
        own = calls[stage]
        needs = all_needs[stage] | sent[stage]
        received[stage] = {x for x in needs if x.kind == "input" or _is_earlier(x, own)}
        for value in received[stage] if before[stage] else ():
            origins = [k for k, x in enumerate(calls) if value.kind == "input" or value.number in x]
            sent[next(k for k in before[stage] if ancestors[k].intersection(origins))].add(value)
    entry = [Source("input", k) for k in range(n_inputs)]
    if len(entry_stages(edges, n)) == 1:
        received[0].update(entry)
    shapes: list[set[int]] = [set() for _ in calls]  # numbers of inputs
    for stage, sources in enumerate(before):
        for source in sources[:1]:
            shapes[source] |= {k for k, x in enumerate(entry) if x not in received[stage]}
        if not sent[stage]:  # a message has a tensor
            shapes[stage].add(0)
    sends = [
        Border(
            tuple(sorted(values, key=lambda x: (x.kind == "input", x))),
            tuple(x for x in sorted(shapes[k]) if entry[x] not in values),
        )
        for k, values in enumerate(sent)
    ]
    inputs = [
        tuple(Border((x,)) if x in received[k] else Border((), (x.number,)) for x in entry)
        for k in range(n)
    ]
    return [
        Route(
            tuple(sends[k] for k in sources) or inputs[stage],
            sends[stage] if stage < n - 1 else None,
        )
        for stage, sources in enumerate(before)
    ]
