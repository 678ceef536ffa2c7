"""Evaluations and predictions: forward-only graphs on the stages of a pipeline.

A graph of so many micro-batches as a batch has runs on the placed model, in evaluation mode, and
leaves no trace in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeexec.devices.device import RemoteDevice, Values
from pipeexec.devices.thread_settings import current_autocast
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step import Step
from pipeexec.executor.step_inputs import check_batch_is_here
from pipeexec.executor.step_result import EvaluationResult, StepResult
from pipeexec.executor.step_runner import MicrobatchLoss, StepRunner
from pipeexec.nesting import Leaf, leaves, mapped, tensors_in
from pipeexec.stages.batches import NO_DIMS, Batch, BatchDims, dims_by_path, sample_dims
from pipeexec.stages.microbatches import Microbatches, are_microbatches
from pipeexec.stages.module_call import Seed, own_output
from pipeexec.stages.recompute import Buffers
from pipeexec.stages.sequence_slices import SequenceCut, positions_of
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.scheduling.schedule import fewer_microbatches


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set evaluation mode in a block; then restore modes, buffers and the random state.

    Each submodule gets back the mode that it had. Buffers are copied before the block.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    modes = [part.training for part in parts]
    buffers = [_Buffer(part, name) for part in parts for name, x in part._buffers.items()
               if x is not None]  # fmt: skip
    random_state = torch.get_rng_state()
    try:
        for module in parts:
            if module.training:
                module.eval()
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        with torch.inference_mode(False), torch.no_grad():
            for buffer in buffers:
                buffer.restore()
        if not torch.equal(torch.get_rng_state(), random_state):
            torch.set_rng_state(random_state)


class _Buffer:
    """A buffer of a module, and its values."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        buffer = module._buffers[name]
        assert buffer is not None
        self.tensor: Tensor = buffer
        self.version = -1 if buffer.is_inference() else buffer._version
        self.values = buffer.detach().clone()

    def restore(self) -> None:
        """Restore the tensor, and its values if they may have changed."""
        if self.module._buffers.get(self.name) is not self.tensor:
            self.module._buffers[self.name] = self.tensor
        if self.version < 0 or self.tensor._version != self.version:
            self.tensor.copy_(self.values)


class MicrobatchResult(MicrobatchLoss):
    """Compute the losses of an evaluation, or keep the outputs of a prediction."""

    def __init__(self) -> None:
        super().__init__()
        #: Output of each micro-batch of this process, by number; None in an evaluation.
        self.outputs: dict[int, Any] | None = None

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the loss of a micro-batch; in a prediction, keep its output and return 0."""
        if self.outputs is None:
            return super().__call__(replica, output, microbatch)
        assert self.step is not None
        self.outputs[self.step.inputs.shares.number(replica, microbatch)] = output
        return torch.zeros(())

    def of_stage(
        self, stage: int, replica: int, output: object, microbatch: int
    ) -> tuple[object, Tensor | None]:
        """Return the output of a stage, and its loss; none in a prediction."""
        if self.outputs is None:
            return super().of_stage(stage, replica, output, microbatch)
        return own_output(stage, output)[0], None


class _ForwardStage(Stage):
    """A stage whose F runs without gradients."""

    def forward(
        self,
        microbatch: int,
        values: Values,
        seed: Seed,
        recomputed: bool,
        split: bool = False,
        again: Buffers | None = None,
    ) -> Values:
        """Run F; keep nothing."""
        if not torch.is_inference_mode_enabled():  # of this thread, which may be a worker's
            values = tuple(x.clone() if x is not None and x.is_inference() else x for x in values)
        return self.evaluate(microbatch, values, seed)


class ForwardRunner(StepRunner):
    """Runs a forward-only graph as `StepRunner` runs the graph of a step.

    It keeps no gradients, and steps no optimizer. Modules must be in evaluation mode.
    """

    result_type, stage_type, loss_type = EvaluationResult, _ForwardStage, MicrobatchResult
    trains = False
    _microbatch_loss: MicrobatchResult

    def _modules(self) -> list[nn.Module]:
        """Return the modules; the forward of DistributedDataParallel may wait for processes."""
        return [
            m.module if isinstance(m, DistributedDataParallel) else m for m in self.model.modules
        ]

    def evaluate(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Return the loss of a batch; see `Pipeline.evaluate`."""
        step = self.run(inputs, targets, Step.walk)
        return self.result(step, may_wait=self.model.processes is None)

    def predict(self, inputs: Batch | None) -> tuple[dict[int, Any], list[float]]:
        """Return the output of each micro-batch of this process by number, and all their sizes."""
        self._check_last_stages()
        outputs = self._microbatch_loss.outputs = {}
        try:
            step = self.run(inputs, None, Step.walk)
            return outputs, list(step.inputs.loss.sizes)
        finally:
            self._microbatch_loss.outputs = None

    def agree_anew(self, shapes: object) -> None:
        """Take the messages of these shapes, and agree on samples of micro-batches anew.

        ``shapes`` are those of the batch, on which processes have agreed.
        """
        self.shares.forget_sizes()
        if self.reports is not None:
            self.reports.shapes = shapes

    def _check_last_stages(self) -> None:
        """Raise if the last stages of the paths of a replica are in several processes."""
        ranks = [
            device.rank if isinstance(device, RemoteDevice) else -1 for device in self.model.devices
        ]
        for first in range(0, self.graph.n_replicas, self.shares.n_paths):
            devices = self.graph.homes[first : first + self.shares.n_paths, -1]
            if len({ranks[d] for d in devices}) > 1:
                raise ArgumentError(
                    "the paths of a bidirectional pipeline have their last stages in several "
                    "processes here, so that no process has the output of a whole batch; use "
                    "evaluate, whose loss is combined, or run the pipeline in one process"
                )

    def _check(self, inputs: Batch | None, targets: Any) -> None:
        predicts = self._microbatch_loss.outputs is not None
        check_batch_is_here(
            inputs, targets, self.graph, self.model.devices, self.loss.of_stages,
            needs_targets=not predicts,
        )  # fmt: skip

    def _prepare(self, inputs: Batch | None, targets: Any) -> Step:
        step = super()._prepare(inputs, targets)
        step.inputs.loss.check = None  # steps of training check that losses combine
        return step


