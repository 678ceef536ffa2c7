"""Hook every all-reduce of this process, those of DistributedDataParallel's reducer included.

The reducer calls its process group from C++, so a wrapper of `torch.distributed.all_reduce` does
not see it. A communication hook can neither be removed nor share a model with another hook. But
every all-reduce passes torch's dispatcher as ``c10d::allreduce_``. There `torch.library` can put a
kernel in front of the backends' kernels, and remove it again.
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

#: Frames above a kernel that are searched for its caller.
_DEPTH = 12


class AllReduce(NamedTuple):
    """An all-reduce that is about to be called.

    Attributes
    ----------
    tensors
        Tensors that are summed.
    group
        Name of the process group.
    is_python
        Whether Python code called it; the reducer is C++.
    is_batch_norm
        Whether `torch.nn.SyncBatchNorm` called it, for its statistics.
    """

    tensors: list[Tensor]
    group: str
    is_python: bool
    is_batch_norm: bool


@contextmanager
def hook_all_reduces(before: Callable[[AllReduce], Callable[[], object] | None]) -> Iterator[None]:
    """Call ``before`` before each all-reduce in the block.

    Parameters
    ----------
    before
        Returns a function to call at the end of the all-reduce, or None. Gloo calls it in the
        thread in which the all-reduce ends. NCCL calls it as soon as the all-reduce is issued, with
        a current stream that waits for it.

    Raises
    ------
    ExecutionError
        If all-reduces of this process are hooked already.
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
        after = before(call)
        with torch._C._AutoDispatchBelowAutograd():
            result = operation(tensors, group, *options)
        if after is not None:
            Work.unbox(result[1]).get_future().then(lambda _: after())
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
    """Return the modules of the innermost Python calls, without this file's, up to autograd's."""
    frame = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < _DEPTH:
        name = str(frame.f_globals.get("__name__", ""))
        if name in ("torch.autograd", "torch.autograd.graph"):
            break
        names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return names
