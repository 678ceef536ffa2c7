"""Context parallelism: tokens, exchanges of keys and values, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs.rows import STAGE_ROWS
from pipesim.errors import ArgumentError, CostsWarning, NetworkError

GPU = ps.GPU(flops=1e12, bandwidth=1e11, memory=80e9)
LLAMA = ps.Transformer.preset("llama3_8b", n_layers=4, bytes_per_gradient=4)
NODE = ps.Network(nodes=ps.Nodes(8, 1e-6, 1e9, 5e-6, 1e8))
RUN: dict[str, Any] = {"microbatch_size": 1, "gpu": GPU, "flash_attention": True}
EXCHANGES = ("ring", "all_gather", "all_to_all")
VARYING = [name for name, row in STAGE_ROWS.items() if row.varies]


def costs(c: int, **options: Any) -> ps.Costs:
    """Return costs of two stages on groups of ``c`` GPUs."""
    t = options.get("tensor_parallel", 1)
    settings: dict[str, Any] = {"network": NODE.grouped(c * t), "context_parallel": c, **RUN}
    return LLAMA.costs([2, 2], **{**settings, **options})


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_gpu_is_no_context_parallelism(exchange: Any) -> None:
    """All fields are those of a call without the arguments."""
    plain = LLAMA.costs([2, 2], **RUN, network=NODE)
    assert costs(1, context_exchange=exchange, context_balance=False) == plain


def test_tokens_are_divided_and_parameters_are_not() -> None:
    """Activations and messages of an all-gather and of one GPU; parameters are copies."""
    one, four = costs(1), costs(4, context_exchange="all_gather")
    for name in ("activation_bytes", "output_bytes", "weight_grad_bytes"):
        whole, part = np.array(getattr(one, name)), np.array(getattr(four, name))
        assert part == pytest.approx(whole / 4), name
    assert four.parameter_bytes == one.parameter_bytes
    assert four.gradient_bytes == one.gradient_bytes
    assert four.optimizer_bytes == tuple(np.array(one.optimizer_bytes) / 4)
    apart = costs(4, context_shards_optimizer=False)
    assert apart.optimizer_bytes == one.optimizer_bytes
    assert four.work is not None
    assert (four.work.gpus_per_device, four.work.tokens) == (4, 8192)


def test_flops_of_a_balanced_mask_and_of_an_unbalanced_one() -> None:
    """Each of four GPUs has a quarter of the scores; the last of four parts has 7 quarters."""

    def flops(**options: Any) -> float:
        table = LLAMA.kernels(
            GPU, microbatch_size=1, flash_attention=True, context_exchange="all_gather", **options
        )
        rows = (table["part"] == "layer") & (table["op"] == "F") & (table["kernel"] == "attention")
        return float(table[rows]["flops"].sum())

    whole = flops()
    assert whole == 2 * 8192 * 8192 * 4096
    assert flops(context_parallel=4) == whole / 4
    assert flops(context_parallel=4, context_balance=False) == whole / 4 * 7 / 4


def kv_bytes(c: int) -> float:
    """Return the bytes of keys and values of a GPU's tokens."""
    return 2 * 2 * 1024 * 8192 / c


def compute(c: int, exchange: Any, op: str) -> float:
    """Return the seconds of the kernels of two layers and the embedding."""
    table = LLAMA.kernels(
        GPU, microbatch_size=1, flash_attention=True, context_parallel=c, context_exchange=exchange
    )
    part = table[table["op"].isin([*op])].groupby("part")["seconds"].sum()
    return float(2 * part["layer"] + part["embedding"])


def test_seconds_of_an_all_gather() -> None:
    """Keys and values of four parts, and in the backward also the sum of their gradients."""
    own = costs(4, context_exchange="all_gather")
    gather = 3 * kv_bytes(4) / 1e9 + 3 * 1e-6
    assert own.forward[0] - compute(4, "all_gather", "F") == pytest.approx(2 * gather)
    assert own.backward[0] - compute(4, "all_gather", "IW") == pytest.approx(4 * gather)


def test_seconds_of_an_all_to_all() -> None:
    """Three quarters of queries, keys, values, and of the output leave a GPU."""
    own = costs(4, context_exchange="all_to_all")
    sent = 2 * 8192 / 4 * (4096 + 2 * 1024 + 4096) * 3 / 4
    both = sent / 1e9 + 2 * 1e-6
    assert own.forward[0] - compute(4, "all_to_all", "F") == pytest.approx(2 * both)
    assert own.backward[0] - compute(4, "all_to_all", "IW") == pytest.approx(2 * both)


