"""What a framework does, in costs: by hand, and from published counts and speeds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps
from pipesim.calibration.measured_steps import measured_steps, step_predictions
from pipesim.errors import ArgumentError, CostsWarning, UnknownNameError
from pipesim.models.attention_rates import attention_flops

PUBLISHED = Path(__file__).parents[2] / "published"
LLAMA = ps.Transformer(
    hidden_size=5120, n_layers=40, n_heads=40, sequence_length=2048, vocabulary_size=128000,
    ffn_size=13824, gated_mlp=True, biases=False, learned_positions=False, dropout=False,
    tied_embeddings=False,
)  # fmt: skip
ALEPH = ps.Framework.preset("aleph_scaling_2023")
#: A GPU whose kernels take the seconds of their FLOPs or bytes alone.
PLAIN = ps.GPU(flops=1e14, bandwidth=1e12)


def accesses(framework: ps.Framework | None) -> list[float]:
    """Return reads and writes of h elements a token between a layer's products: F, then B."""
    table = LLAMA.kernels(PLAIN, microbatch_size=1, flash_attention=True, framework=framework)
    is_moved = (table["part"] == "layer") & (table["flops"] == 0)
    table = table[is_moved & ~table["kernel"].str.contains("accumulation")]
    moved = table.groupby("op")["bytes"].sum() / (2 * 5120 * 2048)
    return [moved["F"], moved["I"] + moved["W"]]


@pytest.mark.parametrize(
    ("framework", "added"),
    [
        (ALEPH, (21, 46)),
        (ps.Framework.preset("aleph_scaling_2023", fused_norm=False), (43, 94)),
        (ps.Framework.preset("aleph_scaling_2023", fused_norm=False, norm_bytes=4), (53, 128)),
    ],
    ids=["fused norm", "norm in 16 bits", "norm in 32 bits"],
)
def test_operations_that_the_scaling_library_does_not_fuse(
    framework: ps.Framework, added: tuple[int, int]
) -> None:
    """As counted in its sources; an MLP of 2.7 h."""
    usual, own = accesses(None), accesses(framework)
    assert [b - a for a, b in zip(usual, own, strict=True)] == pytest.approx(added, abs=0.6)


def test_copies_of_several_sequences() -> None:
    """Queries are copied there and back: 8 accesses each way, of a tensor of h."""
    table = LLAMA.kernels(PLAIN, microbatch_size=2, flash_attention=True, framework=ALEPH)
    copies = table[table["kernel"] == "copy of order"]
    assert (copies["bytes"] / (2 * 2 * 5120 * 2048)).tolist() == [8, 8]


def test_attention_is_as_fast_as_published() -> None:
    """Backwards, published without a mask, are in proportion to FlashAttention-2's forward."""
    speeds = json.loads((PUBLISHED / "flash_attention_h100.json").read_text())["expected"]
    masked = {"64": 299 / 324, "128": 335 / 370}
    for name, kernel in (
        ("FlashAttention-2", "fa2"),
        ("FlashAttention-3", "fa3"),
        ("cuDNN", "cudnn"),
    ):
        for head, published in speeds[name].items():
            speed = attention_flops(kernel, "h100", float(head), 16384, is_backward=True)
            assert speed == pytest.approx(1e12 * published["backward"] * masked[head])
    assert attention_flops("fa3", "a100", 128, 4096, is_backward=False) is None


def forward(
    framework: ps.Framework | str | None, gpu: str = "h100_sxm", **options: object
) -> float:
    """Return the seconds of the forward of one stage."""
    costs = LLAMA.costs(1, gpu=gpu, microbatch_size=1, framework=framework, **options)
    return float(costs.per_stage("forward", 1)[0])


def test_kernels_of_attention_by_age() -> None:
    """Newer ones are faster; one without a table is as much slower than the GPU's own."""
    seconds = [
        forward(ps.Framework(attention_kernel=kernel), flash_attention=True)
        for kernel in ("fa1", "triton", "fa2", "cudnn", "fa3")
    ]
    assert seconds == sorted(seconds, reverse=True)
    own, older = (
        forward(ps.Framework(attention_kernel=kernel), "a100_80gb", flash_attention=True)
        for kernel in ("fa2", "fa1")
    )
    assert own == forward(None, "a100_80gb", flash_attention=True)
    table = LLAMA.kernels("a100_80gb", microbatch_size=1, flash_attention=True)
    core = table[(table["kernel"] == "attention") & (table["op"] == "F")]["seconds"].sum() - 2e-6
    assert older - own == pytest.approx(40 * core)


