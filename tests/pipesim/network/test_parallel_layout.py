"""`Layout`: groups of Megatron-Core by hand, devices of pipesim, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, NetworkError, UnknownNameError


def test_groups_of_the_example_in_megatron() -> None:
    """16 GPUs, 2 tensor- and 4 pipeline-parallel: docstring of ``initialize_model_parallel``."""
    layout = ps.Layout(tensor_parallel=2, pipeline_parallel=4, data_parallel=2)
    pairs = [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert layout.groups("dp") == tuple(pairs)
    assert layout.groups("tp") == tuple((n, n + 1) for n in range(0, 16, 2))
    rows = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert layout.groups("pp") == tuple(rows)


def test_groups_with_context_and_experts() -> None:
    """2 x 2 x 2 GPUs of a stage; experts are on groups of every second GPU."""
    layout = ps.Layout(
        tensor_parallel=2, context_parallel=2, expert_parallel=2, data_parallel=2,
        pipeline_parallel=2,
    )  # fmt: skip
    assert layout.groups("cp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert layout.groups("dp")[:2] == ((0, 4), (1, 5))
    assert layout.groups("dp-cp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("ep")[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("edp")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("tp-cp")[0] == (0, 1, 2, 3)
    assert layout.expert_data_parallel == 2


def test_experts_that_are_not_shared() -> None:
    """With ``expert_tensor_parallel=1``, groups of experts are consecutive GPUs."""
    layout = ps.Layout(
        tensor_parallel=2, data_parallel=4, expert_parallel=4, expert_tensor_parallel=1
    )
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [layout.experts(gpu, 8) for gpu in (0, 1, 4)] == [range(2), range(2, 4), range(2)]


def test_order_with_pipelines_before_replicas() -> None:
    """Megatron-LM's ``--use-tp-pp-dp-mapping``."""
    layout = ps.Layout(
        tensor_parallel=2, pipeline_parallel=2, data_parallel=2, order="tp-cp-ep-pp-dp"
    )
    assert layout.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.lowering == {"n_replicas": 2, "layout": "replica_major"}
    assert [layout.device(*x) for x in itertools.product(range(2), range(2))] == [0, 2, 1, 3]


@pytest.mark.parametrize(("order", "c"), [("tp-cp-ep-dp-pp", 2), ("tp-cp-ep-pp-dp", 1)])
def test_devices_are_those_of_the_lowered_graph(order: str, c: int) -> None:
    """A row of the table names the device that holds the stage of the replica."""
    layout = ps.Layout(
        tensor_parallel=2, context_parallel=c, data_parallel=3, pipeline_parallel=4, order=order
    )
    graph = ps.lower(ps.schedule("1f1b", 4, 4), **layout.lowering)
    for row in layout.table.itertuples():
        assert graph.homes[row.dp, row.pp] == row.device == layout.device(row.pp, row.dp)


@pytest.mark.parametrize("kind", ["tp", "cp", "dp", "pp", "ep", "edp", "etp", "tp-cp-dp-pp"])
def test_groups_divide_all_gpus(kind: str) -> None:
    """Each GPU is in one group of each kind, and groups have its size."""
    layout = ps.Layout(
        tensor_parallel=2, context_parallel=3, data_parallel=4, pipeline_parallel=2,
        expert_parallel=6,
    )  # fmt: skip
    groups = layout.groups(kind)
    assert sorted(itertools.chain(*groups)) == list(range(48))
    assert len({len(group) for group in groups}) == 1


def test_nodes() -> None:
    """GPUs fill nodes one by one."""
    layout = ps.Layout(data_parallel=12)
    assert layout.n_nodes == 2
    assert layout.gpus_of_node(1) == (8, 9, 10, 11)
    assert layout.table["node"].tolist() == [0] * 8 + [1] * 4
    with pytest.raises(ArgumentError, match="node must be 0 to 1, got 2"):
        layout.gpus_of_node(2)


def test_network_and_costs() -> None:
    """Network, sharding and lowering fit each other."""
    layout = ps.Layout(tensor_parallel=2, context_parallel=2, data_parallel=4, expert_parallel=4)
    network = layout.network("dgx_h100", 0.7)
    assert network == ps.Network.preset("dgx_h100", 0.7, gpus_per_device=4)
    assert layout.network(ps.Network.preset("dgx_h100", 0.7)) == network
    model = ps.Transformer.preset("mixtral_8x22b", n_layers=2, sequence_length=4096)
    costs = model.costs([2], microbatch_size=1, gpu="h100_sxm", sequence_parallel=True,
                        network=network, **layout.sharding)  # fmt: skip
    graph = ps.lower(ps.schedule("1f1b", 1, 2), **layout.lowering)
    assert ps.simulate(graph, costs).makespan > 0
    assert costs.expert_replicas == 2
    assert "16 GPUs on 2 nodes" in layout._repr_html_()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"data_parallel": 4, "expert_parallel": 3}, "expert_parallel=3 does not divide the 4"),
        ({"data_parallel": 4, "expert_parallel": 8}, "expert_parallel=8 does not divide the 4"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 4, "expert_tensor_parallel": 3}, "does not divide tensor_parallel=4"),
        ({"order": "tp-dp"}, "order must name tp, cp, ep, dp, pp once each"),
        ({"data_parallel": 16, "available_gpus": 8}, "needs 16 GPUs .*but the cluster has 8"),
        (
            {"data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2,
             "order": "tp-cp-ep-pp-dp"},
            "give an order that ends with pp",
        ),
    ],
)  # fmt: skip
def test_bad_layouts(sizes: dict[str, Any], text: str) -> None:
    """The error names argument, value and what is allowed."""
    with pytest.raises(ArgumentError, match=text):
        ps.Layout(**sizes)


def test_bad_questions() -> None:
    """Groups that are not there, GPUs that are no device, and machines without such groups."""
    layout = ps.Layout(tensor_parallel=2, data_parallel=2)
    with pytest.raises(UnknownNameError, match="unknown kind of group 'tpp'"):
        layout.groups("tpp")
    with pytest.raises(ArgumentError, match="'dp-ep'"):
        layout.groups("dp-ep")
    with pytest.raises(ArgumentError, match="does not divide n_experts=3"):
        ps.Layout(data_parallel=2, expert_parallel=2).experts(0, 3)
    with pytest.raises(ArgumentError, match="replica must be 0 to 1, got 2"):
        layout.device(0, 2)
    apart = ps.Layout(tensor_parallel=2, data_parallel=2, order="dp-tp-cp-ep-pp")
    with pytest.raises(ArgumentError, match="no neighbours"):
        apart.lowering  # noqa: B018
    with pytest.raises(NetworkError, match="must divide the 8 GPUs of a node"):
        ps.Layout(tensor_parallel=3).network("dgx_h100")
