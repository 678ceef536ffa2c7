"""`Transformer.costs(gpu=...)`: seconds by hand from kernels, collectives, launches and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    CostsError,
    CostsWarning,
    NetworkError,
    UnknownNameError,
)

GPU = ps.GPU(flops=1e12, bandwidth=1e11, overhead=1e-6, peak_flops=2e12, memory=80e9)
GPT = ps.Transformer(hidden_size=64, n_layers=8, n_heads=8, sequence_length=32, vocabulary_size=512)
LLAMA = ps.Transformer.preset("llama3_8b", n_layers=8)
#: FLOPs, or bytes, so small beside the others that they do not count.
FREE = 1e30
NODE = ps.Network.preset("dgx_h100", gpus_per_device=4)


def seconds(
    model: ps.Transformer = GPT, gpu: ps.GPU = GPU, layers: Any = (3, 2, 3), **options: Any
) -> ps.Costs:
    """Return costs of a micro-batch of one sequence."""
    return model.costs(layers, microbatch_size=1, gpu=gpu, **options)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_stages_are_sums_of_kernels(recompute: Any) -> None:
    """Layers, and embedding or head; B has the kernels of I and W, and those recomputed."""
    costs = seconds(recompute=recompute)
    table = GPT.kernels(GPU, microbatch_size=1, recompute=recompute)
    part = table.groupby(["part", "op"])["seconds"].sum()
    again = part.get(("layer", "R"), 0.0)
    ops = {"forward": "F", "input_grad": "IR", "weight_grad": "W", "backward": "IWR"}
    for name, letters in ops.items():
        layer, first, last = (
            sum(part.get((where, op), 0.0) for op in letters)
            for where in ("layer", "embedding", "head")
        )
        expected = [3 * layer + first, 2 * layer, 3 * layer + last]
        assert getattr(costs, name) == pytest.approx(expected), name
    assert costs.recompute == costs.forward
    assert (again > 0) == (recompute != "none")


def test_launches_are_a_floor_of_each_operation() -> None:
    """The host launches ahead of the GPU: the longer of both sums, not the sum of longer ones."""
    table = GPT.kernels(GPU, microbatch_size=1)
    layer = table[table["part"] == "layer"].groupby("op")["n_kernels"].sum()
    slow = ps.GPU(flops=1e12, bandwidth=1e11, launch=1e-3)
    costs = seconds(gpu=slow)
    assert costs.forward[1] == pytest.approx(2 * layer["F"] * 1e-3)  # type: ignore[index]
    assert costs.weight_grad[1] == pytest.approx(2 * layer["W"] * 1e-3)  # type: ignore[index]
    assert costs.backward[1] == pytest.approx(2 * (layer["I"] + layer["W"]) * 1e-3)  # type: ignore[index]
    fast = ps.GPU(flops=1e12, bandwidth=1e11, launch=1e-12)
    assert seconds(gpu=fast).forward == seconds(gpu=ps.GPU(flops=1e12, bandwidth=1e11)).forward


def test_collectives_of_tensor_parallelism() -> None:
    """Two all-reduces a layer and direction; behind the embedding, before the head; in the loss."""
    rates = ps.GPU(flops=FREE, bandwidth=FREE)
    one = NODE.group_all_reduce(2 * 32 * 64, 4)
    loss = 3 * NODE.group_all_reduce(4 * 32, 4)
    options: Any = {"gpu": rates, "tensor_parallel": 4, "network": NODE}
    costs = seconds(**options)
    assert costs.forward == pytest.approx([7 * one, 4 * one, 6 * one + loss])
    assert costs.input_grad == pytest.approx([6 * one, 4 * one, 7 * one])
    assert costs.weight_grad == pytest.approx([0, 0, 0], abs=1e-12)
    full = seconds(**options, recompute="full")
    assert full.backward == pytest.approx([12 * one, 8 * one, 13 * one])
    assert seconds(**options, recompute="selective").backward == pytest.approx(costs.backward)


def test_collectives_of_sequence_parallelism() -> None:
    """Each all-reduce is a reduce-scatter and an all-gather; W gathers its inputs again."""
    rates = ps.GPU(flops=FREE, bandwidth=FREE)
    half = NODE.group_all_gather(2 * 32 * 64, 4)
    loss = 3 * NODE.group_all_reduce(4 * 32, 4)
    costs = seconds(gpu=rates, tensor_parallel=4, sequence_parallel=True, network=NODE)
    assert costs.forward == pytest.approx([13 * half, 8 * half, 13 * half + loss])
    assert costs.input_grad == pytest.approx([13 * half, 8 * half, 13 * half])
    assert costs.weight_grad == pytest.approx([6 * half, 4 * half, 7 * half])
    assert costs.backward == pytest.approx([19 * half, 12 * half, 20 * half])


def test_optimizer_step_by_bytes() -> None:
    """38 bytes a parameter with gradients in 32 bits: 12 of them, 24 of the state, 2 written."""
    model = ps.Transformer.preset("llama3_8b", n_layers=8, bytes_per_gradient=4)
    costs = seconds(model)
    parameters = [n / 2 for n in costs.parameter_bytes]  # type: ignore[union-attr]
    assert costs.optimizer_step == pytest.approx([38 * n / 1e11 for n in parameters])
    assert seconds(model, optimizer_step=5.0).optimizer_step == 5
    assert model.costs(1, microbatch_size=1, flops_per_second=1e12).optimizer_step == 0


def steps_of(costs: ps.Costs, schedule: ps.Schedule, **options: Any) -> list[float]:
    """Return the seconds of STEP of the first and of the last stage."""
    graph = ps.lower(schedule, **options)
    duration, steps = costs.of(graph).duration, graph.op == ps.Op.STEP
    ends = (0, graph.n_stages - 1)
    return [float(duration[steps & (graph.stage == stage)][0]) for stage in ends]


def test_gradients_of_a_tied_matrix_are_summed() -> None:
    """By first and last stage of each replica, before STEP; not if one device has both."""
    nodes = ps.Nodes(4, port_latency=1e-3, port_bandwidth=1e6, nic_latency=2e-3, nic_bandwidth=1e5)
    network, nbytes = ps.Network(nodes=nodes), 2 * 64 * 512
    inside, between = network.all_reduce(nbytes, [0, 3]), network.all_reduce(nbytes, [0, 4])
    assert between > 5 * inside
    tied = seconds(layers=[2] * 4, network=network)
    assert tied.tied_bytes == nbytes
    for schedule, options, added in (
        (ps.schedule("1f1b", 4, 8), {}, inside),
        (ps.schedule("1f1b", 4, 8), {"n_replicas": 2}, inside),
        (ps.schedule("1f1b", 4, 8), {"n_replicas": 2, "layout": "stage_major"}, between),
        (ps.schedule("interleaved_1f1b", 2, 4), {}, inside),
        (ps.schedule("zbv", 2, 4), {}, 0),
    ):
        plain = steps_of(replace(tied, tied_bytes=0), schedule, **options)
        assert steps_of(tied, schedule, **options) == pytest.approx([t + added for t in plain])
    # Replicas share the optimizer's work, and not this sum.
    sharded = {"n_replicas": 2, "shard_optimizer": True}
    linear = ps.schedule("1f1b", 4, 8)
    halves = [t / 2 + inside for t in steps_of(replace(tied, tied_bytes=0), linear)]
    assert steps_of(tied, linear, **sharded) == pytest.approx(halves)
    assert seconds(replace(GPT, tied_embeddings=False), network=network).tied_bytes == 0
    assert seconds(layers=1, network=network).tied_bytes == 0
    assert seconds(network=network, optimizer_step=1.0).tied_bytes == 0
    assert ps.Costs.from_dict(tied.to_dict()) == tied
    with pytest.raises(ps.errors.CostsError, match="tied_bytes must be finite bytes >= 0"):
        replace(tied, tied_bytes=-1)


def test_messages() -> None:
    """Whole outputs; parts that the receivers gather; parts of sequence parallelism."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e11, synchronization=1e-3)
    options: Any = {"gpu": gpu, "tensor_parallel": 4, "network": NODE}
    whole = 2 * 32 * 64
    costs = seconds(**options)
    assert (costs.output_bytes[0], costs.output_seconds[0]) == (whole, 1e-3)  # type: ignore[index]
    parts = seconds(**options, scatter_gather=True)
    gather = NODE.group_all_gather(whole, 4)
    assert parts.output_bytes[0] == whole / 4  # type: ignore[index]
    assert parts.output_seconds[0] == pytest.approx(1e-3 + gather)  # type: ignore[index]
    assert parts.activation_bytes == costs.activation_bytes
    split = seconds(**options, scatter_gather=True, sequence_parallel=True)
    assert (split.output_bytes[0], split.output_seconds[0]) == (whole / 4, 1e-3)  # type: ignore[index]
    alone = seconds(gpu=gpu, scatter_gather=True)
    assert (alone.output_bytes[0], alone.output_seconds[0]) == (whole, 1e-3)  # type: ignore[index]


