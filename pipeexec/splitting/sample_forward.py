"""`SampleForward`: modules and data flow of forwards of a sample, in all modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from itertools import product, starmap, zip_longest
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.nesting import Leaf, leaves, own_tensors, tensors_in
from pipeexec.splitting.borders import check_flow
from pipeexec.splitting.cuts import CallWeights
from pipeexec.splitting.data_flow import DataFlow, Mode, Read, Source, follow, merged
from pipeexec.splitting.exported_model import called_module, export_model
from pipeexec.splitting.model_state import ModelState, same_python_draws, unchanged
from pipeexec.splitting.operations import line_of_error
from pipeexec.splitting.stand_in import (
    on_meta,
    run_without_data,
    to_meta,
    with_zeros,
    without_recorders,
)
from pipeexec.splitting.uncut_modules import UncutModules, uncut_modules
from pipesim.errors import ArgumentError, ExecutionError, PipeError

_EXPORT = "torch.export"
#: Forwards after which state that still changes counts as such: what is set once changes before.
_MOST_FORWARDS = 3


class SampleForward(NamedTuple):
    """Modules and data flow of forwards."""

    uncut: UncutModules
    flow: DataFlow  # between these, of all modes that stages can run in
    model: nn.Module  # or a copy of it without data
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    refused: dict[Mode, str]  # modes in which stages cannot run, and why
    empty: dict[str, nn.Module]  # each module that is called, without data
    carried: frozenset[int]  # calls whose result has a shape that only the result tells
    stateful: dict[Mode, frozenset[str]]  # modules that change attributes or buffers of theirs
    once: frozenset[tuple[str, str]]  # modules, and attributes that the first forward alone sets
    flows: dict[Mode, DataFlow]  # of each mode that stages may run in; first that of the model

    def for_stages(self, calls: Sequence[range]) -> SampleForward:
        """Return the forward with the modes that stages of these calls can run in."""
        (own, flow), *others = self.flows.items()
        check_flow(flow, calls)
        flows, refused, stateful = {own: flow}, dict(self.refused), dict(self.stateful)
        for mode, other in others:
            both = merged(flow, other)
            try:
                check_flow(both, calls)
            except ArgumentError as error:
                refused[mode] = str(error)
                del stateful[mode]
            else:
                flow, flows[mode] = both, other
        return self._replace(flow=flow, flows=flows, refused=refused, stateful=stateful)

    def weights(self, kind: str, *, has_data: bool, optimizer_bytes: float) -> list[float]:
        """Return the weight of each call; see `CallWeights`."""
        names = [call.name for call in self.flow.calls]
        measured = CallWeights(
            self.model, names, self.args, self.kwargs,
            has_data=has_data, optimizer_bytes=optimizer_bytes,
        )  # fmt: skip
        with _failing_forward(self.model), unchanged(self.model, guard=False):
            return measured.weights(kind)


def sample_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_data: bool
) -> SampleForward:
    """Return modules and data flow of forwards; the model stays as it was.

    A model without data runs without, or on zeros if its forward reads values, as of masks.
    """
    if not has_data:
        with suppress(Exception):  # a forward may read values anywhere
            empty = on_meta(model)
            return sample_forward(empty, *to_meta((args, kwargs)), has_data=True)
        model = with_zeros(model)
    with _failing_forward(model), unchanged(model):
        uncut = uncut_modules(model, *own_tensors((args, kwargs)))
    return _followed(uncut, model, args, kwargs)


def _followed(
    uncut: UncutModules, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SampleForward:
    """Return the data flow of forwards in all modes; first in that of the model."""
    own = Mode(model.training, grad=True)
    modes = sorted(starmap(Mode, product((True, False), repeat=2)), key=lambda x: x != own)
    calls: frozenset[str] = frozenset()
    is_known = False
    while not is_known:  # which modules without parameters are calls, in all modes
        refused: dict[Mode, str] = {}
        flows: dict[Mode, DataFlow] = {}
        stateful: dict[Mode, frozenset[str]] = {}
        once: set[tuple[str, str]] = set()
        outputs: dict[Mode, tuple[Tensor, ...]] = {}
        for mode in modes:
            try:
                with _failing_forward(model):
                    result = _flow(uncut.names, model, args, kwargs, mode, calls)
                flows[mode], stateful[mode] = result.flow, result.stateful
                once |= result.once
                outputs[mode] = result.output
            except PipeError as error:
                if mode == own:
                    raise
                refused[mode] = str(error)
        changing = frozenset().union(*stateful.values(), *(x.drawing for x in flows.values()))
        is_known, calls = calls >= changing, calls | changing
    flow = flows[own]
    for mode, other in list(flows.items()):
        if reason := _other_way(flow, other):
            refused[mode] = f"{reason}; {_advice(own, mode)}"
            del stateful[mode], flows[mode]
        else:
            flow = merged(flow, other)
    with_grad, without = Mode(training=True, grad=True), Mode(training=True, grad=False)
    if without not in refused and _differ(outputs.get(with_grad, ()), outputs[without]):
        refused[without] = (
            "the model returns other values without gradients than with them, so that its forward "
            "cannot run again; lower the schedule with recompute='never'"
        )
    empty = {x.name: without_recorders(on_meta(model.get_submodule(x.name))) for x in flow.calls}
    carried = frozenset(_carried(empty, flow))
    reads = [_read_of_result(flow, number) for number in sorted(carried)]
    flow = flow._replace(reads=(*flow.reads, *reads))
    flows[own] = flows[own]._replace(reads=(*flows[own].reads, *reads))
    return SampleForward(
        uncut, flow, model, args, kwargs, refused, empty, carried, stateful, frozenset(once), flows
    )


def _advice(own: Mode, mode: Mode) -> str:
    """Return how to run the stages of a model in a mode in which its forward takes another way."""
    if own.training == mode.training:
        advice = "let it not depend on torch.is_grad_enabled()"
        return advice + (", or lower the schedule with recompute='never'" if own.training else "")
    return f"call model.{'train' if mode.training else 'eval'}() and split again"


class _Followed(NamedTuple):
    """Data flow of a forward in one mode."""

    flow: DataFlow
    stateful: frozenset[str]  # modules that are not cut, and change their state
    once: frozenset[tuple[str, str]]  # modules that are cut, and attributes that are set once
    output: tuple[Tensor, ...]


def _differ(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether two outputs, if there are both, have other values."""
    rows = zip(first, second, strict=False)
    return any(
        a.shape != b.shape or not (a.is_meta or torch.allclose(a, b, 1e-3, 1e-6, equal_nan=True))
        for a, b in rows
    )


