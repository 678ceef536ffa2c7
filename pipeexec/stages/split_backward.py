"""`SplitBackward`: a backend of `torch.compile` whose backwards are split as I and W.

`torch.compile` gives a backend the graph of a module's forward, and AOTAutograd makes the graph of
its backward, whose outputs are gradients of inputs and of parameters. Here this graph is cut in
two, and each part is compiled by itself:

- I: operations that gradients of inputs need. Of a graph whose inputs need none, such as that of
  stage 0, those that the gradients of several parameters share.
- W: the others, from saved activations and from values of I.

GraphPP of torchtitan cuts the same graph, with torch's default partitioner
(https://github.com/meta-pytorch/autoparallel). Within the backward of I, the first part runs, and
the tensors that the second reads are kept for W. In every other backward both parts run, one after
the other.

Names of torch that are not public stand here, but for those of autograd, and for those that find
the backend of a compiled module (`pipeexec.data_parallel.compiled_modules`).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from pipeexec.stages.deferred_weight_grads import collecting, is_deferrable
from pipesim.errors import ArgumentError, SplitBackwardWarning
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked

#: A compiled graph: takes a list of tensors, which it may empty, and returns gradients.
Compiled = Callable[[list[Tensor]], Sequence[Any]]
#: Compiles a graph for example inputs.
Compile = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


@checked
@dataclass(frozen=True)
class SplitBackward:
    """Backend of `torch.compile` for stages of schedules with I and W.

    In ``torch.compile(stage, backend=px.SplitBackward())``, or ``stage.compile(backend=...)``, I of
    the stage computes the gradients of its inputs alone, and W those of its parameters, each with
    code of its own. With other backends I computes all. B runs both codes.

    A stage may have several compiled graphs. One whose backward cannot be cut is compiled as a
    whole, and a `pipesim.errors.SplitBackwardWarning` gives the reason when it is compiled:
    dynamic shapes, or a backward that draws random numbers or changes tensors in place. If a
    parameter is no leaf of autograd, or has hooks, I computes all gradients of its graph.

    Parameters
    ----------
    compiler
        Compiler of the forward and of both parts of the backward. ``"aot_eager"`` runs their
        operations one by one. It compiles in a tenth of the time, and is for tests.

    Raises
    ------
    ArgumentError
        `torch.compile` was given ``mode`` or ``options``. Set ``torch._inductor.config`` instead.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> torch.compile(torch.nn.Linear(2, 2), backend=px.SplitBackward()).training
    True
    """

    compiler: Literal["inductor", "aot_eager"] = "inductor"

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Compile a graph; `torch.compile` calls this."""
        if settings:
            raise ArgumentError(
                f"px.SplitBackward takes no {' and no '.join(settings)} of torch.compile: leave "
                "it out, and set torch._inductor.config instead"
            )
        parameters = frozenset(i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter))
        return _COMPILERS[self.compiler](graph, inputs, parameters)


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any], parameters: frozenset[int]) -> Any:
    from torch._functorch import config  # loads slowly
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import BoxedBool

    def compile_graph(part: fx.GraphModule, values: Sequence[Any], **options: Any) -> Any:
        compile_whole = functools.partial(compile_fx_inner, **options)
        if not options.get("is_backward"):
            return compile_whole(part, values)
        # A CUDA graph would write the values that W reads anew in the next I.
        options |= {"static_input_idxs": (), "cudagraphs": BoxedBool(False)}
        compile_part = functools.partial(compile_fx_inner, **options)
        return _compile_backward(part, values, parameters, compile_part, compile_whole)

    # Torch's cache has backwards that are not split. A donated buffer is one that the backward may
    # overwrite, but W reads what I has read.
    with config.patch(enable_autograd_cache=False, donated_buffer=False):
        return compile_fx(graph, inputs, inner_compile=compile_graph)


