"""Collectives between the GPUs of a device: tensor, sequence, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.models.routing import reached
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    dense_parameters,
    kv_bytes,
    recomputes,
    routed_parameters,
    stage_keys,
)
from pipesim.network.collectives import (
    Group,
    gpus_all_to_all,
    gpus_ring_step,
    group_of_gpus,
    half,
    ring,
)
from pipesim.network.network import Network

if TYPE_CHECKING:
    from pipesim.models.shard import Shard
    from pipesim.network.links import Nodes


# Exchanges of keys and values between the GPUs that share a sequence.
#
# Letters are those of `pipesim.models.transformer`, with T = bs/c tokens of a GPU and e bytes an
# element; w are elements of values of a token, o those of the core's output. Messages of one GPU:
#
# ==============  =========================================  ======================================
# exchange        forward                                    backward
# ==============  =========================================  ======================================
# ``ring``        c - 1 steps of eT(k + w)/t                 c - 1 steps of them and their gradients
# ``all_gather``  all-gather of ecT(k + w)/t                 the same, and a reduce-scatter
# ``all_to_all``  all-to-all of eT(q + k + w)/t, and of      the same
#                 eTo/t
# ==============  =========================================  ======================================
#
# A ring computes attention to the keys that it has while the next ones arrive: of each step but
# the first, only the seconds count in which the message takes longer than the c-th of the core.
# The other exchanges do not overlap with compute.
#
# Sources: Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3;
# Llama Team, arXiv 2407.21783, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", arXiv
# 2309.14509, section 3; Transformer Engine, ``context_parallel.py``.


class ContextCollective(NamedTuple):
    """The exchange around one attention core, forward or backward."""

    is_backward: bool  # gradients are exchanged too
    n_collectives: int  # or messages

    def seconds(self, shard: Shard, network: Network, core: tuple[float, float]) -> float:
        """Return the seconds in which no kernel runs, given those of the core, of F and of B."""
        if network.nodes is None:
            return 0.0
        return _EXCHANGES[shard.context_exchange](
            shard, network.nodes, core[self.is_backward], self.is_backward
        )


def context_collectives(shard: Shard) -> tuple[ContextCollective, ContextCollective] | None:
    """Return the exchanges of one layer, forward and backward; None without context parallelism."""
    c = shard.context_parallel
    if c == 1:
        return None
    counts = {"ring": (c - 1, c - 1), "all_gather": (1, 2), "all_to_all": (2, 2)}
    forward, backward = counts[shard.context_exchange]
    return ContextCollective(False, forward), ContextCollective(True, backward)


def _ring(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of a ring's messages that exceed those of the core."""
    c, t = shard.context_parallel, shard.tensor_parallel
    nbytes = kv_bytes(shard) * (2 if is_backward else 1)
    return (c - 1) * max(0.0, gpus_ring_step(nodes, nbytes, c, t) - core / c)


