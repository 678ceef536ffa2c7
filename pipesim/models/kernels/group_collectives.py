"""Collectives of tensor and sequence parallelism: between the GPUs that share a layer.

Tensor parallelism sums the output of projection and of ``down`` over the group, and in the backward
the gradients of both inputs: an all-reduce each (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3). With sequence parallelism each is a reduce-scatter and an all-gather, and W gathers both
inputs again, since their parts alone are kept (Korthikanti et al., arXiv 2205.05198, section
4.2.2). A recompute of the layer repeats the collectives of its forward. The split vocabulary needs
an all-reduce behind the embedding, one of the gradient before the head, and three of one number a
token in the loss: the largest logit, the sum of exponentials, and the logit of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.context.context_collectives import ContextCollective, context_collectives
from pipesim.models.shard_sizes import FP32_BYTES
from pipesim.network.network import Network

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


class Collective(NamedTuple):
    """All-reduces, or halves of one: all-gathers and reduce-scatters.

    Attributes
    ----------
    nbytes
        Bytes of the whole tensor.
    is_half
        Whether it is an all-gather or a reduce-scatter.
    n_collectives
        Number of equal collectives.
    """

    nbytes: float
    is_half: bool = False
    n_collectives: int = 1

    def seconds(self, network: Network, n_gpus: int) -> float:
        """Return the seconds of all of them between GPUs of one device."""
        one = network.group_all_gather if self.is_half else network.group_all_reduce
        return self.n_collectives * one(self.nbytes, n_gpus)


class ExpertCollective(NamedTuple):
    """All-gather and reduce-scatter of tokens between the GPUs that share experts.

    Attributes
    ----------
    nbytes
        Bytes of the gathered tokens.
    n_gpus
        GPUs that share each expert.
    n_collectives
        Number of collectives.
    """

    nbytes: float
    n_gpus: int
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
    """Collectives between the GPUs of a device, by part of the model.

    Attributes
    ----------
    layer, embedding, head
        Those of one dense layer, of the embedding, and of head and loss.
    attention, experts, rest
        Those of a layer with experts before, between and after its exchanges of tokens.
    """

    layer: PartCollectives = PartCollectives()
    embedding: PartCollectives = PartCollectives()
    head: PartCollectives = PartCollectives()
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
    again = () if shard.recompute == "none" else forward
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
    loss = Collective(FP32_BYTES * tokens, n_collectives=3)
    full = shard.recompute == "full"
    if not shard.sequence_parallel:
        one, two = Collective(nbytes), Collective(nbytes, n_collectives=2)
        return GroupCollectives(
            PartCollectives((two,), (two,), (), (two,) if full else ()),
            PartCollectives((one,)),
            PartCollectives((loss,), (one,)),
            *_whole_expert_collectives(shard, one),
        )
    half = Collective(nbytes, is_half=True)
    two, four = half._replace(n_collectives=2), half._replace(n_collectives=4)
    layer = PartCollectives((four,), (four,), (two,), (four,) if full else ())
    if model.kv_rank:  # latent vectors are gathered before their maps to heads
        latent = half._replace(nbytes=_latent_bytes(shard))
        three = half._replace(n_collectives=3)
        forward = (latent, three)
        layer = PartCollectives(forward, forward, (latent, half), forward if full else ())
    return GroupCollectives(
        layer,
        PartCollectives((half,), (half,)),
        PartCollectives((half, loss), (half,), (half,)),
        *_expert_collectives(shard, half),
    )


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
    attention = PartCollectives(sums, sums, (), sums if full else ())
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
    first = half._replace(nbytes=_latent_bytes(shard)) if model.kv_rank else half
    gathers: tuple[Collective, ...] = (first, half)
    again: tuple[Collective, ...] = (first,)
    if model.shared_experts:
        gathers, again = (*gathers, half._replace(n_collectives=2)), (*again, half)
    attention = PartCollectives(gathers, gathers, again, gathers if full else ())
    if shard.expert_tensor_size == 1:
        return attention, PartCollectives()
    nbytes = shard.routed_tokens * model.hidden_size * model.bytes_per_activation
    pair = (ExpertCollective(nbytes, shard.expert_tensor_size),)
    return attention, PartCollectives(pair, pair, (), pair if full else ())
