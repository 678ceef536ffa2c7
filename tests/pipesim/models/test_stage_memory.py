"""Bytes of operations, and workspaces of stages: sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.models.stage_memory import (
    embedding_operations,
    head_operations,
    kept_bytes,
    layer_operations,
)

#: Eight tokens, so that hidden has 256 bytes, inner 640, gate and up 1280, queries 256, keys 128,
#: rows 128, logits 1600 and their softmax 3200.
MODEL = ps.Transformer(
    hidden_size=16, n_layers=2, n_heads=4, n_kv_heads=2, sequence_length=8, vocabulary_size=100,
    ffn_size=40, gated_mlp=True, biases=False, learned_positions=False, dropout=False,
    tied_embeddings=False, bytes_per_gradient=4,
)  # fmt: skip
#: A gradient in 16 bits of each matrix: qkv 32x16, projection 16x16, up 80x16, down 16x40.
BUFFERS = 2 * (512 + 256 + 1280 + 640)
LAYER = 4 * 256 + 2 * 256 + 2 * 128 + 128 + 1280 + 640


def workspaces(model: ps.Transformer, split: list[int], **settings: Any) -> list[tuple[float, ...]]:
    """Return the workspaces of each stage, forward and backward."""
    costs = model.costs(split, microbatch_size=1, flops_per_second=1.0, **settings)
    return [
        tuple(costs.per_stage(f"{name}_workspace_bytes", len(split)).tolist())
        for name in ("forward", "backward")
    ]


def test_workspace_by_hand() -> None:
    """Stage 0 has the most bytes in the activation's backward, the last one in the LM head's.

    There, down has given its input back. Gradients of the activation's output (as large), of gate
    and up, and of the residual stream exist: 1280 + 256. The LM head holds the gradient of logits
    in 16 bits, of its input, and its weight's (3200), but the softmax (3200) no longer.
    """
    assert kept_bytes(layer_operations(MODEL.shard(flash_attention=True))) == LAYER
    forward, backward = workspaces(MODEL, [1, 1], flash_attention=True)
    assert backward == (1280 + 256 + BUFFERS, 1600 + 256 + 3200 - 3200 + BUFFERS)
    assert forward == (256, 1600)  # output of down; logits besides their copy in 32 bits


def test_workspace_of_full_recompute() -> None:
    """A backward first holds what the layer keeps without recompute, besides its input."""
    settings: dict[str, Any] = {"recompute": "full", "flash_attention": True}
    forward, backward = workspaces(MODEL, [2, 0], **settings)
    assert backward[0] == LAYER - 256 + 1280 + 256 + BUFFERS
    assert backward[1] == 1600 + 256 + BUFFERS * 0
    # While the activation runs, its input of 1280 and its output of 640 exist.
    assert forward[0] == 1280 + 640


def test_workspace_of_selective_recompute() -> None:
    """The core's backward has its softmax again, and the gradients of softmax and scores.

    With 512 tokens, scores have 2 * 512 * 512 * 4 bytes, and hidden, queries 512 * 32. In front of
    it, the MLP, its norm and the projection have given back what they keep.
    """
    model = replace(MODEL, sequence_length=512)
    scores, hidden = 2 * 512 * 512 * 4, 512 * 32
    gradients = 2 * hidden + 2 * hidden // 2 + hidden
    later = hidden + 2 * hidden + 512 * 2 * 120
    _, backward = workspaces(model, [1, 1], recompute="selective")
    assert backward[0] == scores + 2 * scores + gradients - later + BUFFERS
    _, backward = workspaces(model, [1, 1])  # the softmax is an activation
    assert backward[0] == 2 * scores + gradients - later + BUFFERS


def test_workspace_of_sequence_parallelism() -> None:
    """Two GPUs: down's backward gathers the gradient of its output (256), hidden has 128.

    The LM head's gathers its input, and sums the gradient of it (256) into 128 bytes.
    """
    settings: dict[str, Any] = {"tensor_parallel": 2, "flash_attention": True}
    half = BUFFERS // 2
    forward, backward = workspaces(MODEL, [1, 1], sequence_parallel=True, **settings)
    assert backward == (640 + 128 + half, 800 + 256 + 256 + 128 + 1600 - 1600 + half)
    assert forward == (256 + 128, 800)
    small = replace(MODEL, ffn_size=8, n_layers=3)
    _, backward = workspaces(small, [1, 1, 1], sequence_parallel=True, **settings)
    # In up's backward: gate and up (128), input, of one GPU and of both, residual; less what
    # down (64) and the activation (128) kept.
    up = 128 + 256 + 256 + 128 + 128 - (64 + 128)
    assert backward[1] == up + 2 * (512 + 256 + 256 + 128) // 2


def test_workspace_of_flash_attention() -> None:
    """Its backward sums the gradient of queries in 32 bits: 512 bytes, which decides if f is 4.

    Gradients of output and queries (256 each), keys and values (128 each), the residual (256), the
    sums (512), and a number of each row (128), where what follows has given back 960.
    """
    later = 256 + 256 + 256 + 128 + 64  # inputs of projection, norm, up, activation and down
    core = 2 * 256 + 2 * 128 + 256 + 512 + 128
    buffers = 2 * (512 + 256 + 8 * 16 + 4 * 16)
    small = replace(MODEL, ffn_size=4, n_layers=3)
    _, backward = workspaces(small, [1, 1, 1], flash_attention=True)
    assert backward[1] == core - later + buffers  # the first stage has the embedding's gradient


def test_workspace_of_the_embedding() -> None:
    """Its gradient is as large as the matrix; the layers behind it have given all back."""
    model = replace(MODEL, vocabulary_size=1000, n_layers=1)
    _, backward = workspaces(model, [1, 0], flash_attention=True)
    assert backward[0] == 256 + 2 * 1000 * 16 - LAYER + BUFFERS


def test_gradients_of_16_bits_are_tensors_of_their_own() -> None:
    """Each weight's gradient exists until it was added; no unused ones are kept."""
    model = replace(MODEL, bytes_per_gradient=2)
    _, backward = workspaces(model, [1, 1], flash_attention=True)
    up = 1280 + 256 + 256 + 2 * 1280 - 1280 - 640  # gate and up, input, residual, weight
    assert backward[0] == max(1280 + 256, up, 256 + 640 + 2 * 640)
    assert up > 1280 + 256


