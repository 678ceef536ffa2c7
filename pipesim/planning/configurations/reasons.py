"""Settings that explain why a part of the step differs between two configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipesim.planning.configurations.choice import (
    PlanChoice,
    offload_text,
    sharding_text,
    slices_text,
)
from pipesim.planning.configurations.order_facts import placement_of

#: Name of each part of a step in sentences.
_NAMES: Mapping[str, str] = {
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


#: Names of parts that contain more if a configuration has certain settings.
_LONGER: Mapping[str, tuple[str, Callable[[PlanChoice], bool]]] = {
    "tensor_parallel": (
        "Collectives of tensor, context and expert parallelism",
        lambda choice: choice.context_parallel * choice.expert_parallel > 1,
    ),
    "messages": (
        "Waits for messages between stages and for copies to the host",
        lambda choice: choice.offload != "none",
    ),
    "reduction_and_optimizer": (
        "Reduction of gradients, gathers of parameters and optimizer",
        lambda choice: choice.shards_parameters,
    ),
}


def part_name(part: str, first: PlanChoice, second: PlanChoice) -> str:
    """Return the name of a part of two configurations in sentences."""
    if part in _LONGER:
        name, applies = _LONGER[part]
        if applies(first) or applies(second):
            return name
    return _NAMES[part]


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
    return f"micro-batches of {sequences}{slices_text(choice)} and {_layer_share(choice)}"


def _layer_share(choice: PlanChoice) -> str:
    """Return the numbers of GPUs that share a layer, a sequence and the experts of a layer."""
    parts = [f"{_count(choice.tensor_parallel, 'GPU')} a layer"]
    parts += [f"{choice.context_parallel} a sequence"] * (choice.context_parallel > 1)
    parts += [f"{choice.expert_parallel} for the experts"] * (choice.expert_parallel > 1)
    return ", ".join(parts)


def _recompute(choice: PlanChoice) -> str:
    """Return the recompute of layers."""
    return f"{choice.recompute} recompute" if choice.recompute != "none" else "none"


def _depth(choice: PlanChoice) -> str:
    """Return the sizes that decide how long the pipeline fills and drains."""
    chunks = f" of {choice.n_chunks} chunks" if choice.n_chunks > 1 else ""
    count = _count(choice.n_microbatches, "micro-batch", "micro-batches") + slices_text(choice)
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
    """Return the number of borders that messages of a micro-batch cross, and what is offloaded."""
    borders = choice.n_stages - 1 if choice.pipeline_parallel > 1 else 0
    copies = f" and {offload_text(choice)}" if choice.offload != "none" else ""
    return f"{_count(borders, 'border')} between stages{copies}"


def _replicas(choice: PlanChoice) -> str:
    """Return the replicas and the optimizer, or how they share parameters."""
    optimizer = f"{'a distributed' if choice.shard_optimizer else 'a whole'} optimizer"
    what = sharding_text(choice) if choice.shards_parameters else optimizer
    return f"{_count(choice.data_parallel, 'replica')} with {what}"


def _tied(choice: PlanChoice) -> str:
    """Return where the matrix of embedding and head is: V placements need no sum over devices."""
    path = placement_of(choice).paths[0]
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
