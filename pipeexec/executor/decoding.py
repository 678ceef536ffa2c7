"""Decode steps: slices behind a prompt, whose inputs come from the output of the last stage.

With one slice of a prompt and two decode steps, on two devices::

    device 0 | F0 prompt    F1         F2
    device 1 |         F0 ->     F1 ->      F2
                    token 0   token 1     token 2

F of the last stage calls ``next_inputs`` on its output. The first stage takes the result as the
input of the next slice; on another device, it comes as a message of the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeexec.distributed.signatures import Signature, signature
from pipeexec.executor.evaluator import (
    Evaluator,
    ForwardRunner,
    MicrobatchResult,
    joined_output,
)
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step import Step
from pipeexec.executor.step_result import EvaluationResult, ProcessResult, merge_results
from pipeexec.nesting import tensors_in, with_tensors
from pipeexec.stages.batches import Batch, split_batches
from pipeexec.stages.microbatches import Microbatches
from pipeexec.stages.stage import Stage, StageLike
from pipesim.errors import ExecutionError, check_flag, check_function
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """Tokens, outputs and timeline of `pipeexec.Pipeline.generate`.

    Attributes
    ----------
    tokens
        Values that ``next_inputs`` returned, joined along the positions and over the groups of
        requests. A tensor of shape ``(batch, n_steps + 1)`` for tokens of shape ``(batch, 1)``: the
        first comes from the prompt, the others from decode steps. Of `Microbatches`, a list with
        those of each group. None in a process without the last stage.
    outputs
        Output of the last stage for the last slice of the prompts, then for each decode step,
        joined over the groups as `Pipeline.predict` does; length ``n_steps + 1``. Of
        `Microbatches`, lists with those of each group. Empty in a process without the last stage,
        and with ``keep_outputs=False``.
    timeline
        Measured start and end of each task (s), of all processes.
    """

    tokens: Any
    outputs: tuple[Any, ...]
    timeline: Timeline

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in(self.tokens)[:6])
        return f"<Generation: tokens {shapes or None}, {self.timeline!r}>"


#: Function that returns the inputs of the next slice, from the output of the last stage.
NextInputs = Callable[[Any], Any]


def _most_likely(slice_dim: int, output: Any) -> Tensor:
    """Return the most likely token of the last position, shape ``(batch, 1)``."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or slice_dim > 1:
        form = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits)
        raise ExecutionError(
            "greedy decoding takes logits of shape (batch, positions, vocabulary), as the output "
            f"or its attribute 'logits', and positions in dimension 1 or 0 (slice_dim={slice_dim}"
            f"); got {form}; give generate(next_inputs=), which returns tokens for your output"
        )
    return logits.narrow(slice_dim, logits.shape[slice_dim] - 1, 1).argmax(-1)


class _Tokens(MicrobatchResult):
    """Keep the outputs of the last stage, and make the inputs of the next slices from them."""

    def __init__(self) -> None:
        super().__init__()
        self.next_inputs: NextInputs | None = None  # None between calls
        self.ordered: Callable[[Any], Any] = lambda x: x
        self.keeps_outputs = True
        self.tokens: dict[int, Any] = {}
        #: Shapes and types of the inputs of each decode step.
        self.forms: dict[int, Signature] = {}

    def of_stage(
        self, stage: int, replica: int, output: object, microbatch: int
    ) -> tuple[object, Tensor | None]:
        """Return the output of a stage; of the last one, the inputs of the next slice."""
        step = self._running_step()
        graph = step.graph
        if stage < graph.n_stages - 1:
            return super().of_stage(stage, replica, output, microbatch)
        place = microbatch % graph.n_slices
        if place < graph.prompt_slices - 1:
            return (), None
        number = step.inputs.shares.number(replica, microbatch)
        assert self.next_inputs is not None
        assert self.outputs is not None
        try:
            values = self.next_inputs(output)
        except Exception as error:  # of the user's code
            error.add_note("raised by next_inputs of generate")
            raise
        self.tokens[number] = values
        if self.keeps_outputs:
            self.outputs[number] = output
        tensors = (values,) if isinstance(values, Tensor) else tensors_in(self.ordered(values))
        self._check(signature(tensors), self.forms[number - place + graph.prompt_slices])
        return tensors if place < graph.n_slices - 1 else (), None

    def _check(self, form: Signature, expected: Signature) -> None:
        if form != expected:
            raise ExecutionError(
                f"next_inputs returned {', '.join(map(str, form)) or 'no tensor'}, but a decode "
                f"step takes {', '.join(map(str, expected))}, as one position of the prompt; "
                "return one position of every tensor of the inputs, with their types"
            )