# Join the outputs of micro-batches by the rules of `Pipeline.predict`

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


def joined_output(
    outputs: Sequence[Any],
    sizes: Sequence[float],
    batch_dims: BatchDims = NO_DIMS,
    default_dim: int = 0,
) -> Any:
    """Return the output of a batch; tensors are on the device of the first micro-batch's.

    ``sizes`` are the numbers of samples of the micro-batches. Tensors without a path in
    ``batch_dims`` are concatenated along ``default_dim``. The output of a single micro-batch is
    that of the batch, whatever it is.
    """
    if len(outputs) == 1:
        return outputs[0]
    rows = [leaves(output, "output") for output in outputs]
    for row in rows[1:]:
        for one, other in zip_longest(rows[0], row):
            if one is None or other is None or one.path != other.path:
                raise ExecutionError(
                    "the last stage returned outputs of different nesting for micro-batches of one "
                    f"batch: {_describe(one)} and {_describe(other)}; return the same for all"
                )
    dims = _output_dims(rows[0], batch_dims)
    joined = iter([
        _joined([leaf.value for leaf in same], sizes, path, dims.get(path, default_dim))
        for same in zip(*rows, strict=True)
        for path in [same[0].path]
    ])  # fmt: skip
    return mapped(lambda _: next(joined), outputs[0])