@pytest.mark.parametrize("method", ["userbuffers", "async"])
def test_collectives_behind_products(method: str) -> None:
    """What stays of four halves of an all-reduce a layer, forward; nothing hides without splits."""
    network = ps.Network.preset("dgx_h100", gpus_per_device=8)
    own = {"tensor_parallel": 8, "network": network, "sequence_parallel": True}
    overlapped = ps.Framework(tensor_overlap=method)
    one = network.group_all_gather(2048 * 5120 * 2, 8)
    table = LLAMA.kernels("h100_sxm", microbatch_size=1, tensor_parallel=8, sequence_parallel=True)
    products = ["qkv", "scores", "context", "projection", "up", "down"]
    is_product = (table["part"] == "layer") & (table["op"] == "F") & table["kernel"].isin(products)
    seconds = table[is_product]["seconds"].sum()
    stays = {"userbuffers": 4 * one / 8 + 0.055 * seconds, "async": 2 * one}
    over = max(0.0, 4 * one - seconds)
    expected = stays["userbuffers"] + over if method == "userbuffers" else max(
        stays["async"], 4 * one - seconds)  # fmt: skip
    hidden = forward(None, **own) - forward(overlapped, **own)
    assert hidden == pytest.approx(40 * (4 * one - expected))
    own["sequence_parallel"] = False
    assert forward(None, **own) == forward(overlapped, **own)


def test_a_gate_of_its_own_has_an_all_reduce() -> None:
    """The backward of a layer has three, as its two products have gradients of their inputs."""
    network = ps.Network.preset("dgx_h100", gpus_per_device=8)
    own = {"tensor_parallel": 8, "network": network, "gpu": PLAIN, "microbatch_size": 1}
    gate = ps.Framework(separate_gate=True)
    usual, more = (
        LLAMA.costs([20, 20], framework=framework, **own).backward[0] for framework in (None, gate)
    )
    summed = 3 * 2 * 5120 * 2048 / PLAIN.bandwidth
    one = network.group_all_reduce(2 * 5120 * 2048, 8)
    assert more - usual == pytest.approx(20 * (summed + one))


