"""Kernels of a transformer: FLOPs of the papers, and bytes and seconds of one layer by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from pipesim.models.gpu import Kernel
from pipesim.models.layer_kernels import KernelSizes, attention_core
from pipesim.models.shard import Shard

GPU = ps.GPU(flops=1e12, bandwidth=1e12)
GPT3 = ps.Transformer(
    hidden_size=12288, n_layers=96, n_heads=96, sequence_length=2048, vocabulary_size=51200
)
LLAMA = ps.Transformer.preset("llama3_8b")


def sums(model: ps.Transformer, column: str, part: str = "layer", **options: Any) -> dict[str, Any]:
    """Return the sum of a column for each operation."""
    table = model.kernels(GPU, microbatch_size=2, **options)
    return table[table["part"] == part].groupby("op")[column].sum().to_dict()


@pytest.mark.parametrize("model", [GPT3, LLAMA], ids=["GPT-3", "Llama"])
@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_flops_are_those_of_the_formulas(model: ps.Transformer, tensor_parallel: int) -> None:
    """As Narayanan et al. and Korthikanti et al. count them; see `pipesim.models.transformer`."""
    linear = model.linear_flops(2) / tensor_parallel
    core = model.core_flops(2) / tensor_parallel
    head = model.head_flops(2) / tensor_parallel
    expected = {"F": linear + core, "I": linear + 2 * core, "W": linear}
    assert sums(model, "flops", tensor_parallel=tensor_parallel) == pytest.approx(expected)
    ends = sums(model, "flops", "head", tensor_parallel=tensor_parallel)
    assert ends == pytest.approx(dict.fromkeys("FIW", head))
    assert set(sums(model, "flops", "embedding").values()) == {0}


def test_flash_attention_computes_half_of_the_scores_and_again_backward() -> None:
    """Dao, arXiv 2307.08691, section 4.1: a causal mask leaves half, the backward has 2.5 times."""
    linear, core = LLAMA.linear_flops(2), LLAMA.core_flops(2)
    expected = {"F": linear + core / 2, "I": linear + 2.5 * core / 2, "W": linear}
    assert sums(LLAMA, "flops", flash_attention=True) == pytest.approx(expected)


def core(model: ps.Transformer, **options: Any) -> Kernel:
    """Return the fused core of a layer, forward."""
    return core_of(model.shard(flash_attention=True, **options))


def core_of(shard: Shard) -> Kernel:
    """Return the fused core of a layer of a shard, forward."""
    (kernel,) = attention_core(KernelSizes(shard)).forward
    return kernel


def test_tiles_of_fused_attention() -> None:
    """A tile for each head and 128 queries, times the steps of a ring, of which one has the mask.

    With a prefix as long as the sequence, all tiles have twice the mean of the keys under the mask
    in addition. Documents have as many tiles as one sequence.
    """
    n_heads, length = LLAMA.n_heads, LLAMA.sequence_length
    tiles = n_heads * length / 128
    assert core(LLAMA).tiles == tiles
    assert core(LLAMA, microbatch_size=2).tiles == 2 * tiles
    assert core(LLAMA, tensor_parallel=4).tiles == tiles / 4
    assert core(LLAMA, context_parallel=4, context_exchange="all_to_all").tiles == tiles / 4
    assert core(LLAMA, context_parallel=4).tiles == tiles
    shard = LLAMA.shard(flash_attention=True)
    assert core_of(replace(shard, prefix=length)).tiles == 3 * tiles
    assert core_of(replace(shard, documents=(length // 2,) * 2)).tiles == tiles


def test_latent_attention_reaches_less() -> None:
    """Queries of 192 and values of 128 elements; see ``test_kernels_published.py``."""
    latent = ps.Transformer.preset("deepseek_v2")
    assert (core(LLAMA).share, core(latent).share) == (1, 0.8)


def test_recomputed_kernels() -> None:
    table = {mode: sums(GPT3, "flops", recompute=mode).get("R", 0)
             for mode in ("none", "selective", "full")}  # fmt: skip
    core, layer = GPT3.core_flops(2), GPT3.layer_flops(2)
    assert table == pytest.approx({"none": 0, "selective": core, "full": layer})


def test_a_gpu_may_be_a_name_or_a_mapping() -> None:
    """As in `Transformer.costs`; a wrong name is met with the nearest one."""
    preset = ps.GPU.preset("h100_sxm")
    table = LLAMA.kernels(preset, microbatch_size=1)
    assert table.equals(LLAMA.kernels("h100_sxm", microbatch_size=1))
    assert table.equals(LLAMA.kernels(vars(preset), microbatch_size=1))
    with pytest.raises(UnknownNameError, match="h100_sxm"):
        LLAMA.kernels("h100_sxn", microbatch_size=1)


def test_bytes_of_a_layer_by_hand() -> None:
    """Sizes h = 8, f = 32, a = 2, s = 4, b = 1 and e = 2; no dropout, no biases."""
    small = ps.Transformer(
        hidden_size=8, n_layers=1, n_heads=2, sequence_length=4, vocabulary_size=16, biases=False,
        dropout=False,
    )  # fmt: skip
    table = small.kernels(GPU, microbatch_size=1)
    layer = table[(table["part"] == "layer") & (table["op"] == "F")]
    x, wide, scores = 4 * 8, 4 * 32, 2 * 4 * 4  # elements of an input, of the MLP, of the scores
    elements = [
        2 * x,  # norm
        x + 8 * 24 + 3 * x,  # qkv
        2 * x + scores, 2 * scores, scores + 2 * x,  # attention core
        x + 8 * 8 + x, 3 * x,  # projection, residual
        2 * x, x + 8 * 32 + wide, 2 * wide, wide + 32 * 8 + x, 3 * x,  # MLP
    ]  # fmt: skip
    assert layer["bytes"].tolist() == [2 * n for n in elements]
    assert layer["kernel"].tolist() == [
        "norm", "qkv", "scores", "softmax", "context", "projection", "residual", "norm",
        "up", "activation", "down", "residual",
    ]  # fmt: skip
    backward = [
        3 * x, x + 32 * 8 + wide, 3 * wide, wide + 32 * 8 + x, 3 * x,  # residual, MLP, norm
        3 * x, x + 8 * 8 + x,  # residual, projection
        scores + 2 * x, scores + 2 * x, 3 * scores, 2 * (scores + 2 * x),  # attention core
        3 * x + 8 * 24 + x, 3 * x,  # qkv, norm
    ]  # fmt: skip
    gradients = table[(table["part"] == "layer") & (table["op"] == "I")]
    assert gradients["bytes"].tolist() == [2 * n for n in backward]
    weights = table[(table["part"] == "layer") & (table["op"] == "W")].set_index("kernel")["bytes"]
    # Input and gradient of the output are read. Autograd adds the gradient to the sum: two reads
    # and a write.
    assert weights["qkv weight"] == 2 * (x + 3 * x + 8 * 24)
    assert weights["qkv accumulation"] == 2 * 3 * 8 * 24
    assert weights["norm accumulation"].tolist() == [2 * 3 * 8] * 2
    wide_sums = replace(small, bytes_per_gradient=4).kernels(GPU, microbatch_size=1)
    weights = wide_sums.set_index(["part", "kernel"])["bytes"]
    # The product adds to a wider sum itself.
    assert weights["layer", "qkv weight"] == 2 * (x + 3 * x) + 2 * 4 * 8 * 24
    assert "qkv accumulation" not in weights["layer"]
    assert weights["head", "logits weight"] == 2 * (4 * 8 + 4 * 16) + 2 * 4 * 8 * 16


def test_cross_entropy_by_hand() -> None:
    """Megatron-LM's, of logits in 32 bits: 8 reads or writes in 5 kernels; 2 in 2 backward.

    Before it, a cast reads 16 bits and writes 32; behind its backward one is the other way round.
    """
    table = GPT3.kernels(GPU, microbatch_size=1, tensor_parallel=8)
    logits = 2048 * 51200 // 8
    loss = table[table["kernel"].isin(["cross-entropy", "cast of logits"])]
    assert loss[["op", "kernel", "n_kernels", "bytes"]].to_numpy().tolist() == [
        ["F", "cast of logits", 1, 6 * logits],
        ["F", "cross-entropy", 5, 8 * 4 * logits],
        ["I", "cross-entropy", 2, 2 * 4 * logits],
        ["I", "cast of logits", 1, 6 * logits],
    ]


def test_gradient_of_the_embedding_by_hand() -> None:
    """A tensor of all rows of a GPU is zeroed; rows of tokens are read and added; sums are added.

    Adding reads and writes the tensor; the sum of micro-batches reads both and writes one.
    """
    table = GPT3.kernels(GPU, microbatch_size=1, tensor_parallel=8)
    weight = table[(table["part"] == "embedding") & (table["op"] == "W")]
    rows, tokens = 12288 * 51200 // 8, 12288 * 2048
    assert weight["bytes"].tolist() == [2 * rows, (2 + 2 * 2) * tokens, (2 + 2 * 2) * rows]
    forward = table[(table["part"] == "embedding") & (table["op"] == "F")]
    # Rows are read and written; the sum with positions; dropout with its mask.
    assert forward["bytes"].tolist() == [4 * tokens, 6 * tokens, 5 * tokens]


def test_depths_of_attention_products() -> None:
    """At half of the rate for a depth of 128: heads have 128 elements, sums over tokens 2048."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e18, half_depth=128)
    table = GPT3.kernels(gpu, microbatch_size=1).set_index("kernel")
    slower = table["seconds"] / (table["flops"] / gpu.flops)
    depths = {"scores": 128, "context": 2048, "scores input": 2048}
    depths |= {"context probabilities": 128, "context values": 2048}
    for kernel, depth in depths.items():
        assert slower[kernel] == pytest.approx(1 + 128 / depth), kernel


