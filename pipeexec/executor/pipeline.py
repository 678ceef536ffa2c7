"""`Pipeline`: run the training steps of a task graph on devices.

`PlacedModel` has what all graphs share: stages, devices, optimizers. `StepRunner` runs the steps of
one graph. `MemoryMethods` has the methods that count bytes, `StateMethods` those that return and
load state, `EvaluationMethods` and `GenerationMethods` those that run forwards alone, this file the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from torch import nn
from torch.amp import GradScaler

from pipeexec.devices.device import DeviceLike
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.executor.accumulation import AccumulatingRunner, Accumulation
from pipeexec.executor.decoding import Decoder, GenerationMethods
from pipeexec.executor.evaluator import EvaluationMethods, Evaluator
from pipeexec.executor.expert_layers import ExpertLayers
from pipeexec.executor.grad_norm import GradNorm
from pipeexec.executor.named_state import StateNames
from pipeexec.executor.offload import Offload
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.sharded_embeddings import ShardedEmbeddings
from pipeexec.executor.sharding import Sharding
from pipeexec.executor.state_methods import StateMethods
from pipeexec.executor.step_capture import CapturingRunner, CudaGraphs
from pipeexec.executor.step_inputs import check_step_batch
from pipeexec.executor.step_memory import MemoryMethods
from pipeexec.executor.step_result import ProcessResult, StepResult, gathered_result, merge_results
from pipeexec.executor.step_runner import StepRunner
from pipeexec.executor.tied_parameters import TiedParameters
from pipeexec.splitting.split_facts import SplitFacts, split_facts
from pipeexec.stages.batches import split_batches
from pipeexec.stages.loss_function import Loss, LossFunction
from pipeexec.stages.microbatches import Microbatches
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_function,
    check_list,
    check_numbers,
    check_type,
    number,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.utils.checks import checked_names


@checked_names
class Pipeline(MemoryMethods, StateMethods, EvaluationMethods, GenerationMethods):
    """Stages on devices, and the task graph that a step of them runs.

    Parameters
    ----------
    stages
        One module a stage, or the result of `pipeexec.split`. Each takes the output of the stage
        before: a tensor or a tuple of tensors. A stage with several edges to it
        (``Placement(..., edges=)``) takes the outputs of all their sources, in the order of these
        stages. With ``processes``, None for stages that run in other processes.
    graph
        From `pipesim.lower`; verified first.
    devices
        One name (``"cpu"``, ``"cuda:0"``) a device of the graph; each ``"cpu"`` is a worker thread.
        With ``processes``, those of this process: the devices of rank 0 are the graph's first.
    loss_fn
        ``loss_fn(output, targets)`` of a micro-batch; runs as part of the last stage. Returns the
        loss, a tensor with one element, or the tuple ``(sum, count)``; see the notes. Or a tuple of
        one of these and a dict of metrics, which are in ``result.metrics``. After the
        first step it is called twice more, with several micro-batches at once, to check that their
        losses combine. None for a forward-only graph: the pipeline predicts and generates alone.
    stage_losses
        Further losses, by stage: ``{2: mtp_loss}``. The module of such a stage returns a pair: its
        output for the next stage, and what ``mtp_loss(predictions, targets)`` takes. That returns
        as ``loss_fn`` does, but no count. The step trains on the sum of all losses; see
        ``result.stage_losses``. With ``processes``, those of such a stage need the targets, too.
    optimizer
        Called with a stage's parameters, returns its `torch.optim.Optimizer`. A function whose
        first parameter is called ``named_parameters`` gets pairs of name and parameter. STEP runs
        the optimizer, and each step begins without gradients. With None, STEP does nothing, and
        gradients add up in ``parameter.grad`` from step to step, as always in torch.
    loss_reduction
        Whether ``loss_fn`` returns a ``"mean"`` over its samples, or a ``"sum"``.
    pin_threads
        Whether each CPU worker stays on a separate core, if there are enough cores.
    timeout
        Seconds after which a step in which no task ends is given up; None for no limit, as a
        debugger needs. With ``processes``, their timeout holds. Time in which the process is
        frozen does not count.
    processes
        From `pipeexec.join`, for a pipeline of several processes. Every process makes the pipeline
        with the same graph, and calls its methods in the same order.
    cuda_graph
        Capture a step as one CUDA graph, and replay it, so that the host's time to launch kernels
        is no part of a step. The first steps run eagerly. So does a step before which the host's
        state has changed, such as a learning rate that is no tensor. Needs one GPU, batches of one
        shape, no random numbers, and capturable optimizers.
    batch_dims
        Values of the batch that are not split along their first dimension, by their paths, such as
        ``{"inputs['mask']": None, "targets": 1}``. The values are the dimension of the samples, or
        None for tensors that every micro-batch needs whole. See `step`; for `predict`, paths of
        outputs, such as ``"output"`` or ``"output.logits"``, too.
    slice_dim
        Dimension of the positions in every tensor of samples, along which a graph of several slices
        a sequence (``graph.n_slices``) cuts micro-batches: inputs, targets, and outputs of
        `predict`. Modules with attention need `pipeexec.KeyValueCache`.
    slice_sizes
        Positions of each slice of a sequence, such as those of
        `pipesim.Transformer.balanced_slices`; all sequences have their sum. None (the default) for
        numbers that differ by one at most. With decode steps, those of the prompt.
    tied
        Copies of parameters in several stages that are cut by hand, one group a parameter, by stage
        and name in its module: ``[[(0, "embedding.weight"), (3, "head.weight")]]``. They must begin
        equal. The graph sums their gradients (``lower(..., tied=[(0, 3)])``). Stages of
        `pipeexec.split` know theirs.
    max_grad_norm
        Largest norm of all gradients, over stages, replicas and processes, with which optimizers
        step. Larger ones are scaled down as ``torch.nn.utils.clip_grad_norm_`` does. The graph
        computes the norm (``lower(..., grad_norm=True)``); without ``max_grad_norm`` it is only
        reported.
    error_if_nonfinite
        Whether a norm that is NaN or infinite raises an error before any optimizer has stepped.
        On a GPU, the host then waits for the norm. If False, the step goes on.
    grad_scaler
        Scales losses, so that gradients of 16 bits do not vanish. If the norm of a step's gradients
        is not finite, no stage steps, and ``StepResult.skipped`` is True. The graph computes the
        norm (``lower(..., grad_norm=True)``). Processes give scalers with the same state.

    Notes
    -----
    Loss and gradients of a step equal those of the whole batch at once, up to rounding, for

    - a sum, and a mean over samples; micro-batches may have different numbers of samples;
    - a mean over anything else, if ``loss_fn`` returns ``(sum, count)``: tokens that are not
      masked or ignored, class weights. Gradients are divided by the total count, over all
      micro-batches and replicas, before the optimizer steps.

    They differ if the loss compares samples with each other (contrastive losses), or if a stage
    does, as a batch norm. The first step causes a `LossWarning` if the losses of micro-batches do
    not combine to the loss of several micro-batches at once.

    `torch.autocast` around `step` holds for the forwards of all stages and for the loss.

    Calls from a second thread while a step runs, from within a stage or the loss, and from a forked
    process raise `ExecutionError`. Only `close` may come from another thread: it ends the step.

    A stage may have several replicas in this process, or paths of a bidirectional placement. The
    first has the given module. The others have copies of it, made here:

    - At the beginning of every step, copies take the parameters, buffers and modes of the first.
    - All share their gradients.
    - Buffers that a step changes, such as statistics of a batch norm, stay as the micro-batches of
      the first one leave them.
    - Other attributes of copies, and their hooks on modules, stay as they were when the pipeline
      was made. Hooks on parameters are refused.

    In several processes, each trains the modules that it was given, with equal weights everywhere.

    A step of several mini-batches begins with the pipeline empty, and ends when it has drained.
    Besides the versions of weights that its schedule needs, each stage has one for the optimizer.

    A graph may have several hosts (``lower(hosts="per_device")``, or a list). Each is a thread that
    issues the tasks of its devices. It waits until other hosts have issued the dependencies of its
    next task. On GPUs, stages then run in these threads. Of the settings of the caller's thread,
    they see autocast alone. Each of several processes has one host.

    With several processes, the shapes of a stage's outputs are found before the first step (see
    `pipeexec.distributed.signatures`) and hold for all steps. Messages carry a header that is
    checked.

    Random numbers (dropout) are drawn per step, stage and micro-batch, starting from
    ``torch.initial_seed()``. After the same `torch.manual_seed`, every schedule and recompute mode
    draws the same numbers.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
    ...     losses = [float(pipeline.step(x, x).loss) for _ in range(5)]
    >>> losses[-1] < losses[0]
    True
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        graph: TaskGraph,
        devices: Sequence[DeviceLike],
        loss_fn: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
        pin_threads: bool = True,
        timeout: float | None = 60.0,
        processes: Processes | None = None,
        cuda_graph: bool = False,
        batch_dims: Mapping[str, int | None] | None = None,
        slice_dim: int = 1,
        slice_sizes: Sequence[int] | None = None,
        tied: Sequence[Sequence[tuple[int, str]]] | None = None,
        max_grad_norm: float | None = None,
        error_if_nonfinite: bool = True,
        grad_scaler: GradScaler | None = None,
        stage_losses: Mapping[int, Loss] | None = None,
    ) -> None:
        with guard_processes(processes):
            _check_timeout(timeout)
            check_flag("pin_threads", pin_threads)
            check_flag("cuda_graph", cuda_graph)
            _check_graph(graph)
            if cuda_graph and processes is not None:
                raise ArgumentError(
                    "cuda_graph=True runs in one process: headers of messages between processes "
                    "are checked by the host; leave it out"
                )
            listed = check_list("stages", stages, "one nn.Module a stage of the graph")
            facts = split_facts(listed)
            of_stages = {
                stage: LossFunction(function, loss_reduction, on_device=cuda_graph)
                for stage, function in _checked_losses(stage_losses, graph, facts).items()
            }
            if loss_fn is None and not graph.forward_only:
                raise ArgumentError(
                    f"graph {graph.name!r} trains, and needs loss_fn(output, targets); to predict "
                    "or generate alone, lower with forward_only=True"
                )
            loss = LossFunction(
                loss_fn or _no_loss, loss_reduction, on_device=cuda_graph, of_stages=of_stages
            )
            if processes is not None:
                processes.agree("the stages of stage_losses", sorted(of_stages))
            if facts is not None and facts.edges != graph.edges:
                raise ArgumentError(
                    f"the graph has stages with the edges {list(graph.edges)}, those of "
                    f"pipeexec.split have {list(facts.edges)}; lower a schedule of "
                    "Placement(..., edges=stages.edges), or split with chain=True for a chain"
                )
            self._ordered = None if facts is None else facts.inputs
            self._model = PlacedModel(
                listed,
                graph,
                check_list("devices", devices, "one name a device of the graph"),
                optimizer,
                pin_threads=pin_threads,
                timeout=timeout,
                processes=processes,
                batch_dims=batch_dims,
                slice_dim=slice_dim,
                slice_sizes=slice_sizes,
                is_split=facts is not None,
                loss_reduction=loss.reduction,
                parts=(
                    CudaGraphs(cuda_graph),
                    ShardedEmbeddings(),
                    ExpertLayers(),
                    Offload(),
                    Sharding(),
                    Accumulation(),
                    TiedParameters(tied, listed, facts),
                    GradNorm(max_grad_norm, error_if_nonfinite, grad_scaler),
                ),
            )
            self.names = StateNames(self._model.modules, graph.n_stages, processes)
            self._set_runner(self._new_runner(graph, loss))

    def _new_runner(self, graph: TaskGraph, loss: LossFunction, n_steps: int = 0) -> StepRunner:
        kind = CapturingRunner if self.cuda_graph else StepRunner
        return kind(graph, self._model, loss, n_steps)

    def _set_runner(self, runner: StepRunner) -> None:
        """Take the runner of the pipeline's graph, and show its parts and those of the model."""
        self._accumulating_runner: AccumulatingRunner | None = None
        evaluator = Decoder if runner.graph.prompt_slices else Evaluator
        self._runner, self._evaluator, model = runner, evaluator(runner), runner.model
        self.graph, self.shares, self.held, self.stages = (
            runner.graph, runner.shares, runner.held, runner.stages
        )  # fmt: skip
        self.devices, self.modules, self.optimizers = model.devices, model.modules, model.optimizers
        self.processes = model.processes

    @property
    def timeout(self) -> float | None:
        """Seconds after which a step in which no task ends is given up; None: no limit.

        It may be set for the next steps of one process.
        """
        return self._runner.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        _check_timeout(seconds)
        self._runner.timeout = seconds

    @property
    def cuda_graph(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return self._model.part(CudaGraphs).is_on

    @property
    def zero_grad(self) -> bool:
        """Whether each step begins without gradients, as it does with an optimizer."""
        return self._model.zero_grad

    @property
    def grad_scaler(self) -> GradScaler | None:
        """Gradient scaler of the steps; None without, or if it is disabled."""
        return self._model.part(GradNorm).scaler

    @property
    def n_steps(self) -> int:
        """Number of steps that have run; random numbers of a step depend on it.

        It may be set before a step, for a training run that is continued.
        """
        return self._runner.n_steps

    @n_steps.setter
    def n_steps(self, number: int) -> None:
        self._runner.n_steps = check_count("n_steps", number, 0)

    @property
    def batch_dims(self) -> Mapping[str, int | None]:
        """Dimensions of the samples by path, as given."""
        return self._model.batch_dims

    @property
    def slice_dim(self) -> int:
        """Dimension of the positions, as given."""
        return self._model.slice_dim

    @property
    def loss_fn(self) -> Loss:
        """Loss function; in one process it may be set, for the next steps."""
        return self._runner.loss.function

    @loss_fn.setter
    def loss_fn(self, function: Loss) -> None:
        if self.processes is not None:
            raise ExecutionError(
                "the loss_fn of a pipeline of several processes cannot be changed: the others "
                "would not know; make another Pipeline"
            )
        with self._model.locked("loss_fn"):
            self._runner.set_loss(
                LossFunction(
                    function,
                    self.loss_reduction,
                    on_device=self.cuda_graph,
                    of_stages=self._runner.loss.of_stages,
                )
            )

    @property
    def loss_reduction(self) -> Literal["mean", "sum"]:
        """Reduction of the losses of samples in ``loss_fn``."""
        return self._runner.loss.reduction

    def with_graph(self, graph: TaskGraph) -> Pipeline:
        """Return a pipeline that runs another graph with the same stages, devices and optimizers.

        Parameters
        ----------
        graph
            Task graph from `pipesim.lower`. It has the same stages on the same devices, and at most
            as many replicas and paths.

        Returns
        -------
        Pipeline
            Pipeline of the other graph. It shares stages, devices and optimizers with this one;
            `close` of one closes both.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     gpipe = pipeline.with_graph(ps.lower(ps.schedule("gpipe", 2, 4)))
        ...     [p.step(x, x).peak_held for p in (pipeline, gpipe)]
        [(2, 1), (4, 4)]
        """
        _check_graph(graph)
        homes, new_homes = self._model.homes, graph.homes.tolist()
        if new_homes != homes[: len(new_homes)]:
            raise ArgumentError(
                f"{graph!r} places its stages on {_as_text(new_homes)}, this pipeline "
                f"on {_as_text(homes)}; make a new Pipeline"
            )
        if graph.edges != self.graph.edges:
            raise ArgumentError(
                f"{graph!r} has stages with the edges {list(graph.edges)}, this pipeline "
                f"{list(self.graph.edges)} ([] is a chain); make a new Pipeline"
            )
        runner = self._runner
        with self._model.locked_open("with_graph"), guard_processes(self.processes):
            self._model.check(graph)
            new_runner = self._new_runner(graph, runner.loss, runner.n_steps)
        new_runner.timeout = runner.timeout
        for stage, new_stage in zip(runner.stages, new_runner.stages, strict=False):
            new_stage.is_random, new_stage.modifies_input = stage.is_random, stage.modifies_input
        pipeline: Pipeline = object.__new__(type(self))
        pipeline.__dict__.update(self.__dict__)
        pipeline._set_runner(new_runner)
        return pipeline

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ArgumentTypeError(
            "a Pipeline has threads, and can neither be copied nor pickled; with_graph runs "
            "another graph, and state_dict() is what to save"
        )

    def step(self, inputs: Any, targets: Any, *, accumulate: bool = False) -> StepResult:
        """Run one training step.

        Parameters
        ----------
        inputs, targets
            Tensors whose first dimension is the batch, nested in any way in tuples, lists, mappings
            and dataclasses; see the notes. The first stage is called with the elements of a tuple,
            with a mapping as keyword arguments, or with one other value. If several stages have no
            stage before them, inputs are a mapping of their numbers, with such inputs of each:
            ``{0: images, 1: tokens}``. ``loss_fn`` gets the targets of a micro-batch nested as they
            are here. With several processes, ``inputs`` may be None in a process without a first
            stage, and leave out first stages of other processes; ``targets`` may be None in one
            without the last. With data-parallel replicas, a process gives the samples of the
            replicas of which it has a stage, concatenated: in one process, the whole batch; if each
            replica has separate processes, its share of the batch.
        accumulate
            Whether gradients add up, and no optimizer steps. The next step without it adds its own,
            and runs the optimizers: all these steps train as one with their batches together,
            weighted by samples or counts, as losses of micro-batches are. More micro-batches in one
            step do the same with less idle time. Gradients are reduced over replicas in each step.
            The graph of such a step is ``timeline.graph`` of its result: the pipeline's without
            STEP. After a step that fails, gradients add up afresh.

        Returns
        -------
        StepResult
            Loss, losses of the micro-batches, metrics, and the measured timeline of the step (s).

        Raises
        ------
        StageError
            If a stage, the loss or the optimizer raised. All other work stops. ``__cause__`` is the
            original error, ``timeline`` has the tasks that ran before it. The next step begins
            afresh. Gradients that add up over steps are restored, except in stages that are
            DistributedDataParallel and with ``cuda_graph``. The message names the stages whose
            optimizers have stepped.
        StallError
            If no task has ended for ``timeout`` seconds; the message tells which task each device
            waits for. The pipeline is closed, as the task that hangs may still be running.
        PeerError
            If another process failed or was lost. Like any other failure of a step of several
            processes, it closes the pipeline.
        ExecutionError
            If the pipeline is closed, before the step or while it runs; if its step cannot be
            captured as a CUDA graph; if the call comes from a second thread, a stage, or a forked
            process; or if gradients are switched off.

        Notes
        -----
        A batch is split into the graph's micro-batches, as evenly as possible:

        - The batch size is the first dimension of the first tensor of the inputs for which it is
          not 1. Targets have as many samples.
        - A tensor whose first dimension is the batch size is split along it.
        - A tensor of first dimension 1 or without dimensions, such as a mask that broadcasts, is
          given whole to every micro-batch. So are numbers, text and None.
        - Everything else is refused, unless its path is in ``batch_dims`` of the pipeline.

        In the first step, matrices of as many rows and columns as there are samples cause a
        `BatchWarning`.

        A graph of several slices a sequence cuts each of these parts along ``slice_dim`` as well;
        a tensor that is given whole is cut if it has as many entries there as the sequence.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     result = pipeline.step(x, x)
        >>> len(result.losses), result.peak_held
        (4, (2, 1))
        """
        check_flag("accumulate", accumulate)
        if accumulate and any(kind != "none" for kind in self._model.part(Sharding).kinds):
            raise ArgumentError(
                "accumulate=True, but the replicas share gradients and optimizer steps: gradients "
                "are scattered in each step, and no share of them is kept; give one step more "
                "micro-batches, or lower without shard_optimizer and shard_parameters"
            )
        with self._model.locked_open("step"):
            runner = self._runner
            if accumulate:
                if self._accumulating_runner is None:
                    with guard_processes(self.processes):
                        self._accumulating_runner = AccumulatingRunner(runner)
                runner = self._accumulating_runner
            return runner.step(self._checked(inputs), targets)

    def _checked(self, inputs: Any) -> Any:
        """Return inputs in the order in which the first stages take them."""
        if inputs is None or self._ordered is None:
            return inputs
        if isinstance(inputs, Microbatches):
            return inputs.map(self._ordered)
        return self._ordered(inputs)

    def check_batch(self, inputs: Any, targets: Any) -> None:
        """Raise unless a step can train on a batch.

        It also raises if this process lacks a part of the batch. No stage runs.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.
        """
        inputs = self._checked(inputs)
        check_step_batch(inputs, targets, self.graph, self.devices, self._runner.loss.of_stages)
        n, n_shares = self.graph.n_microbatches, len(self.shares.local)
        cut = self._model.cut(self.graph)
        split_batches(inputs, targets, n, n_shares, self.batch_dims, cut)

    def align(self) -> None:
        """Measure the differences of the processes' clocks again.

        All processes must call this. It returns at about the same time in each.
        """
        if self.processes is not None:
            with self._model.locked("align"):
                self.processes.barrier()  # names who is late; a round trip would only wait
                self.processes.clock.sample()

    def clocks(self) -> tuple[dict[str, float], ...]:
        """Return the offset of each process's clock to rank 0's.

        All processes must call this.

        Returns
        -------
        tuple of dict
            One dict a rank, with the fields of `pipeexec.distributed.process_clock.Alignment`.
            Empty for one process.
        """
        if self.processes is None:
            return ()
        with self._model.locked("clocks"):
            return tuple(self.processes.share(self.processes.clock.alignment._asdict()))

    def gather(self, result: StepResult) -> StepResult:
        """Return the result of the whole pipeline, in every process.

        All processes must call this. The timeline of the result is on rank 0's clock and begins
        when the first process began. Its losses are on the CPU.

        Parameters
        ----------
        result
            Result of `step` or `evaluate` in this process.

        Returns
        -------
        StepResult
            Result of all processes, with the losses of all micro-batches and the times of all tasks
            (s). In one process, ``result`` itself.
        """
        check_type("result", result, StepResult, "give the result of step")
        if self.processes is None or self._runner.reports is None or result.part is None:
            return result
        graph = result.timeline.graph
        with self._model.locked("gather"):
            packed = self.processes.gather(result.part.pack())
        merged = merge_results(graph, (ProcessResult.unpack(graph, part) for part in packed))
        self._runner.reports.keep_timeline(merged.timeline)
        return gathered_result(result, merged)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of the processes' values, element by element.

        All processes must call this.

        Parameters
        ----------
        values
            Numbers, as many in every process.

        Returns
        -------
        list of float
            One sum a position, equal in every process. In one process, the values as floats.
        """
        if self.processes is None:
            return check_numbers("values", values)
        with self._model.locked("total"):
            return self.processes.total(values)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state of training at the end of a block.

        It restores parameters, buffers, gradients, optimizer state and `n_steps`.

        Returns
        -------
        contextmanager
            Its end restores the state, also after an error.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     before = pipeline.evaluate(x, x).loss
        ...     with pipeline.preserved():
        ...         _ = pipeline.step(x, x)
        ...     pipeline.n_steps, bool(pipeline.evaluate(x, x).loss == before)
        (0, True)
        """
        with self._model.locked_open("preserved"), self._runner.preserved():
            yield

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the devices that change the meaning of measured times, such as slow links."""
        return tuple(dict.fromkeys(device.note for device in self.devices if device.note))

    def close(self) -> None:
        """End the devices' threads, and free captured steps with their memory.

        Pipelines of other graphs on these devices are closed too. A step that runs in another
        thread ends with an `ExecutionError`.
        """
        self._model.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        words = [", ".join(d.name for d in self.devices), *self.notes]
        words += ["as a CUDA graph"] if self.cuda_graph else []
        return f"<Pipeline of {self.graph!r} on {'; '.join(words)}>"


def _check_timeout(timeout: float | None) -> None:
    """Raise unless a timeout is a positive number of seconds, or None."""
    seconds = number(timeout)
    if timeout is not None and (seconds is None or not 0 < seconds < float("inf")):
        raise ArgumentError(
            "timeout must be a positive number of seconds, or None to wait for ever, got "
            f"{timeout!r}"
        )


def _no_loss(output: object, targets: object) -> NoReturn:
    """Raise in place of a loss."""
    raise ArgumentError(
        "the pipeline has no loss_fn, so that it predicts and generates alone; give Pipeline one, "
        "or set pipeline.loss_fn"
    )


def _checked_losses(
    losses: Mapping[int, Loss] | None, graph: TaskGraph, facts: SplitFacts | None
) -> Mapping[int, Loss]:
    """Return ``stage_losses``, if they are of stages that can have a loss of their own."""
    if losses is None:
        return {}
    if not isinstance(losses, Mapping):
        raise ArgumentTypeError(
            "stage_losses must be losses by stage, such as {2: mtp_loss}, got "
            f"{type(losses).__name__}"
        )
    last = graph.n_stages - 1
    for stage, function in losses.items():
        if check_count("stage_losses: a stage", stage, 0) >= last:
            raise ArgumentError(
                f"stage_losses names stage {stage}; the loss of the last of {last + 1} stages is "
                f"loss_fn, and those before it are 0..{last - 1}"
            )
        check_function(f"stage_losses[{stage}]", function, "loss(predictions, targets)")
        if stage in graph.sharded:
            raise ArgumentError(
                f"stage_losses names stage {stage}, whose embedding is sharded; give the loss to "
                "another stage"
            )
    if losses and facts is not None:
        raise ArgumentError(
            "stage_losses are for stages cut by hand, whose modules return a pair of output and "
            "predictions; those of pipeexec.split return what the next stage takes"
        )
    return losses


def _check_graph(graph: TaskGraph) -> None:
    """Raise unless a graph is a valid `TaskGraph` that a pipeline can run."""
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"Pipeline runs a TaskGraph, got {type(graph).__name__}; lower the schedule first"
        )
    verify(graph)
    ends = sorted(set(range(graph.n_stages - 1)).difference(source for source, _ in graph.edges))
    if graph.edges and ends:
        raise ArgumentError(
            f"stage {ends[0]} of graph {graph.name!r} has no edge from it, which pipeexec.Pipeline "
            f"takes of the last stage alone; give one, such as ({ends[0]}, {graph.n_stages - 1}): "
            "a stage with a loss of its own (stage_losses) has an output beside it"
        )
    if graph.skips and not graph.edges:
        raise ArgumentError(
            f"graph {graph.name!r} has skip connections {list(graph.skips)}, which "
            "pipeexec.Pipeline does not run; pipeexec.GPipe does, or lower without skips"
        )


def _as_text(homes: list[list[int]]) -> str:
    return " and ".join(map(str, homes))