def test_gradients_are_exchanged_in_32_bits_by_all_reduces() -> None:
    """Sums of 16 bits: four times the seconds of a reduce-scatter; casts are seconds of STEP."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=2, shard_optimizer=True)
    network = ps.Network(bandwidth=1e11)

    def seconds(framework: ps.Framework | None, op: str) -> float:
        costs = LLAMA.costs([20, 20], gpu=PLAIN, microbatch_size=1, framework=framework,
                            network=network)  # fmt: skip
        timeline = ps.simulate(graph, costs)
        return float(timeline.duration[graph.op == ps.Op[op]].max())

    assert seconds(ALEPH, "REDUCE_GRAD") == pytest.approx(4 * seconds(None, "REDUCE_GRAD"))
    parameters = 20 * LLAMA.layer_parameters + LLAMA.embedding_parameters
    assert seconds(ALEPH, "STEP") - seconds(None, "STEP") == pytest.approx(26e-12 * parameters)
    assert seconds(ALEPH, "UNSHARD") == seconds(None, "UNSHARD")


@pytest.mark.slow
def test_a_published_layout_fits_with_sums_in_16_bits() -> None:
    """NeMo trains Llama 3.1 405B on 1,024 H100, 8 replicas; with sums in 32 bits it would not fit.

    NVIDIA, Megatron-Bridge, performance summary 25.09. Of its 64 micro-batches 16 hold as many
    activations at once.
    """
    graph = ps.lower(ps.schedule("interleaved_1f1b", 8, 16, n_chunks=8), step="none")
    held = []
    for size in (2, 4):
        model = ps.Transformer.preset("llama3_405b", bytes_per_gradient=size)
        costs = model.costs(
            [1, *[2] * 62, 1], microbatch_size=1, tensor_parallel=8, context_parallel=2,
            sequence_parallel=True, flash_attention=True, framework="nemo_2025", gpu="h100_sxm",
            network=ps.Network.preset("dgx_h100", gpus_per_device=16),
        )  # fmt: skip
        state = costs.per_stage("optimizer_bytes", 64).reshape(8, 8).sum(axis=0)
        peak = ps.simulate(graph, replace(costs, workload=None)).memory.peak
        held.append(float((peak - state * 7 / 8).max()))
    assert held[0] < 70e9
    assert held[1] > 80e9


def test_optimizers_that_keep_16_bits_of_each_parameter() -> None:
    """Parameters of 16 bits hold the others: 10 bytes a parameter, not 12, which STEP moves twice.

    Parameters of 32 bits, and an optimizer without states, have no copy.
    """
    for sizes, saved in (({}, 2), ({"bytes_per_parameter": 4}, 0),
                         ({"optimizer_bytes_per_parameter": 0}, 0)):  # fmt: skip
        model = ps.Transformer.preset("llama3_8b", **sizes)
        (plain, spared) = (
            model.costs(
                1, microbatch_size=1, gpu=PLAIN, framework=ps.Framework(master_bytes=nbytes)
            )
            for nbytes in (4, 2)
        )
        nbytes = saved * model.n_parameters
        difference = plain.optimizer_bytes[0] - spared.optimizer_bytes[0]
        assert difference == pytest.approx(nbytes)
        seconds = plain.optimizer_step[0] - spared.optimizer_step[0]
        assert seconds == pytest.approx(2 * nbytes / PLAIN.bandwidth, abs=1e-12)


def test_sums_of_16_bits_add_in_products() -> None:
    """A framework that fuses all sums has no kernel that adds gradients of linear maps."""
    added = [
        set(LLAMA.kernels(PLAIN, microbatch_size=1, framework=framework)["kernel"])
        for framework in (None, "nemo_2025")
    ]
    assert added[0] - added[1] >= {"qkv accumulation", "up accumulation", "down accumulation"}


def test_exchanges_behind_compute() -> None:
    """Rows of measured steps are lowered as their framework says, unless they say otherwise."""
    row = {
        **vars(LLAMA), "microbatch_size": 1, "global_batch": 16, "n_devices": 2, "n_replicas": 2,
        "schedule": "interleaved_1f1b", "n_chunks": 4, "shard_optimizer": True, "seconds": 1.0,
        "flash_attention": True,
    }  # fmt: skip
    early, late, usual, alone = (
        step.graph
        for step in step_predictions(measured_steps([
            {**row, "framework": "megatron_core_2024"},
            {**row, "framework": "megatron_core_2024", "gather_parameters": "after_step"},
            row,
            {**row, "framework": "megatron_core_2024", "n_replicas": 1, "shard_optimizer": False},
        ]))
    )  # fmt: skip
    gathered = [
        float(ps.simulate(graph, ps.Costs(1, 2)).start[graph.op == ps.Op.UNSHARD].min())
        for graph in (early, late)
    ]
    assert gathered[0] == 0 < gathered[1]
    buckets = [int((graph.op == ps.Op.REDUCE_GRAD).sum()) for graph in (early, late, usual, alone)]
    assert buckets == [16 * 16, 16 * 16, 16, 0]


@pytest.mark.parametrize(
    ("name", "options", "hidden"),
    [
        ("1f1b", {"n_replicas": 2, "shard_optimizer": True}, ("grad_sync", "gather_parameters")),
        ("1f1b", {"n_replicas": 2}, ("grad_sync",)),
        ("chimera", {"n_replicas": 2, "shard_optimizer": True}, ("grad_sync",)),
        ("1f1b", {"n_replicas": 2, "shard_parameters": "every"}, ()),
        ("1f1b", {"shard_optimizer": True}, ()),
        ("1f1b", {"n_replicas": 2, "grad_sync": "every", "shard_optimizer": True,
                  "gather_parameters": "after_step"}, ()),
    ],
    ids=["shared optimizer", "replicas", "two paths", "shared parameters", "alone", "explicit"],
)  # fmt: skip
def test_lower_exchanges_as_the_framework(
    name: str, options: dict[str, Any], hidden: tuple[str, ...]
) -> None:
    """Where it applies, and unless the caller says otherwise."""
    schedule = ps.schedule(name, 2, 2)
    every = {"grad_sync": "bucketed", "n_buckets": 16, "gather_parameters": "before_forward"}
    hides = {**{key: every[key] for key in hidden}, "n_buckets": 16}
    core = ps.Framework.preset("megatron_core_2024", schedules=None, messages="overlapped")
    own, same = (ps.lower(schedule, **{**more, **options}) for more in ({"framework": core}, hides))
    assert [str(task) for task in own] == [str(task) for task in same]
    assert own.options == same.options
    source = own.options.source
    assert source is not None
    again = ps.lower(source.schedule, **source.arguments)
    assert [str(task) for task in again] == [str(task) for task in own]


@pytest.mark.parametrize(
    ("messages", "makespan", "interleaved"),
    [("overlapped", 11, "send:1"), ("interleaved", 12, "send:1"), ("blocking", 12, "compute")],
)
def test_messages_of_frameworks(messages: Any, makespan: float, interleaved: str) -> None:
    """Seconds of F are 1, of B 2, of a message 1; a blocking one (>) is in the way of compute.

    ::

        overlapped  0F 0F  .  .  .  . 0B 0B  . 0B 0B   blocking  0F  > 0F  >  .  . 0B 0B  .  . 0B 0B
                     .  . 1F 1B 1B 1F 1B 1B                       .  . 1F 1B 1B  > 1F 1B 1B  >
    """
    framework = ps.Framework(messages=messages)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), framework=framework)
    costs = ps.Costs(1, 2, output_bytes=1, network=ps.Network(bandwidth=1))
    for engine in ("compiled", "simpy"):
        assert ps.simulate(graph, costs, engine=engine).makespan == makespan
    chunks = ps.schedule("interleaved_1f1b", 2, 2, n_chunks=2)
    graph = ps.lower(chunks, framework=framework, n_replicas=2, layout="replica_major")
    streams = {task.op.name: task.stream for task in graph if task.device == 0}
    assert streams["SEND_F"] == interleaved
    assert streams["REDUCE_GRAD"] == "collective"


def test_order_of_ranks_of_frameworks() -> None:
    """As `pipesim.Layout` numbers the GPUs; plans take it too, unless they are told otherwise."""
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        layout = ps.Layout(data_parallel=2, pipeline_parallel=2, order=order)
        framework = ps.Framework(rank_order=order)  # type: ignore[arg-type]
        schedule = ps.schedule("1f1b", 2, 2)
        own = ps.lower(schedule, n_replicas=2, framework=framework)
        same = ps.lower(schedule, **layout.lowering)
        assert (own.device == same.device).all()
        plans = ps.plan(
            replace(LLAMA, n_layers=4), ps.Cluster("dgx_h100", n_gpus=4), global_batch=4,
            tensor_parallel=1, pipeline_parallel=2, microbatch_size=1, recompute="none",
            schedules="1f1b", framework=framework, progress=False,
        )  # fmt: skip
        assert plans.problem.layout == layout.lowering["layout"]


def test_frameworks_run_their_schedules() -> None:
    """One device has no pipeline; a plan takes the schedules that the framework runs."""
    ps.lower(ps.schedule("interleaved_1f1b", 1, 2, n_chunks=2), framework="llm_foundry_2023")
    ps.lower(ps.schedule("zb_h1", 2, 4), framework="torchtitan_2024")
    for name, framework, message in (
        ("zb_h1", "megatron_2021", "runs 1f1b, interleaved_1f1b, and not 'zb_h1'"),
        ("1f1b", "llm_foundry_2023", "has no pipelines, got one of 2 devices"),
        ("gpipe", {"schedules": ["1f1b"]}, "the framework runs 1f1b, and not 'gpipe'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ps.lower(ps.schedule(name, 2, 4), framework=framework)
    own = {"cluster": ps.Cluster("dgx_h100", n_gpus=2), "global_batch": 4, "microbatch_size": 1,
           "pipeline_parallel": 2, "progress": False, "framework": "nemo_2025"}  # fmt: skip
    model = replace(LLAMA, n_layers=4)
    assert set(ps.plan(model, **own).table["schedule"]) <= {"1f1b", "interleaved_1f1b"}
    with pytest.raises(ArgumentError, match=r"no configuration .* 'nemo_2025' runs 1f1b"):
        ps.plan(model, schedules="zbv", **own)
    with pytest.raises(ArgumentError, match="schedules must be a list"):
        ps.Framework(schedules="1f1b")  # type: ignore[arg-type]
    foundry = ps.Framework.preset("llm_foundry_2023")
    assert ps.Framework(**json.loads(json.dumps(foundry.to_dict()))) == foundry


def test_sweeps_give_a_framework_to_costs_and_lowering() -> None:
    base = {
        "n_devices": 2, "n_microbatches": 4, "schedule": "1f1b", "gpu": "h100_sxm", "n_replicas": 2,
        "model": "llama3_8b", "microbatch_size": 1, "flash_attention": True, "optimizer_bytes": 0,
        "network": ps.Network.preset("dgx_h100"),
    }  # fmt: skip
    nemo = ps.Framework.preset("nemo_2025")
    rows = [{"framework": nemo}, {"framework": "nemo_2025"}, {"framework": nemo, "n_buckets": 1}]
    table = ps.sweep(rows, base=base, n_jobs=1, progress=False)
    schedule = ps.schedule("1f1b", 2, 4)
    graph = ps.lower(schedule, n_replicas=2, framework=nemo)
    costs = ps.Transformer.preset("llama3_8b").costs(
        "balanced", gpu="h100_sxm", microbatch_size=1, flash_attention=True, framework=nemo,
        network=ps.Network.preset("dgx_h100"), placement=schedule.placement,
    )  # fmt: skip
    step = ps.simulate(graph, replace(costs, optimizer_bytes=0)).makespan
    assert table["makespan"].tolist()[:2] == [step, step]
    assert table["makespan"][2] > step
    with pytest.raises(UnknownNameError, match="'framework'; it belongs above all tables"):
        ps.sweep([{"transformer": {"framework": "nemo_2025"}}], base=base, progress=False)


def test_launches_of_a_framework() -> None:
    """One that launches from Python is bound by its host if layers are small."""
    tiny = ps.Transformer(
        hidden_size=64, n_layers=2, n_heads=1, sequence_length=64, vocabulary_size=64, dropout=False
    )
    table = tiny.kernels("a100_80gb", microbatch_size=1)
    layer = table[(table["part"] == "layer") & (table["op"] == "F")]["n_kernels"].sum()
    costs = tiny.costs([0, 2, 0], gpu="a100_80gb", microbatch_size=1, framework="megatron_2021")
    assert costs.forward[1] == pytest.approx(2 * layer * 45e-6)


@pytest.mark.parametrize(
    ("modules", "kept", "products", "again"),
    [
        (("core_attn",), 17, 2, ["attention"]),
        (("layernorm",), 15, 0, ["norm", "norm"]),
        (("mlp",), 6.5, 10.5, ["activation", "down", "up"]),
        (("layernorm", "mlp"), 4.5, 10.5, ["activation", "down", "norm", "norm", "up"]),
        (("second_products",), 7.75, 4.75,
         ["activation", "norm", "norm", "projection", "qkv", "residual", "rotary positions", "up"]),
    ],
)  # fmt: skip
def test_recompute_of_modules(modules: Any, kept: float, products: float, again: list[str]) -> None:
    """Llama 3 8B: f = 3.5h and k = h/4, so that a layer keeps 17 tensors of h elements a token.

    Norms keep 2, their products 2, the core q, k and v, the projection 1, gate and up 7, down 3.5.
    Products count in hh a token: an MLP has 10.5; every other one are k 0.25, projection 1, up 3.5.
    """
    model = ps.Transformer.preset("llama3_8b", n_layers=1)
    own = {"microbatch_size": 1, "flash_attention": True, "recompute": "selective",
           "framework": ps.Framework(recompute_modules=modules)}  # fmt: skip
    rows = 4 * model.n_heads / (2 * model.hidden_size) * ("core_attn" not in modules)
    width = model.sequence_length * model.hidden_size
    nbytes = model.shard(**own).layer_activation_bytes
    assert nbytes == pytest.approx((kept + rows) * 2 * width)
    table = model.kernels("h100_sxm", **own)
    table = table[(table["part"] == "layer") & (table["op"] == "R")]
    assert sorted(table["kernel"]) == again
    per_element = 2 * width * model.hidden_size
    if modules != ("core_attn",):
        assert table["flops"].sum() == pytest.approx(products * per_element)
        rate = {"flops_per_second": 1e12, **own}
        costs, once = (model.costs([0, 1, 0], **{**rate, "recompute": x})
                       for x in ("selective", "none"))  # fmt: skip
        seconds = costs.backward[1] - once.backward[1]
        assert seconds == pytest.approx(products * per_element / 1e12, abs=1e-12)


@pytest.mark.parametrize(
    ("modules", "splits", "halves"),
    [(("mlp",), True, 2), (("second_products",), True, 2), (("mlp",), False, 2),
     (("layernorm",), True, 0)],
)  # fmt: skip
def test_recompute_of_modules_repeats_collectives(modules: Any, splits: bool, halves: int) -> None:
    """An MLP gathers its input and scatters its output once more; torchtitan gathers twice."""
    network = ps.Network.preset("dgx_h100", gpus_per_device=8)
    framework = ps.Framework(recompute_modules=modules)
    own = {"tensor_parallel": 8, "sequence_parallel": splits, "microbatch_size": 1,
           "flash_attention": True, "framework": framework}  # fmt: skip
    costs = [
        LLAMA.costs([0, 40, 0], gpu=PLAIN, network=network, recompute=recompute, **own)
        for recompute in ("selective", "none")
    ]
    table = LLAMA.kernels(PLAIN, recompute="selective", **own)
    table = table[(table["part"] == "layer") & (table["op"] == "R")]
    one = network.group_all_gather(2 * 5120 * 2048, 8)
    if not splits:
        one = network.group_all_reduce(2 * 5120 * 2048, 8) / 2
    seconds = costs[0].backward[1] - costs[1].backward[1]
    assert seconds == pytest.approx(40 * (table["seconds"].sum() + halves * one))


@pytest.mark.parametrize("splits", [True, False])
def test_recompute_of_latent_maps_and_shared_experts(splits: bool) -> None:
    """DeepSeek-V3: 128 heads of 192, 128 of them without positions, and values of 128."""
    model = replace(ps.Transformer.preset("deepseek_v3"), n_layers=1, n_dense_layers=0)
    t, tokens = 2, model.sequence_length
    network = ps.Network.preset("dgx_h100", gpus_per_device=t)
    own = {"microbatch_size": 1, "flash_attention": True, "tensor_parallel": t,
           "sequence_parallel": splits}  # fmt: skip
    raised = 1536 * 128 * 192 + 512 * 128 * 256
    shared = 3 * 7168 * 2048
    half = network.group_all_gather(2 * tokens * 7168, t)
    latent = network.group_all_gather(2 * tokens * (1536 + 512 + 64), t)
    if not splits:
        half, latent = network.group_all_reduce(2 * tokens * 7168, t) / 2, 0.0
    for module, kept, products, collectives in (
        ("mla_up_proj", 128 * (192 + 192 + 128), raised, latent),
        ("shared_experts", 3 * 2048, shared, 2 * half),
    ):
        framework = ps.Framework(recompute_modules=[module])
        again = {**own, "recompute": "selective", "framework": framework}
        layers = [model.shard(**x).expert_layer_activation_bytes for x in (own, again)]
        assert layers[0] - layers[1] == 2 * tokens * kept / t
        table = model.kernels(PLAIN, **again)
        table = table[(table["part"] == "expert layer") & (table["op"] == "R")]
        assert table["flops"].sum() == pytest.approx(2 * tokens * products / t)
        rates = {"flops_per_second": 1e12, "network": network}
        for gpu, seconds in (
            (rates, 2 * tokens * products / t / 1e12),
            ({"gpu": PLAIN, "network": network}, table["seconds"].sum() + collectives),
        ):
            costs = [model.costs([0, 1, 0], **gpu, **x) for x in (again, own)]
            assert costs[0].backward[1] - costs[1].backward[1] == pytest.approx(seconds)
    with pytest.raises(ArgumentError, match="has no latent attention"):
        LLAMA.shard(recompute="selective", framework={"recompute_modules": ["mla_up_proj"]})


def test_recompute_of_modules_of_experts() -> None:
    """The activation of experts is not kept; what torchtitan keeps of experts is not known."""
    model = ps.Transformer.preset("mixtral_8x22b", n_layers=1)
    kept = [
        model.shard(
            recompute="selective", flash_attention=True,
            framework=ps.Framework(recompute_modules=modules),
        ).expert_layer_activation_bytes
        for modules in (["core_attn"], ["core_attn", "moe_act"], ["core_attn", "layernorm"])
    ]  # fmt: skip
    tokens = model.sequence_length
    assert kept[0] - kept[1] == 2 * 2 * tokens * model.expert_ffn_size
    assert kept[0] - kept[2] == 2 * 2 * tokens * model.hidden_size
    with pytest.raises(ArgumentError, match="every other product of dense layers, and the model"):
        model.shard(recompute="selective", framework="torchtitan_2024")
    for modules, message in (
        (["core"], "unknown recompute_modules: module 'core'"),
        ([], "must be modules of Megatron-Core"),
        (["mlp", "second_products"], "'second_products'] alone"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ps.Framework(recompute_modules=modules)  # type: ignore[arg-type]


@pytest.mark.slow
def test_unfused_operations_keep_what_torch_saves() -> None:
    """Bytes that autograd keeps of LLaMA's norm in 32 bits, and of its activation."""
    torch = pytest.importorskip("torch")
    model = ps.Transformer(
        hidden_size=64, n_layers=1, n_heads=2, sequence_length=32, vocabulary_size=64, ffn_size=96,
        gated_mlp=True, biases=False, dropout=False, learned_positions=False,
    )  # fmt: skip
    saved: dict[int, int] = {}

    def pack(x: Any) -> Any:
        if x.numel() >= 32 * 64:  # no statistics or weights
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    half = {"dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight = torch.randn(32, 64, **half), torch.randn(64, **half)
    gate, up = torch.randn(32, 96, **half), torch.randn(32, 96, **half)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        x = hidden.float()
        norm = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(hidden) * weight
        norms = sum(saved.values())
        inner = torch.nn.functional.silu(gate) * up
    activation = sum(saved.values()) - norms
    assert (norm.shape, inner.shape) == (hidden.shape, up.shape)

    def kept(**unfused: Any) -> float:
        return model.shard(framework=ps.Framework(**unfused)).layer_activation_bytes

    fused = 2 * 32 * 64  # a norm keeps its input; gate and up are kept in any case
    assert kept(fused_norm=False, norm_bytes=4) - kept() == 2 * (norms - fused)
    assert kept(fused_activation=False) - kept() == activation - 2 * 2 * 32 * 96
    assert kept(fused_rotary=False) == kept()


def test_heads_that_miss_the_tensor_cores() -> None:
    """Heads of 108 elements: 16 times the seconds, and a warning; a fused core fills them up."""
    model = ps.Transformer(
        hidden_size=13824, n_layers=2, n_heads=128, sequence_length=2048, vocabulary_size=250880
    )
    table = model.kernels(PLAIN, microbatch_size=1).query("kernel == 'scores'")
    assert table["seconds"].tolist() == pytest.approx(16 * table["flops"] / PLAIN.flops)
    with pytest.warns(CostsWarning, match=r"heads of 108 elements .* more of each layer"):
        model.costs(1, gpu="a100_80gb", microbatch_size=1)
    model.costs(1, gpu="a100_80gb", microbatch_size=1, flash_attention=True)


def test_unknown_frameworks() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'megatron_core_2024'"):
        forward("megatron_core")
    with pytest.raises(UnknownNameError, match="attribute of a framework"):
        ps.Framework.preset("megatron_2021", fused=True)


def test_costs_keep_their_framework() -> None:
    """Files do, so that costs can be built again for another cluster."""
    costs = LLAMA.costs(4, gpu="h100_sxm", microbatch_size=1, framework=ALEPH)
    assert ps.Costs.from_dict(costs.to_dict()).rebuilt() == costs
