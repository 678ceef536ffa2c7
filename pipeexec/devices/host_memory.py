"""Refuse tensors and results that the machine has no memory for, before they are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipesim.graph.graph import TaskGraph
from pipesim.utils.host_memory import check_memory

__all__ = ["check_results", "check_tensors"]

#: Start, end and bytes of a task; and what the rest of a step's result holds, at least.
_BYTES_PER_TASK, _BYTES_PER_STEP = 24, 1024


def check_tensors(
    what: str, nbytes: int, advice: str, device: torch.device | str | None = None
) -> None:
    """Raise if tensors on ``device`` would not fit, where that is the memory of this machine.

    Raises
    ------
    CapacityError
        Saying how much they need, and how much there is.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type == "cpu":
        check_memory(what, nbytes, advice)


def check_results(graphs: Iterable[TaskGraph], **counts: int) -> None:
    """Raise if the results of a step of each graph, so many times, would not fit.

    Parameters
    ----------
    graphs
        A step of each is kept.
    **counts
        How often, as the product of these; named in the error.

    Raises
    ------
    CapacityError
        Saying how much they need, and how much there is.
    """
    nbytes = sum(_BYTES_PER_TASK * len(graph) + _BYTES_PER_STEP for graph in graphs)
    for count in counts.values():
        nbytes *= count
    names = " x ".join(f"{name}={count}" for name, count in counts.items())
    check_memory(f"keeping {names} results", nbytes, "keep fewer")
