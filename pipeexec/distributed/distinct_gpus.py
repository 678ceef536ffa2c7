"""Refuse processes that share a GPU; NCCL would refuse them later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipesim.errors import ArgumentError


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU, unique over all machines; empty if it has none."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def check_distinct(names: Sequence[Sequence[str]], uuids: Sequence[Sequence[str]]) -> None:
    """Raise if devices of two processes are one GPU.

    Parameters
    ----------
    names, uuids
        Names and UUIDs of the devices of each process.
    """
    owners: dict[str, tuple[int, str]] = {}
    for rank, devices in enumerate(zip(names, uuids, strict=True)):
        for name, uuid in zip(*devices, strict=True):
            first, first_name = owners.setdefault(uuid, (rank, name))
            if uuid and first != rank:
                raise ArgumentError(
                    f"{first_name} of rank {first} and {name} of rank {rank} are the same GPU "
                    f"(UUID {uuid}), and NCCL refuses two processes on one GPU; give each "
                    "process its own GPU (devices=['cuda'] is that of its LOCAL_RANK), or run one "
                    "process with devices=pipeexec.slices('cuda:0', n)"
                )
