"""Certified lower bounds on the memory of a configuration, in any order of its tasks.

Memory is at least parameters, gradients and optimizer, with the activations and the workspace of
one micro-batch of one stage. If micro-batches are slices of sequences, the last slice runs while
the activations of the others are held. Of parameters that replicas share, those of a stage are
gathered while it computes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.expert_pricing import moved_bytes, shared_bytes
from pipesim.planning.configurations.stage_devices import StageDevices

Floats = NDArray[np.float64]
#: Share by which bounds are lowered, since sums are rounded.
ROUNDING = 1e-9


class Sharing(NamedTuple):
    """Replicas that share what a stage holds.

    Attributes
    ----------
    optimizer
        Number of replicas that share the optimizer; 1 if each has all of it.
    parameters
        Whether they share parameters and gradients too.
    """

    optimizer: int = 1
    parameters: bool = False


def least_memory(
    costs: Costs,
    devices: StageDevices,
    sharing: Sharing,
    *,
    splits_backward: bool = True,
    offloads: bool = False,
    n_slices: int = 1,
) -> Floats:
    """Return the least bytes of each device, the allocator's reserve included.

    ``splits_backward`` and ``offloads``: whether any backward is I and W, and whether activations
    may be in host memory.
    """
    n = len(devices.device)
    shares = sharing.optimizer if sharing.parameters else 1
    held = shared_bytes(costs, n, shares, "parameter") + shared_bytes(costs, n, shares, "gradient")
    held += shared_bytes(costs, n, sharing.optimizer, "optimizer")
    of_backward: Floats | None = None
    if sharing.parameters and not splits_backward:
        of_backward = moved_bytes(costs, n, shares, "gradient")
    if n_slices == 1:
        most = _used_bytes(costs, n, of_backward)
    else:
        slices = [costs.microbatch(k) for k in range(n_slices)]
        used = [_used_bytes(own, n, of_backward) for own in slices]
        most = np.max(used, axis=0)
        if not offloads:  # the last slice runs with the activations of the others
            most = used[-1] + sum(own.per_stage("activation_bytes", n) for own in slices[:-1])
    if sharing.parameters:
        most += moved_bytes(costs, n, shares, "parameter")
    least: Floats = devices.sums(held) + devices.most(most)
    return least * (1 + costs.memory_reserve) * (1 - ROUNDING)


def _used_bytes(costs: Costs, n_stages: int, of_backward: Floats | None) -> Floats:
    """Return activations and workspace of a micro-batch; ``of_backward`` are bytes of B besides."""
    forward, backward, activations = (
        costs.per_stage(f"{x}_bytes", n_stages)
        for x in ("forward_workspace", "backward_workspace", "activation")
    )
    if of_backward is not None:
        backward = backward + of_backward
    used: Floats = activations + np.maximum(forward, backward)
    return used
