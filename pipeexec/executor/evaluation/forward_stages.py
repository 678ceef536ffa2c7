"""Stages of a forward-only graph: they keep nothing for a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeexec.devices.device import Device, Values
from pipeexec.embedding.stage import ShardedStage
from pipeexec.executor.microbatch_loss import MicrobatchLoss
from pipeexec.executor.setup.devices_and_stages import make_stages
from pipeexec.experts.stage import ForwardExpertStage
from pipeexec.stages.activation_bytes import ActivationCounter
from pipeexec.stages.forward_buffers import Buffers
from pipeexec.stages.module_call import Seed
from pipeexec.stages.stage import Stage
from pipeexec.stages.stage_like import StageLike
from pipesim.graph.graph import TaskGraph


class MicrobatchResult(MicrobatchLoss):
    """Compute the losses of an evaluation, or keep the outputs of a prediction.

    Attributes
    ----------
    outputs
        Output of each micro-batch of this process, by number; None in an evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, Any] | None = None

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the loss of a micro-batch; in a prediction, keep its output and return 0."""
        if self.outputs is None:
            return super().__call__(replica, output, microbatch)
        assert self.step is not None
        self.outputs[self.step.inputs.shares.number(replica, microbatch)] = output
        return torch.zeros(())


class _ForwardStage(Stage):
    """A stage whose F runs without gradients."""

    def forward(
        self,
        microbatch: int,
        values: Values,
        seed: Seed,
        recomputed: bool,
        split: bool = False,
        again: Buffers | None = None,
    ) -> Values:
        """Run F; keep nothing."""
        if not torch.is_inference_mode_enabled():  # of this thread, which may be a worker's
            values = tuple(x.clone() if x is not None and x.is_inference() else x for x in values)
        return self.evaluate(microbatch, values, seed)


class _ForwardShardedStage(ShardedStage):
    """A sharded embedding whose exchanges end with the vectors."""

    def reorder(self, name: str, microbatch: int, values: Values) -> Values:
        """Append the vectors, and drop the exchange: no gradients follow."""
        outputs = super().reorder(name, microbatch, values)
        del self._exchanges[microbatch]
        self.counter.release()
        return outputs


def make_forward_stages(
    modules: Sequence[nn.Module],
    graph: TaskGraph,
    devices: Sequence[Device],
    counters: Sequence[ActivationCounter],
    result: MicrobatchResult,
) -> list[StageLike]:
    """Return the stages of all replicas of a forward-only graph, replica after replica.

    DistributedDataParallel is left out, as its forward may wait for other processes.

    Parameters
    ----------
    modules, graph, devices, counters
        As of `make_stages`.
    result
        Takes the outputs of the last stage.
    """
    bare = [m.module if isinstance(m, DistributedDataParallel) else m for m in modules]
    types = _ForwardStage, _ForwardShardedStage, ForwardExpertStage
    return make_stages(bare, graph, devices, counters, result, *types)
