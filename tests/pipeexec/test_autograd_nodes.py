"""Autograd graphs that are read from outputs, and the order of their backward."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.graph import AutogradGraph
from pipesim.scheduling.autograd_engine import engine_order

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


def gpipe(m: int = 4, n: int = 3, **options: Any) -> px.GPipe:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    return px.GPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, threads=False, **options)


def tasks(graph: AutogradGraph) -> list[str]:
    """Return the tasks of all nodes in the order in which the engine ran them."""
    ran = sorted(graph.nodes, key=lambda node: -1 if node.position is None else node.position)
    return [str(task) for node in ran for task in node.tasks]


def phony_edges(graph: AutogradGraph) -> Counter[tuple[str, str]]:
    return Counter(
        (graph.nodes[a].name, graph.nodes[b].name) for a, b, is_phony in graph.edges if is_phony
    )


def test_layers_of_torch() -> None:
    """Two layers, by hand; of the ready nodes, `AccumulateGrad` comes first, then the newest."""
    x = torch.ones(1, 2)
    output = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))(x)
    graph = px.autograd_graph(output)
    names = [node.name for node in graph.nodes]
    assert Counter(names) == {"Addmm": 2, "Relu": 1, "T": 2, "AccumulateGrad": 4}
    edges = Counter((names[a], names[b]) for a, b, _ in graph.edges)
    assert edges == {
        ("Addmm", "AccumulateGrad"): 2, ("Addmm", "T"): 2, ("T", "AccumulateGrad"): 2,
        ("Addmm", "Relu"): 1, ("Relu", "Addmm"): 1,
    }  # fmt: skip
    assert graph.order == ()
    assert {node.sequence for node in graph.nodes if node.name == "AccumulateGrad"} == {None}
    output.sum().backward()
    assert graph.order == (
        "Addmm", "AccumulateGrad", "T", "AccumulateGrad", "Relu", "Addmm", "AccumulateGrad", "T",
        "AccumulateGrad",
    )  # fmt: skip
    assert list(graph.threads) == [0]
    assert graph.n_choices == 4


@pytest.mark.parametrize("inputs_have_gradients", [False, True])
def test_gpipe_without_dependencies(inputs_have_gradients: bool) -> None:
    """The nodes of torchgpipe, in the order that the model of the engine predicts."""
    model = gpipe(dependencies=False)
    for _ in range(2):  # the first step of a process may have another order
        output = model(torch.ones(8, 2, requires_grad=inputs_have_gradients))
        graph = px.autograd_graph(output)
        output.sum().backward()
    counts = Counter(node.name for node in graph.nodes)
    assert counts == {
        "Gather": 1, "Layers": 12, "Wait": 16, "Copy": 8, "Fork": 9, "Recompute": 9, "Join": 9,
        "Scatter": 1, **({"AccumulateGrad": 1} if inputs_have_gradients else {}),
    }  # fmt: skip
    assert phony_edges(graph) == {("Join", "Recompute"): 9, ("Recompute", "Fork"): 9}
    assert " ".join(tasks(graph)) == " ".join(map(str, engine_order(3, 4, 3)))
    for node in graph.nodes:
        if node.tasks:
            (task,) = node.tasks
            assert task == (node.partition, node.operation, node.microbatch, -1, -1)
    assert graph.n_choices is not None
    assert graph.n_choices > 20


#: Edges of the graph of torchgpipe 0.0.7, three partitions, four micro-batches, ``except_last``,
#: without its fork and join between micro-batches: those of parameters are left out, and 9 of
#: Checkpoint and 6 of Recompute to its inputs.
TORCHGPIPE = """
3 Cat Join, 1 Cat Addmm, 9 Join Fork, 9 Join Recompute phony, 9 Recompute Fork phony,
3 Fork Checkpoint, 6 Fork Wait, 6 Wait Checkpoint, 2 Wait Addmm, 6 Checkpoint Wait, 2 Addmm Wait,
8 Wait Copy, 6 Copy Join, 2 Copy Wait
"""


def test_nodes_and_edges_are_those_of_torchgpipe() -> None:
    """Layers are its Checkpoint, or the layers' own nodes where nothing is recomputed."""
    names = {"Cat": "Gather", "Checkpoint": "Layers", "Addmm": "Layers"}
    wanted = Counter[tuple[str, ...]]()
    for edge in TORCHGPIPE.split(","):
        count, *ends = edge.split()
        wanted[tuple(names.get(end, end) for end in ends)] += int(count)
    graph = px.autograd_graph(gpipe(dependencies=False)(torch.ones(8, 2)))
    edges = Counter(
        (graph.nodes[a].name, graph.nodes[b].name, *["phony"] * is_phony)
        for a, b, is_phony in graph.edges
        if graph.nodes[b].name != "Scatter"
    )
    assert edges == wanted


def test_gpipe_with_dependencies() -> None:
    """A chain of clock cycles, from the last to the first."""
    output = gpipe()(torch.ones(8, 2))
    graph = px.autograd_graph(output)
    output.sum().backward()
    assert graph.order == ("Gather", *["Tasks"] * 6, "Scatter")
    assert [" ".join(map(str, node.tasks)) for node in graph.nodes][1:4] == [
        "2B3", "2R2 2B2 1B3", "2R1 2B1 1R2 1B2 0B3",
    ]  # fmt: skip
    assert graph.n_choices == 0