def _aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], parameters: frozenset[int]) -> Any:
    from torch._dynamo.backends.common import aot_autograd  # loads slowly
    from torch._dynamo.convert_frame import compile_lock
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_part(part: fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(part.forward)

    def compile_backward(part: fx.GraphModule, values: Sequence[Any]) -> Compiled:
        with compile_lock:  # threads compile in their first backwards, and share fake tensors
            return _compile_backward(part, values, parameters, compile_part, compile_part)

    return aot_autograd(
        fw_compiler=compile_part,
        bw_compiler=compile_backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)


_COMPILERS = {"inductor": _inductor, "aot_eager": _aot_eager}


def _compile_backward(
    graph: fx.GraphModule,
    values: Sequence[Any],
    parameters: frozenset[int],
    compile_part: Compile,
    compile_whole: Compile,
) -> Compiled:
    """Compile the graph of a backward in two parts, or as a whole if it has no W or cannot be cut.

    ``parameters`` are the numbers of those inputs of the forward that are parameters.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    end = graph.graph.output_node()
    outputs: Sequence[Any] = end.args[0]  # type: ignore[assignment]
    is_weight = [
        isinstance(x, fx.Node)
        and isinstance(description, GradAOTOutput)
        and isinstance(description.grad_of, PlainAOTInput)
        and description.grad_of.idx in parameters
        for x, description in zip(outputs, end.meta["desc"], strict=True)
    ]
    if not any(is_weight):
        return compile_whole(graph, values)
    if reason := _obstacle(graph):
        warn_caller(
            f"the backward of a compiled graph of {sum(is_weight)} parameters cannot be cut, as "
            f"{reason}: I computes the gradients of these parameters, too",
            SplitBackwardWarning,
        )
        return compile_whole(graph, values)
    _split_convolutions(graph.graph)
    # Saved values may have other strides than in the trace that made the graph.
    mode = detect_fake_mode(values)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*values)

    of_inputs = [x for x, w in zip(outputs, is_weight, strict=True) if x is not None and not w]
    cut = _cut(graph, of_inputs, [x for x, w in zip(outputs, is_weight, strict=True) if w])
    if not cut.weights:
        return compile_whole(graph, values)
    weights = [i for i, x in enumerate(outputs) if is_weight[i] and x in cut.weights]
    first = [i for i, x in enumerate(outputs) if x is not None and i not in weights]
    of_first = [*(outputs[i] for i in first), *cut.carried]
    saved = graph.graph.find_nodes(op="placeholder")
    needed = _ancestors(of_first, ())
    saved_for_i = [x for x in saved if x in needed]
    input_part = _part(graph, saved_for_i, of_first)
    for_w = [*cut.saved, *cut.carried]
    weight_part = _part(graph, for_w, [outputs[i] for i in weights], owns_outputs=True)
    run_input_part = compile_part(input_part, [x.meta["val"] for x in saved_for_i])
    run_weight_part = compile_part(weight_part, [x.meta["val"] for x in for_w])
    positions = {x: i for i, x in enumerate(saved)}
    arguments_of_i = [positions[x] for x in saved_for_i]
    arguments_of_w = [positions[x] for x in cut.saved]

    def run(arguments: list[Any]) -> list[Any]:
        """Run the part of I, and let W run the other, or run it here outside of I."""
        kept = [arguments[i] for i in arguments_of_w]
        inputs = [arguments[i] for i in arguments_of_i]
        arguments.clear()
        results = run_input_part(inputs)
        kept += results[len(first) :]
        gradients: list[Any] = [None] * len(outputs)
        for i, gradient in zip(first, results, strict=False):
            gradients[i] = gradient
        trained = _leaves(weights, len(outputs))
        store = collecting()
        if store is None or trained is None:
            for i, gradient in zip(weights, run_weight_part(kept), strict=True):
                gradients[i] = gradient
        else:
            store.defer_graph(run_weight_part, kept, trained)
        return gradients

    run._boxed_call = True  # type: ignore[attr-defined] # torch passes one list of arguments
    return run


def _obstacle(graph: fx.GraphModule) -> str | None:
    """Return the reason for which the graph of a backward cannot be cut; None if it can."""
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "its shapes are dynamic (torch.compile(..., dynamic=False) makes them fixed)"
        if node.op == "call_function" and node.is_impure():
            return f"it calls {node.target}, which draws random numbers or has other effects"
    return None


def _split_convolutions(graph: fx.Graph) -> None:
    """Compute the gradients of a convolution's input and weight by operations of their own."""
    target = torch.ops.aten.convolution_backward.default
    for node in graph.find_nodes(op="call_function", target=target):
        *arguments, (of_input, of_weight, of_bias) = node.args
        if not of_input or not (of_weight or of_bias):
            continue
        node.args = (*arguments, [True, False, False])
        with graph.inserting_after(node):
            other = graph.call_function(target, (*arguments, [False, of_weight, of_bias]))
        for result in tuple(node.users):
            if result.args[1] > 0:
                result.replace_input_with(node, other)


def _ancestors(nodes: Iterable[fx.Node], stop: Container[fx.Node]) -> set[fx.Node]:
    """Return nodes and everything from which they are computed, up to nodes of ``stop``."""
    ancestors: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in ancestors:
            ancestors.add(node)
            if node not in stop:
                queue += node.all_input_nodes
    return ancestors


class _Cut(NamedTuple):
    """Which gradients W computes, and what it reads: values of the forward, and values of I."""

    weights: set[fx.Node]
    saved: list[fx.Node]
    carried: list[fx.Node]

    @property
    def reads(self) -> set[fx.Node]:
        return {*self.saved, *self.carried}


def _cut(
    graph: fx.GraphModule, of_inputs: Sequence[fx.Node], of_weights: Sequence[fx.Node]
) -> _Cut:
    """Choose the operations of W from gradients of inputs and of parameters.

    Gradients that are sums, such as those of norms and biases, are W's if their terms are kept for
    products anyway. Otherwise I adds them up, and need not keep their terms.
    """
    in_first = _ancestors(of_inputs, ())
    if not of_inputs:
        n_uses = Counter(x for node in dict.fromkeys(of_weights) for x in _ancestors([node], ()))
        in_first = {x for x, n in n_uses.items() if n > 1}
    results = graph.graph.find_nodes(op="call_function", target=operator.getitem)
    in_first |= {x for x in results if x.all_input_nodes[0] in in_first}
    sums = {
        node
        for node in of_weights
        if all(
            _is_elementwise(x.target) or x.target is torch.ops.aten.sum.dim_IntList
            for x in _ancestors([node], in_first) - in_first
            if x.op == "call_function"
        )
    }
    cut = _values_for_w(graph, in_first, {*of_weights} - sums)
    kept = cut.reads
    late = {x for x in sums if _values_for_w(graph, in_first, {x}).reads <= kept}
    in_first |= _ancestors(sums - late, ())
    return _values_for_w(graph, in_first, cut.weights | late)


def _values_for_w(graph: fx.GraphModule, in_first: set[fx.Node], weights: set[fx.Node]) -> _Cut:
    """Return the values that W reads for these gradients, if I computes the nodes ``in_first``.

    W repeats elementwise operations and views of I on saved values, if it then holds no more bytes.
    """
    in_second = _ancestors(weights, in_first)
    saved = graph.graph.find_nodes(op="placeholder")
    kept = {x for x in saved if x in in_second}
    carried = []
    # The saved values from which elementwise operations compute a node; None if others do, too.
    sources: dict[fx.Node, frozenset[fx.Node] | None] = {x: frozenset([x]) for x in saved}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node not in in_first:
            continue
        repeated: frozenset[fx.Node] | None = frozenset()
        for x in node.all_input_nodes if _is_elementwise(node.target) else [node]:
            own = sources.get(x)
            repeated = None if repeated is None or own is None else repeated | own
        sources[node] = repeated
        if node not in in_second:
            continue
        if repeated is not None and _nbytes(repeated - kept) <= _nbytes([node]):
            kept |= repeated
        else:
            carried.append(node)
    return _Cut(weights, [x for x in saved if x in kept], carried)


def _is_elementwise(target: Any) -> bool:
    """Return whether a function is elementwise or a view."""
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or torch.Tag.pointwise in target.tags
    )


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    return sum(x.meta["val"].nbytes for x in nodes)