def joined_slices(
    outputs: Sequence[Any], sizes: Sequence[float], cut: SequenceCut
) -> tuple[list[Any], list[float]]:
    """Return the output of each micro-batch, and its samples, from those of its slices.

    Tensors have their positions in dimension ``cut.dim``. ``sizes`` are the positions of each
    slice, over all its samples.
    """
    k = cut.n_slices
    if k == 1:
        return list(outputs), list(sizes)
    whole, samples = [], []
    for first in range(0, len(outputs), k):
        own = outputs[first : first + k]
        positions = [positions_of(leaves(output, "output"), cut.dim) for output in own]
        if not all(positions):
            raise ExecutionError(
                f"the output of the last stage has no tensor of positions in dimension {cut.dim} "
                "(slice_dim), along which the outputs of slices are joined; return one, or predict "
                "with a schedule without slices"
            )
        whole.append(joined_output(own, positions, default_dim=cut.dim))
        samples.append(sum(sizes[first : first + k]) // sum(positions))
    return whole, samples


def _output_dims(values: Sequence[Leaf], batch_dims: BatchDims) -> dict[str, int | None]:
    """Return the dimensions of samples that the user gave, by the paths of outputs."""
    dims = dims_by_path(values, "output", batch_dims)
    moved = [path for path, dim in batch_dims.items() if dim and path.startswith("inputs")]
    for path, value in values:
        if moved and isinstance(value, Tensor) and value.dim() > 1 and path not in dims:
            raise ArgumentError(
                f"{moved[0]} has its samples in dimension {batch_dims[moved[0]]}, and {path} of "
                f"the last stage has shape {tuple(value.shape)}: give Pipeline its dimension of "
                f"samples too, such as batch_dims={{{path!r}: {batch_dims[moved[0]]}}}"
            )
    return dims


def _describe(leaf: Any) -> str:
    return "nothing more" if leaf is None else leaf.path


def _joined(values: Sequence[Any], sizes: Sequence[float], path: str, dim: int | None) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensor(values, sizes, path, dim)
    if not all(isinstance(value, _PLAIN) for value in values):
        names = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
        raise ExecutionError(
            f"{path} of the last stage is {names}, which cannot be joined over micro-batches; "
            "return tensors, numbers, text or None, in tuples, lists, dicts or dataclasses, or "
            "switch it off in the model, such as a cache"
        )
    for value in values:
        if value != first and not (value != value and first != first):
            raise ExecutionError(
                f"{path} of the last stage has different values in micro-batches of one batch: "
                f"{first!r:.60} and {value!r:.60}; they cannot be joined: leave it out of the "
                "output"
            )
    return first


def _joined_tensor(
    values: Sequence[Tensor], sizes: Sequence[float], path: str, dim: int | None
) -> Tensor:
    """Return the tensor of a batch; ``dim`` is the dimension of the samples, None for none."""
    first = values[0].detach()
    rows = [x.detach().to(first.device, non_blocking=True) for x in values]
    if dim is not None and all(
        -x.dim() <= dim < x.dim() and x.shape[dim] == n for x, n in zip(rows, sizes, strict=True)
    ):
        samples = [x.movedim(dim, 0) for x in rows]
        if len({(x.shape[1:], x.dtype) for x in samples}) == 1:
            return torch.cat(rows, dim)
    if all(x.shape == first.shape and torch.equal(x, first) for x in rows):
        return first
    shapes = ", ".join(dict.fromkeys(str(tuple(x.shape)) for x in values))
    raise ExecutionError(
        f"{path} of the last stage has shapes {shapes} in micro-batches of "
        f"{', '.join(map(str, sizes))} samples, and values that differ: it has no dimension of "
        "samples along which it could be joined; make the samples its first dimension, name "
        "theirs in batch_dims of Pipeline, or leave it out of the output"
    )


class Evaluator:
    """Evaluates batches, and predicts outputs, with the stages of a pipeline.

    A batch of fewer samples than micro-batches runs a graph of fewer micro-batches. ``training``
    runs the pipeline's steps: it gives graph, model, loss, timeout and number of steps.
    """

    runner_type: ClassVar[type[ForwardRunner]] = ForwardRunner

    def __init__(self, training: StepRunner) -> None:
        self._training = training
        self._runners: dict[int, ForwardRunner] = {}

    def evaluate(self, inputs: Batch | None, targets: Any) -> EvaluationResult:
        """Return the loss of a batch; see `Pipeline.evaluate`."""
        with self._quiet():
            result = self._runner(inputs, targets)[0].evaluate(inputs, targets)
            assert isinstance(result, EvaluationResult)
            return result

    def predict(self, inputs: Batch | None) -> Any:
        """Return the output of a batch; see `Pipeline.predict`."""
        with self._quiet():
            runner, are_given = self._runner(inputs, None)
            outputs, sizes = runner.predict(inputs)
            if not outputs:
                return None
            numbers = sorted(outputs)
            rows = [outputs[k] for k in numbers]
            for tensor in tensors_in(rows):
                if tensor.is_cuda:  # made on a stream of its stage
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if are_given:
                return rows
            model = self._training.model
            cut = model.cut(self._training.graph)
            rows, samples = joined_slices(rows, [sizes[k] for k in numbers], cut)
            return joined_output(rows, samples, model.batch_dims)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Run modules in evaluation mode and without gradients in a block."""
        with torch.no_grad(), evaluation_mode(self._training.model.modules):
            yield

    def _runner(self, inputs: Batch | None, targets: Any) -> tuple[ForwardRunner, bool]:
        """Return the runner for a batch, and whether some process gave `Microbatches`."""
        training, model = self._training, self._training.model
        with guard_processes(model.processes):
            shapes = self._shapes(inputs, targets)
            n = self._n_microbatches(shapes)
            if n not in self._runners:
                graph = _forward_graph(training.graph, n)
                self._runners[n] = self.runner_type(graph, model, training.loss)
        runner = self._runners[n]
        runner.loss, runner.timeout, runner.n_steps = (
            training.loss, training.timeout, training.n_steps
        )  # fmt: skip
        runner.agree_anew(repr((n, shapes)))
        return runner, any(numbers for _, numbers, *_ in shapes)

    def _shapes(self, inputs: Batch | None, targets: Any) -> list[list[Any]]:
        """Return samples, number of `Microbatches`, replicas, shapes and autocast of each process.

        Inputs that are no tensors may change the shapes of outputs, too.
        """
        training, processes = self._training, self._training.model.processes
        own = [
            self._n_samples(inputs, targets),
            [len(batch) for batch in (inputs, targets) if isinstance(batch, Microbatches)],
            len(training.shares.local),
            [
                [path, str(x.dtype), *x.shape] if isinstance(x, Tensor) else [path, f"{x!r:.100}"]
                for path, x in leaves(inputs)
            ],
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
            return []
        pairs = (inputs, None), (None, targets)
        return [
            sample_dims(x, y, dims).n_samples for x, y in pairs if not (x is None and y is None)
        ]

    def _n_microbatches(self, shapes: list[list[Any]]) -> int:
        """Return the number of micro-batches of a batch: one sample each at least.

        Slices count, those of whole sequences. Of sequences with decode steps, only slices of the
        prompt are given.
        """
        graph = self._training.graph
        n_slices = self._training.model.cut(graph).n_slices
        n_paths, most = self._training.shares.n_paths, graph.n_microbatches // graph.n_slices
        numbers = {n / n_shares for _, listed, n_shares, *_ in shapes for n in listed}
        if numbers:
            n = int(min(numbers))
            if numbers != {n} or n % n_slices or not n_paths <= n // n_slices <= most:
                texts = " or ".join(f"{x:g}" for x in sorted(numbers))
                of_sequences = f"multiple of {n_slices} slices" if n_slices > 1 else "whole number"
                parts = "slices of prompts" if graph.prompt_slices else "micro-batches"
                raise ArgumentError(
                    f"inputs and targets have {texts} Microbatches a replica; give both the same "
                    f"{of_sequences}, between {n_paths * n_slices} and {most * n_slices}, the "
                    f"number of {parts} of the schedule"
                )
            return n // n_slices * graph.n_slices
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
        return most * graph.n_slices


def _forward_graph(graph: TaskGraph, n_microbatches: int) -> TaskGraph:
    if graph.forward_only and n_microbatches == graph.n_microbatches:
        return graph
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


class EvaluationMethods(ABC):
    """Methods of `Pipeline` that evaluate batches and predict outputs."""

    _model: PlacedModel
    _evaluator: Evaluator

    @abstractmethod
    def _checked(self, inputs: Any) -> Any:
        """Return inputs whose tensors are in the order in which the first stage takes them."""

    def evaluate(self, inputs: Any, targets: Any) -> EvaluationResult:
        """Return the loss of a batch, from the forwards of the schedule alone.

        - Modules are in evaluation mode meanwhile. Afterwards each has its own mode again, and
          gradients, buffers, optimizers, random numbers and ``n_steps`` are as before.
        - The loss is combined as that of a step. Mini-batches count as one batch.
        - Batches may have different sizes. One with fewer samples than micro-batches runs with
          fewer micro-batches. Each replica, and each path, needs one sample. `Microbatches` may be
          fewer than those of the schedule, too.
        - `torch.autocast` around the call holds for all stages and the loss. A step that is
          captured as a CUDA graph stays as it is; this runs eagerly.

        Parameters
        ----------
        inputs, targets
            As those of `Pipeline.step`; all processes must call this.

        Returns
        -------
        EvaluationResult
            Loss, metrics, and the measured timeline of the forwards (s).

        Raises
        ------
        StageError, StallError, PeerError
            As `Pipeline.step`. After a `StageError` in one process, the pipeline can be used again.
            A process does not wait for the stages after its own: their errors may come with its
            next call.
        ExecutionError
            If the pipeline is closed, or called from another thread, a stage, or a forked process.
        """
        with self._model.locked_open("evaluate"):
            return self._evaluator.evaluate(self._checked(inputs), targets)

    def predict(self, inputs: Any) -> Any:
        """Return the model's output for a batch, from the forwards of the schedule alone.

        It runs like `evaluate`, without targets and loss. The output is nested as that of the last
        stage: the model's own output if `pipeexec.split` made the stages. Micro-batches are joined
        in the order of the batch, on the device of the last stage:

        - Tensors whose first dimension is that of the samples are concatenated.
        - Other values, such as numbers, must be equal in all micro-batches.
        - Of `Microbatches`, the outputs are a list, one a micro-batch.

        Parameters
        ----------
        inputs
            Inputs of a batch, as for `step`.

        Returns
        -------
        object
            The output. With several processes: of the replicas whose last stage is in this process,
            None if there are none.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     y = pipeline.predict(x)
        >>> y.shape, torch.allclose(y, stages[1](stages[0](x)))
        (torch.Size([8, 4]), True)
        """
        with self._model.locked_open("predict"):
            return self._evaluator.predict(self._checked(inputs))
