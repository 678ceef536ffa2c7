"""Exchanges of tokens between experts as fields of `pipesim.Costs`: bytes, seconds, segments.

Before the experts, each of x GPUs sends a token's hidden state once for each of its k experts
(dispatch); after them, results go back (combine). With T tokens a GPU and e bytes an element, each
GPU contributes eTkh bytes, of which ``(x-1)/x`` leave it. All wait for the busiest GPU, which
receives in the dispatch, and sends in the combine, its imbalance times as many (Lepikhin et al.,
"GShard", arXiv 2006.16668, section 3.2; Megatron-Core's ``MoEAlltoAllTokenDispatcher``).

A hierarchical exchange sends a token once to each GPU that has any of its experts: the sender sends
it once to each other node among these, where one GPU gets it and forwards it to the others. Both
overlap (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.2). Messages of
he bytes for each token of a GPU, with N nodes, and the shares of tokens that `reached` has for the
experts of a GPU, r, and for those of a node, R:

========  ==============  =========================================================
link      messages        note
========  ==============  =========================================================
NIC       ``(N - 1)R``    one for each other node
port      ``(x - N)r``    of all nodes, without the GPU that gets the token first
========  ==============  =========================================================

The x GPUs have consecutive numbers, every t-th with experts that t GPUs share (Megatron-LM's order
tp-cp-ep-dp-pp), and fill nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipesim.models.experts.parameter_copies import dense_parameters, routed_parameters
from pipesim.models.experts.token_reach import reached
from pipesim.models.stage_layers import stage_keys
from pipesim.network.network import Network
from pipesim.network.node_collectives import Group, gpus_all_to_all, group_of_gpus, ring

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


#: For each stage, shares of F, of B and of I between its exchanges.
Segments: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]


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
        """Return the seconds of an exchange of so many bytes of a GPU."""
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
    keys = stage_keys(shard.model, sizes)
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
    c, nodes = shard.context_parallel, network.nodes
    if c == 1 or nodes is None:
        return {}
    model, group = shard.model, group_of_gpus(nodes, c, shard.tensor_parallel)
    copies = max(1, int(shard.expert_copies))
    stride = c * shard.tensor_parallel // copies
    of_experts = group_of_gpus(nodes, copies, stride)

    def seconds(n_dense: float, n_routed: float) -> float:
        """Return the seconds of so many parameters of both kinds."""
        total = 0.0
        for n, own in ((n_dense, group), (n_routed, of_experts)):
            if own.n_members > 1 and n:
                gradients = ring(own, n * model.bytes_per_gradient)
                parameters = ring(own, n * model.bytes_per_parameter)
                halves = (gradients + parameters) / 2
                total += halves if shard.context_shards_optimizer else gradients
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

    Parameters
    ----------
    n_layers
        Layers with experts; there are two exchanges each.
    before, after
        Seconds of the stage's embedding and dense layers, and of its LM head.
    parts
        Seconds of each layer before, between and after its exchanges.
    is_backward
        Whether the operation runs from the last layer to the first.

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