def _flow(
    uncut: Sequence[str],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: Mode,
    calls: frozenset[str],
) -> _Followed:
    """Return the data flow of a forward in one mode, and which modules change their state.

    Modules of ``calls`` are calls, and those that change their state, even without parameters.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stateful: frozenset[str] = frozenset()
    once: frozenset[tuple[str, str]] = frozenset()
    first: DataFlow | None = None
    with unchanged(model), torch.set_grad_enabled(mode.grad):
        if model.training != mode.training:
            model.train(mode.training)
        for _ in range(_MOST_FORWARDS):  # until one changes the same as the one before it
            state, before = ModelState(model), stateful
            own_args, own_kwargs = own_tensors((args, kwargs))
            flow, output, used = follow(model, uncut, own_args, own_kwargs, calls | stateful)
            changed = {names[key]: attributes for key, attributes in state.changed().items()}
            inner = {x for x in changed if any(_is_in(x, name) for name in uncut)}
            stateful = frozenset(y for y in uncut if any(_is_in(x, y) for x in inner))
            followed = {x.source.name for x in flow.state}
            outer = changed.keys() - inner
            cut = {
                f"{name}.{key}".lstrip(".")
                for name in outer
                for key in changed[name]
                if not state.is_equal(model.get_submodule(name), key, used)
            }
            cut -= followed
            written = _written_parameters(model, inner, changed)
            if first is None:
                first = flow
                once = frozenset((x, key) for x in outer for key in changed[x])
            if not changed or (stateful == before and not cut):
                break
    if written:
        raise ArgumentError(
            f"a block changes its parameter {written[0]!r} in the forward, but all micro-batches "
            "of a step need one value; change it between steps, outside of the forward"
        )
    if cut:
        raise ArgumentError(
            f"the forward of {type(model).__name__} changes {' and '.join(sorted(cut))} outside of "
            "its blocks, where each stage would change its own; change it in a block, or make it a "
            "buffer that the forward changes by an operation in place"
        )
    if first is not None and first is not flow and not _other_way(first, flow):
        flow = merged(flow, first)
    once -= {(x.module, x.key) for x in flow.state}
    return _Followed(flow, stateful, once, output)


def _is_in(name: str, outer: str) -> bool:
    """Return whether a module is another one, or in it."""
    return name == outer or name.startswith(f"{outer}.") or not outer


def _written_parameters(
    model: nn.Module, names: Iterable[str], changed: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return names of the changed parameters of modules."""
    return [
        f"{name}.{key}".lstrip(".")
        for name in sorted(names)
        for key in changed[name]
        if key in model.get_submodule(name)._parameters
    ]


