"""Options of `pipesim.lower` that follow from the framework, unless the user gives them."""

from __future__ import annotations

from typing import NamedTuple

from pipesim.framework.framework import Framework, GatherParameters, GradSync
from pipesim.lowering.parameter_shards import ShardParameters, checked_shard_parameters
from pipesim.scheduling.placement import Layout, Placement

#: Order of devices by the order of ranks of a framework.
LAYOUT_OF_RANKS: dict[str, Layout] = {
    "tp-cp-ep-dp-pp": "stage_major",
    "tp-cp-ep-pp-dp": "replica_major",
}


class FrameworkOptions(NamedTuple):
    """Messages, and exchanges of replicas; options of `pipesim.lower`."""

    blocking_messages: bool = False
    grad_sync: GradSync = "last"
    n_buckets: int = 4
    gather_parameters: GatherParameters = "after_step"


def framework_options(
    framework: Framework, placement: Placement, *, n_replicas: int, shard_optimizer: bool,
    shard_parameters: ShardParameters,
) -> FrameworkOptions:  # fmt: skip
    """Return the options of a framework, as far as they suit the others.

    Replicas that share parameters hide reductions and gathers in any case, and copies of a stage on
    several paths gather nothing before a forward.
    """
    is_interleaved = placement.n_stages > placement.n_devices
    blocks = {"overlapped": False, "interleaved": not is_interleaved, "blocking": True}
    own = FrameworkOptions(blocks[framework.messages])
    is_alone = n_replicas * placement.n_paths == 1
    if is_alone or checked_shard_parameters(shard_parameters) != "none":
        return own
    gathers = shard_optimizer and placement.n_paths == 1
    return own._replace(
        grad_sync=framework.grad_sync,
        n_buckets=framework.n_buckets,
        gather_parameters=framework.gather_parameters if gathers else "after_step",
    )
