"""A sharded embedding as a pipeline stage: its exchanges and lookups, task by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from pipeexec.devices.device import Values
from pipeexec.devices.thread_settings import ContextFactory
from pipeexec.distributed.signatures import Entry, Signature
from pipeexec.embedding.key_exchange import Exchange
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.nesting import Arguments
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.module_call import LossCall, WeightVersions
from pipesim.errors import ArgumentError, ExecutionError, check_type
from pipesim.utils.checks import checked_names


@checked_names
class EmbeddingStage(nn.Module):
    """A stage that looks up its last input, and passes on the others in front of the vectors.

    Dense features thus go through the pipeline together with the keys: ``(dense, keys)`` becomes
    ``(dense, vectors)``. Lower the graph with ``sharded=[stage]``.

    Parameters
    ----------
    embedding
        The embedding, over the processes that have the stage: one for each replica of the pipeline.

    See Also
    --------
    pipeexec.ShardedEmbedding : The embedding.
    pipesim.lower : Its ``sharded`` names such stages.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> embedding = px.ShardedEmbedding(8, 4)
    >>> stage = px.EmbeddingStage(embedding)
    >>> dense, vectors = stage(torch.ones(2, 3), torch.tensor([1, 5]))
    >>> dense.shape, vectors.shape
    (torch.Size([2, 3]), torch.Size([2, 4]))
    """

    def __init__(self, embedding: ShardedEmbedding) -> None:
        super().__init__()
        self.embedding = check_type("embedding", embedding, ShardedEmbedding)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the other values, if any, and the vectors.

        Parameters
        ----------
        *values
            Tensors of the stage; the last one has the keys, as for `pipeexec.ShardedEmbedding`.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The vectors, or the other values and the vectors.
        """
        *others, keys = values
        vectors = self.embedding(keys)
        return (*others, vectors) if others else vectors

    def output_signature(self, inputs: Signature) -> Signature:
        """Return shapes and types of the outputs of `forward`.

        Parameters
        ----------
        inputs
            Shape and type of each input; the last one is that of the keys.

        Returns
        -------
        tuple of Entry
            Shape and type of each output.
        """
        *others, keys = inputs
        bags = self.embedding.combiner is not None
        shape = (*keys.shape[: len(keys.shape) - bags], self.embedding.dim)
        return (*others, Entry(shape, self.embedding.weight.dtype))


