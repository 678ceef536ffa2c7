"""Run every kernel as Python, or compiled, however little work it has.

``python tests/helpers/kernels.py`` compiles most kernels into the cache on disk. `make test` does
so while linters run.
"""

from __future__ import annotations

import fcntl
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from places import ROOT

import pipesim as ps
from pipesim.simulation import LogNormal
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


def _use_kernels() -> None:
    """Call what most tests call; nothing is equal, so that no shortcut is taken."""
    schedule = ps.schedule("1f1b", 3, 6)
    costs = ps.Costs((1, 2, 3), 2, activation_bytes=1, network=ps.Network(latency=1, bandwidth=1))
    graph = ps.lower(schedule, n_replicas=2)
    noise = ps.Noise(task=LogNormal(0.1), seed=1)
    for timeline in (ps.simulate(graph, costs), ps.simulate(graph, costs, noise=noise)):
        timeline.memory.peak  # noqa: B018
        timeline.why.idle_by_cause()
        timeline.why.critical_path()
        timeline.why.lower_bound  # noqa: B018
    ps.simulate_many(graph, costs, noise, 2, n_jobs=1, progress=False)
    split = ps.Costs((1, 2, 3, 1, 2, 3), input_grad=2, weight_grad=1)
    ps.verify(ps.schedule("v_min", 3, 6, costs=split))
    ps.optimize(ps.Placement.linear(3), 6, costs, 4, evaluations=50, progress=False)
    shared = ps.Link(0, 1, ((0, 1), (1, 2)))
    ps.simulate(ps.lower(schedule), replace(costs, network=ps.Network(links=(shared,))))


if __name__ == "__main__":
    with compiled():
        _use_kernels()
