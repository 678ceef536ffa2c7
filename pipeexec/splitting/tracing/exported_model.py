"""`ExportedModel`: a model as a sequence of modules, from the graph of torch.export.

It is for models whose forward calls no modules that can be cut, but functions with parameters. Each
operation with a parameter begins a module, which has all operations up to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipesim.errors import ArgumentError

__all__ = ["ExportedModel", "export_model"]


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
    outputs
        Numbers of the output's leaves.
    out_spec
        Nesting of the output.
    """

    def __init__(
        self,
        source: nn.Module,
        shapes: Sequence[tuple[int | None, ...] | None],
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[int],
        out_spec: pytree.TreeSpec,
    ) -> None:
        self.source, self.shapes, self.inputs = source, shapes, inputs
        self.outputs, self.out_spec = outputs, out_spec

    def __deepcopy__(self, _: dict[int, Any]) -> _Facts:
        return self


class ExportedModel(nn.Module):
    """A model as modules ``parts.0``, ``parts.1``, ..., with the model's parameters.

    Parameters
    ----------
    parts
        The modules.
    facts
        The model, and the values that parts take.
    """

    def __init__(self, parts: Sequence[_Part], facts: _Facts) -> None:
        super().__init__()
        self.parts, self._facts = nn.ModuleList(parts), facts

    @property
    def source(self) -> nn.Module:
        """The model."""
        return self._facts.source

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules, in the order of their calls."""
        return tuple(f"parts.{k}" for k in range(len(self.parts)))

    def original_name(self, name: str) -> str:
        """Return the name in the model of a parameter of this one."""
        return name.split(".", 3)[3]  # parts.0.graph.name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        values = pytree.tree_leaves((args, kwargs))
        for value, shape in zip(values, self._facts.shapes, strict=True):
            if shape is not None:
                _check_shape(value, shape)
        for part, inputs in zip(self.parts, self._facts.inputs, strict=True):
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


def export_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedModel:
    """Return a model as modules; first dimensions of tensors stay free, if the forward allows it.

    Raises
    ------
    Exception
        Whatever torch.export raises.
    """
    free = {0: torch.export.Dim.AUTO}
    shapes = pytree.tree_map(
        lambda x: free if isinstance(x, Tensor) and x.dim() else None, (args, dict(kwargs))
    )
    names = signature(model.forward).bind(*args, **kwargs).arguments
    spec = dict(zip(names, (*shapes[0], *shapes[1].values()), strict=True))
    program = torch.export.export(model, args, kwargs, dynamic_shapes=spec)
    return _as_modules(model, program.module())


def _as_modules(model: nn.Module, module: Any) -> ExportedModel:
    """Return an exported graph as modules."""
    graph, out_spec = module.graph, module.graph._codegen.pytree_info.out_spec
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._parameters[key] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        with suppress(AttributeError):  # the graph has no module of this name
            module.get_submodule(owner)._buffers[key] = buffer
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parts: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function":  # a module that is called has checks of shapes alone
            if any(x.op == "get_attr" and x.target in weights for x in node.all_input_nodes):
                parts.append([])
            parts[-1].append(node)
    parts = [parts[0] + parts[1], *parts[2:]] if len(parts) > 1 else parts
    shapes = [_shape(x) for x in graph.nodes if x.op == "placeholder"]
    numbers = {x: k for k, x in enumerate(x for x in graph.nodes if x.op == "placeholder")}
    modules, inputs = [], []
    for part in parts:
        own = set(part)
        results = [x for x in part if any(user not in own for user in x.users)]
        arguments = list(dict.fromkeys(y for x in part for y in x.all_input_nodes if y in numbers))
        inputs.append([numbers[x] for x in arguments])
        modules.append(_Part(_part_module(module, part, arguments, results)))
        numbers |= {x: len(numbers) + k for k, x in enumerate(results)}
    (output,) = (x for x in graph.nodes if x.op == "output")
    outputs = [numbers[x] for x in output.args[0]]
    return ExportedModel(modules, _Facts(model, shapes, inputs, outputs, out_spec))


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


def _shape(node: fx.Node) -> tuple[int | None, ...] | None:
    """Return the shape of an argument's tensor; None for other values, and for free lengths."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(n if isinstance(n, int) else None for n in value.shape)
