"""`SearchSpace`: the values that a plan may choose for each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_flag, check_list, check_name
from pipesim.graph.offload_values import StageOffload, checked_offload
from pipesim.lowering.parameter_shards import ShardParameters, checked_shard_parameters
from pipesim.models.transformer import RECOMPUTE, Transformer
from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.listing import Listing
from pipesim.planning.configurations.order_facts import (
    order_facts,
    schedule_options,
    takes_slices,
)
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.scheduling.registry import schedule_info


@dataclass(frozen=True)
class SearchSpace:
    """Values of each parameter; None for all sensible ones.

    Attributes are those of `pipesim.plan`, each a tuple.
    """

    tensor_parallel: tuple[int, ...] | None = None
    pipeline_parallel: tuple[int, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    microbatch_size: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    n_chunks: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    shard_optimizer: tuple[bool, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    context_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    shard_parameters: tuple[ShardParameters, ...] | None = None
    offload: tuple[str, ...] | None = None
    n_slices: tuple[int, ...] | None = None

    @classmethod
    def checked(cls, **values: Any) -> SearchSpace:
        """Return the space of values that are fixed, listed, or None."""
        checks = {
            "schedules": _schedule, "recompute": lambda _, x: check_name("recompute", x, RECOMPUTE),
            "shard_optimizer": check_flag, "sequence_parallel": check_flag,
            "shard_parameters": lambda _, x: checked_shard_parameters(x), "offload": _offload,
        }  # fmt: skip
        return cls(
            **{
                name: None if value is None else _listed(name, value, checks.get(name, check_count))
                for name, value in values.items()
            }
        )

    def measured_size(self, problem: PlanProblem) -> int | None:
        """Return the sequences of the micro-batch of measured layers; None for a transformer."""
        if isinstance(problem.model, Transformer):
            return None
        sizes = self.microbatch_size or (1,)
        if len(sizes) > 1:
            raise ArgumentError(
                f"microbatch_size must be one value, got {sizes!r:.60}: layers were measured with "
                "micro-batches of one size; plan once for the measurement of each size"
            )
        return sizes[0]

    def choices(self, problem: PlanProblem) -> tuple[list[PlanChoice], list[Evaluation]]:
        """Return all configurations without their splits, and the combinations that are invalid."""
        listing = Listing(self, problem)
        listing.fill()
        return listing.choices, listing.invalid


def _schedule(_: str, name: object) -> str:
    """Return the name of a schedule that a plan can use."""
    info = schedule_info(name)
    n_slices = 4 if takes_slices(info.name) else 1
    options = schedule_options(info, 2, n_slices)
    counts = ((p, m * n_slices) for p in (2, 4, 1, 3) for m in range(p, 2 * p + 1))
    devices = next((p for p, m in counts if info.allows(p, m, **options)), None)
    if devices is not None:
        order_facts(info.name, devices, 2, n_slices)
    return info.name


def _offload(name: str, value: object) -> str:
    """Return the text of one value of ``offload`` that holds for all stages."""
    if isinstance(value, str) and "/" in value:
        raise ArgumentError(
            f"{name}={value!r:.60} has a value a stage, and a plan has pipelines of several "
            'depths; give values for all stages, such as "longest:0.5"'
        )
    if isinstance(value, (list, tuple, Mapping)):
        raise ArgumentError(f"{name} must be one value or a list of values, got {value!r:.60}")
    checked = checked_offload(value, 1)  # type: ignore[arg-type]  # it checks the type
    assert isinstance(checked, StageOffload)  # for mypy
    return checked.text


def _listed(name: str, value: Any, check: Any) -> tuple[Any, ...]:
    """Return one value, or the values of a list, checked."""
    if isinstance(value, (str, bool, int)) or not isinstance(value, Iterable):
        value = [value]
    values = check_list(name, value, "one value or a list")
    if not values:
        raise ArgumentError(f"{name} is empty; give a value, or None for all sensible ones")
    return tuple(dict.fromkeys(check(name, x) for x in values))
