"""Slices of equal seconds, against the quadratic of dynamic chunking; prices of decode steps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError
from pipesim.models.layer_kernels import KernelSizes
from pipesim.models.shard_sizes import Matrix

MODEL = ps.Transformer.preset("llama3_8b", sequence_length=65536)
RATE: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 4e14, "flash_attention": True}
GPU: dict[str, Any] = {"microbatch_size": 1, "gpu": "h100_sxm", "flash_attention": True}
STAGES = [8] * 4


def quadratic() -> tuple[float, float]:
    """Return a and b of the FLOPs of a prefix of l tokens, a l^2 + b l: those of the last stage."""
    one = MODEL.shard(microbatch_size=1, flash_attention=True)
    tokens = MODEL.sequence_length
    b = (8 * MODEL.linear_flops() + MODEL.head_flops()) / tokens
    return 8 * MODEL.core_flops() * one.causal_share / tokens**2, b


def test_slices_are_those_of_equal_flops() -> None:
    """Slice k ends where the quadratic has k / n of the sequence's FLOPs (Seq1F1B, section 3.3)."""
    (a, b), n, length = quadratic(), 4, MODEL.sequence_length
    whole = a * length**2 + b * length
    ends = [(math.sqrt(b * b + 4 * a * k * whole / n) - b) / (2 * a) for k in range(1, n + 1)]
    for backward in (False, True):
        slices = MODEL.balanced_slices(STAGES, n, multiple=16, backward=backward, **RATE)
        assert sum(slices) == length
        assert list(accumulate(slices)) == pytest.approx(ends, rel=2e-3)