def test_workload_gives_the_same_costs_again() -> None:
    """Tokens, FLOPs and GPUs; and settings for `Costs.transformer`, as JSON keeps them."""
    costs = seconds(LLAMA, tensor_parallel=4, network=NODE, recompute="full", launch=1e-6)
    load = costs.workload
    assert load is not None
    assert (load.tokens, load.gpus_per_device) == (8192, 4)
    assert (load.peak_flops, load.memory) == (2e12, 80e9)
    assert load.flops == LLAMA.step_flops(1)
    again = ps.Costs.from_dict(costs.to_dict())
    assert again == costs
    assert again.workload is not None
    assert ps.Costs.transformer(**again.workload.settings, network=NODE) == costs  # type: ignore[arg-type]
    placed = seconds(
        layers=[2] * 4, network=ps.Network.preset("dgx_h100"), placement=ps.schedule("zbv", 2, 4)
    )
    settings = placed.workload.settings  # type: ignore[union-attr]
    assert ps.Costs.transformer(**settings, network=placed.network) == placed  # type: ignore[arg-type]
    rate = LLAMA.costs([4, 4], microbatch_size=2, flops_per_second=1e14)
    assert rate.workload is not None
    assert ps.Costs.transformer(**rate.workload.settings) == rate  # type: ignore[arg-type]
    assert rate.workload.peak_flops is None