class DecodeRunner(ForwardRunner):
    """Runs a forward-only graph with decode steps."""

    loss_type = _Tokens
    _microbatch_loss: _Tokens

    def _make_stages(self) -> list[StageLike]:
        """Return the stages; last ones have outputs, the inputs of the next slice, and no loss."""
        stages, n = super()._make_stages(), self.graph.n_stages
        for slot in range(n - 1, len(stages), n):
            stage = stages[slot]
            assert isinstance(stage, Stage)
            stage.loss_fn = None
            stage.output_loss = partial(self._microbatch_loss.of_stage, n - 1, slot // n)
            stage.is_random[False] = True  # next_inputs may draw a token
        return stages

    def _prepare(self, inputs: Batch | None, targets: Any) -> Step:
        """Return a step whose decode steps have a position of their prompt as placeholders."""
        graph, model = self.graph, self.model
        step = super()._prepare(with_decode_steps(inputs, graph, model, self.shares.local), targets)
        sends = np.flatnonzero((graph.op == Op.SEND_F) & (graph.stage == graph.n_stages - 1))
        forms = {
            self.shares.number(int(graph.replica[t]), int(graph.microbatch[t]) + 1):
            step.expected_messages[t].signature
            for t in sends.tolist() if t in step.expected_messages
        }  # fmt: skip
        placeholders = enumerate(step.inputs.microbatches[0])
        forms |= {k: signature([x for x in row if x is not None]) for k, row in placeholders if row}
        self._microbatch_loss.forms = forms
        return step

    def generate(
        self,
        inputs: Batch | None,
        next_inputs: NextInputs,
        ordered: Callable[[Any], Any],
        *,
        keep_outputs: bool,
    ) -> tuple[dict[int, Any], dict[int, Any], list[float], Timeline]:
        """Return tokens and outputs by micro-batch, samples of micro-batches, and the timeline."""
        self._check_last_stages()
        own, processes = self._microbatch_loss, self.model.processes
        own.next_inputs, own.ordered, own.keeps_outputs = next_inputs, ordered, keep_outputs
        tokens: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        own.tokens, own.outputs = tokens, outputs
        try:
            step = self.run(inputs, None, Step.walk)
        finally:
            own.next_inputs, own.outputs, own.tokens = None, None, {}
        sizes = list(step.inputs.loss.sizes)
        if processes is None or self.reports is None:
            return tokens, outputs, sizes, step.readings().timeline
        parts = processes.gather(step.process_result(has_losses=False).pack())
        merged = merge_results(self.graph, (ProcessResult.unpack(self.graph, x) for x in parts))
        self.reports.keep_timeline(merged.timeline)
        return tokens, outputs, sizes, merged.timeline


def with_decode_steps(
    inputs: Batch | None, graph: TaskGraph, model: PlacedModel, shares: Sequence[int]
) -> Microbatches | None:
    """Return the slices of prompts, each prompt followed by placeholders of its decode steps.

    A placeholder is one position of the prompt, whose shape and type the inputs of a step have.
    """
    if inputs is None:
        return None
    n_prompt, n_groups = graph.prompt_slices, graph.n_microbatches // graph.n_slices
    if isinstance(inputs, Microbatches):
        slices = list(inputs)
    else:
        n = n_groups * n_prompt
        split = split_batches(inputs, None, n, len(shares), model.batch_dims, model.cut(graph))
        slices = [with_tensors(inputs, row) for row in split.inputs]
    dim, values = model.slice_dim, []
    for first in range(0, len(slices), n_prompt):
        prompt = slices[first : first + n_prompt]
        row = [x.narrow(dim, 0, 1) if x.dim() > dim else x for x in tensors_in(prompt[-1])]
        values += [*prompt, *[with_tensors(prompt[-1], row)] * (graph.n_slices - n_prompt)]
    return Microbatches(values)


class Decoder(Evaluator):
    """Runs the decode steps of a graph that has some; it neither evaluates nor predicts."""

    runner_type = DecodeRunner

    def evaluate(self, inputs: Batch | None, targets: Any) -> EvaluationResult:
        """Raise, as tokens of decode steps are known only when they run."""
        raise self._only_generates("evaluate")

    def predict(self, inputs: Batch | None) -> Any:
        """Raise, as tokens of decode steps are known only when they run."""
        raise self._only_generates("predict")

    def _only_generates(self, call: str) -> ExecutionError:
        return ExecutionError(
            f"{call} takes the inputs of all slices, but those of the decode steps of "
            f"{self._training.graph.name!r} come from the last stage; call generate, or lower "
            "without prompt_slices"
        )

    def generate(
        self,
        inputs: Batch | None,
        next_inputs: NextInputs | None,
        ordered: Callable[[Any], Any],
        *,
        keep_outputs: bool,
    ) -> Generation:
        """Return tokens and outputs of requests; see `Pipeline.generate`."""
        model = self._training.model
        function = next_inputs or partial(_most_likely, model.slice_dim)
        with self._quiet():
            runner, are_given = self._runner(inputs, None)
            assert isinstance(runner, DecodeRunner)
            tokens, outputs, sizes, timeline = runner.generate(
                inputs, function, ordered, keep_outputs=keep_outputs
            )
        if not tokens:
            return Generation(None, (), timeline)
        for tensor in tensors_in([list(tokens.values()), list(outputs.values())]):
            if tensor.is_cuda:  # made on a stream of its stage
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        n_slices, n_prompt = runner.graph.n_slices, runner.graph.prompt_slices
        groups = sorted({number // n_slices for number in tokens})
        steps = range(n_prompt - 1, n_slices)
        own_tokens = [
            joined_output(
                [tokens[group * n_slices + k] for k in steps],
                [1] * len(steps),
                default_dim=model.slice_dim,
            )
            for group in groups
        ]
        rows = [[outputs[group * n_slices + k] for group in groups] for k in steps if outputs]
        if are_given:
            return Generation(own_tokens, tuple(rows), timeline)
        samples = [sizes[group * n_slices + n_slices - 1] for group in groups]
        dims = {
            f"output{path.removeprefix('inputs')}": dim
            for path, dim in model.batch_dims.items() if path.startswith("inputs")
        }  # fmt: skip
        return Generation(
            joined_output(own_tokens, samples, dims),
            tuple(joined_output(row, samples, model.batch_dims) for row in rows),
            timeline,
        )


class GenerationMethods(ABC):
    """Method of `Pipeline` that generates tokens."""

    graph: TaskGraph
    _model: PlacedModel
    _evaluator: Evaluator

    @abstractmethod
    def _checked(self, inputs: Any) -> Any:
        """Return inputs whose tensors are in the order in which the first stage takes them."""

    def generate(
        self,
        inputs: Any,
        next_inputs: NextInputs | None = None,
        *,
        keep_outputs: bool = True,
    ) -> Generation:
        """Run prompts and decode steps of a graph with ``prompt_slices``, and return the tokens.

        The batch is split along the samples into the graph's groups of requests. The prompt of a
        group is cut into ``prompt_slices`` slices (``slice_dim`` and ``slice_sizes`` of the
        pipeline). Each of the ``n_slices - prompt_slices`` decode steps takes one position. So a
        request gets one token from its prompt, and one from each step. Stages keep keys and values
        of the positions before in `pipeexec.KeyValueCache`. Otherwise it runs like `evaluate`.

        Parameters
        ----------
        inputs
            Prompts: inputs of a batch, as for `step`, of one length. Prompts of different lengths
            are `Microbatches`, one a slice of each group: ``prompt_slices`` times the number of
            groups.
        next_inputs
            ``next_inputs(output)`` runs as part of the last stage, on its output for the last slice
            of a prompt and for each decode step. Returns the inputs of the next step, with one
            position: nested as ``inputs``, or one tensor, if the inputs have one. None for the most
            likely token of the last position, by the output or its attribute ``logits``.
        keep_outputs
            Whether to return the outputs of the last stage, too; they stay on its device.

        Returns
        -------
        Generation
            Tokens, outputs of each step, and the measured timeline.

        Raises
        ------
        StageError, StallError, PeerError
            As `evaluate`; also if ``next_inputs`` raises, or returns tensors that are not of the
            shape and type of one position of the prompt.
        ExecutionError
            If the graph has no decode steps. As `evaluate`.

        Notes
        -----
        - The number of steps is that of the graph: no request ends early.
        - Random numbers that ``next_inputs`` draws depend on ``torch.initial_seed()`` alone, so
          that two calls draw the same ones; call `torch.manual_seed` between them.

        See Also
        --------
        pipesim.lower : Its ``prompt_slices`` are the slices of a prompt.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> schedule = ps.schedule("gpipe", 2, 3).with_slices(3)  # one group, a prompt and 2 steps
        >>> graph = ps.lower(schedule, forward_only=True, prompt_slices=1)
        >>> stages = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     result = pipeline.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        >>> result.tokens.shape, [tuple(x.shape) for x in result.outputs]
        (torch.Size([2, 3]), [(2, 3, 8), (2, 1, 8), (2, 1, 8)])
        """
        if next_inputs is not None:
            check_function("next_inputs", next_inputs, "next_inputs(output)")
        check_flag("keep_outputs", keep_outputs)
        if not isinstance(self._evaluator, Decoder):
            raise ExecutionError(
                f"generate runs decode steps, which {self.graph.name!r} does not have; lower with "
                "forward_only=True and prompt_slices=, and run that graph with with_graph"
            )
        with self._model.locked_open("generate"):
            return self._evaluator.generate(
                self._checked(inputs), next_inputs, self._checked, keep_outputs=keep_outputs
            )
