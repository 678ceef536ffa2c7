"""Recognize communication in a profiler's trace, whatever the library that carried it out.

Kernels of NCCL and RCCL tell their collective by name, or not: ``ncclDevKernel_Generic`` runs
several, and grouped calls have one kernel. Then the event's ``args``, or the call that launched the
kernel, tell it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALL_REDUCE = "all_reduce"
#: Ranges and operations of torch.distributed and its backends, by the start of their names.
_CALLS = re.compile(
    r"c10d::|_?c10d_functional::|symm_mem::|record_param_comms|[a-z]*ccl:|(gloo|mpi|ucc):|nccl"
)
#: Libraries of collectives, and collectives of other libraries, anywhere in a kernel's name.
_LIBRARIES = re.compile(
    r"[nrx]ccl|mscclpp|msccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce",
    re.IGNORECASE,
)
_ALL_REDUCE = re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)
_OTHER = re.compile(
    r"broadcast|reduce_?scatter|all_?gather|all_?to_?all|send|recv|(?<![a-z])_?reduce(?![a-z])"
    r"|scatter|gather|barrier|wait",
    re.IGNORECASE,
)
#: Categories of calls that launch work: cuda_runtime, cuda_driver, hip_runtime, xpu_runtime, ...
_LAUNCHES = re.compile(r"([a-z0-9]+_)?(runtime|driver)")
_NAME = "Collective name"


def is_communication(name: str, args: object, *, on_device: bool) -> bool:
    """Return whether an event communicates, as its name or its ``args`` tell."""
    if isinstance(args, dict) and args.get(_NAME):
        return True
    return bool(_LIBRARIES.search(name) if on_device else _CALLS.match(name))


def collective(name: str, args: Mapping[str, Any]) -> str | None:
    """Return `ALL_REDUCE`, ``"other"`` for another collective, or None if nothing tells it."""
    for text in (str(args.get(_NAME) or ""), name):
        if _ALL_REDUCE.search(text):
            return ALL_REDUCE
        if _OTHER.search(text):
            return "other"
    return None


def is_launch(category: object) -> bool:
    """Return whether events of a category are calls of a driver, which launch kernels."""
    return isinstance(category, str) and _LAUNCHES.fullmatch(category) is not None
