"""`Framework`: what a training framework does between a model and a machine, with sources.

Two frameworks that train one model on one machine differ in the kernels that they run, in what they
hide behind other work, and in what they send. Each field of `Framework` is one such difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pipesim.errors import (
    ArgumentError,
    check_list,
    check_name,
    check_text,
    check_type,
    find_name,
)
from pipesim.utils.checks import Amount, Fraction, Range, checked

if TYPE_CHECKING:
    import pandas as pd


AttentionKernel = Literal["", "fa1", "fa2", "fa3", "triton", "cudnn"]
TensorOverlap = Literal["none", "userbuffers", "async"]
FusedSums = Literal["wider", "all", "none"]
GradSync = Literal["last", "bucketed"]
GatherParameters = Literal["after_step", "before_forward"]
GradientExchange = Literal["reduce_scatter", "all_reduce"]
ExpertProducts = Literal["streams", "grouped", "sequential"]
#: Parts of a layer that ``recompute="selective"`` may recompute.
RecomputeModule = Literal[
    "core_attn", "layernorm", "mlp", "moe_act", "shared_experts", "mla_up_proj", "second_products"
]
Messages = Literal["overlapped", "interleaved", "blocking"]
RankOrder = Literal["", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
#: Buckets of the gradients of a stage.
Buckets = Annotated[int, Range(1, 1000)]


@checked
@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a training framework does; the defaults are the best case.

    In the best case kernels are fused and attention is as fast as on the GPU's data sheet. Only
    collectives of tensor parallelism are then exposed, as `TensorOverlap` ``"none"`` says.

    Attributes
    ----------
    name
        Name for tables; empty for the best case.
    attention_kernel
        Fused attention kernel: ``"fa1"``, ``"fa2"``, ``"fa3"``, ``"triton"`` or ``"cudnn"``; empty
        (the default) for ``attention_ratio`` of the GPU. It has speeds of its own on A100 and H100,
        by size of a head, sequence and direction (`pipesim.models.attention_rates`).
    score_bias
        Whether a bias of positions (ALiBi) is the addend of the product of scores: the scores of
        an attention core that is not fused are written and read once more, forward.
    fused_rotary, fused_activation, fused_norm
        Whether rotary positions, the MLP's activation, and norms are one kernel each. Unfused ones
        are a kernel for each operation of torch: `pipesim.models.layer_kernels` counts them.
    norm_bytes
        Bytes of an element inside of an unfused norm; 2 by default.
    separate_gate
        Whether gate and up of a gated MLP are two products. The gradients of their inputs are then
        added, and tensor parallelism without sequence parallelism sums each of them over the group:
        3 all-reduces in the backward of a layer, and not 2.
    attention_copies
        Whether gradients of queries, keys and values are concatenated, and tokens copied to another
        order around the core if a micro-batch has several sequences.
    tensor_overlap
        How collectives of tensor parallelism are hidden behind products; only with sequence
        parallelism.

        - ``"none"`` (the default): not at all.
        - ``"userbuffers"``: as in Transformer Engine with NVIDIA's settings for H100. A quarter of
          each reduce-scatter stays, and 6 % of each collective of the backward; the multiprocessors
          that they take make the products of the forward 5.5 % slower.
        - ``"async"``: torch's asynchronous tensor parallelism; half of each collective stays,
          assumed from the 8 to 9 % of a step that torchtitan measured.
    expert_products
        How the products of a GPU's experts run:

        - ``"streams"`` (the default): one for each expert, several at a time, as Transformer Engine
          (``multi_stream_cublas_gemm``) for ``--moe-grouped-gemm`` of Megatron-LM.
        - ``"grouped"``: one kernel, whose tiles have the rows of one expert each (CUTLASS).
        - ``"sequential"``: one after another (``SequentialMLP`` of Megatron-LM).
    fused_permute
        Whether tokens are put in the order of experts, and their results summed, in one kernel each
        (``--moe-permute-fusion``).
    fused_router
        Whether scores, their top k and the auxiliary loss are three kernels
        (``--moe-router-fusion``); False by default.
    fused_expert_bias
        Whether the bias of an expert's result is added in its product. Otherwise Megatron-LM scales
        it by the token's weight and adds it in 32 bits, expert by expert (``_apply_bias``).
    expert_padding
        Whether tokens of each expert are copied to padded places, and back, for products below 16
        bits (``Fp8Padding`` of Megatron-LM); False by default, as if the dispatch did so.
    shared_expert_overlap
        Whether shared experts run behind the exchanges of tokens: their ``up`` behind the dispatch,
        their ``down`` behind the combine (``--moe-shared-expert-overlap``); False by default. Not
        for pairs of F and B, which hide exchanges themselves: Megatron-LM refuses both.
    fused_sums
        Which products of weight gradients add to their sums (``gradient_accumulation_fusion``);
        otherwise a kernel adds them:

        - ``"wider"`` (the default): where sums have more bytes than parameters.
        - ``"all"``: all, as in Megatron-LM if it sums in 16 bits.
        - ``"none"``: none.
    exchange_element_bytes
        Bytes of an element of gradients while replicas exchange them; 0 (the default) for those of
        the sums, ``bytes_per_gradient``.
    gradient_exchange
        Whether replicas that share an optimizer ``"reduce_scatter"`` gradients (the default), or
        ``"all_reduce"`` them, twice as many bytes. Replicas with an optimizer each all-reduce.
    exchange_copies
        Bytes a parameter that casts and copies around the exchange read and write; 0 by default.
    grad_sync, n_buckets
        When gradients are reduced: ``"last"`` (the default), after the last backward of a stage, or
        ``"bucketed"``, in so many buckets behind it.
    gather_parameters
        When replicas that share an optimizer gather parameters: ``"after_step"`` (the default), or
        ``"before_forward"``, behind the first forwards of the next step.
    overlap_cost
        Share of its speed that compute loses beside a fast collective between replicas; 0 (the
        default) for none. `pipesim.Costs` has its rule and source. Presets that hide collectives
        behind compute have the 0.43 that was measured there.
    recompute_modules
        What ``recompute="selective"`` recomputes in a layer; ``("core_attn",)`` by default. All
        but the last are those of Megatron-Core's ``--recompute-modules``.

        - ``"core_attn"``: the attention core.
        - ``"layernorm"``: both norms, whose outputs are not kept.
        - ``"mlp"``: the MLP of a dense layer, of which only the input is kept.
        - ``"moe_act"``: the activation of experts, whose output is not kept.
        - ``"shared_experts"``: their MLP, whose input the router keeps.
        - ``"mla_up_proj"``: the maps of latent attention to heads, and positions, so that queries,
          keys and values are not kept.
        - ``"second_products"``, alone: all but the core and every other matrix product, of which
          q, v, the first of the MLP and down are kept, as in torchtitan with ``"op"``. It is for
          dense layers without latent attention.
    messages
        When messages between stages run beside compute: ``"overlapped"`` (the default), always;
        ``"interleaved"``, if a device has several stages; ``"blocking"``, never.
    rank_order
        Order of ranks as `pipesim.Layout` takes it, the kind with consecutive numbers first.
        ``"tp-cp-ep-dp-pp"`` is ``layout="stage_major"`` of `pipesim.lower`, and
        ``"tp-cp-ep-pp-dp"`` ``"replica_major"``. Empty (the default) for the default of each
        function.
    schedules
        Names of the schedules of its pipelines; empty if it has no pipelines, and None (the
        default) for all. One device has no pipeline, and runs any schedule.
    master_bytes
        Bytes a parameter with which the optimizer holds parameters of 16 bits in 32:

        - 4 (the default): a copy.
        - 2: the bits that the parameter lacks; or, where replicas share parameters, the shares
          themselves are held in 32 bits, and cast when they are gathered.
    launch
        Seconds of the host to launch a kernel; None (the default) for those of the GPU.
    source
        Where the values are from.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.Framework.preset("megatron_core_2024").attention_kernel
    'cudnn'
    >>> model = ps.Transformer.preset("llama3_8b")
    >>> best, foundry = (
    ...     model.costs(1, microbatch_size=1, gpu="h100_sxm", flash_attention=True, framework=name)
    ...     for name in (None, "llm_foundry_2023"))
    >>> f"{foundry.forward[0] / best.forward[0]:.2f}"  # an older attention kernel
    '1.19'
    """

    name: str = ""
    attention_kernel: AttentionKernel = ""
    score_bias: bool = False
    fused_rotary: bool = True
    fused_activation: bool = True
    fused_norm: bool = True
    norm_bytes: Amount = 2.0
    separate_gate: bool = False
    attention_copies: bool = False
    tensor_overlap: TensorOverlap = "none"
    expert_products: ExpertProducts = "streams"
    fused_permute: bool = True
    fused_router: bool = False
    fused_expert_bias: bool = True
    expert_padding: bool = False
    shared_expert_overlap: bool = False
    fused_sums: FusedSums = "wider"
    exchange_element_bytes: Amount = 0.0
    gradient_exchange: GradientExchange = "reduce_scatter"
    exchange_copies: Amount = 0.0
    grad_sync: GradSync = "last"
    n_buckets: Buckets = 4
    gather_parameters: GatherParameters = "after_step"
    overlap_cost: Fraction = 0.0
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    messages: Messages = "overlapped"
    rank_order: RankOrder = ""
    schedules: tuple[str, ...] | None = None
    master_bytes: Amount = 4.0
    launch: Amount | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.schedules is not None:
            names = check_list("schedules", self.schedules, "names of schedules, or None for all")
            checked_names = tuple(check_text("schedules: a name", name) for name in names)
            object.__setattr__(self, "schedules", checked_names)
        modules = check_list("recompute_modules", self.recompute_modules, "names of modules")
        for name in modules:
            check_name("recompute_modules: module", name, get_args(RecomputeModule))
        if not modules or ("second_products" in modules and len(modules) > 1):
            raise ArgumentError(
                "recompute_modules must be modules of Megatron-Core, such as ['core_attn', 'mlp'], "
                f"or ['second_products'] alone, got {modules!r:.80}"
            )
        object.__setattr__(self, "recompute_modules", tuple(modules))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Framework:
        """Return a framework as it was at some time; `pipesim.frameworks` lists them.

        Parameters
        ----------
        name
            Such as ``"megatron_core_2024"``.
        **changes
            Attributes to change, such as ``fused_norm=False``.

        Returns
        -------
        Framework
            With its name.
        """
        name = find_name("framework", name, PRESETS)
        for attribute in changes:
            check_name("attribute of a framework", attribute, [x.name for x in fields(cls)])
        return replace(PRESETS[name], name=name, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes that differ from the best case, as values of JSON.

        Returns
        -------
        dict
            Attributes by name, which ``Framework(**values)`` takes.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: v for k, v in values.items() if v != getattr(BEST_CASE, k)}


