"""`pipesim.Cluster`: nodes, GPUs, memory and network, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, UnknownNameError


def test_machine_has_its_gpu_memory_and_network() -> None:
    """The machine of a name has the data sheet of its GPU, at 70 % of nominal bandwidths."""
    cluster = ps.Cluster("dgx_h100", n_gpus=64)
    assert (cluster.n_gpus, cluster.gpus_per_node) == (64, 8)
    assert cluster.gpu == ps.GPU.preset("h100_sxm")
    assert cluster.memory == 76 * 2**30
    assert cluster.network(8) == ps.Network.preset("dgx_h100", efficiency=0.7, gpus_per_device=8)


def test_memory_and_share() -> None:
    """The memory that was given counts, times the usable share."""
    assert ps.Cluster("dgx_a100", 8, memory=40e9, usable_memory=0.9).memory == 36e9


def test_own_gpu_and_nodes() -> None:
    """A cluster without a machine has the GPU and the network that were given."""
    gpu = ps.GPU(flops=1e14, bandwidth=1e12, memory=16e9)
    nodes = ps.Nodes(4, port_bandwidth=50e9, nic_bandwidth=10e9)
    cluster = ps.Cluster(n_gpus=8, gpu=gpu, network=ps.Network(nodes=nodes))
    assert cluster.network(2).nodes == nodes.grouped(2)
    assert cluster.gpus == (gpu,)


def test_calibrated_file_scales_the_machine() -> None:
    """Factors of a GPU's file replace the default efficiency of a machine."""
    fitted = {"gpu": {"flops": 5e14, "bandwidth": 2e12, "memory": 80e9}, "network_efficiency": 0.5}
    network = ps.Cluster("dgx_h100", 8, gpu=fitted).network()
    assert network.nodes is not None
    assert network.nodes.port_bandwidth == 225e9


def test_mixed_nodes_have_the_slowest_network() -> None:
    """Each kind of node keeps its GPU; the network has the slower rates."""
    cluster = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)])
    assert [gpu.name for gpu in cluster.gpus] == ["h100_sxm", "a100_80gb"]
    assert cluster.network() == ps.Cluster("dgx_a100", 16).network()
    assert cluster.gpu_numbers(8) == [[0], [1]]
    with pytest.raises(ArgumentError, match="GPUs of the cluster differ"):
        _ = cluster.gpu


@pytest.mark.parametrize(
    "cluster",
    [
        ps.Cluster("dgx_h100", 64, usable_memory=0.9),
        ps.Cluster([("dgx_h100", 8), ("dgx_a100", 16)]),
        ps.Cluster(n_gpus=4, gpu="h100_sxm", network=ps.Network(1e-6, 1e11)),
    ],
)
def test_round_trip(cluster: ps.Cluster) -> None:
    """JSON keeps all of a cluster; text and HTML say what it is."""
    assert ps.Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert f"{cluster.groups[0].n_gpus} h100_sxm" in repr(cluster)
    assert "h100_sxm" in cluster._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_gpus": 8}, "needs a GPU"),
        ({"machine": "dgx_h100"}, "n_gpus is missing"),
        ({"machine": "dgx_h100", "n_gpus": 0}, "a cluster needs a GPU"),
        ({"machine": "dgx_h100", "n_gpus": 60}, "do not fill nodes of 8 GPUs"),
        ({"machine": [("dgx_h100", 8), ("dgx_a100", 4)]}, "do not fill nodes"),
        ({"machine": []}, "has no GPU"),
        ({"n_gpus": 8, "gpu": "h100_sxm"}, "network is missing"),
        ({"machine": "dgx_h100", "n_gpus": 8, "gpu": {"flops": 1.0, "bandwidth": 1.0}}, "memory"),
        ({"machine": "dgx_h100", "n_gpus": 8, "usable_memory": 1.5}, "at most 1"),
    ],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    """Errors say what is missing or wrong."""
    with pytest.raises(ArgumentError, match=text):
        ps.Cluster(**arguments)


def test_part_of_a_node() -> None:
    """Any number of its GPUs: a rack of 72 has one NVLink domain, of which jobs use 64."""
    rack = ps.Cluster("gb200_nvl72", 64)
    assert (rack.gpus_per_node, rack.n_gpus, rack.gpu.name) == (64, 64, "gb200")
    inside, outside = rack.network(), ps.Cluster("dgx_b200", 64).network()
    assert inside.all_reduce(1e9, range(0, 64, 8)) < outside.all_reduce(1e9, range(0, 64, 8)) / 4
    assert ps.Cluster("dgx_h100", 6).gpus_per_node == 6


def test_unknown_machine() -> None:
    """An unknown machine names the nearest."""
    with pytest.raises(UnknownNameError, match="dgx_h100"):
        ps.Cluster("dgx_h10", 8)