def test_first_gives_the_dynamic_chunks_of_sglang() -> None:
    """Each next chunk x solves a x^2 + (2 a l + b) x = f(first) - f(0), in whole pages."""
    (a, b), page, first = quadratic(), 64, 8192
    target, expected, start = a * first**2 + b * first, list[int](), 0
    while start < MODEL.sequence_length:
        slope = 2 * a * start + b
        chunk = (math.sqrt(slope**2 + 4 * a * target) - slope) / (2 * a)
        chunk = int((chunk + 1e-6) // page) * page
        expected.append(min(chunk, MODEL.sequence_length - start))
        start += expected[-1]
    assert MODEL.balanced_slices(STAGES, first=first, multiple=page, **RATE) == expected


def test_slices_of_a_layout_with_losses_before_the_last_stage() -> None:
    """Multi-token prediction on the slowest stage counts there."""
    model = ps.Transformer.preset("llama3_8b", n_layers=8, mtp_layers=1, sequence_length=65536)
    layout = "Et*2|t*2|t*2|t*2m|L"
    slices = model.balanced_slices(layout, 4, **RATE)
    seconds = np.max(model.costs(layout, slices=slices, **RATE).forward, axis=0)
    assert seconds.max() < 1.01 * seconds.min()


@pytest.mark.slow
def test_slices_take_equal_seconds_on_a_gpu() -> None:
    """The slowest slice takes little longer than the mean, and the pipeline ends earlier."""
    own: dict[str, Any] = {**GPU, "tensor_parallel": 2, "sequence_parallel": True}
    own["network"] = ps.Network.preset("dgx_h100", gpus_per_device=2)
    slices = MODEL.balanced_slices(STAGES, 8, multiple=64, **own)
    assert not np.mod(slices[:-1], 64).any()
    makespans = {}
    for name, cut in {"equal": 8, "balanced": slices}.items():
        costs = MODEL.costs(STAGES, slices=cut, **own)
        graph = ps.lower(ps.schedule("seq1f1b", 4, 8, n_slices=8), forward_only=True)
        makespans[name] = ps.simulate(graph, costs).makespan
        slowest = np.array(costs.forward).max(axis=0)
        assert (slowest.max() < 1.01 * slowest.mean()) == (name == "balanced")
    assert makespans["balanced"] < makespans["equal"]


def test_as_many_slices_as_asked_for() -> None:
    """Also where the host's launches take longer than kernels, so that all sizes are as fast."""
    tiny = ps.Transformer(
        hidden_size=64, n_layers=2, n_heads=2, sequence_length=100, vocabulary_size=64
    )
    gpu = ps.GPU.preset("h100_sxm", launch=1e-3)
    slices = tiny.balanced_slices(2, 5, multiple=16, microbatch_size=1, gpu=gpu)
    assert sum(slices) == 100
    assert len(slices) == 5
    assert not np.mod(slices[:-1], 16).any()


def test_mistakes_say_what_to_give() -> None:
    for arguments, text in (
        ({}, "give one"),
        ({"n_slices": 2, "first": 64}, "give one"),
        ({"n_slices": 9, "multiple": 8192}, "give fewer slices"),
        ({"first": 100, "multiple": 64}, "multiple=64 does not divide first=100"),
        ({"n_slices": 2, "multiple": 3, "context_parallel": 2}, "in multiples of 3 tokens"),
        ({"n_slices": 2, "backward": True, "last_logits": True}, "leave one of the two out"),
    ):
        with pytest.raises(ArgumentError, match=text):
            MODEL.balanced_slices(STAGES, **{**RATE, **arguments})


def test_a_server_computes_the_logits_of_last_tokens_alone() -> None:
    """By FLOPs, all but those of one token a slice are spared; a training refuses such costs."""
    slices, served = [49152, 16384], {**RATE, "microbatch_size": 2, "slices": [49152, 16384]}
    head = MODEL.head_flops(2) / RATE["flops_per_second"] / MODEL.sequence_length  # of a token
    whole, last = (MODEL.costs(STAGES, last_logits=x, **served) for x in (False, True))
    spared = np.array(whole.forward) - np.array(last.forward)
    expected = np.zeros((4, 2))
    expected[3] = head * (np.array(slices) - 1)
    assert spared == pytest.approx(expected, abs=1e-12)
    assert ps.Costs.from_dict(last.to_dict()).rebuilt() == last
    packed = {**RATE, "lengths": [[512, 1024, 512]]}  # three prompts
    whole, own = (MODEL.costs(STAGES, last_logits=x, **packed).forward[3] for x in (False, True))
    assert whole - own == pytest.approx(head / 2 * (2048 - 3))
    graph = ps.lower(ps.schedule("seq1f1b", 4, 2, n_slices=2))
    with pytest.raises(CostsError, match="graph trains; give forward_only=True"):
        ps.simulate(graph, last)
    with pytest.raises(ArgumentError, match="leave one of the two out"):
        MODEL.costs(STAGES, last_logits=True, vocabulary_parallel=True, **RATE)


def test_a_server_balances_forwards() -> None:
    """With few tokens, logits take as long as layers forward; they have no backward."""
    model = replace(ps.Transformer.preset("llama3_8b", sequence_length=64), n_layers=8)
    served: dict[str, Any] = {"gpu": "h100_sxm", "microbatch_size": 1, "last_logits": True}

    def slowest(split: Any, **options: Any) -> float:
        return max(model.costs(split, **served, **options).forward)

    least = min(slowest([k, 8 - k]) for k in range(3, 7))
    assert least < slowest(2, partition="even")
    assert slowest(2, partition="balanced") == least
    order = ps.schedule("gpipe", 2, 2)
    assert [slowest("balanced", placement=x) for x in (order, order.placement)] == [least, least]


def test_logits_of_last_tokens_need_no_loss_and_no_memory_of_others() -> None:
    """A slice of one token has them all the same; GPUs that share the vocabulary gather them."""
    own: dict[str, Any] = {**GPU, "tensor_parallel": 2, "slices": [65535, 1]}
    own["network"] = ps.Network.preset("dgx_h100", gpus_per_device=2)
    whole, last = (MODEL.costs([32], last_logits=x, **own) for x in (False, True))
    assert last.forward[0][1] < whole.forward[0][1] < 1.02 * last.forward[0][1]
    product = MODEL.head_flops() / 2 / ps.GPU.preset("h100_sxm").peak
    assert whole.forward[0][0] - last.forward[0][0] > product
    logits = 2 * 65534 * MODEL.vocabulary_size / 2
    spared = np.subtract(whole.forward_workspace_bytes, last.forward_workspace_bytes)[0]
    assert spared[0] == pytest.approx(logits)


def test_a_decode_step_reads_weights_and_keys_at_the_bandwidth() -> None:
    """Products of one token have no waves of tiles, and attention reads all keys and values."""
    gpu, steps = ps.GPU.preset("h100_sxm", launch=0.0), [65535, 1]
    costs = MODEL.costs([32], slices=steps, **{**GPU, "gpu": gpu}).microbatch(1)
    read = MODEL.layer_matrices * 32 + MODEL.vocabulary_size * MODEL.hidden_size
    read += 32 * 2 * MODEL.kv_size * MODEL.sequence_length
    least = read * MODEL.bytes_per_parameter / gpu.bandwidth
    seconds = costs.forward[0] if isinstance(costs.forward, tuple) else costs.forward
    assert least < seconds < 1.15 * least, "norms, activations and overheads besides"


def test_a_decode_step_reads_the_experts_of_its_tokens_alone() -> None:
    moe = ps.Transformer.preset("mixtral_8x22b", sequence_length=1)
    up_matrix = Matrix(moe.hidden_size, 2 * moe.expert_ffn_size)
    for n_tokens, n_read in ((1, 2), (4, 8), (32, 8)):
        sizes = KernelSizes(moe.shard(microbatch_size=n_tokens))
        *_, up = sizes.grouped("up", up_matrix, 2.0 * n_tokens, 8)
        weights = n_read * np.prod(up_matrix) * moe.bytes_per_parameter
        assert weights < up.nbytes < 1.1 * weights
