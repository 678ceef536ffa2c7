"""`Evaluator`: forward-only runs of a pipeline, one graph for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeexec.devices.thread_settings import current_autocast
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.evaluation.forward_runner import ForwardRunner
from pipeexec.executor.evaluation.joined_outputs import joined_output, joined_slices
from pipeexec.executor.evaluation.modes import evaluation_mode
from pipeexec.executor.results.step_result import EvaluationResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.nesting import leaves, tensors_in
from pipeexec.stages.batches import Batch
from pipeexec.stages.microbatches import Microbatches, are_microbatches, check_uncut
from pipeexec.stages.sample_dims import sample_dims
from pipeexec.stages.sequence_slices.cut_batch import SequenceCut
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.scheduling.subsets import fewer_microbatches


class Evaluator:
    """Evaluates batches, and predicts outputs, with the stages of a pipeline.

    A batch of fewer samples than micro-batches runs a graph of fewer micro-batches.

    Parameters
    ----------
    training
        Runs the pipeline's steps: gives graph, model, loss, timeout and number of steps.
    """

    def __init__(self, training: StepRunner) -> None:
        self._training = training
        self._runners: dict[int, ForwardRunner] = {}

    def evaluate(self, inputs: Batch | None, targets: Any) -> EvaluationResult:
        """Return the loss of a batch; see `Pipeline.evaluate`."""
        with self._quiet():
            runner, shapes = self._runner(inputs, targets)
            result = runner.evaluate(inputs, targets, shapes)
            assert isinstance(result, EvaluationResult)
            return result

    def predict(self, inputs: Batch | None) -> Any:
        """Return the output of a batch; see `Pipeline.predict`."""
        with self._quiet():
            runner, shapes = self._runner(inputs, None)
            outputs, sizes = runner.predict(inputs, shapes)
            if not outputs:
                return None
            numbers = sorted(outputs)
            rows = [outputs[k] for k in numbers]
            for tensor in tensors_in(rows):
                if tensor.is_cuda:  # made on a stream of its stage
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if runner.shares.shapes is not None:  # some process gave Microbatches
                return rows
            model = self._training.model
            cut = SequenceCut(self._training.graph.n_slices, model.slice_dim)
            rows, samples = joined_slices(rows, [sizes[k] for k in numbers], cut)
            return joined_output(rows, samples, model.batch_dims)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Run modules in evaluation mode and without gradients in a block."""
        modules = self._training.model.modules
        with torch.no_grad(), evaluation_mode(modules):
            yield

    def _runner(self, inputs: Batch | None, targets: Any) -> tuple[ForwardRunner, object]:
        """Return the runner for a batch, and the batch's shapes, which all processes know."""
        training, model = self._training, self._training.model
        with guard_processes(model.processes):
            shapes = self._shapes(inputs, targets)
            n = self._n_microbatches(shapes)
            if n not in self._runners:
                graph = _forward_graph(training.graph, n)
                self._runners[n] = ForwardRunner(graph, model, training.loss)
        runner = self._runners[n]
        runner.loss, runner.timeout, runner.n_steps = (
            training.loss, training.timeout, training.n_steps
        )  # fmt: skip
        return runner, repr((n, shapes))

    def _shapes(self, inputs: Batch | None, targets: Any) -> list[list[Any]]:
        """Return samples, `Microbatches`, replicas, shapes and autocast of each process.

        Inputs that are no tensors may change the shapes of outputs, too.
        """
        training, processes = self._training, self._training.model.processes
        own = [
            self._n_samples(inputs, targets),
            self._n_listed(inputs, targets),
            len(training.shares.local),
            [_shape(path, value) for path, value in leaves(inputs)],
            None if current_autocast() is None else [
                str(torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ],
        ]  # fmt: skip
        return [own] if processes is None else processes.share(own)

    def _n_samples(self, inputs: Batch | None, targets: Any) -> list[int]:
        """Return the number of samples of inputs and of targets, if they are here."""
        dims = self._training.model.batch_dims
        if are_microbatches(inputs, targets):
            check_uncut(self._training.graph.n_slices)
            return []
        pairs = (inputs, None), (None, targets)
        return [
            sample_dims(x, y, dims).n_samples for x, y in pairs if not (x is None and y is None)
        ]

    def _n_listed(self, inputs: Batch | None, targets: Any) -> list[int]:
        """Return the number of `Microbatches` of inputs and of targets, if they are here."""
        return [len(batch) for batch in (inputs, targets) if isinstance(batch, Microbatches)]

    def _n_microbatches(self, shapes: list[list[Any]]) -> int:
        """Return the number of micro-batches of a batch: one sample each at least.

        Slices count, those of whole sequences.
        """
        n_slices = self._training.graph.n_slices
        n_paths, most = self._training.shares.n_paths, self._training.graph.n_microbatches
        most //= n_slices
        numbers = {n / n_shares for _, listed, n_shares, *_ in shapes for n in listed}
        if numbers:
            n = int(min(numbers))
            if numbers != {n} or not n_paths <= n <= most:
                texts = " or ".join(f"{x:g}" for x in sorted(numbers))
                raise ArgumentError(
                    f"inputs and targets have {texts} Microbatches a replica; give both the same "
                    f"whole number, between {n_paths} and {most}, the number of micro-batches of "
                    "the schedule"
                )
            return n
        for samples, _, n_shares, *_ in shapes:
            for n_samples in samples:
                if 0 < n_samples < n_paths * n_shares:
                    raise ArgumentError(
                        f"the batch has {n_samples} samples for {n_shares} replicas"
                        + (f" of {n_paths} paths each" if n_paths > 1 else "")
                        + f"; give at least {n_paths * n_shares}, or evaluate with a pipeline of "
                        "one replica"
                    )
                most = min(most, max(n_samples // n_shares, n_paths))
        return most * n_slices


def _shape(path: str, value: Any) -> list[Any]:
    """Return the path of a value, and shape and type of a tensor, or else the value as text."""
    if not isinstance(value, Tensor):
        return [path, f"{value!r:.100}"]
    return [path, str(value.dtype), *value.shape]


def _forward_graph(graph: TaskGraph, n_microbatches: int) -> TaskGraph:
    """Return the forward-only graph of the schedule of a graph, with so many micro-batches."""
    source = graph.options.source
    if source is None:
        raise ArgumentError(
            f"{graph!r} was not made by pipesim.lower, so that its schedule is unknown; evaluate "
            "and predict need one: lower a schedule, or load it with pipesim.Schedule.load"
        )
    schedule = source.schedule
    if n_microbatches < schedule.n_microbatches:
        schedule = fewer_microbatches(schedule, n_microbatches)
    no_backward = {"recompute": "never", "recompute_first": False, "recompute_waits": False,
                   "grad_sync": "last", "step": "flush"}  # fmt: skip
    return lower(schedule, **{**source.arguments, **no_backward, "forward_only": True})
