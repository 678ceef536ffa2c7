"""Processes that share a GPU are refused before NCCL is asked, which would refuse them later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipesim.errors import ArgumentError

__all__ = ["check_distinct", "uuid_of"]


def uuid_of(device: torch.device) -> str:
    """Return the name of a GPU that no other has, on whatever machine; empty where it has none."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def check_distinct(names: Sequence[Sequence[str]], uuids: Sequence[Sequence[str]]) -> None:
    """Raise if devices of two processes are one GPU.

    Parameters
    ----------
    names, uuids
        Of the devices of each process.

    Raises
    ------
    ArgumentError
        Naming the processes and the GPU.
    """
    found: dict[str, tuple[int, str]] = {}
    for rank, (own, of_rank) in enumerate(zip(names, uuids, strict=True)):
        for name, uuid in zip(own, of_rank, strict=True):
            first, its = found.setdefault(uuid, (rank, name))
            if uuid and first != rank:
                raise ArgumentError(
                    f"{its} of rank {first} and {name} of rank {rank} are the same GPU (UUID "
                    f"{uuid}), and NCCL refuses two processes on one GPU; give each process a GPU "
                    "of its own (devices=['cuda'] is that of its LOCAL_RANK), or run one process "
                    "with devices=pipeexec.slices('cuda:0', n)"
                )
