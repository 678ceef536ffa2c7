"""A sharded embedding as the stage of a pipeline: its exchanges and lookups, task by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Values
from pipeexec.distributed.signatures import Entry, Signature
from pipeexec.embedding.key_exchange import Exchange
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.stages.activation_bytes import ActivationCounter
from pipeexec.stages.module_call import Seed
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentError, ExecutionError, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op

__all__ = ["EmbeddingStage", "ShardedStage", "check_embedding", "check_keys", "exchange_options"]


class EmbeddingStage(nn.Module):
    """A stage that looks up its last input, and passes on the others in front of the vectors.

    So that dense features go through the pipeline beside the keys: ``(dense, keys)`` becomes
    ``(dense, vectors)``. To be lowered with ``sharded=[stage]``.

    Parameters
    ----------
    embedding
        Over a group of the processes that have the stage, one for each replica of the pipeline.

    Raises
    ------
    ArgumentError
        For a module that is none.
    """

    def __init__(self, embedding: ShardedEmbedding) -> None:
        super().__init__()
        self.embedding = check_type("embedding", embedding, ShardedEmbedding)

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


def check_embedding(module: nn.Module | None, stage: int, ranks: Sequence[int]) -> None:
    """Raise `ArgumentError` unless a stage is an embedding over the processes of its replicas.

    ``ranks`` are those of the devices on which its replicas are.
    """
    embedding = module.embedding if isinstance(module, EmbeddingStage) else None
    if not isinstance(embedding, ShardedEmbedding):
        raise ArgumentError(
            f"the graph was lowered with stage {stage} sharded, but its module is a "
            f"{type(module).__name__}; give pipeexec.EmbeddingStage(pipeexec.ShardedEmbedding(...))"
        )
    if embedding.gradients != "sum":
        raise ArgumentError(
            f"the embedding of stage {stage} has gradients={embedding.gradients!r}, but losses of "
            "a pipeline are weighted over the whole batch already; leave gradients out"
        )
    if len(set(ranks)) < len(ranks):
        raise ArgumentError(
            f"stage {stage} is sharded over {len(ranks)} replicas, which are in processes "
            f"{list(ranks)}; give each replica of it a process of its own"
        )
    if embedding.n_ranks != len(ranks) or (len(ranks) > 1 and {*embedding.ranks} != {*ranks}):
        raise ArgumentError(
            f"the embedding of stage {stage} is spread over processes {list(embedding.ranks)}, but "
            f"the replicas of the stage are in processes {list(ranks)}; give the embedding a group "
            "of these"
        )


def check_keys(modules: Iterable[nn.Module], microbatches: Sequence[Values]) -> None:
    """Raise `ArgumentError` for keys of a batch that are no rows, before any of them is sent.

    ``modules`` are all replicas of the first stage, of which one at most is in this process, and
    so are ``microbatches``, which are empty where another has them.
    """
    given = [values for values in microbatches if values]
    for embedding in (x.embedding for x in modules if isinstance(x, EmbeddingStage)):
        for microbatch, (*_, keys) in enumerate(given):
            assert keys is not None
            try:
                embedding.check(keys)
            except ArgumentError as error:
                raise ArgumentError(f"stage 0, micro-batch {microbatch}: {error}") from error


def exchange_options(graph: TaskGraph) -> dict[str, bool]:
    """Return the options of `ShardedStage` that a graph was lowered for."""
    exchanges = graph.op == Op.ALL_TO_ALL
    return {
        "reorders": bool((graph.op == Op.DISPATCH).any()),
        "accumulates": bool((graph.part[exchanges] == EXCHANGES.index("accumulated")).any()),
    }


class ShardedStage(Stage):
    """The stage of an `EmbeddingStage`: what it holds for a micro-batch is its exchange of keys.

    What passes by the lookup goes from task to task beside it.

    Parameters
    ----------
    module, index, device, held
        As for `Stage`.
    reorders
        Whether keys are grouped, and vectors and gradients put in order, by tasks of their own.
    accumulates
        Whether gradients of all micro-batches are exchanged together.
    """

    def __init__(
        self,
        module: EmbeddingStage,
        index: int,
        device: torch.device,
        held: ActivationCounter,
        *,
        reorders: bool = False,
        accumulates: bool = False,
    ) -> None:
        super().__init__(module, index, device, held)
        self.embedding, self._reorders = module.embedding, reorders
        self._exchanges: dict[int, Exchange] = {}
        self._accumulated = module.embedding.accumulated_gradients() if accumulates else None
        self.sent = 0  # bytes of the latest exchange

    def dispatch(self, microbatch: int, values: Values) -> Values:
        """Group the keys, the last of the values, by owner; return the others."""
        *others, keys = values
        assert keys is not None
        keeps_keys = self._accumulated is not None
        self._exchanges[microbatch] = self.embedding.dispatch(keys, keeps_keys=keeps_keys)
        return tuple(others)

    def exchange(self, name: str, microbatch: int, values: Values) -> Values:
        """Run one of `pipesim.ops.EXCHANGES`; return what passes by.

        Unless they have tasks of their own, `dispatch` comes before the first, and `reorder` after
        vectors have come and before gradients go.
        """
        if name == "accumulated":
            assert self._accumulated is not None
            self._accumulated.exchange()
            self.sent = self._accumulated.sent
            return ()
        if name == "counts" and not self._reorders:
            values = self.dispatch(microbatch, values)
        exchange = self._exchanges[microbatch]
        if name == "vectors":
            exchange.receive()
            if not self._reorders:
                values = self.reorder(name, microbatch, values)
        elif name == "gradients":
            if not self._reorders:
                values = self.reorder(name, microbatch, values)
            exchange.send_gradients()
        else:
            getattr(exchange, name)()
        self.sent = exchange.sent[name]
        return values

    def reorder(self, name: str, microbatch: int, values: Values) -> Values:
        """Put vectors in the order of the keys, behind the values; or sum gradients of each key."""
        exchange = self._exchanges[microbatch]
        if name == "vectors":
            return (*values, exchange.combine())
        *others, gradient = values
        if gradient is None:
            raise ExecutionError(
                f"nothing depends on the vectors of stage {self.index}, so that its rows get "
                "no gradient; let the loss depend on them"
            )
        exchange.sum_gradients(gradient)
        return tuple(others)

    def held_tensors(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that the exchange of a micro-batch holds; none before its first.

        Those of accumulated gradients, of no micro-batch, have number -1.
        """
        if microbatch < 0 and self._accumulated is not None:
            return list(self._accumulated.tensors())
        exchange = self._exchanges.get(microbatch)
        return [] if exchange is None else list(exchange.tensors())

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
        self.counter.acquire()
        return values

    def backward(self, microbatch: int, gradients: Values) -> Values:
        """Run B: add up the gradients of this process's rows; keys have none."""
        passed = self.input_grad(microbatch, gradients)
        self.weight_grad(microbatch)
        return passed

    def input_grad(self, microbatch: int, gradients: Values) -> Values:
        """Run I: pass back the gradients of what has passed by."""
        if self._accumulated is not None and not self._reorders:
            gradients = self.reorder("gradients", microbatch, gradients)
        return (*gradients, None)

    def weight_grad(self, microbatch: int) -> None:
        """Run W: add up the gradients of rows, or keep them until those of all are exchanged."""
        exchange = self._exchanges.pop(microbatch)
        if self._accumulated is None:
            exchange.accumulate()
        else:
            self._accumulated.add(exchange.summed())
        self.counter.release()

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        super().reset()
        self._exchanges.clear()
        if self._accumulated is not None:
            self._accumulated.clear()
