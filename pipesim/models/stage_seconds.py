"""Seconds of a transformer's stages: from a rate alone, or from kernels on a GPU and its network.

Letters are those of `pipesim.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipesim.costs.cost_fields import Segments
from pipesim.errors import ArgumentError, CostsWarning, NetworkError, check_type
from pipesim.models.gpu import GPU, Kernel, product_ratio
from pipesim.models.layer_kernels import (
    KernelSizes,
    OperationKernels,
    attention_core,
    embedding_kernels,
    head_kernels,
    layer_kernels,
    layer_segments,
    mtp_kernels,
    shared_kernels,
)
from pipesim.models.model_sizes import checked_value, expert_matrix, mtp_flops
from pipesim.models.precision import FORMATS
from pipesim.models.shard_collectives import (
    AnyCollective,
    Collective,
    ContextCollective,
    PartCollectives,
    copy_seconds,
    exchange_seconds,
    expert_fields,
    exposed_seconds,
    group_collectives,
    segment_shares,
)
from pipesim.models.shard_sizes import (
    ALIGNED,
    FP32_BYTES,
    StageKey,
    each_layer,
    linear_elements,
    mean_layer,
    optimizer_bytes,
    optimizer_parameters,
    per_stage,
    recomputes,
    sent_states,
    stage_keys,
    stage_parameters,
)
from pipesim.network.network import Network
from pipesim.utils.caller_warnings import warn_caller

if TYPE_CHECKING:
    from pipesim.models.shard import Shard


@dataclass(frozen=True)
class RateSeconds:
    """Seconds as FLOPs over one rate, ``flops_per_second`` of each GPU; see `Shard.stages`."""

    shard: Shard
    flops_per_second: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """See `StageSeconds`; the embedding takes 0."""
        model = self.shard.model
        layer = mean_layer(model, self._both(experts=False), self._both(experts=True))
        mtp = mtp_flops(model, self.shard.microbatch_size)
        times = 1 if self.shard.last_logits else 3
        last = times * (self._head_flops + model.mtp_layers * (self._head_flops + mtp))
        last += model.mtp_layers * self._both(experts=model.n_expert_layers > 0)
        return layer / self._rate, 0.0, last / self._rate

    @property
    def layers(self) -> list[float]:
        """See `StageSeconds`."""
        dense, experts = (self._both(experts=x) / self._rate for x in (False, True))
        return each_layer(self.shard.model, dense, experts)

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """See `StageSeconds`."""
        model, rate = self.shard.model, self._rate
        head, mtp = self._head_flops / rate, mtp_flops(model, self.shard.microbatch_size) / rate

        def stage_values(cores: int, linears: int, ends: int, again: bool) -> tuple[float, ...]:
            dense, expert = (
                (linears * linear + cores * core + again * recomputed) / rate
                for linear, core, recomputed in map(self._flops, (False, True))
            )
            return per_stage(
                self.shard, sizes, dense, loss=ends * head, experts=expert, mtp=ends * mtp
            )

        forward = stage_values(1, 1, 1, again=False)
        return {
            "forward": forward,
            "backward": stage_values(2, 2, 2, again=True),
            "input_grad": stage_values(2, 1, 1, again=True),
            "weight_grad": stage_values(0, 1, 1, again=False),
            "recompute": forward,
            **expert_fields(self.shard, sizes, None),
        }

    @property
    def _head_flops(self) -> float:
        """FLOPs of one LM head, forward."""
        shard, model = self.shard, self.shard.model
        if shard.last_logits:
            return shard.logit_tokens * model.head_flops() / model.sequence_length
        return model.head_flops(shard.microbatch_size)

    def _both(self, *, experts: bool) -> float:
        """Return the FLOPs of its busiest GPU in F and B of a layer; see `StageSeconds.parts`."""
        linear, core, recomputed = self._flops(experts)
        if self.shard.last_logits:
            return linear + core
        return 3 * (linear + core) + recomputed

    def _flops(self, experts: bool) -> tuple[float, float, float]:
        """Return FLOPs of linear maps, of the core, and of the recompute of a layer.

        They are those of all GPUs of a device as if each were its busiest.
        """
        shard, model, b = self.shard, self.shard.model, self.shard.microbatch_size
        core: float = model.core_flops(b)
        if shard.causal_share != 1:
            core *= shard.causal_share
        if shard.attended != 1:
            core *= shard.attended
        if not experts:
            linear: float = model.linear_flops(b)
        else:
            linear = model.expert_layer_flops(b) - model.core_flops(b) if model.n_experts else 0
            routed = 2 * b * model.sequence_length * model.experts_per_token * expert_matrix(model)
            if shard.imbalance != 1:
                linear += routed * (shard.imbalance - 1)
        recomputed = core + linear if shard.recompute == "full" else 0
        recomputed += core * recomputes(shard, "core_attn")
        column = 2 * b * model.sequence_length * model.hidden_size  # of a product
        if recomputes(shard, "mlp") and not experts:
            recomputed += column * model.ffn_size * (model.mlp_inputs + 1)
        if recomputes(shard, "shared_experts") and experts:
            width = model.shared_experts * model.expert_ffn_size
            recomputed += column * width * (model.mlp_inputs + 1)
        if recomputes(shard, "mla_up_proj"):
            keys = model.kv_rank * (model.n_heads * model.head_size + model.value_size)
            maps = (model.query_rank or model.hidden_size) * model.query_size + keys
            recomputed += column / model.hidden_size * maps
        if recomputes(shard, "second_products"):
            columns = model.kv_size + model.core_output_size + model.ffn_size * model.gated_mlp
            recomputed += column * columns
        return linear, core, recomputed

    @property
    def without_launches(self) -> RateSeconds:
        """The same: a rate has no launches."""
        return self

    @property
    def _rate(self) -> float:
        return self.shard.tensor_parallel * self.shard.context_parallel * self.flops_per_second


def stage_seconds(
    shard: Shard, gpu: GPU | None, flops_per_second: float | None, network: Network | None
) -> GpuSeconds | RateSeconds:
    """Return the seconds of stages from a GPU, or from one rate.

    Warn if GPUs share layers, but the network has no rate between them.
    """
    if (gpu is None) == (flops_per_second is None):
        choice = 'gpu=..., such as pipesim.GPU.preset("h100_sxm"), or flops_per_second=...'
        text = f"give {choice}, not both" if gpu is not None else f"give one of {choice}"
        raise ArgumentError(text)
    n_gpus = shard.n_gpus
    if gpu is None:
        if isinstance(network, Network) and network.nodes and network.nodes.gpus_per_device > 1:
            _check_gpus(network.nodes.gpus_per_device, shard)
        rate = checked_value("flops_per_second", flops_per_second, "FLOP/s", above_zero=True)
        return RateSeconds(shard, rate)
    check_type("gpu", gpu, GPU, 'give such as pipesim.GPU.preset("h100_sxm")')
    product_ratio(gpu, shard.precision)  # refuses a format that the GPU lacks
    network = Network() if network is None else check_type("network", network, Network)
    if network.nodes is not None:
        _check_gpus(network.nodes.gpus_per_device, shard)
    elif n_gpus > 1 and shard.context_groups == 1:  # others are warned of with the whole device
        warn_caller(
            f"{_sizes_text(shard)}, but the network has no nodes: collectives between the {n_gpus} "
            "GPUs of a device take no time; give such as "
            f'network=pipesim.Network.preset("dgx_h100", gpus_per_device={n_gpus})',
            CostsWarning,
        )
    return _gpu_seconds(shard, gpu, network)


def warn_of_misaligned_heads(shard: Shard, gpu: GPU) -> None:
    """Warn if products of an attention core do not run on tensor cores."""
    core = attention_core(KernelSizes(shard))
    slow = [k for kernels in (core.forward, core.input_grad) for k in kernels if k.is_misaligned]
    if not slow:
        return
    lost = sum(
        gpu.kernel_seconds(k) - gpu.kernel_seconds(k._replace(is_misaligned=False)) for k in slow
    )
    head = shard.model.query_size / shard.model.n_heads
    warn_caller(
        f"heads of {head:g} elements are no multiple of {ALIGNED}: the products of scores miss the "
        f"tensor cores, which takes {lost:.2g} s more of each layer and micro-batch; take another "
        "number of heads, or flash_attention=True, whose kernel fills them up",
        CostsWarning,
    )


@lru_cache(maxsize=256)
def _gpu_seconds(shard: Shard, gpu: GPU, network: Network) -> GpuSeconds:
    """Return `GpuSeconds`, which all splits of a model share."""
    launch = shard.framework.launch
    return GpuSeconds(shard, gpu if launch is None else replace(gpu, launch=launch), network)


def _sizes_text(shard: Shard) -> str:
    text = f"tensor_parallel={shard.tensor_parallel}"
    if shard.context_parallel == 1:
        return text
    return f"{text} x context_parallel={shard.context_parallel}"


def _check_gpus(gpus_per_device: int, shard: Shard) -> None:
    if gpus_per_device != shard.n_gpus:
        gpus = "1 GPU" if gpus_per_device == 1 else f"{gpus_per_device} GPUs"
        raise NetworkError(
            f"{_sizes_text(shard)}, but a device of the network has {gpus}; give "
            f"gpus_per_device={shard.n_gpus} to the network"
        )


class StageSeconds(Protocol):
    """Seconds of stages, of which the first has the embedding."""

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of F and B of a layer, of the embedding, and of MTP, heads and losses.

        Layers of a model with experts differ; the seconds are their mean. With ``last_logits``
        they are those of F alone, as are those of `layers`.
        """

    @property
    def layers(self) -> list[float]:
        """Seconds of F and B of each layer, exchanges of experts included."""

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in seconds, one value a stage, for its number of layers."""

    @property
    def without_launches(self) -> StageSeconds:
        """The same without the host's launches: a lower bound, and sums over layers."""


