"""`Plans`, the configurations of a plan, ranked or ruled out; and `Plan`, one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_flag
from pipesim.graph.graph import TaskGraph
from pipesim.models.transformer import Transformer
from pipesim.planning.choice import Evaluation, PlanChoice
from pipesim.planning.explanation import Explanation, explanation, memory_parts, step_parts
from pipesim.planning.megatron import megatron_flags
from pipesim.planning.plan_tables import (
    front_ranks,
    plan_html,
    plans_html,
    plans_line,
    plans_text,
    ranked_table,
    ruled_out_table,
    short_names,
)
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import checked_choice, named_choice
from pipesim.planning.torchtitan import torchtitan_toml
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline, warn_of_costs, warn_of_memory_limit
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_whole
from pipesim.utils.texts import format_bytes, format_time

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Plan:
    """One configuration with its costs, schedule, graph and timeline, each built on demand.

    Attributes
    ----------
    problem
        Model, cluster and batch.
    evaluation
        Configuration, step and memory.

    Examples
    --------
    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
    >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
    >>> plans.best.graph
    <TaskGraph 1f1b: 12 tasks, 2 replicas, 2 devices, 1 stages, 2 micro-batches, recompute=never>
    >>> plans.best.timeline.memory.fits
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
        warn_of_costs(self.graph, self.costs)
        warn_of_memory_limit(timeline)
        return timeline

    def to_megatron(self) -> str:
        """Return the flags of Megatron-LM for this configuration, quoted for a shell.

        They are those of Megatron-LM 0.20.0: parallel sizes, order of ranks, stages and their
        layers, batch sizes, precision, bytes of gradients and of the optimizer's state, recompute,
        distributed optimizer and its overlap, Megatron-FSDP, and of experts the dispatcher and
        kernels. ``shlex.split`` makes them a list. Replicas follow from the number of processes.
        Sizes of the model, its other kernels and the optimizer's rates are not among them.
        Gradients of 2 bytes are ``--grad-reduce-in-bf16``: by default Megatron-LM sums in 4. Bytes
        of the model that no flags make are refused.
        ``offload="all"`` of a model with experts is the offload of the inputs of all modules, which
        are nearly all activations.

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
        problem = self.problem
        _check_writable(problem, "Megatron-LM")
        return megatron_flags(
            self.choice, problem.global_batch, problem.layout, problem.exchange(self.choice),
            problem.model if isinstance(problem.model, Transformer) else None, problem.parallel,
        )  # fmt: skip

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
        """
        problem, path = self.problem, ""
        _check_writable(problem, "torchtitan")
        if schedule_csv is not None:
            path = str(check_path("schedule_csv", schedule_csv, "write"))
            if not path.endswith(".csv") or self.choice.pipeline_parallel == 1:
                raise ArgumentError(
                    "schedule_csv must end in .csv, and be of a pipeline of at least 2 devices, got"
                    f" {path!r} and pipeline_parallel={self.choice.pipeline_parallel}"
                )
        text = torchtitan_toml(
            self.choice, problem.model, problem.global_batch, problem.layout, path,
            problem.parallel.precision, problem.framework,
        )  # fmt: skip
        if path:
            self.schedule.save(path)
        return text

    def __repr__(self) -> str:
        step, memory, high = self.evaluation.step, self.evaluation.memory, self.evaluation.high
        results = "" if math.isnan(step) else f": {format_time(step)} a step"
        if not math.isnan(noisy := self.evaluation.noisy_step):
            results += f", {format_time(noisy)} with noise"
        if not math.isnan(high):
            results += f" ({format_time(self.evaluation.low)} to {format_time(high)})"
        results += "" if math.isnan(memory) else f", {format_bytes(memory)} on the fullest device"
        return f"<Plan {self.choice}{results}>"

    def _repr_html_(self) -> str:
        return plan_html(self)


