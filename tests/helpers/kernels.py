"""Run every kernel as Python, or compiled, however little work it has."""

from __future__ import annotations

import fcntl
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from places import ROOT

import pipesim  # noqa: F401  # its modules are looked through
from pipesim.utils.jit import Kernel


def every_kernel() -> list[Kernel[..., Any]]:
    """Return the kernels of all modules of pipesim."""
    return list(_kernels_of(tuple(name for name in sys.modules if name.startswith("pipesim."))))


@functools.cache
def _kernels_of(modules: tuple[str, ...]) -> tuple[Kernel[..., Any], ...]:
    """Return the kernels of modules; looking through all of them takes milliseconds."""
    values = (value for name in modules for value in vars(sys.modules[name]).values())
    return tuple(value for value in values if isinstance(value, Kernel))


def as_python() -> Any:
    """Return a context in which no kernel is compiled."""
    return _running(lambda kernel: kernel.function)


def compiled() -> Any:
    """Return a context in which every kernel is."""
    return _running(_dispatcher)


@contextmanager
def _running(choose: Callable[[Kernel[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before = {kernel: kernel._compiled for kernel in every_kernel()}
    try:
        for kernel in before:
            kernel._compiled = choose(kernel)
        yield
    finally:
        for kernel, function in before.items():
            kernel._compiled = function


@functools.cache
def _dispatcher(kernel: Kernel[..., Any]) -> Callable[..., Any]:
    """Compile once."""
    kernel.compile()
    assert kernel._compiled is not None
    return kernel._compiled


def compile_in_turn() -> None:
    """Let one process at a time compile a file's kernels: others load from the cache what it did.

    In a new checkout, each worker of pytest-xdist would compile all kernels, which takes a minute.
    Kernels of different files are compiled at the same time. Without numba there is nothing to do.
    """
    try:
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    compile_now, lock, depth = Dispatcher.compile, threading.RLock(), [0]

    def wait_and_compile(self: Any, signature: Any) -> Any:
        with lock:
            if depth[0]:  # a kernel compiles those that it calls
                return compile_now(self, signature)
            path = Path(self.py_func.__code__.co_filename)
            with (path if path.is_file() else ROOT / "constraints.txt").open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # till the file is closed
                depth[0] += 1
                try:
                    return compile_now(self, signature)
                finally:
                    depth[0] -= 1

    Dispatcher.compile = wait_and_compile
