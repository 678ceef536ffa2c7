"""`ForwardRunner`: runs a forward, and runs it again if a partition drew numbers without a seed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipeexec.gpipe.call import Call
from pipeexec.gpipe.partition_tasks import PartitionTasks
from pipeexec.gpipe.runtime import Runtime
from pipeexec.stages.random_numbers import next_seed, use_seed


class ForwardRunner:
    """Runs the forwards of a module.

    With several micro-batches, each partition that draws random numbers gets a seed for each
    micro-batch. Whether a partition draws is known after its first forward. If the generator has
    moved in a forward, a partition drew without a seed; the forward is then run a second time,
    with seeds for all partitions. Recomputes would draw other numbers otherwise.
    """

    def __init__(self) -> None:
        # Whether other code draws from the process's generator while a forward runs: a generator
        # that moved then says nothing about partitions.
        self._others_draw = False

    def run(
        self,
        runtime: Runtime,
        stream: str,
        inputs: tuple[Tensor, ...],
        microbatches: Sequence[tuple[Tensor, ...]],
        recomputed: Sequence[bool],
        tracked: Sequence[int],
        batch_norms: Sequence[DeferredBatchNorm],
        *,
        atomic: bool,
    ) -> tuple[Call, bool, tuple[Tensor, ...]]:
        """Run a forward; return its call, whether the output is one tensor, and the outputs.

        Parameters
        ----------
        runtime, stream
            Stages and devices, and the name of the stream of each device that computes.
        inputs, microbatches
            Tensors of the mini-batch, and of each micro-batch.
        recomputed
            For each micro-batch, whether it is recomputed.
        tracked
            Partitions that have a backward.
        batch_norms
            Their running statistics are restored if the forward fails.
        atomic
            Whether the input is one tensor, not a tuple.
        """
        several = len(microbatches) > 1
        seed = next_seed() if several and runtime.draws_random(unknown=True) else None
        repeats = several and bool(tracked) and any(recomputed) and not self._others_draw
        states = runtime.random_states() if repeats else None
        call = Call(PartitionTasks(runtime, recomputed, seed, tracked), stream)
        try:
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
        except BaseException:
            for norm in batch_norms:  # early partitions may have run the whole mini-batch
                norm.undo()
            raise
        if states is not None and runtime.restore_random_states(states):
            call.wait()
            buffers = call.tasks.first_buffers()
            call.forget()
            seed = next_seed()
            call = Call(PartitionTasks(runtime, recomputed, seed, tracked, buffers), stream)
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
            self._others_draw = not runtime.draws_random(unknown=False)  # no partition had drawn
        if seed is not None and runtime.draws_random(unknown=False):
            use_seed()
        return call, is_atomic, outputs