def _part(
    graph: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    owns_outputs: bool = False,
) -> fx.GraphModule:
    """Return the graph of outputs from inputs.

    With ``owns_outputs``, none is a view of an input or of another output.
    """
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = _ancestors(outputs, set(inputs))
    for node in inputs:
        # By its name, inductor's cache tells this graph from others, which may overwrite inputs.
        copies[node] = part.placeholder(f"split_{node.name}")
        copies[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    results, bases = [copies[x] for x in outputs], set(part.find_nodes(op="placeholder"))
    for i, base in enumerate(results if owns_outputs else ()):
        while getattr(base.target, "is_view", False):
            base = base.all_input_nodes[0]
        if base in bases:
            meta = dict(results[i].meta)
            results[i] = part.call_function(torch.ops.aten.clone.default, (results[i],))
            results[i].meta = meta
        bases.add(base)
    end = part.output(tuple(results))
    end.meta["user_visible_output_idxs"] = list(range(len(results)))  # inductor keeps their strides
    return fx.GraphModule(graph, part)


def _leaves(numbers: Sequence[int], n_inputs: int) -> list[nn.Parameter] | None:
    """Return the parameters that are these inputs of the node of autograd whose backward runs.

    None if one of them is no leaf, or its gradient cannot be deferred.
    """
    edges = torch._C._current_autograd_node().next_functions
    if len(edges) != n_inputs:  # of numbers among the inputs, autograd knows nothing
        return None
    leaves: list[Any] = [getattr(edges[i][0], "variable", None) for i in numbers]
    return leaves if all(map(is_deferrable, leaves)) else None
