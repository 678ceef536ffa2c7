"""Splits of the layers of a plan's choices: even, or balanced over the devices of a placement."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.models.layers import Layers
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.order_facts import placement_of
from pipesim.planning.configurations.problem import PlanProblem


class DeviceSeconds(NamedTuple):
    """Seconds of one micro-batch on one device: of a layer, of the embedding, and of the head."""

    layer: float
    embedding: float
    head: float


def stages_of(
    problem: PlanProblem, choice: PlanChoice, seconds: Callable[[], Sequence[DeviceSeconds]]
) -> tuple[int, ...] | None:
    """Return the layers of each stage of a choice; None if there are too few.

    ``seconds`` returns those of each device, for the layers of a transformer.
    """
    n_layers, model = problem.n_layers, problem.model
    placement = placement_of(choice)
    if problem.is_even:
        n_each, rest = divmod(n_layers, placement.n_stages)
        return None if rest else (n_each,) * placement.n_stages
    if isinstance(model, Layers):
        if placement.n_stages > n_layers:
            return None
        layers = [sum(x) for x in zip(*_layer_seconds(model), strict=True)]
        return tuple(balanced_split(layers, placement.n_stages))
    return uniform_split(placement.paths[0], seconds(), n_layers)


def _layer_seconds(model: Layers) -> list[tuple[float, ...]]:
    """Return the seconds of the operations of each measured layer."""
    names = ("forward", "backward") if "backward" in model.columns else (
        "forward", "input_grad", "weight_grad"
    )  # fmt: skip
    return [tuple(model.columns[name]) for name in names]


def uniform_split(
    device_of: Sequence[int], seconds: Sequence[DeviceSeconds], n_layers: int
) -> tuple[int, ...] | None:
    """Return the layers of each stage, such that the busiest device is as fast as possible.

    Layers go one by one to the device that then has the least to do, which is optimal for equal
    layers. On a device they go to the stage that then has the least to do. At equal seconds the
    later device gets the layer: in 1F1B it holds fewer micro-batches.

    Parameters
    ----------
    device_of
        Device of each stage.
    seconds
        Seconds of each device.
    n_layers
        Number of layers; the first and the last stage of several may have none.

    Returns
    -------
    tuple or None
        Layers of each stage; None if there are fewer layers than the stages need.

    Examples
    --------
    >>> uniform_split([0, 1, 2, 3], [DeviceSeconds(1.0, 0.0, 2.0)] * 4, 14)
    (4, 4, 4, 2)
    >>> uniform_split([0, 1, 1, 0], [DeviceSeconds(1.0, 0.0, 2.0)] * 2, 10)
    (3, 3, 3, 1)
    """
    n, last = len(device_of), len(device_of) - 1
    sizes = [0 if n > 1 and stage in (0, last) else 1 for stage in range(n)]
    if sum(sizes) > n_layers:
        return None
    ends = [seconds[device_of[0]].embedding] + [0.0] * last
    ends[last] += seconds[device_of[last]].head
    stages: list[list[int]] = [[] for _ in seconds]
    for stage, device in enumerate(device_of):
        stages[device].append(stage)
    loads = []
    for device, own in enumerate(stages):
        layers = sum(sizes[stage] for stage in own)
        load = sum(ends[stage] for stage in own) + layers * seconds[device].layer
        loads.append((load + seconds[device].layer, -device))
    heapq.heapify(loads)
    for _ in range(n_layers - sum(sizes)):
        load, minus = loads[0]
        layer = seconds[-minus].layer
        heapq.heapreplace(loads, (load + layer, minus))
        own = stages[-minus]
        if len(own) > 1:
            own = [min(own, key=lambda k: (sizes[k] * layer + ends[k], -k))]
        sizes[own[0]] += 1
    return tuple(sizes)
