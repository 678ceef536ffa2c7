"""Facts of the schedules of configurations that hold for any number of micro-batches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from pipesim.errors import ArgumentError
from pipesim.ops import Op
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.stage_devices import StageDevices
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ScheduleInfo, schedule_info
from pipesim.scheduling.schedule import Schedule


class OrderFacts(NamedTuple):
    """Facts of a schedule that hold for any number of micro-batches.

    Attributes
    ----------
    devices
        Devices of its stages.
    splits_backward
        Whether it has I and W.
    schedule
        The order of few micro-batches.
    """

    devices: StageDevices
    splits_backward: bool
    schedule: Schedule


def placement_of(choice: PlanChoice) -> Placement:
    """Return the placement of the schedule of a choice; errors are those of `order_facts`."""
    return choice_facts(choice).schedule.placement


def hides_exchanges(choice: PlanChoice) -> bool:
    """Return whether exchanges of experts may run behind the compute of another micro-batch."""
    return choice.expert_parallel > 1 and choice_facts(choice).schedule.overlapped is not None


def choice_facts(choice: PlanChoice) -> OrderFacts:
    """Return `order_facts` of the schedule of a choice."""
    return order_facts(choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_slices)


def order_facts(name: str, n_devices: int, n_chunks: int, n_slices: int = 1) -> OrderFacts:
    """Return placement and operations of a schedule, from the order of few micro-batches."""
    return order_facts_of(schedule_info(name), n_devices, n_chunks, n_slices)


@lru_cache(maxsize=4096)
def order_facts_of(
    info: ScheduleInfo, n_devices: int, n_chunks: int, n_slices: int = 1
) -> OrderFacts:
    """Return `order_facts` of an entry of the registry, which a later registration replaces."""
    options = schedule_options(info, n_chunks, n_slices)
    counts = [n_slices * k for k in range(-(-n_devices // n_slices), 2 * n_devices + 1)]
    n = next((k for k in counts if info.allows(n_devices, k, **options)), counts[0])
    built = info.make(n_devices, n, **options)
    if built.placement.n_paths > 1 or built.n_batches > 1:
        raise ArgumentError(
            f"schedules has {info.name!r}, whose micro-batches take several paths or belong to "
            "several mini-batches; a plan has one of each"
        )
    if built.n_slices != n_slices:
        raise ArgumentError(
            f"schedules has {info.name!r}, whose micro-batches are {built.n_slices} slices of a "
            f"sequence, got n_slices={n_slices}; give a schedule with an option n_slices"
        )
    devices = StageDevices.of_placement(built.placement)
    return OrderFacts(devices, _has_input_grads(built), built)


def takes_slices(name: str) -> bool:
    """Return whether a schedule cuts sequences into a number of slices."""
    return "n_slices" in schedule_info(name).options


def schedule_options(info: ScheduleInfo, n_chunks: int, n_slices: int) -> dict[str, Any]:
    """Return the options of a schedule for numbers of chunks and of slices, if it takes them."""
    values = {"n_chunks": n_chunks, "n_slices": n_slices}
    return {name: value for name, value in values.items() if name in info.options}


def _has_input_grads(schedule: Schedule) -> bool:
    """Return whether a schedule splits any backward."""
    return bool((schedule.op == Op.I).any())