def test_a_ring_hides_its_messages_behind_attention() -> None:
    """No seconds while they are short; then the excess of three of four steps."""
    fast = replace(NODE, nodes=ps.Nodes(8, 0.0, 1e12, 0.0, 1e12))
    own = costs(4, network=fast.grouped(4))
    assert own.forward[0] == pytest.approx(compute(4, "ring", "F"))
    slow = replace(NODE, nodes=ps.Nodes(8, 0.0, 1e7, 0.0, 1e7))
    slowed = costs(4, network=slow.grouped(4))
    core = 2 * 8192 * 2048 * 4096 / 1e12
    exposed = 3 * (kv_bytes(4) / 1e7 - core / 4)
    assert slowed.forward[0] - compute(4, "ring", "F") == pytest.approx(2 * exposed)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_more_gpus_take_no_longer(exchange: Any) -> None:
    """With links that cost nothing, seconds and bytes shrink."""
    free = ps.Network(nodes=ps.Nodes(8))
    rows = [
        costs(c, context_exchange=exchange, network=free.grouped(c)) for c in (1, 2, 4, 8)
    ]  # fmt: skip
    for name in ("forward", "backward", "activation_bytes"):
        values = [getattr(row, name)[0] for row in rows]
        assert values == sorted(values, reverse=True), name


def test_buffers_of_each_exchange() -> None:
    """Beyond a quarter of one GPU's: two parts of the keys; all of them; or another output."""
    base = LLAMA.shard(flash_attention=True).layer_activation_bytes / 4
    kept = {
        exchange: LLAMA.shard(
            flash_attention=True, context_parallel=4, context_exchange=exchange
        ).layer_activation_bytes
        for exchange in EXCHANGES
    }
    output = 2 * 4096 * 8192 / 4
    assert kept == {"ring": base, "all_gather": base, "all_to_all": base + output}


def test_gradients_are_summed_over_all_copies() -> None:
    """One replica of four GPUs: the sum is part of STEP. Two: a ring over 8 GPUs in all."""
    own = costs(4)
    single = ps.lower(ps.schedule("1f1b", 2, 2))
    n = np.array(own.parameter_bytes)[0] / 2
    halves = 3 / 4 * (4 + 2) * n / 1e9 + 2 * 3 * 1e-6
    steps = own.of(single).duration[(single.op == ps.Op.STEP) & (single.stage == 0)]
    assert steps == pytest.approx(own.optimizer_step[0] + halves)
    assert own.reduced_share == (1 / 4, 1 / 4)
    pair = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=2)
    rows = (pair.op == ps.Op.REDUCE_GRAD) & (pair.stage == 0)
    expected = own.network.all_reduce(n, [0, 2], "fastest")
    assert own.of(pair).duration[rows] == pytest.approx(expected)


def test_tensor_and_context_parallel_groups() -> None:
    """The GPUs of a context-parallel group are every second GPU of a device."""
    own = costs(2, tensor_parallel=2, sequence_parallel=True, context_exchange="all_gather")
    assert own.work is not None
    assert own.work.gpus_per_device == 4
    alone = costs(2, context_exchange="all_gather")
    assert own.parameter_bytes[0] < alone.parameter_bytes[0]
    assert own.output_bytes[0] == alone.output_bytes[0] / 2


#: For each micro-batch, ``context_parallel`` and tokens of a sequence.
SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1024, 8192]))


@given(
    st.lists(SIZES, min_size=4, max_size=4).map(lambda sizes: [(4, 8192), *sizes[1:]]),
    st.sampled_from([1, 2]),
    st.sampled_from(EXCHANGES),
)
def test_micro_batches_cost_what_runs_of_their_sizes_cost(
    sizes: list[tuple[int, int]], n_replicas: int, exchange: Any
) -> None:
    """Seconds and bytes of each, in both engines; all else is that of the largest."""
    sizes = sizes[:1] * (4 * n_replicas - len(sizes)) + sizes
    context, lengths = zip(*sizes, strict=True)
    own = costs(4, context_parallel=context, lengths=lengths, context_exchange=exchange)
    for k, (c, length) in enumerate(sizes):
        run = costs(c, lengths=[length], context_exchange=exchange)
        for name in VARYING:
            assert getattr(own.microbatch(k), name) == getattr(run, name), name
    whole = costs(4, context_exchange=exchange)
    others = {name: getattr(whole, name) for name in (*VARYING, "workload")}
    assert replace(own.averaged(), **others) == whole
    assert own.work is not None
    assert own.work.tokens == sum(4 // c * length for c, length in sizes) / len(sizes)
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=n_replicas)
    timeline, other = (ps.simulate(graph, own, engine=e) for e in ("compiled", "simpy"))
    assert timeline.start.tolist() == other.start.tolist()
    assert (timeline.why.idle_by_cause().sum(axis=1) == timeline.idle).all()