def _other_way(flow: DataFlow, other: DataFlow) -> str:
    """Return how the calls of a forward differ from those of another; empty if they do not."""
    names = [x.name for x in flow.calls], [x.name for x in other.calls]
    for first, second in zip_longest(*names):
        if first != second:
            calls = "ends" if second is None else f"calls {second!r}"
            called = "ended" if first is None else f"called {first!r}"
            return f"its forward {calls} where that of the sample {called}"
    for call, a, b in zip(flow.calls, flow.records, other.records, strict=True):
        if len(tensors_in(a.result)) != len(tensors_in(b.result)):
            return f"{call.name!r} returns another number of tensors"
    return ""


def _carried(empty: Mapping[str, nn.Module], flow: DataFlow) -> Iterator[int]:
    """Yield the calls whose result has a shape that only the result tells."""
    for number, (call, record) in enumerate(zip(flow.calls, flow.records, strict=True)):
        rows = leaves(record.result)
        args, kwargs = own_tensors(record.arguments)
        try:
            with same_python_draws(), torch.random.fork_rng([]):
                computed = leaves(run_without_data(empty[call.name], args, kwargs))
        except Exception:  # of operations that need values, or have no kernel without data
            computed = []
        if [_outline(x) for x in rows] == [_outline(x) for x in computed]:
            continue
        yield number
        if any(isinstance(x.value, (bool, int, float)) for x in rows):
            raise ArgumentError(
                f"{call.name!r} returns a number beside tensors, which other stages cannot know; "
                "return it as a tensor"
            )


def _outline(leaf: Leaf) -> tuple[Any, ...]:
    """Return path and form of a value in a result."""
    if isinstance(leaf.value, Tensor):
        return leaf.path, leaf.value.shape, leaf.value.dtype
    is_plain = isinstance(leaf.value, (bool, int, float, str, torch.Size, NoneType))
    return leaf.path, leaf.value if is_plain else type(leaf.value)


def _read_of_result(flow: DataFlow, number: int) -> Read:
    """Return the read of all tensors that a call returns."""
    tensors = tensors_in(flow.records[number].result)
    sources = (Source("output", number, position) for position in range(len(tensors)))
    return Read(number + 1, frozenset(sources), f"the call of {flow.calls[number].name!r}")


def exported_forward(forward: SampleForward) -> SampleForward:
    """Return modules and data flow of the model's graph, cut at its operations with parameters.

    If there is no graph, return the given ones, with the reason.
    """
    uncut = forward.uncut
    failed = (*uncut.ways_failed, (uncut.way, "these are fewer than two"))
    try:
        return _of_graph(
            forward.model,
            forward.args,
            forward.kwargs,
            UncutModules((), frozenset(), _EXPORT, failed),
        )
    except _NoGraph as error:
        failed = (*uncut.ways_failed, (_EXPORT, str(error)))
        return forward._replace(uncut=uncut._replace(ways_failed=failed))


