"""A sharded embedding as the stage of a pipeline: its exchanges and lookups, task by task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeexec.key_exchange import Exchange
from pipeexec.sharded_embedding import ShardedEmbedding
from pipeexec.signatures import Entry, Signature
from pipeexec.stage import Held, Seed, Stage, Values
from pipesim.errors import ArgumentError, ExecutionError

__all__ = ["EmbeddingStage", "ShardedStage", "check_embedding"]


class EmbeddingStage(nn.Module):
    """A stage that looks up its last input, and passes on the others in front of the vectors.

    So that dense features go through the pipeline beside the keys: ``(dense, keys)`` becomes
    ``(dense, vectors)``. To be lowered with ``sharded=[stage]``.

    Parameters
    ----------
    embedding
        Over a group of as many processes as the pipeline has replicas.
    """

    def __init__(self, embedding: ShardedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the other values and the vectors, or the vectors where there are no others."""
        *others, keys = values
        vectors = self.embedding(keys)
        return (*others, vectors) if others else vectors

    def output_signature(self, inputs: Signature) -> Signature:
        """Return shapes and types of what `forward` returns for those of its inputs."""
        *others, keys = inputs
        bags = self.embedding.combiner is not None
        shape = (*keys.shape[: len(keys.shape) - bags], self.embedding.dim)
        return (*others, Entry(shape, self.embedding.weight.dtype))


def check_embedding(module: nn.Module | None, stage: int, n_replicas: int) -> None:
    """Raise `ArgumentError` unless a stage is an embedding over as many processes as replicas."""
    embedding = module.embedding if isinstance(module, EmbeddingStage) else None
    if not isinstance(embedding, ShardedEmbedding):
        raise ArgumentError(
            f"the graph was lowered with stage {stage} sharded, but its module is a "
            f"{type(module).__name__}; give pipeexec.EmbeddingStage(pipeexec.ShardedEmbedding(...))"
        )
    if embedding.n_ranks != n_replicas:
        raise ArgumentError(
            f"the embedding of stage {stage} is spread over {embedding.n_ranks} processes, but the "
            f"graph has {n_replicas} replicas; give each replica a process, and the embedding a "
            "group of those that have its stage"
        )


class ShardedStage(Stage):
    """The stage of an `EmbeddingStage`: what it holds for a micro-batch is its exchange of keys.

    What passes by the lookup goes from task to task beside it.
    """

    def __init__(
        self, module: EmbeddingStage, index: int, device: torch.device, held: Held
    ) -> None:
        super().__init__(module, index, device, held)
        self.embedding = module.embedding
        self._exchanges: dict[int, Exchange] = {}
        self.sent = 0  # bytes of the latest exchange

    def exchange(self, name: str, microbatch: int, values: Values) -> Values:
        """Run one of `pipesim.ops.EXCHANGES`; return what passes by, and the vectors."""
        given: Values = ()
        if name == "counts":
            *others, keys = values
            assert keys is not None
            self._exchanges[microbatch] = self.embedding.dispatch(keys)
            values = tuple(others)
        exchange = self._exchanges[microbatch]
        if name == "vectors":
            given = (exchange.vectors(),)
        elif name == "gradients":
            *others, gradient = values
            if gradient is None:
                raise ExecutionError(
                    f"nothing depends on the vectors of stage {self.index}, so that its rows get "
                    "no gradient; let the loss depend on them"
                )
            exchange.gradients(gradient)
            values = tuple(others)
        else:
            getattr(exchange, name)()
        self.sent = exchange.sent[name]
        return (*values, *given)

    def forward(
        self,
        microbatch: int,
        values: Values,
        seed: Seed,
        recomputed: bool,
        split: bool = False,
        again: bool = False,
    ) -> Values:
        """Run F: look up the rows that this process was asked for."""
        self._exchanges[microbatch].lookup()
        self.held.take()
        return values

    def backward(self, microbatch: int, gradients: Values) -> Values:
        """Run B: add up the gradients of this process's rows; keys have none."""
        self.weight_grad(microbatch)
        return self.input_grad(microbatch, gradients)

    def input_grad(self, microbatch: int, gradients: Values) -> Values:
        """Run I: pass back the gradients of what has passed by."""
        return (*gradients, None)

    def weight_grad(self, microbatch: int) -> None:
        """Run W."""
        self._exchanges.pop(microbatch).accumulate()
        self.held.give()

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        super().reset()
        self._exchanges.clear()