def test_dropout_keeps_masks() -> None:
    """A byte an element: of the embedding's output, and of two a layer; the branch's gradient."""
    model = replace(MODEL, dropout=True)
    shard = model.shard(flash_attention=True)
    assert kept_bytes(embedding_operations(shard)) == 128
    assert kept_bytes(layer_operations(shard)) == LAYER + 2 * 128
    assert kept_bytes(head_operations(shard)) == 2 * 256 + 3200


def test_fused_loss_keeps_16_bits() -> None:
    """The logits (1600) become their gradient in place; the LM head's backward has the most bytes.

    That is the gradients of its input and of its weight (3200), besides the layer's buffers.
    """
    settings: dict[str, Any] = {"flash_attention": True, "fused_loss": True}
    assert kept_bytes(head_operations(MODEL.shard(**settings))) == 2 * 256 + 1600
    forward, backward = workspaces(MODEL, [1, 1], **settings)
    assert backward[1] == 256 + 3200 + BUFFERS
    assert forward[1] == 0
    costs = MODEL.costs([1, 1], microbatch_size=1, flops_per_second=1.0, **settings)
    apart = MODEL.costs([1, 1], microbatch_size=1, flops_per_second=1.0, flash_attention=True)
    for name in ("activation_bytes", "weight_grad_bytes"):
        assert (apart.per_stage(name, 2) - costs.per_stage(name, 2)).tolist() == [0, 1600]


def test_fused_loss_reads_and_writes_16_bits() -> None:
    """Three times the logits forward, twice backward, in three kernels."""
    gpu = ps.GPU.preset("h100_sxm")
    table = MODEL.kernels(gpu, microbatch_size=1, fused_loss=True)
    loss = table[table["kernel"] == "cross-entropy"]
    assert loss["bytes"].tolist() == [3 * 1600, 2 * 1600]
    assert loss["n_kernels"].sum() == 3
    assert not table["kernel"].str.contains("cast").any()


@given(
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 2),
)
def test_recompute_never_needs_more_in_all(
    recompute: Any, flash: bool, sequence: bool, t: int, n_first: int
) -> None:
    """One micro-batch's activations and workspace are at most those without recompute.

    A recomputed layer keeps its input besides the copy that its operations keep.
    """
    run = {"tensor_parallel": t, "sequence_parallel": sequence, "flash_attention": flash}
    split = [n_first, 2 - n_first]
    none, some = (
        MODEL.costs(split, microbatch_size=1, flops_per_second=1.0, recompute=r, **run)
        for r in ("none", recompute)
    )
    for direction in ("forward", "backward"):
        names = ("activation_bytes", f"{direction}_workspace_bytes")
        held = [sum(costs.per_stage(name, 2) for name in names) for costs in (some, none)]
        assert (held[0] <= held[1]).all()


def test_peak_of_a_pipeline_by_hand() -> None:
    """Two stages, two replicas: 18 bytes a parameter, of which 12 are shared, and the rest."""
    costs = MODEL.costs([1, 1], microbatch_size=1, flops_per_second=1.0, flash_attention=True)
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, shard_optimizer=True)
    table = ps.simulate(graph, costs).memory.breakdown()
    parameters = 16 * (32 + 16 + 80 + 40) + 2 * 16 + 1600
    first = table.loc[0]
    assert first["parameters"] == 2 * parameters
    assert first["gradients"] == 4 * parameters
    assert first["optimizer"] == 6 * parameters
    assert first["activations"] == 2 * LAYER
    assert first["workspace"] == 1280 + 256 + BUFFERS
    assert first["total"] == 12 * parameters + 2 * LAYER + 1280 + 256 + BUFFERS
    assert table.loc[2].equals(first)
    assert table.loc[1, "activations"] == LAYER + 2 * 256 + 3200


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_operations_have_names(recompute: Any) -> None:
    """Every operation of a layer is listed once for each time that it runs."""
    names = [operation.name for operation in layer_operations(MODEL.shard(recompute=recompute))]
    if recompute == "full":
        assert names == ["layer"]
    else:
        assert names == ["norm", "qkv", "core", "projection", "residual", "norm", "up",
                         "activation", "down", "residual"]  # fmt: skip
