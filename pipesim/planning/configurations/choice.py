"""`PlanChoice`, one configuration of a training run, and `Evaluation`, its step and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from pipesim.lowering.parameter_shards import ShardParameters

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
    context_parallel
        Groups of ``tensor_parallel`` GPUs that share each sequence; together they are one device.
    expert_parallel
        GPUs among which the experts of a layer are divided; those of several replicas.
    shard_parameters
        Whether replicas share parameters, as in `pipesim.lower`: ``"none"``, ``"every"``,
        ``"step"``, or the number of stages whose parameters a device keeps.
    offload
        Activations that wait in host memory, as in `pipesim.lower`: ``"none"``, ``"all"``, a share
        such as ``"0.5"``, or ``"longest:0.5"``.
    n_slices
        Slices of each sequence; 1 for whole sequences.

    Raises
    ------
    TypeError
        For missing arguments. Values are not checked here, but by `Plans.plan`.

    See Also
    --------
    pipesim.Plans.choice : Return a configuration by some of its settings, checked.
    pipesim.plan : Search configurations; ``where`` gets them.

    Examples
    --------
    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
    >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
    >>> choice = plans.choice(pipeline_parallel=2)
    >>> print(choice)
    tp1 pp2 dp1, 1f1b, 4 micro-batches of 1
    >>> choice.n_gpus, choice.n_stages
    (2, 2)
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
    context_parallel: int = 1
    expert_parallel: int = 1
    shard_parameters: ShardParameters = "none"
    offload: str = "none"
    n_slices: int = 1

    @property
    def gpus_per_device(self) -> int:
        """GPUs of a device of the pipeline."""
        return self.tensor_parallel * self.context_parallel

    @property
    def shard_options(self) -> dict[str, Any]:
        """Arguments of `Transformer.shard` that say what one GPU has and runs."""
        return {
            "microbatch_size": self.microbatch_size,
            "tensor_parallel": self.tensor_parallel,
            "sequence_parallel": self.sequence_parallel,
            "recompute": self.recompute,
            "context_parallel": self.context_parallel,
            "expert_parallel": self.expert_parallel,
        }

    @property
    def n_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus_per_device * self.pipeline_parallel * self.data_parallel

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel * self.n_chunks

    @property
    def n_scheduled(self) -> int:
        """Micro-batches of the schedule of a replica: slices, if sequences are cut into them."""
        return self.n_microbatches * self.n_slices

    @property
    def shards_parameters(self) -> bool:
        """Whether replicas share parameters, gradients and optimizer."""
        return self.shard_parameters != "none"

    @property
    def optimizer_shares(self) -> int:
        """Replicas that share the optimizer; 1 if each has all of it."""
        return self.data_parallel if self.shard_optimizer or self.shards_parameters else 1

    @property
    def layout_matters(self) -> bool:
        """Whether GPUs are in another order with the stages of a replica in a row."""
        return self.pipeline_parallel > 1 and self.data_parallel > 1

    def __str__(self) -> str:
        parts = [
            sizes_text(self),
            self.schedule
            + (f" x{self.n_chunks}" if self.n_chunks > 1 else "")
            + " for costs" * self.ordered_for_costs,
            microbatches_text(self),
        ]
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        parts += ["distributed optimizer"] * self.shard_optimizer
        parts += [sharding_text(self)] * self.shards_parameters
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += [offload_text(self)] * (self.offload != "none")
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


def invalid(choice: PlanChoice, reason: str, status: Status = "invalid") -> Evaluation:
    """Return a configuration that is ruled out before anything is known of it."""
    nan = math.nan
    return Evaluation(choice, nan, nan, nan, nan, status, reason)


def partial_choice(**settings: Any) -> PlanChoice:
    """Return some settings of many configurations; 0 and "" stand for values that do not matter."""
    none: dict[str, Any] = {
        **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "data_parallel"), 0),
        **dict.fromkeys(("microbatch_size", "n_microbatches", "n_chunks", "n_slices"), 0),
        **dict.fromkeys(("context_parallel", "expert_parallel"), 0),
        **dict.fromkeys(("schedule", "recompute", "shard_parameters", "offload"), ""),
        "shard_optimizer": False, "sequence_parallel": False, "layers_per_stage": (),
    }  # fmt: skip
    return PlanChoice(**{**none, **settings})


def with_settings(choice: PlanChoice, **settings: Any) -> PlanChoice:
    """Return a configuration with other settings, as `dataclasses.replace` does.

    It sets all fields at once, since a plan changes tens of thousands of configurations.
    """
    changed = object.__new__(PlanChoice)
    vars(changed).update(vars(choice), **settings)
    return changed


def sizes_text(choice: PlanChoice) -> str:
    """Return the sizes of parallelism, such as "tp8 pp4 dp2"; cp and ep only above 1."""
    context, experts = choice.context_parallel, choice.expert_parallel
    parts = [f"tp{choice.tensor_parallel}", f"cp{context}" * (context > 1)]
    parts += [f"pp{choice.pipeline_parallel}", f"dp{choice.data_parallel}"]
    parts += [f"ep{experts}" * (experts > 1)]
    return " ".join(part for part in parts if part)


def microbatches_text(choice: PlanChoice) -> str:
    """Return number and size of the micro-batches of a replica, such as "8 micro-batches of 1"."""
    word = "micro-batch" if choice.n_microbatches == 1 else "micro-batches"
    return f"{choice.n_microbatches} {word} of {choice.microbatch_size}{slices_text(choice)}"


def slices_text(choice: PlanChoice) -> str:
    """Return the slices of a sequence, such as " in 4 slices"; empty for whole sequences."""
    return f" in {choice.n_slices} slices" if choice.n_slices > 1 else ""


def sharding_text(choice: PlanChoice) -> str:
    """Return how replicas share parameters, such as "parameters gathered for every use"."""
    value = choice.shard_parameters
    texts = {"none": "whole parameters", "every": "parameters gathered for every use",
             "step": "parameters gathered once a step"}  # fmt: skip
    if isinstance(value, str):
        return texts[value]
    return f"parameters of {value} {'stage' if value == 1 else 'stages'} gathered"


def offload_text(choice: PlanChoice) -> str:
    """Return the activations that wait in host memory, such as "offload longest:0.5"."""
    return f"offload {choice.offload}"


def layers_text(sizes: Sequence[int]) -> str:
    """Return the layers of each stage as a sum in order of stages, such as ``"4+14x5+6"``."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return "+".join(f"{n}x{size}" if n > 1 else str(size) for size, n in runs)
