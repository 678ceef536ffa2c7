"""`PlanChoice`, one configuration of a training run, and `Evaluation`, its step and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

__all__ = ["Evaluation", "PlanChoice", "Status", "layers_text", "microbatches_text"]

#: Outcome of a configuration.
Status = Literal["simulated", "cannot win", "does not fit", "invalid"]


@dataclass(frozen=True)
class PlanChoice:
    """One configuration of a training run.

    Attributes
    ----------
    tensor_parallel
        GPUs that share each layer; together they are one device of the pipeline.
    pipeline_parallel
        Devices of the pipeline.
    data_parallel
        Replicas of the pipeline.
    microbatch_size
        Sequences of a micro-batch.
    n_microbatches
        Micro-batches of a replica in a step; accumulation steps if ``pipeline_parallel`` is 1.
    schedule
        Name of the schedule.
    n_chunks
        Stages of each device.
    recompute
        Recompute of layers: ``"none"``, ``"selective"`` or ``"full"``.
    shard_optimizer
        Whether each replica updates its share of the parameters, as in ZeRO-1.
    sequence_parallel
        Whether tensors that tensor parallelism leaves whole are split along the sequence.
    layers_per_stage
        Layers of each stage.
    ordered_for_costs
        Whether the schedule orders its tasks for the costs, if it can, and not for equal ones.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    microbatch_size: int
    n_microbatches: int
    schedule: str
    n_chunks: int
    recompute: str
    shard_optimizer: bool
    sequence_parallel: bool
    layers_per_stage: tuple[int, ...]
    ordered_for_costs: bool = False

    @property
    def n_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel * self.n_chunks

    @property
    def layout_matters(self) -> bool:
        """Whether GPUs are in another order with the stages of a replica in a row."""
        return self.pipeline_parallel > 1 and self.data_parallel > 1

    def __str__(self) -> str:
        parts = [
            f"tp{self.tensor_parallel} pp{self.pipeline_parallel} dp{self.data_parallel}",
            self.schedule
            + (f" x{self.n_chunks}" if self.n_chunks > 1 else "")
            + " for costs" * self.ordered_for_costs,
            microbatches_text(self),
        ]
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        parts += ["distributed optimizer"] * self.shard_optimizer
        parts += ["sequence parallel"] * self.sequence_parallel
        if len(set(self.layers_per_stage)) > 1:
            parts.append(f"{layers_text(self.layers_per_stage)} layers")
        return ", ".join(parts)


class Evaluation(NamedTuple):
    """Step and memory of one configuration, or the reason why it has none.

    Attributes
    ----------
    choice
        The configuration.
    step
        Seconds of a step as `pipesim.simulate` returns them for the whole cluster; NaN unless
        simulated.
    bound
        Lower bound on ``step`` (s); NaN for an invalid configuration.
    memory
        Bytes of the fullest device, the allocator's reserve included. A lower bound if the
        configuration was not simulated; NaN if it is invalid.
    bubble
        Idle share of all devices (0..1); NaN unless simulated.
    status
        ``"simulated"``; ``"cannot win"``: its bounds show that it is neither among the best nor on
        the front of time and memory; ``"does not fit"`` in memory; or ``"invalid"``.
    reason
        Reason of the status in words; empty if simulated.
    noisy_step
        Percentile of the seconds of noisy steps; NaN without noise.
    """

    choice: PlanChoice
    step: float
    bound: float
    memory: float
    bubble: float
    status: Status
    reason: str = ""
    noisy_step: float = float("nan")


def microbatches_text(choice: PlanChoice) -> str:
    """Return number and size of the micro-batches of a replica, such as "8 micro-batches of 1"."""
    word = "micro-batch" if choice.n_microbatches == 1 else "micro-batches"
    return f"{choice.n_microbatches} {word} of {choice.microbatch_size}"


def layers_text(sizes: Sequence[int]) -> str:
    """Return the layers of each stage as a sum in order of stages, such as ``"4+14x5+6"``."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return "+".join(f"{n}x{size}" if n > 1 else str(size) for size, n in runs)
