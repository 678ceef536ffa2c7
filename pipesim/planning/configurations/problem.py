"""`PlanProblem`: model, cluster and batch of a plan, and the costs and graph of any choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.planning.cluster import Cluster
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.scheduling.placement import Layout
from pipesim.scheduling.registry import schedule as named_schedule
from pipesim.scheduling.schedule import Schedule

__all__ = ["PlanProblem"]


@dataclass(frozen=True)
class PlanProblem:
    """Model, cluster and batch of a plan.

    Attributes
    ----------
    model
        Sizes of a transformer, or measured layers.
    cluster
        GPUs, nodes and network.
    global_batch
        Sequences of a step, of all replicas.
    memory_limit
        Most bytes of each device, as in `pipesim.simulate`; None if unknown.
    flash_attention, scatter_gather, fused_loss
        As in `pipesim.models.tensor_parallel.Shard`.
    layout
        Order of the devices of replicas, as in `pipesim.lower`.
    """

    model: Transformer | Layers
    cluster: Cluster
    global_batch: int
    memory_limit: float | None = None
    flash_attention: bool = True
    scatter_gather: bool = False
    fused_loss: bool = False
    layout: Layout = "stage_major"

    def costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of the stages of a choice."""
        network = self.cluster.network(gpus_per_device=choice.tensor_parallel)
        if isinstance(self.model, Layers):
            return self.model.costs(choice.layers_per_stage, network=network)
        return self.model.costs(
            choice.layers_per_stage,
            microbatch_size=choice.microbatch_size,
            gpu=self.cluster.gpu,
            tensor_parallel=choice.tensor_parallel,
            sequence_parallel=choice.sequence_parallel,
            recompute=choice.recompute,  # type: ignore[arg-type]  # one of `RECOMPUTE`
            flash_attention=self.flash_attention,
            scatter_gather=self.scatter_gather,
            fused_loss=self.fused_loss,
            network=network,
        )

    def schedule(self, choice: PlanChoice, costs: Costs) -> Schedule:
        """Return the schedule of a choice, ordered for its costs if the schedule takes costs."""
        return named_schedule(
            choice.schedule, choice.pipeline_parallel, choice.n_microbatches, **self.options(choice)
        )

    def options(self, choice: PlanChoice) -> dict[str, Any]:
        """Return the options of the schedule of a choice."""
        return {"n_chunks": choice.n_chunks} if choice.schedule == "interleaved" else {}

    def graph(self, choice: PlanChoice, schedule: Schedule) -> TaskGraph:
        """Return the task graph of all replicas."""
        return lower(
            schedule,
            n_replicas=choice.data_parallel,
            shard_optimizer=choice.shard_optimizer,
            layout=self.layout,
        )

    def limits(self, choice: PlanChoice) -> float | Sequence[float] | None:
        """Return the most bytes of each device of a choice, for `pipesim.simulate`."""
        return self.memory_limit