#: Today's terms: fused kernels, exchanges in the type of the sums.
BEST_CASE = Framework()

#: Measured beside an all-gather over NVLink, https://github.com/NVIDIA/nccl/issues/1428.
OVERLAP_COST = 0.43

_MEGATRON_CORE = Framework(
    attention_kernel="cudnn",
    tensor_overlap="userbuffers",
    fused_expert_bias=False,
    grad_sync="bucketed",
    n_buckets=16,
    gather_parameters="before_forward",
    overlap_cost=OVERLAP_COST,
    messages="interleaved",
    rank_order="tp-cp-ep-dp-pp",
    schedules=("1f1b", "interleaved_1f1b"),
    source="NVIDIA/dgxc-benchmarking, settings of NeMo: ub_tp_comm_overlap, overlap_grad_sync, "
    "overlap_param_sync; Megatron-Bridge, comm_overlap.py; Megatron-LM, buckets of at least "
    "40 million parameters, which are 10 to 30 of a chunk of models of 70 to 400 billion; "
    "arguments.py (overlap_p2p_comm with interleaving alone), parallel_state.py",
)

PRESETS: dict[str, Framework] = {
    "megatron_2021": Framework(
        messages="blocking",
        rank_order="tp-cp-ep-dp-pp",
        schedules=("1f1b", "interleaved_1f1b"),
        launch=45e-6,
        source="Narayanan et al., arXiv 2104.04473; Megatron-LM, p2p_communication.py (requests "
        "are waited for), parallel_state.py; launches: 240 steps of vTrain's node are "
        "predicted best with 50 us a kernel (Bang et al., arXiv 2312.12391)",
    ),
    "megatron_deepspeed_2022": Framework(
        score_bias=True,
        fused_sums="none",
        exchange_element_bytes=4.0,
        gradient_exchange="all_reduce",
        exchange_copies=16.0,
        messages="blocking",
        rank_order="tp-cp-ep-dp-pp",
        schedules=("1f1b",),
        source="BigScience's Megatron-DeepSpeed: ALiBi as addend of baddbmm; bf16 optimizer of "
        "DeepSpeed, which sums and exchanges gradients in 32 bits (chronicles-prequel.md); "
        "DeepSpeed, runtime/pipe: schedule.py (TrainSchedule), p2p.py, topology.py",
    ),
    "aleph_scaling_2023": Framework(
        fused_rotary=False,
        fused_activation=False,
        separate_gate=True,
        attention_copies=True,
        exchange_element_bytes=4.0,
        gradient_exchange="all_reduce",
        exchange_copies=26.0,
        messages="blocking",
        rank_order="tp-cp-ep-dp-pp",
        schedules=("1f1b",),
        source="Aleph-Alpha/scaling: core/nn/rotary.py, mlp.py, linear/column_parallel_linear.py, "
        "core/optimizer/allreduce.py (allreduce_tensor_in_float32), parameter_group.py, "
        "core/nn/pipeline_schedule/train.py, parallel_module/communicator.py, topology.py",
    ),
    "llm_foundry_2023": Framework(
        attention_kernel="triton",
        overlap_cost=OVERLAP_COST,
        schedules=(),
        master_bytes=2.0,
        source="mosaicml/llm-foundry, scripts/train/benchmarking/submit_benchmarks.py: attn_impl "
        "triton, FSDP; torch.distributed.fsdp.MixedPrecision: sharded parameters have 32 bits",
    ),
    "megatron_core_2024": _MEGATRON_CORE,
    "nemo_2025": replace(
        _MEGATRON_CORE,
        fused_sums="all",
        master_bytes=2.0,
        source="as megatron_core_2024; NVIDIA/dgxc-benchmarking: grad_sync_dtype bf16 (sums have "
        "16 bits: bytes_per_gradient=2), gradient_accumulation_fusion; NVIDIA/NeMo, "
        "megatron_base_model.py: store_param_remainders of the distributed optimizer",
    ),
    "megatron_bridge_2025": replace(
        _MEGATRON_CORE,
        fused_router=True,
        fused_sums="all",
        messages="overlapped",
        rank_order="",
        schedules=None,
        source="NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0: "
        "grad_reduce_in_fp32 off (sums have 16 bits: bytes_per_gradient=2), moe_router_fusion, "
        "moe_permute_fusion, moe_grouped_gemm; other kernels and exchanges of replicas as "
        "megatron_core_2024; messages, order of ranks and optimizer were not looked up",
    ),
    "torchtitan_2024": Framework(
        attention_kernel="fa2",
        fused_rotary=False,
        fused_activation=False,
        fused_norm=False,
        norm_bytes=4.0,
        separate_gate=True,
        overlap_cost=OVERLAP_COST,
        recompute_modules=("second_products",),
        rank_order="tp-cp-ep-dp-pp",
        master_bytes=2.0,
        source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; "
        "distributed/parallel_dims.py, activation_checkpoint.py; fully_shard with "
        "MixedPrecisionPolicy: sharded parameters have 32 bits",
    ),
}