class _Work(NamedTuple):
    """Work of an operation on a module, or on a stage."""

    busy: float  # seconds of kernels and collectives
    launches: float  # number of launches of the host


#: Fields of `Costs`, and the fields of `OperationKernels` whose kernels each runs.
_FIELDS = {
    "forward": ("forward",),
    "backward": ("recompute", "input_grad", "weight_grad"),
    "input_grad": ("recompute", "input_grad"),
    "weight_grad": ("weight_grad",),
    "recompute": ("forward",),
}


@dataclass(frozen=True)
class GpuSeconds:
    """Seconds of kernels on a GPU, and of collectives between the GPUs that share a layer.

    An operation of a stage takes the sum of its kernels and collectives, or the time of the host to
    launch them, if that is longer. Collectives overlap with kernels only in layers, as the
    framework's ``tensor_overlap`` says.
    """

    shard: Shard
    gpu: GPU
    network: Network

    @property
    def _balanced(self) -> tuple[str, ...]:
        """Fields of `Costs` that a balanced split counts: F and B, or F of ``last_logits``."""
        return ("forward",) if self.shard.last_logits else ("forward", "backward")

    @cached_property
    def parts(self) -> tuple[float, float, float]:
        """See `StageSeconds`."""

        def both(work: dict[str, _Work]) -> float:
            return sum(self._seconds(work[name]) for name in self._balanced)

        layer, embedding, head = map(both, (self._layer, self._embedding, self._head))
        model, experts = self.shard.model, self._expert_layer_seconds
        if model.mtp_layers:
            own = head + both(self._mtp) + (experts if model.n_expert_layers else layer)
            head += model.mtp_layers * own
        return mean_layer(model, layer, experts), embedding, head

    @property
    def layers(self) -> list[float]:
        """See `StageSeconds`."""
        layer = sum(self._seconds(self._layer[name]) for name in self._balanced)
        return each_layer(self.shard.model, layer, self._expert_layer_seconds)

    @cached_property
    def _expert_layer_seconds(self) -> float:
        """Seconds of a layer with experts, with its exchanges; 0 without experts."""
        if not self.shard.model.n_experts:
            return 0.0
        busy = sum(self._seconds(self._experts[name]) for name in self._balanced)
        return busy + len(self._balanced) * sum(exchange_seconds(self.shard, self.network))

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """See `StageSeconds`."""
        kept, rows = self._kept, []
        sent = sent_states(self.shard, sizes)
        messages = {n: self._message_seconds(n) for n in {*sent}}
        for key in stage_keys(self.shard, sizes):
            if key not in kept:
                kept[key] = tuple(self._seconds(self._of_stage(name, key)) for name in _FIELDS)
            rows.append(kept[key])
        return {
            **dict(zip(_FIELDS, zip(*rows, strict=True), strict=True)),
            "optimizer_step": self._optimizer_steps(sizes),
            "output_seconds": tuple(messages[n] for n in sent),
            **expert_fields(self.shard, sizes, self.network),
            **self._unshared_steps(sizes),
        }

    def segments(self, sizes: Sequence[int]) -> Segments | None:
        """Return ``segments`` of `pipesim.Costs`; None without exchanges of experts."""
        model = self.shard.model
        if not model.n_expert_layers or self.shard.expert_parallel == 1:
            return None
        return tuple(map(self._stage_segments, stage_keys(self.shard, sizes)))

    def _stage_segments(self, key: StageKey) -> tuple[tuple[float, ...], ...]:
        return tuple(
            segment_shares(
                key.n_experts,
                before=self._embedding[name].busy * key.is_first
                + self._layer[name].busy * key.n_dense,
                after=self._head[name].busy * key.losses
                + (self._mtp[name].busy * key.mtp if key.mtp else 0.0),
                parts=self._segment_works[name],
                is_backward=name != "forward",
            )
            for name in ("forward", "backward", "input_grad")
        )

    @cached_property
    def _segment_works(self) -> dict[str, tuple[float, float, float]]:
        """Seconds of attention, experts and rest of a layer with experts, by field."""
        collectives = group_collectives(self.shard)
        exchanged = (collectives.attention, collectives.experts, collectives.rest)
        works = [
            self._works(kernels, own, is_layer=True)
            for kernels, own in zip(layer_segments(self.shard), exchanged, strict=True)
        ]
        works[0] = self._without_hidden(works[0])
        return {
            name: (works[0][name].busy, works[1][name].busy, works[2][name].busy)
            for name in _FIELDS
        }

    @cached_property
    def without_launches(self) -> GpuSeconds:
        """The same on a GPU that never waits for its host."""
        return replace(self, gpu=replace(self.gpu, launch=0.0))

    def _optimizer_steps(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of STEP of each stage, by the bytes that it reads and writes.

        Gradients are read for their norm and by the update, and set to zero; the optimizer's state
        is read and written, and parameters are written. With Adam in mixed precision and gradients
        in 32 bits that is 38 bytes a parameter. With ``gradient_passes``, gradients are also read
        and written by clipping, and set to zero in `_unshared_steps`. Parameters in 16 bits are
        then a copy of those of the optimizer, which are read once more: 46 bytes.
        """
        model, has_passes = self.shard.model, self.shard.gradient_passes
        passes = 4 if has_passes else 3
        nbytes = passes * model.bytes_per_gradient + 2 * optimizer_bytes(self.shard)
        nbytes += model.bytes_per_parameter
        if has_passes and model.bytes_per_parameter < FP32_BYTES:
            nbytes += FP32_BYTES
        stepped = optimizer_parameters(self.shard, sizes)
        return tuple(n * nbytes / self.gpu.bandwidth for n in stepped)

    def _unshared_steps(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return ``reduce_copies`` of `pipesim.Costs`: seconds of STEP that replicas do not share.

        With ``gradient_passes`` all gradients of a GPU are read for the check for NaN, read and
        written by a division, and set to zero: 16 bytes a parameter with gradients in 32 bits.
        Casts and copies of the framework's exchange are added, and casts of parameters to the
        format of products.
        """
        sums: dict[str, tuple[float, ...]] = copy_seconds(self.shard, sizes, self.network)
        nbytes = self.shard.framework.exchange_copies
        if self.shard.gradient_passes:
            nbytes += 4 * self.shard.model.bytes_per_gradient
        cast = FORMATS[self.shard.precision].cast if self.shard.precision in FORMATS else 0.0
        if not nbytes and not cast:
            return sums
        dense, experts = linear_elements(self.shard)
        linear = per_stage(self.shard, sizes, dense, experts=experts)
        own = sums.get("reduce_copies", (0.0,) * len(sizes))
        return {
            "reduce_copies": tuple(
                copies + (n * nbytes + m * cast) / self.gpu.bandwidth
                for copies, n, m in zip(
                    own, stage_parameters(self.shard, sizes), linear, strict=True
                )
            )
        }

    def _message_seconds(self, n_outputs: int) -> float:
        """Return the seconds of a message besides its bytes: synchronization, and its gather."""
        shard = self.shard
        nbytes = n_outputs * shard.output_bytes * shard.tensor_parallel
        gathered = Collective(nbytes, is_half=True)
        gather = self._collective_seconds(gathered) if shard.scattered_messages else 0.0
        return self.gpu.synchronization + gather

    @cached_property
    def _kept(self) -> dict[StageKey, tuple[float, ...]]:
        """Seconds in each of `_FIELDS` of stages by their layers."""
        return {}

    def _of_stage(self, name: str, key: StageKey) -> _Work:
        works = [self._layer[name], self._embedding[name], self._head[name]]
        works.append(self._experts[name] if key.n_experts else _Work(0.0, 0.0))
        works.append(self._mtp[name] if key.mtp else _Work(0.0, 0.0))
        return _Work(*(key.total(*x) for x in zip(*works, strict=True)))

    def _seconds(self, work: _Work) -> float:
        return max(work.busy, work.launches * self.gpu.launch)

    @cached_property
    def _layer(self) -> dict[str, _Work]:
        groups = group_collectives(self.shard)
        return self._works(layer_kernels(self.shard), groups.layer, is_layer=True)

    @cached_property
    def _experts(self) -> dict[str, _Work]:
        """Work of a layer with experts, without its exchanges of tokens."""
        layer = layer_kernels(self.shard, experts=True)
        works = self._works(layer, group_collectives(self.shard).expert_layer, is_layer=True)
        return self._without_hidden(works)

    def _without_hidden(self, works: dict[str, _Work]) -> dict[str, _Work]:
        """Return works of a layer without the seconds of shared experts that exchanges hide.

        Forward, their ``up`` runs behind the dispatch, and ``down`` behind the combine; backward
        their gradients of inputs, the other way round (``shared_experts.py`` of Megatron-LM).
        """
        if not self.shard.framework.shared_expert_overlap:
            return works
        dispatch, combine = exchange_seconds(self.shard, self.network)
        shared = shared_kernels(self.shard)

        def hidden(kernels: tuple[Kernel, ...], of_up: float, of_down: float) -> float:
            down = sum(self.gpu.kernel_seconds(k) for k in kernels if "down" in k.name)
            up = sum(self.gpu.kernel_seconds(k) for k in kernels) - down
            return min(of_up, up) + min(of_down, down)

        forward = hidden(shared.forward, dispatch, combine)
        back = hidden(shared.input_grad, combine, dispatch)
        less = {"forward": forward, "recompute": forward, "backward": back, "input_grad": back}
        return {k: work._replace(busy=work.busy - less.get(k, 0.0)) for k, work in works.items()}

    @cached_property
    def _embedding(self) -> dict[str, _Work]:
        return self._works(embedding_kernels(self.shard), group_collectives(self.shard).embedding)

    @cached_property
    def _head(self) -> dict[str, _Work]:
        return self._works(head_kernels(self.shard), group_collectives(self.shard).head)

    @cached_property
    def _mtp(self) -> dict[str, _Work]:
        """Work of what comes before the layer of one of ``mtp_layers``."""
        return self._works(mtp_kernels(self.shard), group_collectives(self.shard).mtp)

    def _works(
        self, kernels: OperationKernels, collectives: PartCollectives, *, is_layer: bool = False
    ) -> dict[str, _Work]:
        exposed = exposed_seconds(self.shard) if is_layer else None
        works = {}
        for name, parts in _FIELDS.items():
            busy = launches = 0.0
            for part in parts:
                products = hidden = 0.0
                for kernel in getattr(kernels, part):
                    seconds = self.gpu.kernel_seconds(kernel)
                    busy += seconds
                    products += seconds * kernel.is_product
                    launches += kernel.n_kernels
                for collective in getattr(collectives, part):
                    seconds = self._collective_seconds(collective)
                    launches += collective.n_collectives
                    if exposed is not None and isinstance(collective, Collective):
                        hidden += seconds
                    else:
                        busy += seconds
                if exposed is not None:
                    busy += exposed(part, hidden, products)
            works[name] = _Work(busy, launches)
        return works

    def _collective_seconds(self, collective: AnyCollective) -> float:
        if self.network.nodes is None:
            return 0.0
        if isinstance(collective, ContextCollective):
            return collective.seconds(self.shard, self.network, self._core_seconds)
        return collective.seconds(self.network, self.shard.tensor_parallel)

    @cached_property
    def _core_seconds(self) -> tuple[float, float]:
        core = attention_core(KernelSizes(self.shard))
        forward, backward = (
            sum(map(self.gpu.kernel_seconds, kernels))
            for kernels in (core.forward, core.input_grad)
        )
        return forward, backward
