"""`RunOptions`: the checked options of a validation, whatever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pipeexec.distributed.processes import Processes
from pipeexec.stages.batches import Batch
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_count, check_flag, check_function, check_type


class RunOptions(NamedTuple):
    """Checked options of `validate` that pipelines and `GPipe` modules share.

    Attributes
    ----------
    batches
        Yields ``repeat * (n_steps + 1)`` batches ``(inputs, targets)``, or raises `ArgumentError`.
    n_steps, warm_up, repeat
        Measured steps, steps before them, and number of repeats.
    optimizer, costs, progress
        As for `validate`.
    """

    batches: Iterator[tuple[Batch, Any]]
    n_steps: int
    warm_up: int
    repeat: int
    optimizer: OptimizerFactory | None
    costs: Costs | None
    progress: Callable[[str], None] | None


def check_options(
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None,
    *,
    n_steps: int,
    warm_up: int,
    repeat: int,
    costs: Costs | None,
    progress: Callable[[str], None] | None,
    processes: Processes | None,
    cuda_graph: bool,
) -> RunOptions:
    """Return the options that every validation has."""
    n_steps = check_count("n_steps", n_steps)
    warm_up = check_count("warm_up", warm_up, 0)
    repeat = check_count("repeat", repeat)
    check_flag("cuda_graph", cuda_graph)
    if processes is not None:
        check_type("processes", processes, Processes, "give the result of pipeexec.join")
    if progress is not None:
        check_function("progress", progress, "progress(line)")
    if optimizer is not None:
        check_function("optimizer", optimizer, "optimizer(parameters)")
    if not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches must yield (inputs, targets), got {batches!r:.60} "
            f"({type(batches).__name__}); give a generator or a list of batches"
        )
    source = _take_batches(batches, repeat * (n_steps + 1))
    return RunOptions(source, n_steps, warm_up, repeat, optimizer, costs, progress)


def _take_batches(
    batches: Iterable[tuple[Batch, Any]], n_batches: int
) -> Iterator[tuple[Batch, Any]]:
    """Yield ``n_batches`` batches; raise `ArgumentError` if there are fewer."""
    source = iter(batches)
    for number in range(n_batches):
        try:
            yield next(source)
        except StopIteration:
            raise ArgumentError(
                f"got {number} batches, but {n_batches} are needed: one to warm up with, and one "
                "a step"
            ) from None