class Fork(Function):
    """Returns its input and a phony tensor."""

    @staticmethod
    def forward(ctx: Any, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.microbatch, ctx.partition = i, 0
        return x.detach(), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0]


class Join(Function):
    """Takes a phony tensor, too."""

    @staticmethod
    def forward(ctx: Any, i: int, x: Tensor, phony: Tensor) -> Tensor:
        ctx.microbatch, ctx.partition = i, 0
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0], None


def test_functions_of_the_user() -> None:
    """Their contexts have micro-batches; the edge from join to fork is told from the others."""
    x = [torch.ones(2, requires_grad=True) for _ in range(2)]
    first, phony = Fork.apply(0, x[0] * 2)  # type: ignore[no-untyped-call]
    second = Join.apply(1, x[1] * 3, phony)  # type: ignore[no-untyped-call]
    graph = px.autograd_graph({"outputs": [first, second], "other": 1})
    first.sum().add(second.sum()).backward()
    assert phony_edges(graph) == {("Join", "Fork"): 1}
    places = {node.name: (node.microbatch, node.partition) for node in graph.nodes}
    assert places["Fork"] == (0, 0)
    assert places["Join"] == (1, 0)
    assert graph.order.index("Join") < graph.order.index("Fork")


def test_a_stage_of_a_pipeline() -> None:
    """A hook reads the graph of each micro-batch while the pipeline runs."""
    stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
    graphs = []
    hook = stages[1].register_forward_hook(
        lambda module, args, output: graphs.append(px.autograd_graph(output))
    )
    graph = ps.lower(ps.schedule("1f1b", 2, 2), recompute="never")
    with px.Pipeline(stages, graph, ["cpu"] * 2, nn.functional.mse_loss) as pipeline:
        pipeline.step(torch.ones(4, 2), torch.ones(4, 1))
    hook.remove()
    assert len(graphs) >= 2  # and those of forwards that find out about the module
    for order in (graph.order for graph in graphs[-2:]):
        assert order[0] == "Addmm"
        assert Counter(order) >= Counter(T=1, AccumulateGrad=3)


def test_it_keeps_nothing_alive() -> None:
    """Neither before a backward nor after it: tensors, contexts, hooks of shared parameters."""
    layer = nn.Linear(2, 2)
    kept = layer.weight.expand_as(layer.weight)  # keeps the weight's `AccumulateGrad`
    assert kept.grad_fn is not None
    ((shared, _),) = kept.grad_fn.next_functions
    for runs in (False, True):
        saved = torch.ones(2)
        alive = weakref.ref(saved)
        output = Fork.apply(0, layer(saved[None]) * saved)[0]  # type: ignore[no-untyped-call]
        context = weakref.ref(output.grad_fn)
        graph = px.autograd_graph(output)
        if runs:
            output.sum().backward()
        del saved, output
        gc.collect()
        assert alive() is None
        assert context() is None
        assert len(graph) == 6
        kept.sum().backward(retain_graph=True)  # runs the shared node: not of this graph
        assert len(graph.order) == (6 if runs else 0)
    assert shared is not None


def test_one_backward_is_noted() -> None:
    """The first that begins at the output and does not fail; a second call notes the next one."""
    fails = True

    def check(gradient: Tensor) -> None:
        if fails:
            raise ValueError("no")

    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    middle.register_hook(check)
    output = middle.exp()
    graph = px.autograd_graph(output)
    with pytest.raises(ValueError, match="no"):
        output.sum().backward(retain_graph=True)
    assert graph.order == ()
    fails = False
    middle.sum().backward(retain_graph=True)  # of another output
    assert graph.order == ()
    torch.autograd.grad(output.sum(), middle, retain_graph=True)  # runs one of three nodes
    assert [node.position for node in graph.nodes] == [0, None, None]
    again = px.autograd_graph(output)
    output.sum().backward()
    assert graph.order == ("Exp",)
    assert again.order == ("Exp", "Mul", "AccumulateGrad")


def test_runs_within_the_backward_are_others() -> None:
    """A reentrant checkpoint runs the weight's node twice: once in a run of its own."""
    weight = torch.ones(2, requires_grad=True)
    inner = checkpoint(lambda x: x * weight, torch.ones(2, requires_grad=True), use_reentrant=True)
    graph = px.autograd_graph(output := weight.exp() + inner)
    output.sum().backward()
    assert sorted(node.position or 0 for node in graph.nodes) == list(range(len(graph)))


def test_outputs_without_a_graph() -> None:
    for output in (torch.ones(2), torch.ones(2, requires_grad=True), [], "text"):
        with pytest.raises(ArgumentError, match="output has no autograd graph"):
            px.autograd_graph(output)


def test_a_graph_of_too_many_nodes() -> None:
    output = torch.ones(2, requires_grad=True)
    for _ in range(9):
        output = output * 2
    with pytest.raises(
        ArgumentError, match="has 10 nodes, more than max_nodes=9; give max_nodes=10"
    ):
        px.autograd_graph(output, max_nodes=9)
    assert len(px.autograd_graph(output, max_nodes=10)) == 10
