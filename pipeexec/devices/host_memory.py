"""Refuse tensors and results that do not fit this machine's memory, before they are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipesim.graph.graph import TaskGraph
from pipesim.utils.host_memory import check_memory

#: Bytes of a task's start, end and size; and of the rest of a step's result, at least.
_BYTES_PER_TASK, _BYTES_PER_STEP = 24, 1024


def check_tensors(
    subject: str, nbytes: int, advice: str, device: torch.device | str | None = None
) -> None:
    """Raise CapacityError if tensors on ``device``, a CPU, would not fit this machine's memory."""
    torch_device = torch.get_default_device() if device is None else torch.device(device)
    if torch_device.type == "cpu":
        check_memory(subject, nbytes, advice)


def check_results(graphs: Iterable[TaskGraph], **counts: int) -> None:
    """Raise CapacityError if the results of several steps of each graph would not fit.

    The product of ``counts`` is the number of results of each graph. The error names them.
    """
    nbytes = sum(_BYTES_PER_TASK * len(graph) + _BYTES_PER_STEP for graph in graphs)
    for count in counts.values():
        nbytes *= count
    names = " x ".join(f"{name}={count}" for name, count in counts.items())
    check_memory(f"keeping {names} results", nbytes, "keep fewer")