@dataclass(frozen=True, repr=False, eq=False)
class Plans:
    """Configurations of a plan: the ranked ones first, then those that were ruled out.

    ``plans[k]`` is the `Plan` of rank ``k``; a loop over the plans begins with the best, and
    ``len(plans)`` is the number of ranks.

    Attributes
    ----------
    problem
        Model, cluster and batch.
    evaluations
        One a configuration: simulated ones by rank, then the others.
    seconds
        Seconds of the search.
    complete
        Whether the search ended; False if it was interrupted.
    percentile
        Percentile of noisy steps by which the best are ranked; None without noise.
    notes
        Assumptions and limits to show beside the results, a sentence each.

    Examples
    --------
    Two layers on two GPUs: replicas take ``2 * 6`` seconds, a pipeline ``(4 + 1) * 3``.

    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
    >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
    >>> plans.best
    <Plan tp1 pp1 dp2, 1f1b, 2 micro-batches of 1: 12.0 s a step, 18.0 B on the fullest device>
    >>> plans.table["step"].round(3).tolist()
    [12.0, 12.0, 15.0]
    """

    problem: PlanProblem
    evaluations: tuple[Evaluation, ...]
    seconds: float = math.nan
    complete: bool = True
    percentile: float | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def ranked(self) -> tuple[Evaluation, ...]:
        """Simulated configurations that fit, best first."""
        return tuple(x for x in self.evaluations if x.status == "simulated")

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a simulated configuration that fits, the best first, indexed by ``rank``.

        Columns:

        - ``step`` (s), and with noise ``noisy_step``, the percentile of noisy steps (s); columns
          of the next two lines are then those of it, where it is known;
        - ``low`` and ``high``, the ends of the interval of 80 % (s; NaN where `Timeline.interval`
          has only a band, unless it ranks);
        - ``tokens_per_second`` of the whole cluster, ``mfu`` (0..1) of the GPUs in use; NaN if the
          model's tokens or FLOPs are unknown;
        - ``bubble`` (0..1), idle share of all devices;
        - ``memory``: bytes of the fullest device, the allocator's reserve included; ``room``, the
          share of its limit that is left (0..1; NaN for unlike limits);
        - ``gap``: step over its lower bound, minus 1;
        - the settings of the configuration, as in `PlanChoice`, and its ``status``.
        """
        return ranked_table(self.problem, self.ranked, noisy=self.percentile is not None)

    @cached_property
    def ruled_out(self) -> pd.DataFrame:
        """One row a configuration that is not ranked: ``status``, ``reason``, and its settings.

        ``bound`` is a lower bound on its step (s). ``memory`` is in bytes of the fullest device, a
        lower bound if the configuration was not simulated. Both are NaN if it is invalid.
        """
        return ruled_out_table([x for x in self.evaluations if x.status != "simulated"])

    @cached_property
    def front(self) -> pd.DataFrame:
        """Rows of `table` of which none is better in time or memory and as good in the other.

        They are in ascending order of steps, of noisy steps with noise.
        """
        return self.table.iloc[front_ranks(self._seconds, self.table["memory"].tolist())]

    @property
    def counts(self) -> dict[str, int]:
        """Number of configurations with each status."""
        statuses = ("simulated", "cannot win", "does not fit", "invalid")
        return {status: sum(x.status == status for x in self.evaluations) for status in statuses}

    @property
    def best(self) -> Plan:
        """The configuration of rank 0; raises `ArgumentError` if none is ranked."""
        return self.plan(0)

    def plan(self, which: int | PlanChoice) -> Plan:
        """Return the configuration with a rank, 0 for the best, or any that `choice` returns.

        Configurations that were not simulated are simulated when their timeline is used.

        Parameters
        ----------
        which
            Rank, from 0, or a configuration, ranked or not.

        Returns
        -------
        Plan
            The configuration with its costs, schedule, graph and timeline.
        """
        if isinstance(which, PlanChoice):
            return self._named(which)
        if not self.ranked:
            raise ArgumentError(f"no configuration is ranked: {plans_line(self)}; see ruled_out")
        is_rank = isinstance(which, Integral) and not isinstance(which, bool)
        rank = int(which) if is_rank else -1
        if not 0 <= rank < len(self.ranked):
            raise ArgumentError(
                f"rank must be a whole number from 0 to {len(self.ranked) - 1}, or a "
                f"configuration such as plans.choice(tensor_parallel=2), got {which!r:.60}"
            )
        return self._plans.setdefault(rank, Plan(self.problem, self.ranked[rank]))

    def choice(self, **settings: Any) -> PlanChoice:
        """Return a configuration by its settings, for `plan` and `explain`, searched or not.

        Parameters
        ----------
        **settings
            Fields of `PlanChoice`. By default sizes are 1, and nothing is recomputed, sharded or
            split along the sequence; the schedule is 1F1B. Replicas and micro-batches follow from
            the cluster and the batch. ``layers_per_stage`` may be a list, a number of even stages
            or a layout string of Megatron; by default stages are balanced.

        Returns
        -------
        PlanChoice
            All settings of the configuration.
        """
        return named_choice(self.problem, settings)

    def plot(self, *, ax: Axes | None = None, labels: bool = True, **options: Any) -> Axes:
        """Draw memory over time of all ranked configurations.

        The front is labelled with parallel sizes, chunks and recompute, and with further settings
        where these are equal.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.
        labels
            Whether to label configurations of the front.
        **options
            ``legend``, ``height``, ``unit``, ``title`` and ``memory_limit`` (bytes) of
            `pipesim.plot.plan_front`.

        Returns
        -------
        matplotlib.axes.Axes
            Seconds of a step on the x axis, bytes of the fullest device on the y axis, in suitable
            units.
        """
        from pipesim.plot.charts import plan_front

        table = self.table.assign(step=self._seconds).dropna(subset="step")
        ranks = list(map(int, self.front.index))
        shown = short_names([self.ranked[rank].choice for rank in ranks])
        names = dict(zip(ranks, shown, strict=True))
        limit = self.problem.memory_limit
        least = self.problem.cluster.memory if limit is None else limit
        options = {"memory_limit": least} | options
        names = names if check_flag("labels", labels) else {}
        return plan_front(table, ranks, names, ax=ax, **options)

    def explain(
        self, first: int | Plan | PlanChoice = 0, second: int | Plan | PlanChoice = 1
    ) -> Explanation:
        """Return why the step of one configuration differs from that of another.

        Parameters
        ----------
        first, second
            Ranks, plans, or any configurations; by default the best and the second.

        Returns
        -------
        Explanation
            Parts of the difference in seconds, and of the memory in bytes; as text when printed.

        Examples
        --------
        >>> import pipesim as ps
        >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
        >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
        >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
        >>> plans.explain(plans.choice(), plans.choice(pipeline_parallel=2))
        <Explanation: A takes 12.0 s a step: 3.00 s less than B with 15.0 s, or 20.0%.>
        """
        plans = [x if isinstance(x, Plan) else self.plan(x) for x in (first, second)]
        seconds = [step_parts(plan.timeline, plan.problem.rebuilt(plan.choice)) for plan in plans]
        return explanation(
            (plans[0].choice, plans[1].choice),
            (seconds[0], seconds[1]),
            (memory_parts(plans[0].timeline), memory_parts(plans[1].timeline)),
            is_tied=bool(getattr(self.problem.model, "tied_embeddings", False)),
        )

    def to_megatron(self) -> str:
        """Return the flags of Megatron-LM for the best configuration.

        Returns
        -------
        str
            Flags in one line, quoted for a shell.
        """
        return self.best.to_megatron()

    def to_torchtitan(self, schedule_csv: Path | str | None = None) -> str:
        """Return torchtitan's settings of the best configuration, as TOML.

        Parameters
        ----------
        schedule_csv
            File to write the order to; None (the default) for a schedule of torch.

        Returns
        -------
        str
            Tables ``training``, ``parallelism`` and ``activation_checkpoint``.
        """
        return self.best.to_torchtitan(schedule_csv)

    def to_csv(self, path: Path | str) -> None:
        """Write `table` and then `ruled_out` to one CSV file, whole or not at all.

        Units are those of the tables; ``rank`` is empty for configurations that are ruled out.

        Parameters
        ----------
        path
            File to write. A file of that name is replaced.
        """
        from pipesim.utils.packages import pandas as pd

        path = check_path("path", path, "write")
        tables = [self.table.reset_index(), self.ruled_out]
        if len(self.ranked):
            tables[0]["bound"] = [row.bound for row in self.ranked]
        whole = pd.concat([table for table in tables if len(table)] or tables)
        if "rank" in whole:
            whole["rank"] = whole["rank"].astype("Int64")
        write_whole(path, lambda file: whole.to_csv(file, index=False))

    def summary(self, n_best: int = 5) -> str:
        """Return the counts of configurations, and a table of the best few, as text.

        Parameters
        ----------
        n_best
            Number of configurations in the table; 5 by default.

        Returns
        -------
        str
            A line of counts, and a row and its configuration for each of the best.

        Examples
        --------
        >>> import pipesim as ps
        >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
        >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
        >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
        >>> print(plans.summary(n_best=1))
        3 configurations: 3 simulated, 0 pruned by bounds, ...
        rank    step ...
              configuration
        0     12.0 s ...
              tp1 pp1 dp2, 1f1b, 2 micro-batches of 1
        """
        return plans_text(self, n_best)

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        """Plans by rank, so that what they build is built once."""
        return {}

    @property
    def _seconds(self) -> list[float]:
        """Seconds of each ranked configuration, of noisy steps with noise."""
        column = "step" if self.percentile is None else "noisy_step"
        seconds: list[float] = self.table[column].tolist()
        return seconds

    def _named(self, choice: PlanChoice) -> Plan:
        """Return the plan of a configuration, ranked or not."""
        choice = checked_choice(self.problem, choice)
        for rank, row in enumerate(self.ranked):
            if row.choice == choice:
                return self.plan(rank)
        rows = [row for row in self.evaluations if row.choice == choice]
        new = Evaluation(choice, math.nan, math.nan, math.nan, math.nan, "simulated")
        return Plan(self.problem, rows[0] if rows else new)

    def __len__(self) -> int:
        return len(self.ranked)

    def __getitem__(self, rank: int) -> Plan:
        return self.plan(rank)

    def __iter__(self) -> Iterator[Plan]:
        return (self.plan(rank) for rank in range(len(self.ranked)))

    def __repr__(self) -> str:
        return f"<Plans: {plans_line(self)}>"

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return plans_html(self)


def _check_writable(problem: PlanProblem, trainer: str) -> None:
    """Refuse encoders and lengths, which the settings of a trainer do not have."""
    extra = "encoders" if problem.encoders else "lengths" if problem.lengths is not None else ""
    if extra:
        raise ArgumentError(
            f"the settings of {trainer} that a plan writes are those of one model and of sequences "
            f"of its length; for a plan with {extra} take the numbers of plan.choice"
        )
