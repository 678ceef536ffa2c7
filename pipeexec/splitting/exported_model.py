"""`ExportedModel`: a model as a sequence of modules, from the graph of torch.export.

Its modules are those of the model that a split does not cut. Each has also the operations between
it and the next one. Of models that call functions with parameters, each operation with a parameter
begins a module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipesim.errors import ArgumentError

#: What a graph may keep: tensors, and graphs of parts of the forward.
_KEPT = Tensor, nn.Module


class _Part(nn.Module):
    """Some operations of a graph; a plain module, whose copies keep its hooks."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *values: Any) -> Any:
        """Return the results that other parts need."""
        return self.graph(*values)


class _Facts:
    """Facts that copies of an `ExportedModel` share.

    Attributes
    ----------
    source
        The model; no child of the copies.
    shapes
        For each leaf of the arguments, the shape that a tensor must have, None for any length.
    inputs
        For each part, the numbers of the values that it takes: first leaves of the arguments, then
        results of parts in turn.
    outputs, out_spec
        Numbers of the output's leaves, and its nesting.
    """

    def __init__(
        self,
        source: nn.Module,
        names: Sequence[str],
        shapes: Sequence[tuple[int | None, ...] | None],
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[int],
        out_spec: pytree.TreeSpec,
    ) -> None:
        self.source, self.names, self.shapes, self.inputs = source, tuple(names), shapes, inputs
        self.outputs, self.out_spec = outputs, out_spec
        self.paths = [name.split(".") for name in names]

    def __deepcopy__(self, _: dict[int, Any]) -> _Facts:
        return self


class ExportedModel(nn.Module):
    """A model as modules, each of which takes results of those before, with its parameters."""

    def __init__(self, parts: Sequence[_Part], facts: _Facts) -> None:
        super().__init__()
        self._facts = facts
        for path, part in zip(facts.paths, parts, strict=True):
            owner: nn.Module = self
            for key in path[:-1]:
                if key not in owner._modules:
                    owner.add_module(key, nn.Module())
                owner = owner.get_submodule(key)
            owner.add_module(path[-1], part)

    @property
    def source(self) -> nn.Module:
        """The model."""
        return self._facts.source

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules, in the order of their calls."""
        return self._facts.names

    def original_name(self, name: str) -> str:
        """Return the name in the model of a parameter of this one."""
        prefix = next(x for part in self.names if name.startswith(x := f"{part}.graph."))
        return name.removeprefix(prefix)

    def _parts(self) -> Iterator[nn.Module]:
        for path in self._facts.paths:
            part: Any = self
            for key in path:
                part = part._modules[key]
            yield part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        values = pytree.tree_leaves((args, kwargs))
        for value, shape in zip(values, self._facts.shapes, strict=True):
            if shape is not None:
                _check_shape(value, shape)
        for part, inputs in zip(self._parts(), self._facts.inputs, strict=True):
            values += part(*(values[k] for k in inputs))
        return pytree.tree_unflatten([values[k] for k in self._facts.outputs], self._facts.out_spec)


def _check_shape(tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise if a tensor has not the shape that the graph needs."""
    if len(shape) != tensor.dim() or any(
        n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True)
    ):
        text = ", ".join("any" if n is None else str(n) for n in shape)
        raise ArgumentError(
            f"a tensor of the batch has shape {tuple(tensor.shape)}, but torch.export fixed it to "
            f"({text}) by the sample; split again with a sample of this shape"
        )


def export_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], uncut: Collection[str] = ()
) -> ExportedModel:
    """Return a model as modules; first dimensions of tensors stay free, if the forward allows it.

    Each call of a module of ``uncut``, of which none is inside another, begins a module of the
    result, which has its name; that of a second call ends in ``@1``. If the graph has fewer than
    two of them, each operation with a parameter begins a module. Errors are those of torch.export.
    """
    free = {0: torch.export.Dim.AUTO}
    shapes = pytree.tree_map(
        lambda x: free if isinstance(x, Tensor) and x.dim() else None, (args, dict(kwargs))
    )
    names = signature(model.forward).bind(*args, **kwargs).arguments
    spec = dict(zip(names, (*shapes[0], *shapes[1].values()), strict=True))
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
    except Exception as error:
        with suppress(Exception):  # the first error tells more
            program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=True)
            return _as_modules(model, program.module(), uncut)
        raise error from None
    return _as_modules(model, program.module(), uncut)


class _Operations(NamedTuple):
    """Operations of a graph that become one module."""

    name: str
    nodes: list[fx.Node]