def test_a_hand_drawn_step_of_two_sizes() -> None:
    """One sequence of 8192 on four GPUs, then four of 2048, one a GPU, of which one is idle.

    Linear maps of all micro-batches take equal seconds, and scores of the second are 1/4 of those
    of the first: (L/4)^2 on one GPU are a quarter of L^2/4.
    """
    rate: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 1e12}
    idle = [[2048], [1024, 1024], [512] * 4]
    own = LLAMA.costs([2, 2], lengths=[8192, idle], context_parallel=[4, 1], **rate)
    long, short = own.forward[0]
    core = 2 * LLAMA.core_flops() / 4 / 1e12
    assert long - short == pytest.approx(core * 3 / 4)
    assert own.work is not None
    assert own.work.tokens == (8192 + 3 * 2048) / 2
    first, *others = (LLAMA.costs([2, 2], lengths=[x], **rate).work for x in (8192, *idle))
    assert own.work.flops == pytest.approx(sum(x.flops for x in (first, *others) if x) / 2)
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), own)
    both = sum(np.array(own.forward[1]) + own.backward[1])
    assert timeline.makespan == pytest.approx(long + both + own.backward[0][0]), "B1 before B0"
    sliced = LLAMA.costs([2, 2], context_parallel=[4, 1], slices=2, **rate)
    alone = LLAMA.costs([2, 2], context_parallel=4, slices=2, **rate)
    assert sliced.forward[0][:2] == alone.forward[0]


def test_groups_of_several_sizes_compute_at_the_same_time() -> None:
    """Seconds and bytes are those of the group with the most; parameters those of all GPUs."""
    parts = [[8192], [1024, 1024], [512]]
    own = costs(4, context_parallel=[[2, 1, 1]], lengths=[parts])
    runs = [costs(c, lengths=[x]) for c, x in zip((2, 1, 1), parts, strict=True)]
    for name in ("forward", "backward", "activation_bytes", "output_bytes"):
        assert getattr(own, name) == tuple(
            max(x) for x in zip(*(getattr(run, name) for run in runs), strict=True)
        )
    assert own.reduce_copies == costs(4).reduce_copies
    assert own.work is not None
    assert (own.work.tokens, own.work.gpus_per_device) == (8192 + 2048 + 512, 4)


def test_settings_build_the_same_costs_again() -> None:
    """`rebuilt` keeps context parallelism, and may change it."""
    own = costs(4, context_exchange="all_to_all")
    assert ps.Costs.from_dict(own.to_dict()).rebuilt() == own
    assert own.rebuilt(context_exchange="ring") == costs(4)
    several = costs(4, context_parallel=[1, 4, [2, 1, 1]], lengths=[[[512, 512]], 4096, 2048])
    assert ps.Costs.from_dict(several.to_dict()).rebuilt() == several


def test_networks_must_group_all_gpus_of_a_device() -> None:
    """A device has tensor_parallel x context_parallel GPUs."""
    with pytest.raises(NetworkError, match=r"tensor_parallel=1 x context_parallel=4, but .*1 GPU"):
        LLAMA.costs([2, 2], **RUN, context_parallel=4, network=NODE)
    with pytest.warns(CostsWarning, match="between the 4 GPUs of a device take no time"):
        LLAMA.costs([2, 2], **RUN, context_parallel=4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context_parallel": 3}, "context_parallel=3 splits a sequence into 3 parts"),
        ({"context_parallel": 8192}, "16384 parts, two a GPU .*give context_balance=False"),
        ({"context_parallel": 0}, "context_parallel must be at least 1"),
        ({"context_parallel": 16, "context_exchange": "all_to_all"}, "do not divide n_kv_heads=8"),
        ({"context_exchange": "tree"}, "unknown context_exchange 'tree'"),
        ({"context_balance": 1}, "context_balance must be"),
        ({"context_parallel": []}, "context_parallel is empty; give a number, or a list"),
        ({"context_parallel": [4, 3]}, r"context_parallel\[1\]=3 does not divide the GPUs of a de"),
        ({"context_parallel": [4, 0]}, r"context_parallel\[1\] must be at least 1, got 0"),
        (
            {"context_parallel": [[2, 0], 4]},
            r"context_parallel\[0\]\[1\] must be at least 1, got 0",
        ),
        ({"context_parallel": [2, 1], "lengths": [512]}, "context_parallel has 2 values, but len"),
        (
            {"context_parallel": [2, 1], "lengths": [[[8], [8]], 8]},
            r"lengths\[0\] has documents of 2 groups of GPUs, but the device has groups of 2 \(con",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], text: str) -> None:
    """The error names argument, value and what is allowed."""
    with pytest.raises(ArgumentError, match=text):
        LLAMA.costs([2, 2], **{**RUN, **changes})
