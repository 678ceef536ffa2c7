"""`Stages`: a model as stages, and what flows between them.

The file is longer than 300 lines for its documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

from pipeexec.nesting import call_arguments, tensors_in
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.report import StagesReport, stages_report
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.splitting.tied import TiedGroup
from pipesim.errors import ArgumentError, ExecutionError, check_count, check_function
from pipesim.scheduling.schedule import Schedule

__all__ = ["Stages"]

#: A loss, and the gradient of each parameter.
Gradients: TypeAlias = list[Tensor | None]


class Stages(Sequence[SplitStage | None]):
    """Stages of a model, in order; `pipeexec.split` makes them.

    They share their parameters with the model, and have the modules of its forward in order. Stages
    of other processes are None. Each takes the output of the stage before. The first one takes
    `arguments` of a batch, the last one returns the model's output.

    Parameters
    ----------
    stages
        Module of each stage; None for stages of other processes.
    ordered
        Function of a batch, which returns it with its tensors in the order of `arguments`.
    sample
        Tensors of the sample that the model was cut with.

    Attributes
    ----------
    model
        The model.
    modules
        Names of the modules of each stage, in the order of their calls.
    tied
        Parameters that several stages have, and train: a group each, of pairs of a stage and the
        parameter's name in the stage's module. The first one is the model's own, others are copies.
    blocks
        Names of the modules between which stages are cut, one for each call, in their order.
    way
        How these modules were found:

        - ``"nn.Sequential"``: those of the model, which is one;
        - ``"blocks of transformer.h"``: a list, each module of which takes an output of the one
          before; or several lists;
        - ``"base_model_pp_plan of the configuration"``: Hugging Face's plan for pipelines;
        - ``"calls of block"``: calls of one module, each of which takes an output of the last;
        - ``"modules that the forward calls"``: the largest ones;
        - ``"torch.export"``: functions with parameters, of a model that calls no two modules.
    ways_failed
        Ways that were tried before: pairs of a name, and why it was not taken.

    Raises
    ------
    ExecutionError
        By a call of stages that are those of other processes.

    See Also
    --------
    pipeexec.split : Cut a model into stages.
    pipeexec.Pipeline : Run the stages on devices.
    pipeexec.read_checkpoint : Read a checkpoint for the model.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
    >>> len(stages), stages.modules, stages.way
    (2, (('0', '1'), ('2', '3')), 'nn.Sequential')
    >>> torch.equal(stages(torch.ones(8, 4)), model(torch.ones(8, 4)))
    True
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[SplitStage | None],
        modules: Sequence[tuple[str, ...]],
        ordered: Callable[[Any], Any],
        tied: tuple[TiedGroup, ...],
        blocks: tuple[str, ...],
        *,
        way: str,
        ways_failed: tuple[tuple[str, str], ...],
        sample: tuple[Tensor, ...],
    ) -> None:
        self.model, self.modules, self.tied, self.blocks = model, tuple(modules), tied, blocks
        self.way, self.ways_failed = way, ways_failed
        self._stages, self._ordered, self._sample = tuple(stages), ordered, sample

    @overload
    def __getitem__(self, index: int) -> SplitStage | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SplitStage | None, ...]: ...
    def __getitem__(self, index: int | slice) -> SplitStage | tuple[SplitStage | None, ...] | None:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[SplitStage | None]:
        return iter(self._stages)

    def __repr__(self) -> str:
        parts = (
            f"{names[0]} to {names[-1]}"
            + ("" if stage is None else f" ({sum(p.numel() for p in stage.parameters()):,})")
            for names, stage in zip(self.modules, self, strict=True)
        )
        return f"<Stages of {type(self.model).__name__}, by {self.way}: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        from pipesim.plot.html_parts import note_html, table_html

        title = f"{len(self)} stages of {type(self.model).__name__}, by {self.way}"
        rows = [
            [str(k), f"{names[0]} to {names[-1]}", _n_parameters(stage)]
            for k, (names, stage) in enumerate(zip(self.modules, self, strict=True))
        ]
        table = table_html(["stage", "modules", "parameters"], rows)
        tied = [" = ".join(f"{name} (stage {k})" for k, name in group) for group in self.tied]
        return note_html(title) + table + (note_html("Tied: " + "; ".join(tied)) if tied else "")

    @property
    def tied_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each group of `tied`, as `pipesim.lower` takes them; each set of stages once.

        Such as ``((0, 3),)``, if the first of four stages has the embedding, and the last the head.
        """
        return tuple(sorted({tuple(stage for stage, _ in group) for group in self.tied}))

    def arguments(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a batch, as the first stage takes them.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.

        Returns
        -------
        tuple of torch.Tensor
            The tensors, in the order of the first stage's arguments.

        Raises
        ------
        ArgumentError
            If the batch is not nested as the sample was, or has other values that are no tensors.

        See Also
        --------
        ordered : Return the batch itself, in this order.
        check : Compare the stages with the model.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
        >>> [tensor.shape for tensor in stages.arguments(torch.ones(2, 4))]
        [torch.Size([2, 4])]
        """
        return tensors_in(self._ordered(batch))

    def ordered(self, batch: Any) -> Any:
        """Return a batch whose tensors are in the order of `arguments`.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.

        Returns
        -------
        object
            The batch, in the order of the sample; for example, a dict with its keys in this order.

        Raises
        ------
        ArgumentError
            As `arguments`.

        See Also
        --------
        arguments : Return the tensors alone.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
        >>> stages.ordered(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        """
        return self._ordered(batch)

    def __call__(self, batch: Any) -> Any:
        """Return the output of all stages, one after the other."""
        values: Any = self.arguments(batch)
        for stage in self._local():
            values = stage(*values)
        return values

    def _local(self) -> list[SplitStage]:
        """Return all stages, if they are in this process."""
        stages = [stage for stage in self if stage is not None]
        if len(stages) < len(self):
            raise ExecutionError(
                f"stages {[k for k, x in enumerate(self) if x is None]} are those of other "
                "processes; only a pipeexec.Pipeline of all processes can run them"
            )
        return stages

    def report(
        self,
        batch: Any = None,
        *,
        schedules: Sequence[str | Schedule] = ("gpipe", "1f1b"),
        n_microbatches: int = 8,
    ) -> StagesReport:
        """Measure the stages, and predict steps of them.

        Each stage runs some forwards and backwards on one thread of this machine. Parameters,
        gradients, buffers and random numbers stay as they were.

        Parameters
        ----------
        batch
            A micro-batch, nested as the sample was. By default the sample.
        schedules
            Names of schedules, or schedules of as many stages. A name gets as many stages a device
            as it has by default.
        n_microbatches
            Micro-batches of a step of the named schedules.

        Returns
        -------
        StagesReport
            ``table`` has a row a stage: modules, layers, parameters, FLOPs, seconds and bytes.
            ``makespans`` has seconds by schedule, predicted from ``costs``.

        Raises
        ------
        ArgumentError
            If a schedule has another number of stages; and as `arguments`.
        UnknownNameError
            For an unknown schedule.
        ExecutionError
            If stages are those of other processes, or if one fails.

        See Also
        --------
        check : Compare loss and gradients with those of the model.
        pipeexec.profile : Measure the stages on their devices.
        pipesim.simulate : Predict a timeline from the costs.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
        >>> report = stages.report(schedules=["1f1b"])
        >>> report.table["parameters"].tolist(), list(report.makespans)
        ([40, 40], ['1f1b'])
        """
        check_count("n_microbatches", n_microbatches)
        values = self._sample if batch is None else self.arguments(batch)
        title = f"{len(self)} stages of {type(self.model).__name__}, by {self.way}"
        return stages_report(title, self._local(), self.blocks, values, schedules, n_microbatches)

    def check(self, batch: Any, loss_fn: Callable[[Any], Tensor] | None = None) -> float:
        """Compare loss and gradients of the stages with those of the model, for one batch.

        Model and stages run one after the other in this thread, in the mode (training or not) that
        they have. Dropout draws the same numbers for both. Parameters, gradients, buffers and the
        states of torch's random numbers stay as they were.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.
        loss_fn
            Called with the model's output; returns the loss. By default the sum of squares of all
            floating-point values of the output.

        Returns
        -------
        float
            Largest difference of the loss or of a parameter's gradient, relative to its largest
            element. 0 means equal to the last bit.

        Raises
        ------
        ArgumentError
            If two forwards of the model differ, after the same state of torch's random numbers; and
            as `arguments`.
        ExecutionError
            If ``loss_fn`` fails, or returns no loss; and if stages are those of other processes.

        See Also
        --------
        report : Measure the stages.
        pipeexec.check_equivalent : Compare training steps of two configurations.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
        >>> stages.check(torch.ones(8, 4))
        0.0
        """
        if loss_fn is None:
            loss_fn = _sum_of_squares
        check_function("loss_fn", loss_fn, "loss_fn(output), which returns a tensor")
        self.arguments(batch)
        args, kwargs = call_arguments(batch)
        stages = self._local()  # before the model runs

        def gradients(forward: Callable[[], Any], copies: Sequence[TiedGroup]) -> Gradients:
            with unchanged(self.model, *stages):  # all draw the same random numbers
                values = self._gradients(forward, loss_fn, copies)
                states.append(torch.get_rng_state())
                return values

        states: list[Tensor] = []

        whole = gradients(lambda: self.model(*args, **kwargs), ())
        again = gradients(lambda: self.model(*args, **kwargs), ())
        if any(not _equal(a, b) for a, b in zip(whole, again, strict=True)):
            raise ArgumentError(
                "two forwards of the model differ, with equal states of torch's random numbers, so "
                "that its stages cannot be compared with it; let it draw no other random numbers, "
                "and keep nothing but buffers from one forward to the next"
            )
        parts = gradients(lambda: self(batch), self.tied)
        if not torch.equal(states[0], states[-1]):
            raise ArgumentError(
                "the stages draw other random numbers than the model, as its forward draws some "
                "outside of its modules, such as F.dropout; call model.eval() and split again, to "
                "compare without dropout"
            )
        return max(_difference(a, b) for a, b in zip(whole, parts, strict=True))

    def _gradients(
        self,
        forward: Callable[[], Any],
        loss_fn: Callable[[Any], Tensor],
        copies: Sequence[TiedGroup],
    ) -> Gradients:
        """Return a loss and the gradients of all parameters, which stay as they were.

        Those of copies add to those of their parameters.
        """
        output = forward()
        try:
            loss = loss_fn(output)
        except Exception as error:  # of the user's code
            raise ExecutionError(
                f"loss_fn fails on the model's output: {type(error).__name__}: {error!s:.300}"
            ) from error
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise ExecutionError(
                f"loss_fn must return a tensor of one element that has a gradient, got {loss!r:.60}"
            )
        places = {id(p): [p] for p in self.model.parameters() if p.requires_grad}
        for group in copies:
            first, *others = (self._parameter(stage, name) for stage, name in group)
            places[id(first)] += others
        parameters = [p for row in places.values() for p in row]
        gradients = iter(torch.autograd.grad(loss, parameters, allow_unused=True))
        sums = [_sum([next(gradients) for _ in row]) for row in places.values()]
        return [loss.detach(), *sums]

    def _parameter(self, stage: int, name: str) -> nn.Parameter:
        """Return a parameter of a stage of this process."""
        part = self._stages[stage]
        assert part is not None, "all stages have run"
        return part.get_parameter(name)


def _n_parameters(stage: nn.Module | None) -> str:
    """Return the number of parameters of a stage, as text."""
    if stage is None:
        return "in another process"
    return f"{sum(p.numel() for p in stage.parameters()):,}"


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients, without those that are missing."""
    values = [x for x in gradients if x is not None]
    return torch.stack(values).sum(0) if len(values) > 1 else next(iter(values), None)


def _sum_of_squares(output: Any) -> Tensor:
    values = [x.square().sum() for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack(values).sum()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference of two tensors, relative to the largest element of the first.

    It is infinite if one of them is missing.
    """
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    most = float((a - b).abs().max())
    return most / float(a.abs().max()) if most else 0.0
