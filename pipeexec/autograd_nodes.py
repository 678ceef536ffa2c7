"""`px.autograd_graph`: read the graph that autograd built, and the order in which it is run."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from pipeexec.nesting import tensors_in
from pipesim.errors import ArgumentError, check_count
from pipesim.graph.autograd_graph import AutogradEdge, AutogradGraph, AutogradNode
from pipesim.ops import Action
from pipesim.utils.checks import checked_names

#: Sequence number of nodes that torch does not number: the largest of 64 bits.
_UNNUMBERED = 2**64 - 1


@checked_names
def autograd_graph(output: Any, *, max_nodes: int = 1000) -> AutogradGraph:
    """Return the graph that autograd built for an output, and note the order of its backward.

    Call it between forward and backward. The graph holds numbers and names alone: neither tensors
    nor nodes of autograd live longer through it. Each node gets its position when the next
    ``backward()`` from the output, or from a loss of it, has returned. Later backwards are not
    noted; call it again before them.

    Micro-batch and partition are those that a node's context has: ``ctx.microbatch`` and
    ``ctx.partition``, integers. Nodes of `pipeexec.GPipe` have them, and so may nodes of your own
    ``torch.autograd.Function``. Edges are through phony tensors if they leave the second output of
    a function named Fork, or lead to the second input of one named Join, as in torchgpipe.

    - With dependencies, `pipeexec.GPipe` has a chain of nodes, one a clock cycle, which issue
      several tasks each. Without, it has torchgpipe's nodes. The nodes of its layers are in graphs
      of their own, one a micro-batch and partition, which tasks run. Edges of ``Scatter`` to
      parameters are left out: a gradient passes there only if `torch.autograd.grad` or a hook of
      a parameter takes it.
    - For a stage of a `pipeexec.Pipeline`, call it in a forward hook of the stage's module:
      ``module.register_forward_hook(lambda module, args, output: graphs.append(
      px.autograd_graph(output)))``. A forward that is recomputed has no graph: recompute never.

    Parameters
    ----------
    output
        A tensor, or tensors in tuples, lists and dicts, such as an output of `pipeexec.GPipe`, of
        any module, or a loss.
    max_nodes
        Most nodes of a graph.

    Returns
    -------
    pipesim.graph.AutogradGraph
        Nodes and edges; after the backward, also positions and threads of the nodes.

    Raises
    ------
    ArgumentError
        If no tensor of ``output`` has a graph, or the graph has more than ``max_nodes`` nodes.

    See Also
    --------
    pipesim.plot.autograd_graph : Draw the graph.
    pipesim.autograd_orders : Orders that the engine may choose, simulated.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> output = layers(torch.ones(1, 2))
    >>> graph = px.autograd_graph(output)
    >>> graph
    <AutogradGraph: 5 nodes, 4 edges; no backward has run it yet>
    >>> output.sum().backward()
    >>> graph.order
    ('Relu', 'Addmm', 'AccumulateGrad', 'T', 'AccumulateGrad')
    """
    check_count("max_nodes", max_nodes)
    roots = list(dict.fromkeys(x.grad_fn for x in tensors_in(output) if x.grad_fn is not None))
    if not roots:
        raise ArgumentError(
            "output has no autograd graph: no tensor of it was computed from one that requires a "
            "gradient, or it was detached or computed under torch.no_grad(); give the output of a "
            "forward, or the loss, before its backward"
        )
    functions = _sorted_functions(roots)
    if len(functions) > max_nodes:
        raise ArgumentError(
            f"the autograd graph has {len(functions)} nodes, more than max_nodes={max_nodes}; give "
            f"max_nodes={len(functions)}, or the output of fewer layers"
        )
    nodes = [_node(function) for function in functions]
    index = {function: k for k, function in enumerate(functions)}
    edges = {
        AutogradEdge(
            k,
            index[target],
            (nodes[index[target]].name, output_number) == ("Fork", 1)
            or (nodes[k].name, input_number) == ("Join", 1),
        ): None
        for k, function in enumerate(functions)
        for input_number, (target, output_number) in enumerate(_targets(function))
        if target is not None
    }
    graph = AutogradGraph(nodes, list(edges))
    _note_order(functions, roots, graph)
    return graph


def _sorted_functions(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph, each after those that run before it, else newest first."""
    waits = Counter[Node]()
    stack, visited = list(roots), set(roots)
    while stack:
        for target, _ in _targets(stack.pop()):
            if target is not None:
                waits[target] += 1
                if target not in visited:
                    visited.add(target)
                    stack.append(target)
    number = count()  # tells nodes of one sequence number apart
    ready = [(-root._sequence_nr(), next(number), root) for root in roots if not waits[root]]
    heapify(ready)
    functions = []
    while ready:
        function = heappop(ready)[-1]
        functions.append(function)
        for target, _ in _targets(function):
            if target is not None:
                waits[target] -= 1
                if not waits[target]:
                    heappush(ready, (-target._sequence_nr(), next(number), target))
    return functions


def _targets(function: Node) -> Sequence[tuple[Node | None, int]]:
    """Return the edges of a node, but those of `pipeexec.GPipe` to its parameters."""
    return function.next_functions[: getattr(function, "n_edges_read", None)]


def _node(function: Node) -> AutogradNode:
    """Return the record of a node that did not run."""
    microbatch, partition = (
        value if isinstance(value := getattr(function, name, None), int) else None
        for name in ("microbatch", "partition")
    )
    number, tasks = function._sequence_nr(), getattr(function, "partition_tasks", ())
    return AutogradNode(
        name=re.sub(r"^torch::autograd::|^_+|Backward\d*$", "", function.name()),
        microbatch=microbatch,
        partition=partition,
        tasks=tuple(Action(j, op, i) for op, i, j in tasks),
        sequence=None if number == _UNNUMBERED else number,
        device=str(function._input_metadata[0].device) if function._input_metadata else "cpu",
    )


def _note_order(functions: Sequence[Node], roots: Sequence[Node], graph: AutogradGraph) -> None:
    """Give the nodes of ``graph`` their positions at the end of the next backward from a root.

    A run of the engine that reaches none of the roots is another one: an ``AccumulateGrad`` may be
    shared with other graphs.
    """
    run = -1  # number of the engine's run
    order: list[tuple[int, int]] = []  # node and thread
    hooks: list[RemovableHandle] = []
    lock = threading.Lock()  # roots on several GPUs run in a thread each

    def end_backward() -> None:
        threads = {thread: k for k, thread in enumerate(dict.fromkeys(t for _, t in order))}
        places = {k: (p, threads[thread]) for p, (k, thread) in enumerate(order)}
        graph.nodes = [
            replace(node, position=places[k][0], thread=places[k][1]) if k in places else node
            for k, node in enumerate(graph.nodes)
        ]
        for hook in hooks:
            hook.remove()

    def hook_of(k: int, is_root: bool) -> Callable[[object], None]:
        def note(_: object) -> None:
            nonlocal run
            current = torch._C._current_graph_task_id()
            with lock:
                if is_root and current != run:  # the first root; a run before it has failed
                    run = current
                    order.clear()
                    Variable._execution_engine.queue_callback(end_backward)
                if current == run:
                    order.append((k, threading.get_ident()))

        return note

    hooks += [f.register_prehook(hook_of(k, f in roots)) for k, f in enumerate(functions)]
