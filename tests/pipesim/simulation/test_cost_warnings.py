"""Warnings of `simulate`: costs built for another network, and a recompute that counts twice."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

import pipesim as ps
from pipesim.errors import CostsError, CostsWarning, NetworkError
from pipesim.simulation import Normal

NODE = ps.Network.preset("dgx_h100", gpus_per_device=4)
GPT = ps.Transformer(
    hidden_size=1024, n_layers=4, n_heads=16, sequence_length=1024, vocabulary_size=50304
)
COSTS = GPT.costs([2, 2], microbatch_size=1, gpu="h100_sxm", tensor_parallel=4, network=NODE)
GRAPH = ps.lower(ps.schedule("1f1b", 2, 4))
SLOW = NODE.scaled(bandwidth=0.1)


def test_a_network_is_changed_after_the_costs_were_built() -> None:
    """Files keep the network of the collectives; costs that are built again have the new one."""
    stale = ps.Costs.from_dict(replace(COSTS, network=SLOW).to_dict())
    with pytest.warns(CostsWarning, match=r"bandwidth of 3.15e\+10 bytes/s \(built with 3.15e\+1"):
        makespan = ps.simulate(GRAPH, stale).makespan
    rebuilt = stale.rebuilt()
    assert rebuilt == COSTS.rebuilt(network=SLOW)
    assert rebuilt == GPT.costs(
        [2, 2], microbatch_size=1, gpu="h100_sxm", tensor_parallel=4, network=SLOW
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostsWarning)
        assert ps.simulate(GRAPH, rebuilt).makespan > 1.2 * makespan


def test_the_rates_that_the_seconds_of_stages_follow_from() -> None:
    """NICs count for groups over nodes alone; without tensor parallelism, none does."""
    nic = replace(NODE, nodes=replace(NODE.nodes, nic_bandwidth=1e9, nic_latency=1.0))
    wide = ps.Network.preset("dgx_h100", gpus_per_device=16)
    over_nodes = COSTS.rebuilt(tensor_parallel=16, network=wide)
    one = COSTS.rebuilt(tensor_parallel=1, network=ps.Network.preset("dgx_h100"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostsWarning)
        ps.simulate(GRAPH, replace(COSTS, network=nic))
        ps.simulate(GRAPH, replace(one, network=one.network.scaled(bandwidth=0.1)))
        ps.simulate(GRAPH, replace(COSTS, network=ps.Network()))
    far = replace(wide, nodes=replace(wide.nodes, nic_latency=1.0))
    with pytest.warns(CostsWarning, match="latency between nodes of 1 s"):
        ps.simulate(GRAPH, replace(over_nodes, network=far))
    noise = ps.Noise(task=Normal(0.01), seed=0)
    with pytest.warns(CostsWarning, match="between the 4 GPUs of a device"):
        ps.simulate_many(GRAPH, replace(COSTS, network=SLOW), noise, 2, progress=False)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_graph_recomputes_what_backwards_recompute_too(mode: str) -> None:
    costs = COSTS.rebuilt(recompute=mode)
    twice = ps.lower(ps.schedule("1f1b", 2, 4), recompute="always")
    with pytest.warns(CostsWarning, match=f"recompute='{mode}'.*recomputed twice"):
        ps.simulate(twice, costs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostsWarning)
        ps.simulate(GRAPH, costs)
        ps.simulate(twice, costs.rebuilt(recompute="none"))


def test_costs_that_cannot_be_built_again() -> None:
    """And a rate in place of a GPU."""
    with pytest.raises(CostsError, match="costs are of no transformer"):
        ps.Costs(1, 2).rebuilt()
    with pytest.raises(NetworkError, match="give gpus_per_device=8"):
        COSTS.rebuilt(tensor_parallel=8)
    with pytest.warns(CostsWarning, match="the network has no nodes"):
        free = COSTS.rebuilt(network=ps.Network())
    with pytest.warns(CostsWarning, match="built without nodes, where they are free"):
        ps.simulate(GRAPH, replace(free, network=NODE))
    by_rate = COSTS.rebuilt(flops_per_second=1e14)
    assert by_rate.rebuilt(gpu="h100_sxm") == COSTS
