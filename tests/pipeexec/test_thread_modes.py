"""Modes of several threads that overlap, beside modules that torch has compiled."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from pipeexec.stages.module_call import OwnGenerator
from pipeexec.thread_modes import ThreadMode

pytestmark = pytest.mark.slow  # loads torch's compiler


class Eager(ThreadMode):
    """Runs operations as they are; compiled code runs without its compilation under it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def overlap(first: TorchDispatchMode, second: TorchDispatchMode) -> None:
    """Enter and leave a mode in this thread, and in the middle enter another that ends later."""
    is_active, ends = threading.Event(), threading.Event()

    def run() -> None:
        with second:
            is_active.set()
            ends.wait()

    other = threading.Thread(target=run)
    with first:
        other.start()
        is_active.wait()
    ends.set()
    other.join()


def own_generator() -> OwnGenerator:
    return OwnGenerator(1, torch.device("cpu"))


@pytest.mark.parametrize("second", [Eager, own_generator])
def test_compiled_code_runs_after_modes_that_overlap(second: Any) -> None:
    """It is compiled once, with and without a mode that lets it run."""
    n_compiled, n_runs = 0, 0

    def backend(graph: GraphModule, _: Any) -> Any:
        nonlocal n_compiled
        n_compiled += 1

        def run(*values: Tensor) -> Any:
            nonlocal n_runs
            n_runs += 1
            return graph.forward(*values)

        return run

    torch._dynamo.reset()
    overlap(Eager(), second())
    double = torch.compile(lambda x: 2 * x, backend=backend)
    for _ in range(2):
        double(torch.ones(2))
        with own_generator():
            double(torch.ones(2))
    assert (n_compiled, n_runs) == (1, 4)
    with Eager():
        double(torch.ones(2))
    assert (n_compiled, n_runs) == (1, 4)
    torch._dynamo.reset()