def check_embedding(module: nn.Module | None, stage: int, ranks: Sequence[int]) -> None:
    """Raise `ArgumentError` unless a stage is an embedding over the processes of its replicas.

    ``ranks`` are the ranks of the devices of its replicas.
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
            f"{list(ranks)}; give each replica its own process"
        )
    if embedding.n_ranks != len(ranks) or (len(ranks) > 1 and {*embedding.ranks} != {*ranks}):
        raise ArgumentError(
            f"the embedding of stage {stage} is spread over processes {list(embedding.ranks)}, but "
            f"the replicas of the stage are in processes {list(ranks)}; give the embedding a group "
            "of these"
        )


def check_keys(modules: Iterable[nn.Module], microbatches: Sequence[Values]) -> None:
    """Raise `ArgumentError` for keys of a batch that are no rows, before any key is sent.

    Modules are all replicas of the first stage, of which at most one is in this process. Inputs of
    micro-batches of another process are empty.
    """
    own = [values for values in microbatches if values]
    for embedding in (x.embedding for x in modules if isinstance(x, EmbeddingStage)):
        for microbatch, (*_, keys) in enumerate(own):
            assert keys is not None
            try:
                embedding.check(keys)
            except ArgumentError as error:
                raise ArgumentError(f"stage 0, micro-batch {microbatch}: {error}") from error


class ShardedStage:
    """The stage of an `EmbeddingStage`; for each micro-batch it holds an exchange of keys.

    It implements `pipeexec.stages.stage.StageLike`, and the tasks of exchanges besides. Values
    that are not looked up are passed from task to task.

    Parameters
    ----------
    counter
        Counts micro-batches in flight; shared by the stages of a device.
    reorders
        Whether separate tasks group keys, and reorder vectors and gradients.
    accumulates
        Whether gradients of all micro-batches are exchanged together.

    Attributes
    ----------
    sent
        Bytes that the latest exchange sent to other processes.
    """

    is_ddp = False

    def __init__(
        self,
        module: EmbeddingStage,
        index: int,
        counter: ActivationCounter,
        *,
        reorders: bool = False,
        accumulates: bool = False,
    ) -> None:
        self.module: nn.Module = module
        self.index, self.counter = index, counter
        self.is_random: dict[bool, bool] = {}
        self.modifies_input: dict[bool, bool] = {}
        self.loss_fn: LossCall | None = None
        self.arguments: Sequence[Arguments] | None = None
        self.versions: WeightVersions | None = None
        self.meter: ActivationMeter | None = None
        self.embedding, self._reorders = module.embedding, reorders
        self._exchanges: dict[int, Exchange] = {}
        self._accumulated = module.embedding.accumulated_gradients() if accumulates else None
        self.sent = 0

    def dispatch(self, microbatch: int, values: Values) -> Values:
        """Group the keys, the last of the values, by owner; return the others."""
        *others, keys = values
        assert keys is not None
        keeps_keys = self._accumulated is not None
        self._exchanges[microbatch] = self.embedding.dispatch(keys, keeps_keys=keeps_keys)
        return tuple(others)

    def exchange(self, name: str, microbatch: int, values: Values) -> Values:
        """Run one of `pipesim.ops.EXCHANGES`; return the values to pass on.

        Without separate tasks for them, `dispatch` runs before the first exchange, and `reorder`
        after the vectors are received and before the gradients are sent.
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
        """Append the vectors in the order of the keys, or sum the gradients of each key."""
        exchange = self._exchanges[microbatch]
        if name == "vectors":
            return (*values, exchange.combine())
        *others, gradient = values
        if gradient is None:
            raise ExecutionError(
                f"no output depends on the vectors of stage {self.index}, so its rows get no "
                "gradient; let the loss depend on them"
            )
        exchange.sum_gradients(gradient)
        return tuple(others)

    def held_tensors(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that the exchange of a micro-batch holds; none before its first phase.

        Micro-batch -1 stands for the accumulated gradients.
        """
        if microbatch < 0 and self._accumulated is not None:
            return list(self._accumulated.tensors())
        exchange = self._exchanges.get(microbatch)
        return [] if exchange is None else list(exchange.tensors())

    def forward(self, microbatch: int, values: Values, /, *_: object) -> Values:
        """Run F: look up the rows that all processes requested; they draw no random numbers."""
        self._exchanges[microbatch].lookup()
        self.counter.acquire()
        return values

    def recompute(self, microbatch: int, /, *_: object) -> None:
        """Raise: graphs have no R of a sharded stage."""
        raise ExecutionError(
            f"a graph has R of micro-batch {microbatch} of the sharded stage {self.index}, which "
            "keeps no activations; lower the schedule with sharded="
        )

    def backward(self, microbatch: int, gradients: Values, /) -> Values:
        """Run B: add up the gradients of this process's rows; keys have no gradient."""
        input_gradients = self.input_grad(microbatch, gradients)
        self.weight_grad(microbatch)
        return input_gradients

    def input_grad(self, microbatch: int, gradients: Values, /) -> Values:
        """Run I: return the gradients of the values that were passed on."""
        if self._accumulated is not None and not self._reorders:
            gradients = self.reorder("gradients", microbatch, gradients)
        return (*gradients, None)

    def weight_grad(self, microbatch: int, /) -> None:
        """Run W: add up the gradients of rows, or keep them for the exchange of all."""
        exchange = self._exchanges.pop(microbatch)
        if self._accumulated is None:
            exchange.accumulate()
        else:
            self._accumulated.add(exchange.summed())
        self.counter.release()

    def pending_parameters(self, microbatch: int, /) -> set[int] | None:
        """Return None: W makes all gradients."""
        return None

    def begin_step(self, autocast: ContextFactory | None, /) -> None:
        """Do nothing: lookups are not affected by autocast."""

    def end_step(self) -> None:
        """Do nothing: the exchanges of a step are complete."""

    def after_optimizer_step(self, *, zero_grad: bool) -> None:
        """Do nothing: the stage has no versions of weights."""

    def mean_count(self, count: Tensor | float, /) -> Tensor | float:
        """Return the count: the pipeline knows all replicas."""
        return count

    def reset(self) -> None:
        """Drop the micro-batches in flight, after a failure."""
        self._exchanges.clear()
        if self._accumulated is not None:
            self._accumulated.clear()


class ForwardShardedStage(ShardedStage):
    """A sharded embedding whose exchanges end with the vectors."""

    def reorder(self, name: str, microbatch: int, values: Values) -> Values:
        """Append the vectors, and drop the exchange: no gradients follow."""
        outputs = super().reorder(name, microbatch, values)
        del self._exchanges[microbatch]
        self.counter.release()
        return outputs