def frameworks() -> pd.DataFrame:
    """List the frameworks that `Framework.preset` accepts, one row a name.

    Returns
    -------
    pandas.DataFrame
        Indexed by name; a column for each attribute of `Framework`, ``source`` last.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.frameworks().loc["llm_foundry_2023", "attention_kernel"]
    'triton'
    """
    from pipesim.utils.packages import pandas as pd

    rows = {name: vars(replace(preset, name=name)) for name, preset in PRESETS.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name").drop(columns="name")


def as_framework(framework: Framework | Mapping[str, Any] | str | None) -> Framework:
    """Return a framework from any form that `pipesim.Transformer.costs` takes."""
    if framework is None:
        return BEST_CASE
    if isinstance(framework, str):
        return Framework.preset(framework)
    if isinstance(framework, Mapping):
        values = dict(framework)
        for name in values:
            check_name("attribute of a framework", name, [x.name for x in fields(Framework)])
        return Framework(**values)
    return check_type("framework", framework, Framework, 'give such as "megatron_core_2024"')


def schedule_reason(framework: Framework, schedule: str, n_devices: int) -> str:
    """Return why a framework does not run a schedule on some devices; empty if it does."""
    names = framework.schedules
    if names is None or n_devices == 1 or schedule in names:
        return ""
    name = f"framework {framework.name!r}" if framework.name else "the framework"
    if not names:
        return f"{name} has no pipelines, got one of {n_devices} devices; take another framework"
    runs = f"{name} runs {', '.join(names)}, and not {schedule!r}"
    return f"{runs}; take one of these, another framework, or this one with schedules=None"