def test_a_gated_activation_reads_two_tensors() -> None:
    table = LLAMA.kernels(GPU, microbatch_size=1).set_index(["op", "kernel"])
    one = 2 * 8192 * 14336  # bytes of a tensor of the MLP
    assert table.loc[("F", "activation"), "bytes"] == 3 * one
    assert table.loc[("I", "activation"), "bytes"] == 5 * one


def test_sequence_parallel_splits_what_is_whole() -> None:
    split = GPT3.kernels(GPU, microbatch_size=1, tensor_parallel=8, sequence_parallel=True)
    whole = GPT3.kernels(GPU, microbatch_size=1, tensor_parallel=8)
    ratio = (split["bytes"] / whole["bytes"])[whole["part"] == "layer"]
    assert set(ratio[whole["kernel"].isin(["norm", "dropout and residual", "residual"])]) == {1 / 8}
    assert set(ratio[whole["kernel"].isin(["qkv", "softmax", "down weight"])]) == {1}


def test_seconds_and_bounds() -> None:
    """The rows of seconds are those of the GPU, whose sum is that of an operation."""
    gpu = ps.GPU.preset("a100_80gb")
    table = GPT3.kernels(gpu, microbatch_size=1, tensor_parallel=8)
    bounds = table.set_index("kernel")["bound"]
    assert bounds["qkv"] == bounds["down weight"] == "compute"
    assert set(bounds["norm"]) == {"memory"}
    assert (table["seconds"] >= table["bytes"] / gpu.bandwidth).all()
    assert (table["seconds"] >= table["flops"] / gpu.flops).all()
    tiny = ps.Transformer(
        hidden_size=16, n_layers=1, n_heads=2, sequence_length=4, vocabulary_size=16
    ).kernels(gpu, microbatch_size=1)
    assert set(tiny["bound"]) == {"overhead"}
    assert isinstance(tiny, pd.DataFrame)


def test_flash_attention_keeps_no_scores() -> None:
    """Activations are those of selective recompute, and 4 bytes for each head and token."""
    tokens = 2 * 2048
    flash = GPT3.shard(microbatch_size=2, tensor_parallel=8, flash_attention=True)
    selective = GPT3.shard(microbatch_size=2, tensor_parallel=8, recompute="selective")
    extra = flash.layer_activation_bytes - selective.layer_activation_bytes
    assert extra == pytest.approx(tokens * 4 * 96 / 8)


def test_bad_input() -> None:
    with pytest.raises(ArgumentTypeError, match=r"gpu must be a pipesim.GPU, got .* give such as"):
        GPT3.kernels(989e12, microbatch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tensor_parallel=5 does not divide n_heads=96"):
        GPT3.kernels(GPU, microbatch_size=1, tensor_parallel=5)
    with pytest.raises(ArgumentError, match="flash_attention must be True or False"):
        GPT3.kernels(GPU, microbatch_size=1, flash_attention=1)  # type: ignore[arg-type]
