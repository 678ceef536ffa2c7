"""`TrainerSettings`: the configuration that a framework was started with, as pipesim needs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipesim.errors import ArgumentError
from pipesim.framework.framework import BEST_CASE, Framework, GatherParameters
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import GradSyncs
from pipesim.lowering.lower import lower
from pipesim.models.parallel import ExpertExchange
from pipesim.models.precision import Precision
from pipesim.planning.choice import PlanChoice, layers_text
from pipesim.scheduling.placement import Layout, Placement
from pipesim.scheduling.registry import schedule as named_schedule
from pipesim.scheduling.schedule import Schedule


@dataclass(frozen=True, repr=False)
class TrainerSettings:
    """Configuration of a training run that another framework would do.

    `pipesim.read_megatron` and `pipesim.read_torchtitan` make it.

    Attributes
    ----------
    choice
        Parallel sizes, micro-batches, schedule, layers of each stage, recompute and sharding.
        ``choice.layers_per_stage`` is empty if the number of layers is unknown.
    global_batch
        Sequences of a step of all replicas.
    layout
        Order of the devices of replicas, as in `pipesim.lower`.
    grad_sync, gather_parameters
        When replicas reduce gradients and gather parameters, as in `pipesim.lower`.
    framework
        What the framework does besides, as its flags or settings say.
    flash_attention
        Whether the attention core is one fused kernel.
    precision
        Number format of linear products of layers.
    mtp_layers
        Layers of multi-token prediction of the model, for `pipesim.Transformer`.
    stage_layout
        Layout of Megatron if stages before the last have multi-token prediction or losses; empty if
        ``choice.layers_per_stage`` says all.
    schedule_csv
        File with the order of the pipeline; empty for the named schedule of ``choice``.
    bytes_per_gradient, optimizer_bytes_per_parameter
        Bytes of a summed gradient and of the optimizer's state, for `pipesim.Transformer`.
        Megatron-LM sums in 4 bytes with bfloat16, unless ``--grad-reduce-in-bf16`` is given.
        Settings of torchtitan do not give them: they are then those of a `pipesim.Transformer`.
    expert_exchange
        How tokens reach their experts, as in `pipesim.Transformer.costs`.
    ignored
        Flags or settings that do not change the tasks, or that are not known. Sizes of the model
        are among them: give them to `pipesim.Transformer`.

    Examples
    --------
    >>> import pipesim as ps
    >>> settings = ps.read_megatron(
    ...     "--pipeline-model-parallel-size 4 --num-layers 32 --micro-batch-size 1 "
    ...     "--global-batch-size 8 --num-layers-per-virtual-pipeline-stage 4 --bf16"
    ... )
    >>> settings
    <TrainerSettings tp1 pp4 dp1, interleaved_1f1b x2, 8 micro-batches of 1; 4(x8) layers by stage>
    >>> float(ps.simulate(settings.graph, ps.Costs(1, 2)).bubble_fraction)
    0.15789473684210525
    >>> model = ps.Transformer.preset("llama3_8b", bytes_per_gradient=settings.bytes_per_gradient)
    >>> model.costs(gpu="h100_sxm", **settings.cost_options).per_stage("forward", 8).shape
    (8,)
    """

    choice: PlanChoice
    global_batch: int
    layout: Layout = "stage_major"
    grad_sync: GradSyncs = "last"
    gather_parameters: GatherParameters = "after_step"
    framework: Framework = BEST_CASE
    flash_attention: bool = True
    precision: Precision = "bf16"
    mtp_layers: int = 0
    stage_layout: str = ""
    schedule_csv: str = ""
    bytes_per_gradient: float = 2.0
    optimizer_bytes_per_parameter: float = 12.0
    expert_exchange: ExpertExchange = "direct"
    ignored: tuple[str, ...] = ()

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the operations of each device, for `pipesim.lower`; one replica."""
        choice = self.choice
        if self.schedule_csv:
            schedule = Schedule.load(self.schedule_csv)
            counts = (schedule.n_devices, schedule.n_stages, schedule.n_microbatches)
            expected = (choice.pipeline_parallel, choice.n_stages, choice.n_scheduled)
            if counts != expected:
                raise ArgumentError(
                    f"{self.schedule_csv} has {counts[0]} devices, {counts[1]} stages and "
                    f"{counts[2]} micro-batches; the settings have {expected[0]}, {expected[1]} "
                    f"and {expected[2]}"
                )
            return schedule
        return named_schedule(
            choice.schedule, choice.pipeline_parallel, choice.n_scheduled, **choice.options
        )

    @property
    def placement(self) -> Placement:
        """Devices of the stages of one replica."""
        return self.schedule.placement

    @property
    def lower_options(self) -> dict[str, Any]:
        """Options of `pipesim.lower`, without those of experts, which need costs."""
        choice = self.choice
        return {
            "n_replicas": choice.data_parallel,
            "layout": self.layout,
            "shard_optimizer": choice.shard_optimizer,
            "grad_sync": self.grad_sync,
            "gather_parameters": self.gather_parameters,
            "shard_parameters": choice.shard_parameters,
            "offload": choice.offload,
            "framework": self.framework,
        }

    @property
    def cost_options(self) -> dict[str, Any]:
        """Arguments of `pipesim.Transformer.costs` that the settings give, with the layers."""
        choice = self.choice
        return {
            "layers_per_stage": self.stage_layout or choice.layers_per_stage,
            "slices": choice.n_slices,
            "framework": self.framework,
            "flash_attention": self.flash_attention,
            "precision": self.precision,
            "expert_exchange": self.expert_exchange,
            **choice.shard_options,
        }

    @cached_property
    def graph(self) -> TaskGraph:
        """Task graph of all replicas: `schedule`, lowered with `lower_options`."""
        return lower(self.schedule, **self.lower_options)

    def __repr__(self) -> str:
        layers = self.choice.layers_per_stage
        parts = [str(self.choice)]
        if layers and len(set(layers)) == 1:  # the text of a choice has the others
            parts.append(f"{layers_text(layers)} layers by stage")
        parts += [f"layout {self.stage_layout}"] * bool(self.stage_layout)
        parts += [f"order of {self.schedule_csv}"] * bool(self.schedule_csv)
        parts += [f"{len(self.ignored)} ignored"] * bool(self.ignored)
        return f"<TrainerSettings {'; '.join(parts)}>"


def whole_number(name: str, dividend: int, divisor: int, why: str) -> int:
    """Return a quotient; raise `ArgumentError` naming ``name`` and ``why`` if it is not whole."""
    quotient, rest = divmod(dividend, divisor)
    if rest or not quotient:
        raise ArgumentError(f"{name}: {why}; {dividend} is no multiple of {divisor}")
    return quotient


def replicas_of(name: str, n_gpus: int | None, gpus_per_replica: int) -> int:
    """Return the number of replicas on some GPUs; 1 if their number is unknown."""
    if n_gpus is None:
        return 1
    why = f"n_gpus={n_gpus} must be a multiple of the GPUs of a replica"
    return whole_number(name, n_gpus, gpus_per_replica, why)
