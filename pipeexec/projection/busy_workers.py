"""`busy_workers`: other CPU workers that run copies of some layers while these are measured."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pipeexec.devices.thread_settings import ContextFactory, thread_settings
from pipeexec.executor.pipeline import Pipeline
from pipeexec.projection.layer_modules import dummy_loss
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph


class _Worker(threading.Thread):
    """Runs steps of a pipeline, one after the other, until it is stopped."""

    def __init__(self, pipeline: Pipeline, settings: ContextFactory) -> None:
        super().__init__(name="busy worker", daemon=True)
        self.pipeline, self.settings = pipeline, settings
        self.is_busy, self.is_stopped = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Run steps; the first one makes the worker busy."""
        n = self.pipeline.graph.n_microbatches
        try:
            with self.settings():
                while not self.is_stopped.is_set():
                    self.pipeline.step(torch.zeros(n, 1), torch.zeros(n, 1))
                    self.is_busy.set()
        except Exception as error:  # of the user's code, raised by `busy_workers`
            self.error = error
        finally:
            self.is_busy.set()


@contextmanager
def busy_workers(
    modules: Sequence[nn.Module], graph: TaskGraph, optimizer: OptimizerFactory | None, n: int
) -> Iterator[None]:
    """Let ``n`` more CPU workers run steps of copies of modules in a block.

    Raises
    ------
    ExecutionError
        If a step of theirs fails.
    """
    workers: list[_Worker] = []
    with ExitStack() as stack:
        for _ in range(n):
            pipeline = stack.enter_context(
                Pipeline(
                    copy.deepcopy(list(modules)), graph, ["cpu"], dummy_loss, optimizer,
                    loss_reduction="sum", pin_threads=False, tied=(),
                )
            )  # fmt: skip
            workers.append(_Worker(pipeline, thread_settings()))
            workers[-1].start()
        try:
            for worker in workers:
                worker.is_busy.wait()
            yield
        finally:
            for worker in workers:
                worker.is_stopped.set()
            for worker in workers:
                worker.join()
    for worker in workers:
        if worker.error is not None:
            raise ExecutionError(
                f"a busy worker failed in a step of copies of the layers: {worker.error!s:.300}"
            ) from worker.error