def _all_gather(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of the all-gather of all keys and values, or of both collectives."""
    c, t = shard.context_parallel, shard.tensor_parallel
    one = half(group_of_gpus(nodes, c, t), c * kv_bytes(shard))
    return one * (2 if is_backward else 1)


def _all_to_all(shard: Shard, nodes: Nodes, core: float, is_backward: bool) -> float:
    """Return the seconds of both exchanges, of queries, keys and values, and of the output."""
    model, t = shard.model, shard.tensor_parallel
    token = model.bytes_per_activation * shard.tokens / t
    widths = (model.query_size + model.kv_size + model.value_size, model.core_output_size)
    c = shard.context_parallel
    return sum(gpus_all_to_all(nodes, token * width, c, t) for width in widths)


_EXCHANGES = {"ring": _ring, "all_gather": _all_gather, "all_to_all": _all_to_all}


# Collectives of tensor and sequence parallelism: between the GPUs that share a layer.
#
# Tensor parallelism sums the output of projection and of ``down`` over the group, and in the
# backward the gradients of both inputs: an all-reduce each (Shoeybi et al., "Megatron-LM", arXiv
# 1909.08053, section 3). With sequence parallelism each is a reduce-scatter and an all-gather, and
# W gathers both inputs again, since their parts alone are kept (Korthikanti et al., arXiv
# 2205.05198, section 4.2.2). A recompute of the layer repeats the collectives of its forward. The
# split vocabulary needs an all-reduce behind the embedding, one of the gradient before the head,
# and three of one number a token in the loss: the largest logit, the sum of exponentials, and the
# logit of the target.


class Collective(NamedTuple):
    """Equal all-reduces, or halves of one: all-gathers and reduce-scatters."""

    nbytes: float  # of the whole tensor
    is_half: bool = False
    n_collectives: int = 1

    def seconds(self, network: Network, n_gpus: int) -> float:
        """Return the seconds of all of them between GPUs of one device."""
        one = network.group_all_gather if self.is_half else network.group_all_reduce
        return self.n_collectives * one(self.nbytes, n_gpus)


def exposed_seconds(shard: Shard) -> Callable[[str, float, float], float] | None:
    """Return how many seconds of a layer's collectives stay; None if they are not hidden.

    The function takes a field of `PartCollectives`, the seconds of its collectives, and those of
    its products. Transformer Engine with NVIDIA's settings for H100
    (``userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192`` of Megatron-Bridge) gathers in a ring
    behind the product that needs the gathered input, which hides all, and scatters the result of
    projection and ``down`` in four chunks, of which the last stays. Their products lack 24 and 16
    of 132 multiprocessors: 5.5 % of the forward's products. Bulk collectives of the backward take
    as many for a short time: 6 % of their seconds stay.
    """
    method = shard.framework.tensor_overlap
    if method == "none" or not shard.sequence_parallel or shard.tensor_parallel == 1:
        return None
    e = shard.model.bytes_per_activation
    scattered = e / (e + shard.operand_bytes) if e else 0.5  # share of reduce-scatters

    def exposed(part: str, seconds: float, products: float) -> float:
        if method == "async":
            return max(0.5 * seconds, seconds - products)
        over = max(0.0, seconds - products)
        if part in ("forward", "recompute"):
            return scattered * seconds / 4 + 0.055 * products + over
        return 0.06 * seconds + over

    return exposed


class ExpertCollective(NamedTuple):
    """All-gather and reduce-scatter of tokens between the GPUs that share experts."""

    nbytes: float  # of the gathered tokens
    n_gpus: int  # that share each expert
    n_collectives: int = 2

    def seconds(self, network: Network, n_gpus: int) -> float:
        """Return the seconds of both; ``n_gpus``, those of the device, does not matter."""
        return self.n_collectives * network.group_all_gather(self.nbytes, self.n_gpus)


#: A collective between GPUs of a device.
AnyCollective = Collective | ContextCollective | ExpertCollective


class PartCollectives(NamedTuple):
    """Collectives of a layer, of the embedding or of the head; fields as `OperationKernels`."""

    forward: tuple[AnyCollective, ...] = ()
    input_grad: tuple[AnyCollective, ...] = ()
    weight_grad: tuple[AnyCollective, ...] = ()
    recompute: tuple[AnyCollective, ...] = ()


class GroupCollectives(NamedTuple):
    """Collectives between the GPUs of a device, by part of the model."""

    layer: PartCollectives = PartCollectives()  # dense
    embedding: PartCollectives = PartCollectives()
    head: PartCollectives = PartCollectives()  # with one loss
    mtp: PartCollectives = PartCollectives()  # embedding and map before a layer of MTP
    # Of a layer with experts: before, between and after its exchanges of tokens.
    attention: PartCollectives = PartCollectives()
    experts: PartCollectives = PartCollectives()
    rest: PartCollectives = PartCollectives()

    @property
    def expert_layer(self) -> PartCollectives:
        """Those of a whole layer with experts, without its exchanges of tokens."""
        first = map(tuple.__add__, self.attention, self.experts)
        return PartCollectives(*map(tuple.__add__, first, self.rest))


def group_collectives(shard: Shard) -> GroupCollectives:
    """Return the collectives of the GPUs of a device; none for one GPU."""
    groups = _tensor_collectives(shard)
    exchanges = context_collectives(shard)
    if exchanges is None:
        return groups
    forward, backward = ((exchange,) for exchange in exchanges)
    again = forward if shard.recompute == "full" or recomputes(shard, "core_attn") else ()
    context = PartCollectives(forward, backward, (), again)
    layer, attention = (
        PartCollectives(*map(tuple.__add__, own, context))
        for own in (groups.layer, groups.attention)
    )
    return groups._replace(layer=layer, attention=attention)


def _tensor_collectives(shard: Shard) -> GroupCollectives:
    """Return the collectives of a tensor-parallel group; none for one GPU."""
    if shard.tensor_parallel == 1:
        return GroupCollectives()
    model, tokens = shard.model, shard.tokens
    nbytes = tokens * model.hidden_size * model.bytes_per_activation
    loss, trains = Collective(FP32_BYTES * tokens, n_collectives=3), not shard.last_logits
    if not trains:  # all logits are gathered, of which a token is drawn
        nbytes_of_logits = model.bytes_per_activation * shard.logit_tokens * model.vocabulary_size
        loss = Collective(nbytes_of_logits, is_half=True)
    full, of_mlp = shard.recompute == "full", recomputes(shard, "mlp")
    of_second = recomputes(shard, "second_products")
    of_half = of_mlp or of_second  # of the two halves of a layer
    if not shard.sequence_parallel:
        one, two = Collective(nbytes), Collective(nbytes, n_collectives=2)
        has_gate = shard.framework.separate_gate and model.gated_mlp
        back = two._replace(n_collectives=2 + has_gate)
        out = (Collective(nbytes, is_half=True), Collective(2 * nbytes))
        return GroupCollectives(
            PartCollectives((two,), (back,), (), (two,) if full else (one,) * of_half),
            PartCollectives((one,)),
            PartCollectives((loss,), (one,) * trains),
            PartCollectives((one, out[0]), (out[1],)),
            *_whole_expert_collectives(shard, one),
        )
    half, wide = Collective(nbytes, is_half=True), Collective(2 * nbytes, is_half=True)
    gather = _gather(shard)
    gathers, scatters = gather._replace(n_collectives=2), half._replace(n_collectives=2)
    both = (gathers, scatters)
    again = both if full else (gather, half) * of_mlp + (gathers,) * of_second
    layer = PartCollectives(both, both, (gathers,), again)
    if model.kv_rank:  # latent vectors are gathered before their maps to heads
        latent = half._replace(nbytes=_latent_bytes(shard))
        forward, backward = (latent, gather, scatters), (latent, gathers, half)
        again = (latent,) * recomputes(shard, "mla_up_proj") + (gather, half) * of_mlp
        again = forward if full else again
        layer = PartCollectives(forward, backward, (latent, gather), again)
    return GroupCollectives(
        layer,
        PartCollectives((half,), (half,)),
        PartCollectives((half, loss), (half,) * trains, (half,) * trains),
        PartCollectives((half, wide, half), (half, wide, half), (wide,)),
        *_expert_collectives(shard, half),
    )


def _gather(shard: Shard) -> Collective:
    """Return the all-gather of an operand of a product, in the format of operands."""
    nbytes = shard.tokens * shard.model.hidden_size * shard.operand_bytes
    return Collective(nbytes, is_half=True)


def _latent_bytes(shard: Shard) -> float:
    """Return the bytes of latent vectors of all tokens of a group, and of the key's positions."""
    model = shard.model
    width = (model.query_rank or model.hidden_size) + model.kv_rank + model.rope_head_size
    return shard.tokens * width * model.bytes_per_activation


def _whole_expert_collectives(
    shard: Shard, one: Collective
) -> tuple[PartCollectives, PartCollectives, PartCollectives]:
    """Return the collectives of a layer with experts if each GPU has all tokens of its group.

    Outputs of attention, of shared experts and of experts are summed, and gradients of inputs.
    """
    full = shard.recompute == "full"
    if not shard.model.n_experts:
        return PartCollectives(), PartCollectives(), PartCollectives()
    sums = (one._replace(n_collectives=1 + (shard.model.shared_experts > 0)),)
    of_shared = (shard.model.shared_experts > 0) * recomputes(shard, "shared_experts")
    attention = PartCollectives(sums, sums, (), sums if full else (one,) * of_shared)
    rest = PartCollectives((one,), (one,), (), (one,) if full else ())
    return attention, PartCollectives(), rest


def _expert_collectives(shard: Shard, half: Collective) -> tuple[PartCollectives, PartCollectives]:
    """Return the collectives of a layer with experts before, and between, its exchanges.

    Attention gathers its input and scatters its output, and so do shared experts. GPUs that share
    experts gather the tokens that each of them received, and scatter the sums of their results.
    """
    model, full = shard.model, shard.recompute == "full"
    if not model.n_experts:
        return PartCollectives(), PartCollectives()
    gather, latent = _gather(shard), half._replace(nbytes=_latent_bytes(shard))
    forward: tuple[Collective, ...] = (gather, half)
    backward, again = forward, forward[:1]
    if model.kv_rank:
        forward, backward, again = (latent, half), (latent, gather), (latent,)
    if model.shared_experts:
        forward, backward = ((*own, gather, half) for own in (forward, backward))
        again = (*again, gather)
    repeated = (latent,) * recomputes(shard, "mla_up_proj")
    if model.shared_experts and recomputes(shard, "shared_experts"):
        repeated += (gather, half)
    attention = PartCollectives(forward, backward, again, forward if full else repeated)
    if shard.expert_tensor_size == 1:
        return attention, PartCollectives()
    nbytes = shard.routed_tokens * model.hidden_size * model.bytes_per_activation
    pair = (ExpertCollective(nbytes, shard.expert_tensor_size),)
    return attention, PartCollectives(pair, pair, (), pair if full else ())


# Exchanges of tokens between experts as fields of `pipesim.Costs`: bytes, seconds, segments.
#
# Before the experts, each of x GPUs sends a token's hidden state once for each of its k experts
# (dispatch); after them, results go back (combine). With T tokens a GPU and e bytes an element,
# each GPU contributes eTkh bytes, of which ``(x-1)/x`` leave it. All wait for the busiest GPU,
# which receives in the dispatch, and sends in the combine, its imbalance times as many (Lepikhin
# et al., "GShard", arXiv 2006.16668, section 3.2; Megatron-Core's ``MoEAlltoAllTokenDispatcher``).
#
# A hierarchical exchange sends a token once to each GPU that has any of its experts: the sender
# sends it once to each other node among these, where one GPU gets it and forwards it to the
# others. Both overlap (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section
# 3.2.2). Messages of he bytes for each token of a GPU, with N nodes, and the shares of tokens that
# `reached` has for the experts of a GPU, r, and for those of a node, R:
#
# ========  ==============  =========================================================
# link      messages        note
# ========  ==============  =========================================================
# NIC       ``(N - 1)R``    one for each other node
# port      ``(x - N)r``    of all nodes, without the GPU that gets the token first
# ========  ==============  =========================================================
#
# The x GPUs have consecutive numbers, every t-th with experts that t GPUs share (Megatron-LM's
# order tp-cp-ep-dp-pp), and fill nodes.


def exchange_bytes(shard: Shard) -> tuple[float, float]:
    """Return the bytes that a GPU contributes to a dispatch, and to a combine.

    The part that it keeps is included.
    """
    if shard.expert_parallel == 1:
        return 0.0, 0.0
    model = shard.model
    copies: float = model.experts_per_token
    if shard.expert_exchange == "hierarchical":
        copies = shard.expert_parallel * reached(model, shard.local_experts)
    sent = shard.expert_tokens * copies * model.hidden_size
    dispatched = shard.dispatch_element_bytes or model.bytes_per_activation
    back = model.bytes_per_activation * sent * shard.imbalance
    return dispatched * sent * shard.imbalance, back


def exchange_seconds(shard: Shard, network: Network) -> tuple[float, float]:
    """Return the seconds of a dispatch and of a combine; 0 for a network without nodes."""
    nodes = network.nodes
    if nodes is None or shard.expert_parallel == 1:
        return 0.0, 0.0
    x, stride = shard.expert_parallel, shard.expert_tensor_size
    dispatched, back = exchange_bytes(shard)
    if shard.expert_exchange == "direct":
        one = gpus_all_to_all(nodes, dispatched, x, stride)
        return one, one if back == dispatched else gpus_all_to_all(nodes, back, x, stride)
    group = group_of_gpus(nodes, x, stride)
    port_copies, nic_copies = _copies(shard, group)
    nic = nodes.node_bandwidth / nodes.gpus_per_node
    copies = x * reached(shard.model, shard.local_experts)
    latency = group.port_latency
    if group.n_nodes > 1:
        latency += group.nic_latency

    def seconds(nbytes: float) -> float:
        token = nbytes / copies
        return max(token * port_copies / nodes.port_bandwidth, token * nic_copies / nic) + latency

    return seconds(dispatched), seconds(back)


def _copies(shard: Shard, group: Group) -> tuple[float, float]:
    """Return the messages of a token through a port, and through a NIC, of a hierarchical exchange.

    They are the most of any sender: of one on the last node, which may have fewer members.
    """
    model, local, n_nodes = shard.model, shard.local_experts, group.n_nodes
    ports = (group.n_members - n_nodes) * reached(model, local)
    return ports, (n_nodes - 1) * reached(model, group.largest * local) if n_nodes > 1 else 0.0


def expert_fields(
    shard: Shard, sizes: Sequence[int], network: Network | None
) -> dict[str, tuple[float, ...]]:
    """Return the fields of `pipesim.Costs` about exchanges of experts; none for one GPU.

    Seconds are given if the network has nodes. Otherwise they follow from bytes and links.
    """
    if not shard.model.n_expert_layers or shard.expert_parallel == 1:
        return {}
    n, (dispatched, back) = len(sizes), exchange_bytes(shard)
    keys = stage_keys(shard, sizes)
    fields: dict[str, tuple[float, ...]] = {
        "expert_layers": tuple(float(key.n_experts) for key in keys),
        "dispatch_bytes": (dispatched,) * n,
        "combine_bytes": (back,) * n,
    }
    if network is not None and network.nodes is not None:
        dispatch, combine = exchange_seconds(shard, network)
        fields |= {"exchange_dispatch": (dispatch,) * n, "exchange_combine": (combine,) * n}
    return fields


def copy_seconds(shard: Shard, sizes: Sequence[int], network: Network) -> dict[str, Any]:
    """Return ``reduce_copies`` of `pipesim.Costs`: sums of gradients within a device.

    The c context-parallel groups reduce gradients, and gather parameters that each of them stepped
    in part: a reduce-scatter of gradients and an all-gather of parameters, or, if each steps all of
    them, an all-reduce of gradients.
    """
    c, nodes = shard.n_copies, network.nodes
    if c == 1 or nodes is None:
        return {}
    model, group = shard.model, group_of_gpus(nodes, c, shard.tensor_parallel)
    copies = max(1, int(shard.expert_copies))
    stride = c * shard.tensor_parallel // copies
    of_experts = group_of_gpus(nodes, copies, stride)

    def seconds(n_dense: float, n_routed: float) -> float:
        total = 0.0
        for n, own in ((n_dense, group), (n_routed, of_experts)):
            if own.n_members > 1 and n:
                gradients, parameters = n * model.bytes_per_gradient, n * model.bytes_per_parameter
                if shard.context_shards_optimizer:
                    total += half(own, gradients) + half(own, parameters)
                else:
                    total += ring(own, gradients)
        return total

    dense, routed = dense_parameters(shard, sizes), routed_parameters(shard, sizes)
    return {"reduce_copies": tuple(map(seconds, dense, routed))}


def segment_shares(
    n_layers: int,
    *,
    before: float,
    after: float,
    parts: tuple[float, float, float],
    is_backward: bool,
) -> tuple[float, ...]:
    """Return the shares of an operation of a stage between its exchanges; they sum to 1.

    Each of ``n_layers`` with experts has two exchanges, and ``parts`` seconds before, between and
    after them. ``before`` and ``after`` are the seconds of embedding and dense layers, and of the
    LM head.

    Examples
    --------
    >>> segment_shares(1, before=1, after=2, parts=(3, 1, 1), is_backward=False)
    (0.5, 0.125, 0.375)
    >>> segment_shares(1, before=1, after=2, parts=(3, 1, 1), is_backward=True)
    (0.375, 0.125, 0.5)
    """
    attention, experts, rest = parts
    seconds = [before]
    for _ in range(n_layers):
        seconds[-1] += attention
        seconds += [experts, rest]
    seconds[-1] += after
    if is_backward:
        seconds.reverse()
    total = sum(seconds)
    if not total:
        return (1 / len(seconds),) * len(seconds)
    return tuple(x / total for x in seconds)
