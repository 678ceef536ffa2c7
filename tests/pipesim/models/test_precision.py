"""Products in 8 and 4 bits: kernels, collectives and memory of one layer by hand."""

import re
from dataclasses import replace

import pandas as pd
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, ArgumentTypeError
from pipesim.models.precision import FORMATS

#: Sizes h = 8, f = 32, v = 16, s = 8 tokens, e = 2, heads of 8; no dropout, no biases.
SMALL = ps.Transformer(
    hidden_size=8, n_layers=1, n_heads=1, sequence_length=8, vocabulary_size=16, biases=False,
    dropout=False, bytes_per_gradient=4,
)  # fmt: skip
#: The same with 4 experts of inner size 32, of which a token goes to 2, and a shared one.
EXPERTS = replace(SMALL, n_experts=4, experts_per_token=2, shared_experts=1)
#: Deep products at 1 TFLOP/s in 16 bits; bytes take no time.
GPU = ps.GPU(flops=1e12, bandwidth=1e18, fp8_ratio=1.6, mxfp8_ratio=1.5, nvfp4_ratio=3.0)
X, WIDE = 8 * 8, 8 * 32  # elements of an input, and of the MLP


def kernels(model: ps.Transformer, precision: str, part: str = "layer") -> pd.DataFrame:
    """Return the kernels of a part, by operation and name."""
    table = model.kernels(GPU, microbatch_size=1, flash_attention=True, precision=precision)
    return table[table["part"] == part].set_index(["op", "kernel"])


def test_fp8_products_by_hand() -> None:
    """Operands have one byte, results two; a cast reads 2 bytes and writes 1 twice."""
    table = kernels(SMALL, "fp8")["bytes"]
    assert table["F"].drop(["norm", "attention", "activation", "residual"]).to_dict() == {
        "qkv": X + 8 * 24 + 2 * 3 * X,  # the norm wrote its input
        "projection cast": 4 * X, "projection": X + 8 * 8 + 2 * X,
        "up": X + 8 * 32 + 2 * WIDE,
        "down cast": 4 * WIDE, "down": WIDE + 32 * 8 + 2 * X,
    }  # fmt: skip
    assert table["I"].drop(["norm", "attention", "activation", "residual"]).to_dict() == {
        "down input cast": 4 * X, "down input": X + 32 * 8 + 2 * WIDE,
        "up input cast": 4 * WIDE, "up input": WIDE + 8 * 32 + 2 * X,
        "projection input cast": 4 * X, "projection input": X + 8 * 8 + 2 * X,
        "qkv input cast": 4 * 3 * X, "qkv input": 3 * X + 8 * 24 + 2 * X,
    }  # fmt: skip
    assert table["W", "down weight"] == X + WIDE + 2 * 4 * 8 * 32  # both were cast before


@pytest.mark.parametrize("precision", FORMATS)
def test_only_products_of_layers_are_faster(precision: str) -> None:
    """The attention core, the LM head and the router are as in 16 bits."""
    for model, part in ((SMALL, "layer"), (EXPERTS, "expert layer")):
        tables = [
            kernels(model, x, part).query("flops > 0")["seconds"] for x in ("bf16", precision)
        ]
        ratio = (tables[0] / tables[1]).to_dict()
        expected = {
            (op, name): 1
            if re.match("attention|router", name)
            else getattr(GPU, f"{precision}_ratio")
            for op, name in ratio
        }
        assert ratio == pytest.approx(expected, rel=1e-4)
        assert kernels(model, precision, "head").equals(kernels(model, "bf16", "head"))


def test_formats_of_16_bits_cost_the_same() -> None:
    assert kernels(EXPERTS, "fp16").equals(kernels(EXPERTS, "bf16"))


def test_casts_of_experts() -> None:
    """Inputs of all maps: routed tokens are copies, and the router reads those of the norm."""
    table = kernels(EXPERTS, "fp8", "expert layer")["bytes"]
    routed = 2 * 8  # tokens
    assert table["F", "experts up cast"] == 4 * routed * 8
    assert table["F", "experts down cast"] == 4 * routed * 32
    assert table["I", "experts down input cast"] == 4 * routed * 8
    assert table["F", "experts up"] == routed * 8 + 4 * 8 * 32 + 2 * routed * 32
    assert table["F", "shared up cast"] == 4 * X
    assert not any("router cast" in name for _, name in table.index)