def test_forms_of_a_gpu() -> None:
    """A preset's name, and a table of fields as in a file, stand for the GPU."""
    by_name = LLAMA.costs(4, microbatch_size=1, gpu="h100_sxm", partition="even")
    preset = ps.GPU.preset("h100_sxm")
    assert by_name == LLAMA.costs(4, microbatch_size=1, gpu=preset, partition="even")
    fields = {"flops": 1e12, "bandwidth": 1e11, "overhead": 1e-6}
    assert seconds(gpu=fields).forward == seconds().forward  # type: ignore[arg-type]
    assert by_name.all_reduce == "fastest"


def test_a_partition_balances_seconds_on_the_gpu() -> None:
    """Layers of few FLOPs take their launches; the head's share is smaller than by FLOPs."""
    slow_host = ps.GPU(flops=1e15, bandwidth=1e13, launch=1e-4)
    model = replace(GPT, vocabulary_size=5120)
    costs = model.costs(4, microbatch_size=1, gpu=slow_host, partition="balanced")
    assert costs.workload is not None
    assert costs.workload.settings is not None
    assert costs.workload.settings["layers_per_stage"] == [2, 2, 2, 2]
    by_flops = model.costs(4, microbatch_size=1, flops_per_second=1e12, partition="balanced")
    assert by_flops.workload is not None
    assert by_flops.workload.settings is not None
    assert by_flops.workload.settings["layers_per_stage"][-1] < 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ArgumentError, r"give one of gpu=..., such as .*, or flops_per_second=...$"),
        (
            {"gpu": GPU, "flops_per_second": 1e12},
            ArgumentError,
            r"give gpu=.* or flops_per_second=..., not both",
        ),
        ({"gpu": "h100"}, UnknownNameError, "unknown GPU 'h100'.*h100_sxm"),
        ({"gpu": {"flop": 1}}, UnknownNameError, "unknown field of a GPU 'flop'.*flops"),
        ({"gpu": {"flops": 1e12}}, ArgumentError, "gpu lacks bandwidth"),
        ({"gpu": {"flops": 0, "bandwidth": 1}}, ArgumentError, "flops must be finite FLOP/s > 0"),
        ({"gpu": 5}, ArgumentTypeError, "gpu must be a pipesim.GPU"),
        ({"gpu": GPU, "network": 5}, ArgumentTypeError, "network must be a pipesim.*Network"),
        (
            {"gpu": GPU, "network": ps.Network.preset("dgx_h100"), "tensor_parallel": 4},
            NetworkError,
            "tensor_parallel=4, but a device of the network has 1 GPU; give gpus_per_device=4",
        ),
        (
            {"flops_per_second": 1e12, "network": NODE, "tensor_parallel": 8},
            NetworkError,
            "tensor_parallel=8, but .* has 4 GPUs; give gpus_per_device=8",
        ),
        ({"gpu": GPU, "optimizer_step": [1, 2, 3]}, CostsError, "optimizer_step has 3 .* 2 stages"),
        ({"flops_per_second": 1e12, "launch": [1e-6]}, CostsError, "launch has 1 .* 2 stages"),
        ({"gpu": GPU, "network": NODE}, NetworkError, "tensor_parallel=1, but .* has 4 GPUs"),
        ({"gpu": GPU, "tensor_parallel": 3}, ArgumentError, "does not divide n_heads=8"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GPT.costs([4, 4], microbatch_size=1, **options)


def test_free_collectives_are_announced() -> None:
    with pytest.warns(CostsWarning, match="collectives between the 4 GPUs of a device take no"):
        costs = seconds(tensor_parallel=4)
    assert max(costs.forward) > 0  # type: ignore[arg-type]


def test_a_rate_on_single_gpus_of_a_network() -> None:
    """Without kernels, a network of single GPUs stands for one of any groups."""
    network = ps.Network.preset("dgx_h100")
    for nodes in (network, network.grouped(8)):
        costs = GPT.costs(4, microbatch_size=1, flops_per_second=1e12, tensor_parallel=8,
                          partition="even", network=nodes)  # fmt: skip
        assert costs.network == nodes


#: A model whose head takes longer than its layers.
LARGE_HEAD = replace(GPT, vocabulary_size=20_000)


@pytest.mark.parametrize(
    "call",
    [
        lambda: LARGE_HEAD.costs(4, microbatch_size=1, gpu=GPU, tensor_parallel=4),
        lambda: ps.Costs.transformer(
            4, **asdict(LARGE_HEAD), microbatch_size=1, gpu=GPU, tensor_parallel=4
        ),
        lambda: LARGE_HEAD.shard().stages(4, 1e12),
    ],
)
def test_warnings_name_the_line_of_the_user(call: Callable[[], object]) -> None:
    """Of free collectives, and of a split that the head makes uneven."""
    with pytest.warns(CostsWarning) as caught:
        call()
    assert "partition=" in str(caught[-1].message)
    assert {warning.filename for warning in caught} == {__file__}
