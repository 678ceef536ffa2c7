"""Random state of a process: torch's generators.

Steps need the seed and the number of steps alone: `pipeexec.stages.random_numbers`. The state of
torch's generators is for what runs between steps, such as the order of a data loader. Python and
numpy have generators of their own; a program that uses these can save their state as an object.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeexec.devices.device import Device
from pipesim.errors import CheckpointError


def random_state(devices: Sequence[Device]) -> dict[str, str]:
    """Return the states of torch's generators of the CPU and of this process's GPUs, as text."""
    gpus = {d.torch_device.index or 0 for d in devices if d.torch_device.type == "cuda"}
    states = {"cpu": torch.get_rng_state()}
    states |= {f"cuda:{k}": torch.cuda.get_rng_state(k) for k in sorted(gpus)}
    return {name: base64.b64encode(x.numpy().tobytes()).decode() for name, x in states.items()}


def random_tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of generators.

    Raises
    ------
    CheckpointError
        If one is no state of this version of torch.
    """
    try:
        tensors = {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in states.items()
        }
        for name, tensor in tensors.items():
            device = torch.device(name)
            if device.type == "cpu":
                torch.Generator().set_state(tensor)
            elif device.index < torch.cuda.device_count():
                torch.Generator(device).set_state(tensor)
        tensors["cpu"]  # it must be there
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint has no valid random state: {error!s:.100}; give another"
        ) from error
    return tensors


def load_random_state(seed: int, states: Mapping[str, torch.Tensor]) -> None:
    """Seed torch, and set its generators; GPUs that are not there are left out."""
    torch.manual_seed(seed)
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        device = torch.device(name)
        if device.type != "cpu" and device.index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