def _as_modules(model: nn.Module, module: Any, uncut: Collection[str]) -> ExportedModel:
    """Return an exported graph as modules."""
    graph, out_spec = module.graph, module.graph._codegen.pytree_info.out_spec
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._parameters[key] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        with suppress(AttributeError):  # the graph has no module of this name
            module.get_submodule(owner)._buffers[key] = buffer
    for node in graph.nodes:
        if node.op == "get_attr" and not isinstance(attrgetter(node.target)(module), _KEPT):
            raise ArgumentError("the graph keeps an object that the forward makes, a generator")
    # A module that is called has checks of shapes alone.
    nodes = [x for x in graph.nodes if x.op == "call_function"]
    parts = _by_modules(nodes, uncut)
    if len(parts) < 2:
        parts = _by_parameters(
            nodes, {x for x, _ in model.named_parameters(remove_duplicate=False)}
        )
    shapes = [_shape(x) for x in graph.nodes if x.op == "placeholder"]
    values = {x: k for k, x in enumerate(x for x in graph.nodes if x.op == "placeholder")}
    (output,) = (x for x in graph.nodes if x.op == "output")
    _move_writes(parts)
    repeated = _numbers(nodes)
    numbered = [_with_numbers(part.nodes, repeated) for part in parts]
    modules, inputs = [], []
    for index, own in enumerate(numbered):
        others = {output}.union(*(x for k, x in enumerate(numbered) if k != index))
        results = [x for x in parts[index].nodes if not others.isdisjoint(x.users)]
        results = [x for x in results if x not in repeated or output in x.users]
        arguments = list(dict.fromkeys(y for x in own for y in x.all_input_nodes if y in values))
        inputs.append([values[x] for x in arguments])
        modules.append(_Part(_part_module(module, own, arguments, results)))
        values |= {x: len(values) + k for k, x in enumerate(results)}
    outputs = [values[x] for x in output.args[0]]
    names = [x.name for x in parts]
    return ExportedModel(modules, _Facts(model, names, shapes, inputs, outputs, out_spec))


def _by_modules(nodes: Sequence[fx.Node], uncut: Collection[str]) -> list[_Operations]:
    """Return operations by the calls of modules; those before the first belong to it."""
    parts: list[_Operations] = []
    before: list[fx.Node] = []
    for node in nodes:
        name = _uncut_call(node, uncut)
        if name and (not parts or name != parts[-1].name):
            if any(x.name == name for x in parts):  # its operations are not in one place
                return []
            parts.append(_Operations(name, before))
            before = []
        (parts[-1].nodes if parts else before).append(node)
    return parts


def _uncut_call(node: fx.Node, uncut: Collection[str]) -> str:
    """Return the call of an uncut module that an operation is part of, such as ``block@1``."""
    numbers = ""
    for key, (name, _) in node.meta.get("nn_module_stack", {}).items():
        numbers += "".join(re.findall(r"@\d+$", key))  # of the calls around it, too
        if name in uncut:
            return f"{name}{numbers}"
    return ""


def called_module(call: str) -> str:
    """Return the name of a module from that of its call, such as ``block`` from ``block@1``."""
    return call.partition("@")[0]


def _by_parameters(nodes: Sequence[fx.Node], weights: Collection[str]) -> list[_Operations]:
    """Return operations by those with parameters; those before the first belong to it."""
    parts: list[list[fx.Node]] = [[]]
    for node in nodes:
        if any(x.op == "get_attr" and x.target in weights for x in node.all_input_nodes):
            parts.append([])
        parts[-1].append(node)
    parts = [parts[0] + parts[1], *parts[2:]] if len(parts) > 1 else parts
    return [_Operations(f"parts.{k}", part) for k, part in enumerate(parts)]


def _part_module(
    module: nn.Module, part: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    """Return a module that runs some operations, with the parameters that they take."""
    graph = fx.Graph()
    values = {x: graph.placeholder(x.name) for x in inputs}
    for node in part:
        for x in node.all_input_nodes:
            if x not in values:  # a parameter, a buffer or a constant
                values[x] = graph.get_attr(str(x.target))
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[x] for x in results))
    return fx.GraphModule(module, graph)


def _move_writes(parts: Sequence[_Operations]) -> None:
    """Move writes of new values to buffers, which end a graph, to the only part that reads them.

    A buffer that has been changed in place is not written again.
    """
    places = {x: k for k, part in enumerate(parts) for x in part.nodes}
    for node in list(parts[-1].nodes):
        inputs = node.all_input_nodes
        if str(node.target) != "aten.copy_.default" or node.users or len(inputs) != 2:
            continue
        buffer, value = inputs
        changed = value
        while changed in places and _writes(changed):
            changed = changed.all_input_nodes[0]
        readers = {places[x] for x in buffer.users if x is not node}
        if changed is buffer:
            parts[-1].nodes.remove(node)
        elif readers == {places.get(value)}:
            parts[-1].nodes.remove(node)
            parts[readers.pop()].nodes.append(node)


def _numbers(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the operations whose results are numbers that can be computed again.

    Shapes are. What is read from data is, if no operation writes to memory.
    """
    kinds = bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool
    numbers = {x for x in nodes if isinstance(x.meta.get("val"), kinds)}
    if any(map(_writes, nodes)):
        numbers = {
            x
            for x in numbers
            if numbers.issuperset(x.all_input_nodes) or str(x.target).startswith("aten.sym_")
        }
    return numbers


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _with_numbers(part: Sequence[fx.Node], numbers: set[fx.Node]) -> list[fx.Node]:
    """Return operations with those of others whose numbers they take, such as lengths.

    Tensors alone can be sent to other stages, so that each part computes the numbers that it needs.
    """
    result, needed = set(part), list(part)
    while needed:
        others = numbers.intersection(needed.pop().all_input_nodes) - result
        result |= others
        needed += others
    return [x for x in part[0].graph.nodes if x in result]


def _shape(node: fx.Node) -> tuple[int | None, ...] | None:
    """Return the shape of an argument's tensor; None for other values, and for free lengths."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(n if isinstance(n, int) else None for n in value.shape)
