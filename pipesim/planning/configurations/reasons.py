"""Settings that explain why a part of the step differs between two configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.problem import placement_of

__all__ = ["PART_NAMES", "part_reason"]

#: Name of each part of a step in sentences.
PART_NAMES: Mapping[str, str] = {
    "compute": "Compute",
    "tensor_parallel": "Collectives of tensor parallelism",
    "recompute": "Recompute",
    "warm_up_cool_down": "Bubble of warm-up and cool-down",
    "imbalance": "Bubble of uneven stages",
    "schedule_order": "Bubble of the order",
    "host": "Waits for the host",
    "messages": "Waits for messages between stages",
    "reduction_and_optimizer": "Reduction of gradients and optimizer",
}


def part_reason(part: str, first: PlanChoice, second: PlanChoice, *, is_tied: bool = False) -> str:
    """Return the settings behind a part of both configurations in words; "" if they are equal.

    ``is_tied``: whether embedding and head share their matrix.
    """
    text = _SETTINGS[part]
    values = text(first), text(second)
    if is_tied and part == "reduction_and_optimizer":
        places = _tied(first), _tied(second)
        if places[0] != places[1]:
            values = f"{values[0]} and {places[0]}", f"{values[1]} and {places[1]}"
    return "" if values[0] == values[1] else f"{values[0]}, against {values[1]}"


def _kernels(choice: PlanChoice) -> str:
    """Return the sizes that decide how efficient kernels are."""
    sequences = _count(choice.microbatch_size, "sequence")
    return f"micro-batches of {sequences} and {_layer_share(choice)}"


def _layer_share(choice: PlanChoice) -> str:
    """Return the number of GPUs that share a layer."""
    return f"{_count(choice.tensor_parallel, 'GPU')} a layer"


def _recompute(choice: PlanChoice) -> str:
    """Return the recompute of layers."""
    return f"{choice.recompute} recompute" if choice.recompute != "none" else "none"


def _depth(choice: PlanChoice) -> str:
    """Return the sizes that decide how long the pipeline fills and drains."""
    chunks = f" of {choice.n_chunks} chunks" if choice.n_chunks > 1 else ""
    count = _count(choice.n_microbatches, "micro-batch", "micro-batches")
    return (
        f"{_schedule(choice)} on {_count(choice.pipeline_parallel, 'device')}{chunks} with {count}"
    )


def _split(choice: PlanChoice) -> str:
    """Return the fewest and the most layers of a stage."""
    few, most = min(choice.layers_per_stage), max(choice.layers_per_stage)
    stages = _count(choice.n_stages, "stage")
    if choice.n_stages == 1:
        return f"all layers in {stages}"
    if few == most:
        return f"{few} layers in each of {stages}, which differ in embedding, head or layers"
    return f"{few} to {most} layers in each of {stages}"


def _schedule(choice: PlanChoice) -> str:
    """Return the schedule, and whether it is ordered for the costs."""
    return choice.schedule + " for costs" * choice.ordered_for_costs


def _borders(choice: PlanChoice) -> str:
    """Return the number of borders that messages of a micro-batch cross."""
    borders = choice.n_stages - 1 if choice.pipeline_parallel > 1 else 0
    return f"{_count(borders, 'border')} between stages"


def _replicas(choice: PlanChoice) -> str:
    """Return the replicas and the optimizer."""
    optimizer = "a distributed" if choice.shard_optimizer else "a whole"
    return f"{_count(choice.data_parallel, 'replica')} with {optimizer} optimizer"


def _tied(choice: PlanChoice) -> str:
    """Return where the matrix of embedding and head is: V placements need no sum over devices."""
    path = placement_of(choice.schedule, choice.pipeline_parallel, choice.n_chunks).paths[0]
    return f"tied embeddings on {_count(len({path[0], path[-1]}), 'device')}"


def _count(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun."""
    return f"{number} {one if number == 1 else many or one + 's'}"


_SETTINGS: Mapping[str, Callable[[PlanChoice], str]] = {
    "compute": _kernels,
    "tensor_parallel": _layer_share,
    "recompute": _recompute,
    "warm_up_cool_down": _depth,
    "imbalance": _split,
    "schedule_order": _schedule,
    "host": _kernels,
    "messages": _borders,
    "reduction_and_optimizer": _replicas,
}