def graph_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleForward:
    """Return modules and data flow of the model's graph, cut where modules of the model are."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ArgumentError(
                f"{name or 'the model'!r} has a backward hook, which a graph of torch.export does "
                "not run; remove it, or give way='modules'"
            )
    with _failing_forward(model), unchanged(model):
        state = ModelState(model)
        uncut = uncut_modules(model, *own_tensors((args, kwargs)))
        changed = state.changed()
    for name, module in model.named_modules():
        for key in changed.get(id(module), ()):
            if key not in module._buffers:
                raise ArgumentError(
                    f"the forward changes {f'{name}.{key}'.lstrip('.')!r}, which a graph of "
                    "torch.export does not do; make it a buffer, or give way='modules'"
                )
    try:
        return _of_graph(model, args, kwargs, uncut._replace(way=f"{_EXPORT}, {uncut.way}"))
    except _NoGraph as error:
        raise ArgumentError(
            f"torch.export makes no graph of {type(model).__name__} to cut ({error}); change the "
            "forward as that says, or give way='modules'"
        ) from error


class _NoGraph(Exception):
    """There is no graph that can be cut; the text is the reason."""


def _of_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], uncut: UncutModules
) -> SampleForward:
    """Return modules and data flow of a model's graph, whose parts are calls of uncut modules.

    `_NoGraph` tells why there is none: torch.export fails, or fewer than two modules result.
    """
    with unchanged(model), redirect_stderr(StringIO()):  # torch prints the graphs of its errors
        try:
            own_args, own_kwargs = own_tensors((args, kwargs))
            exported = export_model(model, own_args, own_kwargs, uncut.names)
        except Exception as error:  # of the user's code, and whatever torch.export raises
            text = str(error).strip().partition("\n")[0]
            raise _NoGraph(f"{type(error).__name__}: {text:.120}") from error
    names = exported.names
    if len(names) < 2:
        raise _NoGraph("fewer than two operations of the graph have parameters")
    graph = UncutModules(names, frozenset(names), _EXPORT, uncut.ways_failed)
    if all(called_module(x) in uncut.names for x in names):
        blocks = frozenset(x for x in names if called_module(x) in uncut.blocks)
        graph = graph._replace(blocks=blocks, way=uncut.way)
    result = _followed(graph, exported, args, kwargs)
    own, other = (Mode(x, grad=True) for x in (model.training, not model.training))
    if _has_other_graph(model, exported, args, kwargs, other):
        mode = "training" if other.training else "evaluation"
        reason = (
            f"the graph of torch.export has one mode, and {type(model).__name__} computes other "
            f"values in {mode} mode; {_advice(own, other)}"
        )
        result.refused.update({other._replace(grad=grad): reason for grad in (True, False)})
    return result


def _has_other_graph(
    model: nn.Module,
    exported: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: Mode,
) -> bool:
    """Return whether a model computes other outputs or buffers than its graph, or draws others."""
    results = []
    for module in (model, exported):
        with unchanged(model, exported), torch.no_grad():
            if module.training != mode.training:
                module.train(mode.training)
            own_args, own_kwargs = own_tensors((args, kwargs))
            try:
                output = module(*own_args, **own_kwargs)
            except Exception:  # of the user's code
                return True
            tensors = (*tensors_in(output), *model.buffers(), torch.get_rng_state())
            results.append([x.clone() for x in tensors])
    return len(results[0]) != len(results[1]) or _differ(*results)


@contextmanager
def _failing_forward(model: nn.Module) -> Iterator[None]:
    """Raise `ExecutionError` for errors in a forward."""
    try:
        yield
    except PipeError:
        raise
    except Exception as error:  # of the user's code, or of what follows it
        raise ExecutionError(
            f"the forward of {type(model).__name__} fails on the sample: "
            f"{type(error).__name__}: {str(error).strip():.150}{line_of_error(error)}; give a "
            "sample that the model takes"
        ) from error