def test_gathers_have_the_bytes_of_operands() -> None:
    """Of 4 collectives of a forward two are gathers; without latency 3/4 of the seconds stay."""
    model = replace(SMALL, n_heads=2, n_kv_heads=2, hidden_size=16)
    nodes = ps.Nodes(2, 0.0, 1.0, 0.0, 1.0, gpus_per_device=2)  # bytes take seconds

    def seconds(precision: str) -> ps.Costs:
        return model.costs(
            1, microbatch_size=1, gpu=GPU, tensor_parallel=2, sequence_parallel=True,
            flash_attention=True, network=ps.Network(nodes=nodes), precision=precision,
        )  # fmt: skip

    nbytes = 2 * 8 * 16
    half = nbytes / 2  # seconds of a gather, or of a reduce-scatter, between 2 GPUs
    usual, low = seconds("bf16"), seconds("fp8")
    for op, gathers in (("forward", 2), ("input_grad", 2), ("weight_grad", 2)):
        saved = usual.per_stage(op, 1)[0] - low.per_stage(op, 1)[0]
        assert saved == pytest.approx(gathers * half / 2), op


def test_memory_by_hand() -> None:
    """W keeps inputs of one byte; two copies of the parameters of linear maps are held."""
    usual, low = (SMALL.shard(flash_attention=True, precision=x) for x in ("bf16", "fp8"))
    # Inputs of qkv, up and down lose a byte each. The core keeps its own output, of two bytes, and
    # the projection its input, of one.
    kept = low.layer_activation_bytes - usual.layer_activation_bytes
    assert kept == -X - X - WIDE + X
    assert low.layer_weight_grad_bytes == usual.layer_weight_grad_bytes / 2
    fields, others = low.stage_bytes(1), usual.stage_bytes(1)
    linear = 8 * 24 + 8 * 8 + 2 * 8 * 32
    for name in ("forward_workspace_bytes", "backward_workspace_bytes"):
        assert fields[name][0] - others[name][0] >= 2 * linear, name
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "output_bytes"):
        assert fields[name] == others[name]


def test_parameters_are_cast_once_a_step() -> None:
    """Of 4 experts, a shared one, and attention; the optimizer's own step is as long."""
    gpu = replace(GPU, bandwidth=1e12)
    usual, low = (
        EXPERTS.costs(1, microbatch_size=1, gpu=gpu, flash_attention=True, precision=x)
        for x in ("bf16", "mxfp8")
    )
    linear = 8 * 24 + 8 * 8 + 5 * 2 * 8 * 32
    copies = low.per_stage("reduce_copies", 1)[0] - usual.per_stage("reduce_copies", 1)[0]
    assert copies == pytest.approx(linear * (4 + 1 / 16) / 1e12)
    assert low.optimizer_step == usual.optimizer_step


@pytest.mark.parametrize(
    ("precision", "gpu", "able"),
    [("fp8", "a100_80gb", "h100_sxm"), ("mxfp8", "h100_sxm", "b200"), ("nvfp4", "h200", "gb200")],
)
def test_a_gpu_without_the_format(precision: str, gpu: str, able: str) -> None:
    """The message names GPUs that have it; a GPU of one's own may say that it has."""
    text = f'precision="{precision}", but {gpu} has no products of this format; .*{able}'
    with pytest.raises(ArgumentError, match=text):
        SMALL.costs(1, microbatch_size=1, gpu=gpu, precision=precision)
    with pytest.raises(ArgumentError, match=text):
        ps.plan(SMALL, ps.Cluster(n_gpus=8, gpu=gpu, machine="dgx_h100"), global_batch=8,
                pipeline_parallel=1, precision=precision, progress=False)  # fmt: skip
    own = replace(ps.GPU.preset(gpu), **{f"{precision}_ratio": 1.5})
    assert SMALL.costs(1, microbatch_size=1, gpu=own, precision=precision).forward


def test_unknown_precision() -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="mxfp8"):
        SMALL.costs(1, microbatch_size=1, gpu="h100_sxm", precision="fp4")


def test_presets_and_the_table_have_the_same_ratios() -> None:
    table = ps.gpus()
    for name in ("a100_80gb", "h100_sxm", "b200"):
        for precision in FORMATS:
            ratio = table.loc[name, f"{precision}_ratio"]
            assert getattr(ps.GPU.preset(name), f"{precision}_ratio") == ratio
    assert table.loc["h100_sxm", ["fp8_ratio", "mxfp8_ratio"]].tolist() == [1.65, 0]
