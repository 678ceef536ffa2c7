"""A configuration from its settings, checked as those of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from pipesim.costs.layer_split import checked_split
from pipesim.errors import ArgumentError, check_count, check_flag, check_name
from pipesim.planning.configurations.choice import PlanChoice, microbatches_text
from pipesim.planning.configurations.evaluator import Evaluator
from pipesim.planning.configurations.plan_tables import SETTINGS
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.planning.configurations.search_space import SearchSpace

_DEFAULTS: Mapping[str, Any] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "data_parallel": None,
    "microbatch_size": 1,
    "schedule": "1f1b",
    "n_chunks": None,
    "recompute": "none",
    "shard_optimizer": False,
    "sequence_parallel": False,
    "context_parallel": 1,
    "expert_parallel": 1,
    "shard_parameters": "none",
    "offload": "none",
    "n_slices": 1,
}
_COUNTS = (
    "tensor_parallel", "pipeline_parallel", "data_parallel", "microbatch_size", "n_microbatches",
    "n_chunks", "context_parallel", "expert_parallel", "n_slices",
)  # fmt: skip


def named_choice(problem: PlanProblem, settings: Mapping[str, Any]) -> PlanChoice:
    """Return the configuration of settings; see `Plans.choice`."""
    for name in settings:
        check_name("setting of a configuration", name, SETTINGS)
    single = {**_DEFAULTS, **settings}
    n_microbatches, layers = (single.pop(x, None) for x in ("n_microbatches", "layers_per_stage"))
    ordered = check_flag("ordered_for_costs", single.pop("ordered_for_costs", False))
    for name, value in single.items():
        may_be_missing = name in ("data_parallel", "n_chunks")
        is_value = isinstance(value, (str, bool, Real))
        if not is_value and not (value is None and may_be_missing):
            raise ArgumentError(f"{name} must be one value, got {value!r:.60}")
    schedules = single.pop("schedule")
    if "microbatch_size" not in settings and problem.measured_size is not None:
        single["microbatch_size"] = problem.measured_size
    choices, ruled_out = SearchSpace.checked(schedules=schedules, **single).choices(problem)
    if not choices:
        raise ArgumentError(f"no such configuration: {ruled_out[0].reason}")
    if len(choices) > 1:
        raise ArgumentError(f"n_chunks is missing: {schedules} takes any number of chunks")
    choice = replace(choices[0], ordered_for_costs=ordered)
    if ordered and not problem.takes_costs(choice.schedule):
        raise ArgumentError(f"ordered_for_costs=True, but {choice.schedule} takes no costs")
    if n_microbatches is not None and choice.n_microbatches != check_count(
        "n_microbatches", n_microbatches
    ):
        replicas = "replica" if choice.data_parallel == 1 else "replicas"
        raise ArgumentError(
            f"n_microbatches={n_microbatches}, but global_batch={problem.global_batch} on "
            f"{choice.data_parallel} {replicas} is {microbatches_text(choice)}; leave "
            "n_microbatches out"
        )
    return _with_layers(problem, choice, layers)


def _with_layers(problem: PlanProblem, choice: PlanChoice, layers: object) -> PlanChoice:
    """Return a configuration with these layers of each stage; balanced ones for None."""
    if layers is None:
        balanced = Evaluator(problem).with_split(choice)
        if balanced is None:
            raise ArgumentError(
                f"{problem.n_layers} layers are too few for {choice.n_stages} stages"
            )
        return balanced
    name = "layers_per_stage"
    sizes = checked_split(layers, problem.n_layers, name, ends_may_be_empty=True)
    if len(sizes) != choice.n_stages:
        raise ArgumentError(
            f"{name} has {len(sizes)} stages; pipeline_parallel={choice.pipeline_parallel} and "
            f"n_chunks={choice.n_chunks} make {choice.n_stages}"
        )
    return replace(choice, layers_per_stage=sizes)


def checked_choice(problem: PlanProblem, choice: PlanChoice) -> PlanChoice:
    """Return a configuration without settings that do not apply, such as sharing by one replica."""
    settings = {name: getattr(choice, name) for name in SETTINGS}
    for name in _COUNTS:
        check_count(name, settings[name])
    batch = choice.data_parallel * choice.n_microbatches * choice.microbatch_size
    if batch != problem.global_batch:
        raise ArgumentError(
            f"the configuration has {choice.data_parallel} replicas of {choice.n_microbatches} "
            f"micro-batches of {choice.microbatch_size} sequences, which are {batch}; the "
            f"plan's global_batch is {problem.global_batch}"
        )
    if choice.n_gpus != problem.cluster.n_gpus:
        sizes = [choice.tensor_parallel, choice.pipeline_parallel, choice.data_parallel]
        sizes[1:1] = [choice.context_parallel] * (choice.context_parallel > 1)
        raise ArgumentError(
            f"the configuration has {choice.n_gpus} GPUs ({' x '.join(map(str, sizes))}); the "
            f"plan's cluster has {problem.cluster.n_gpus}, and all are used"
        )
    return named_choice(problem, settings)
