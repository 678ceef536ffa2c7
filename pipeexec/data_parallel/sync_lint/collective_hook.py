"""Notice every all-reduce of this process, those of DistributedDataParallel's reducer included.

The reducer calls its process group from C++, so that wrapping `torch.distributed.all_reduce` does
not see it, and a communication hook can neither be removed nor share a model with another. But
every all-reduce, whoever calls it, goes through torch's dispatcher as ``c10d::allreduce_``, where
`torch.library` can put a kernel in front of those of the backends, and take it away again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from pipesim.errors import ExecutionError

__all__ = ["AllReduce", "noticed"]

#: Frames above a kernel that are searched for who called it.
_DEPTH = 12


class AllReduce(NamedTuple):
    """An all-reduce that is about to be called.

    Attributes
    ----------
    tensors
        What is added up.
    group
        Name of the process group.
    is_python
        Whether Python code called it; the reducer is C++.
    is_batch_norm
        Whether `torch.nn.SyncBatchNorm` did, for its statistics.
    """

    tensors: list[Tensor]
    group: str
    is_python: bool
    is_batch_norm: bool


@contextmanager
def noticed(begin: Callable[[AllReduce], Callable[[], object] | None]) -> Iterator[None]:
    """Call ``begin`` before each all-reduce, and what it returns when that has ended.

    Ends are noticed in the thread that the backend ends it in; of NCCL when it has been issued, in
    a stream that waits for it.

    Raises
    ------
    ExecutionError
        If all-reduces of this process are noticed already.
    """
    operation = torch.ops.c10d.allreduce_.default

    def all_reduce(tensors: list[Tensor], group: Any, *options: Any) -> Any:
        names = _callers()
        call = AllReduce(
            tensors,
            str(ProcessGroup.unbox(group).group_name),
            any(name.startswith("torch.distributed") for name in names),
            "torch.nn.modules._functions" in names,
        )
        ended = begin(call)
        with torch._C._AutoDispatchBelowAutograd():
            result = operation(tensors, group, *options)
        if ended is not None:
            Work.unbox(result[1]).get_future().then(lambda _: ended())
        return result

    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "Autograd"):
        raise ExecutionError(
            "all-reduces of this process are watched already; end that px.watch_sync() block "
            "before the next one begins"
        )
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", all_reduce, "Autograd")
    try:
        yield
    finally:
        library._destroy()


def _callers() -> list[str]:
    """Return the modules of the innermost Python calls, but for this one's, until autograd's."""
    frame = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < _DEPTH:
        name = str(frame.f_globals.get("__name__", ""))
        if name in ("torch.autograd", "torch.autograd.graph"):
            break
        names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return names
