"""Settings of torch that belong to a thread, handed on to the threads that work for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch

__all__ = ["Casts", "autocast", "one_thread", "thread_settings"]

#: Makes the context of autocast.
Casts = Callable[[], AbstractContextManager[None]]


def thread_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a context with this thread's gradient mode, inference mode and autocast."""
    tracks, infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = autocast()
    if not infers and casts is None:
        return partial(torch.set_grad_enabled, tracks)

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if infers:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(tracks))
            if casts is not None:
                stack.enter_context(casts())
            yield

    return settings


def autocast() -> Casts | None:
    """Return what makes a context with this thread's autocast; None without autocast.

    Casts are not cached: one made without a graph, for a forward that is recomputed, must not serve
    one that needs it.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return None
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]

    @contextlib.contextmanager
    def casts() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in zip(kinds, dtypes, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return casts


def one_thread() -> AbstractContextManager[None]:
    """Return a context in which torch computes with one thread, as workers do."""
    return contextlib.nullcontext() if torch.get_num_threads() == 1 else _one_of_several()


@contextlib.contextmanager
def _one_of_several() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)
