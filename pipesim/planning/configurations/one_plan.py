"""`Plan`, one configuration with its costs, schedule, graph and timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.megatron import megatron_flags
from pipesim.planning.configurations.plan_texts import plan_html
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.planning.configurations.torchtitan import torchtitan_toml
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.cost_warnings import warn_of_costs
from pipesim.simulation.simulate import predict_timeline, warn_of_memory_limit
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path
from pipesim.utils.units import format_bytes, format_time


@dataclass(frozen=True, repr=False)
class Plan:
    """One configuration with its costs, schedule, graph and timeline, each built on demand.

    Attributes
    ----------
    problem
        Model, cluster and batch.
    evaluation
        Configuration, step and memory.

    Raises
    ------
    TypeError
        For missing arguments. `Plans.plan` makes a plan; values are not checked here.

    See Also
    --------
    pipesim.Plans.plan : Return the plan of a rank or of any configuration.
    pipesim.PlanChoice : The settings of a configuration.

    Examples
    --------
    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
    >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
    >>> plans.best.graph
    <TaskGraph 1f1b: 12 tasks, 2 replicas, 2 devices, 1 stages, 2 micro-batches, recompute=never>
    >>> plans.best.timeline.fits
    True
    """

    problem: PlanProblem
    evaluation: Evaluation

    @property
    def choice(self) -> PlanChoice:
        """The configuration."""
        return self.evaluation.choice

    @property
    def step(self) -> float:
        """Seconds of a step; simulated now if the search did not."""
        step = self.evaluation.step
        return self.timeline.makespan if math.isnan(step) else step

    @cached_property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return self.problem.costs(self.choice)

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the operations of each device."""
        return self.problem.schedule(self.choice, self.costs)

    @cached_property
    def graph(self) -> TaskGraph:
        """Task graph of all replicas."""
        return self.problem.graph(self.choice, self.schedule, self.costs)

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated step of all replicas; ``fits`` is None for layers without bytes."""
        limits = self.problem.limits(self.choice)
        timeline = replace(predict_timeline(self.graph, self.costs), limits=limits)
        warn_of_costs(self.graph, self.costs, stacklevel=4)
        warn_of_memory_limit(timeline, stacklevel=4)
        return timeline

    def to_megatron(self) -> str:
        """Return the flags of Megatron-LM for this configuration, quoted for a shell.

        They are those of Megatron-LM 0.20.0: parallel sizes, order of ranks, stages and their
        layers, batch sizes, recompute, distributed optimizer and Megatron-FSDP. ``shlex.split``
        makes them a list. Replicas follow from the number of processes. Sizes of the model, kernels
        and the optimizer's settings are not among them. ``offload="all"`` of a model with experts
        is the offload of the inputs of all modules, which are nearly all activations.

        Returns
        -------
        str
            Flags in one line, quoted for a shell.

        Examples
        --------
        >>> import pipesim as ps
        >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
        >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
        >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
        >>> plans.best.to_megatron().split(" --")[-2:]
        ['micro-batch-size 1', 'global-batch-size 4']
        """
        has_experts = bool(getattr(self.problem.model, "n_experts", 0))
        problem = self.problem
        return megatron_flags(
            self.choice, problem.global_batch, problem.layout, has_experts=has_experts
        )

    def to_torchtitan(self, schedule_csv: Path | str | None = None) -> str:
        """Return the settings of torchtitan 0.2.2 for this configuration, as TOML.

        Tables are ``training``, ``parallelism`` and ``activation_checkpoint``; add those of the
        model, its data and optimizer. Layers have the names of torchtitan's Llama. Comments name
        differences between the plan and torchtitan, such as FSDP in place of a distributed
        optimizer.

        Parameters
        ----------
        schedule_csv
            File to write the order to, as torch's CSV, which the settings then name. It needs no
            schedule of torch, but stages in loops or in a V. None for a schedule of torch.

        Returns
        -------
        str
            Tables of TOML, with comments.

        Examples
        --------
        >>> import pipesim as ps
        >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
        >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
        >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
        >>> plans.best.to_torchtitan().splitlines()[:3]
        ['[training]', 'local_batch_size = 1', 'global_batch_size = 4']
        """
        problem, path = self.problem, ""
        if schedule_csv is not None:
            path = str(check_path("schedule_csv", schedule_csv, "write"))
            if not path.endswith(".csv") or self.choice.pipeline_parallel == 1:
                raise ArgumentError(
                    "schedule_csv must end in .csv, and be of a pipeline of at least 2 devices, got"
                    f" {path!r} and pipeline_parallel={self.choice.pipeline_parallel}"
                )
        text = torchtitan_toml(
            self.choice, problem.model, problem.global_batch, problem.layout, path
        )
        if path:
            self.schedule.save(path)
        return text

    def __repr__(self) -> str:
        step, memory = self.evaluation.step, self.evaluation.memory
        results = "" if math.isnan(step) else f": {format_time(step)} a step"
        results += "" if math.isnan(memory) else f", {format_bytes(memory)} on the fullest device"
        return f"<Plan {self.choice}{results}>"

    def _repr_html_(self) -> str:
        return plan_html(self)
