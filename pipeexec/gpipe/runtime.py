"""`Runtime`: the stages, devices and routes that all forwards of a `pipeexec.GPipe` share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device
from pipeexec.gpipe.arguments import Switches
from pipeexec.gpipe.checkpoint import recomputing
from pipeexec.gpipe.partition import Partition, skips_across
from pipeexec.gpipe.routes import RoutesByPartition, forward_routes, routes_by_partition
from pipeexec.stages.activation_bytes import ActivationCounter
from pipeexec.stages.random_numbers import default_state, set_default_state
from pipeexec.stages.stage import Stage


class Runtime(NamedTuple):
    """Everything that all forwards of one module share.

    Attributes
    ----------
    stages, partitions, devices
        One of each a partition; the partition is the stage's module.
    forward_routes, backward_routes
        Routes of outputs and skips, and of their gradients.
    locks
        One a partition: two forwards may run it in different threads.
    call_numbers
        Numbers of forwards.
    switches
        Switches for experiments.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    forward_routes: RoutesByPartition
    backward_routes: RoutesByPartition
    locks: Sequence[AbstractContextManager[Any]]
    call_numbers: Iterator[int]
    switches: Switches

    def draws_random(self, unknown: bool) -> bool:
        """Return whether a forward draws random numbers; ``unknown`` if it has not run yet."""
        return any(stage.is_random.get(stage.module.training, unknown) for stage in self.stages)

    def random_states(self) -> list[Tensor]:
        """Return the states of the devices' generators."""
        return [default_state(device) for device in dict.fromkeys(s.device for s in self.stages)]

    def restore_random_states(self, states: Sequence[Tensor]) -> bool:
        """Restore ``states`` if a generator has moved; return whether one had.

        All partitions are then asked anew whether they draw.
        """
        devices = dict.fromkeys(stage.device for stage in self.stages)
        if all(map(torch.equal, states, self.random_states())):
            return False
        for device, state in zip(devices, states, strict=True):
            set_default_state(device, state)
        for stage in self.stages:
            stage.is_random.clear()
        return True


def make_runtime(
    parts: Sequence[nn.Sequential],
    torch_devices: Sequence[torch.device],
    devices: Sequence[Device],
    switches: Switches,
) -> Runtime:
    """Return the stages and routes of the parts of a module, one device each.

    Random numbers are drawn on ``torch_devices``; tasks and messages run on ``devices``.
    """
    skips = skips_across(parts)
    partitions = [
        Partition(
            part,
            [key for key, (_, target) in skips.items() if target == j],
            [key for key, (source, _) in skips.items() if source == j],
        )
        for j, part in enumerate(parts)
    ]
    stages = [
        Stage(partition, j, device, ActivationCounter())
        for j, (partition, device) in enumerate(zip(partitions, torch_devices, strict=True))
    ]
    for stage in stages:
        stage.recompute_context, stage.recompute_option = recomputing, "checkpoint='never'"
    routes = forward_routes(len(parts), skips, portals=switches.portals)
    return Runtime(
        stages,
        partitions,
        devices,
        routes_by_partition(len(parts), routes),
        routes_by_partition(len(parts), [route.reverse for route in routes]),
        [threading.RLock() for _ in parts],
        itertools.count(),
        switches,
    )
