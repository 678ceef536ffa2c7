"""Pass a thread's settings of torch to the threads that run its tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch

#: Makes a context.
ContextFactory = Callable[[], AbstractContextManager[None]]


def thread_settings() -> ContextFactory:
    """Return a factory of contexts with this thread's gradient and inference mode, and autocast."""
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = current_autocast()
    if not is_inference and autocast is None:
        return partial(torch.set_grad_enabled, has_grad)

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(has_grad))
            if autocast is not None:
                stack.enter_context(autocast())
            yield

    return settings


def current_autocast() -> ContextFactory | None:
    """Return a factory of contexts with this thread's autocast; None without autocast.

    Casts are not cached: a cast made without a graph, in a forward that will be recomputed, must
    not serve a forward that needs the graph.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return None
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in zip(kinds, dtypes, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return autocast


def one_thread() -> AbstractContextManager[None]:
    """Return a context in which torch computes with one thread, as CPU workers do."""
    return contextlib.nullcontext() if torch.get_num_threads() == 1 else _set_one_thread()


@contextlib.contextmanager
def _set_one_thread() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)
