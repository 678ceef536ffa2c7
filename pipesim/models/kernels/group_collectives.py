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

from pipesim.models.shard_sizes import FP32_BYTES
from pipesim.network.network import Network

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard

__all__ = ["Collective", "GroupCollectives", "PartCollectives", "group_collectives"]


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


class PartCollectives(NamedTuple):
    """Collectives of a layer, of the embedding or of the head; fields as `OperationKernels`."""

    forward: tuple[Collective, ...] = ()
    input_grad: tuple[Collective, ...] = ()
    weight_grad: tuple[Collective, ...] = ()
    recompute: tuple[Collective, ...] = ()


class GroupCollectives(NamedTuple):
    """Collectives of one layer, of the embedding, and of head and loss."""

    layer: PartCollectives = PartCollectives()
    embedding: PartCollectives = PartCollectives()
    head: PartCollectives = PartCollectives()


def group_collectives(shard: Shard) -> GroupCollectives:
    """Return the collectives of a tensor-parallel group; none for one GPU."""
    if shard.tensor_parallel == 1:
        return GroupCollectives()
    model = shard.model
    tokens = shard.microbatch_size * model.sequence_length
    nbytes = tokens * model.hidden_size * model.bytes_per_activation
    loss = Collective(FP32_BYTES * tokens, n_collectives=3)
    full = shard.recompute == "full"
    if not shard.sequence_parallel:
        one, two = Collective(nbytes), Collective(nbytes, n_collectives=2)
        return GroupCollectives(
            PartCollectives((two,), (two,), (), (two,) if full else ()),
            PartCollectives((one,)),
            PartCollectives((loss,), (one,)),
        )
    half = Collective(nbytes, is_half=True)
    two, four = half._replace(n_collectives=2), half._replace(n_collectives=4)
    return GroupCollectives(
        PartCollectives((four,), (four,), (two,), (four,) if full else ()),
        PartCollectives((half,), (half,)),
        PartCollectives((half, loss), (half,), (half,)),
    )
