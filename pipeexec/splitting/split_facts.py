"""`SplitFacts`: facts about a split, read from its stages, also from wrapped ones.

They are the parameters that several stages have, the names of parameters in the model, and the
differences between the stages and their model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isnan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.compiled_modules import WRAPPED, unwrapped
from pipeexec.nesting import call_arguments, own_tensors, tensors_in, with_tensors
from pipeexec.splitting.borders import Route, shape_alone
from pipeexec.splitting.data_flow import DataFlow
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.operations import line_of_error
from pipeexec.splitting.split_stage import SplitStage
from pipesim.errors import ArgumentError, ExecutionError, PipeError
from pipesim.scheduling.placement import Edges, entry_stages, stage_pairs

#: Copies of one parameter: stage, and name of the parameter in the stage's module.
TiedGroup = tuple[tuple[int, str], ...]
#: A parameter of several stages, and its first name in the model's modules of each of them.
Shared = tuple[nn.Parameter, dict[int, str]]


def shared_parameters(
    model: nn.Module,
    flow: DataFlow,
    calls: Sequence[range],
    outer: Sequence[frozenset[str]],
) -> list[Shared]:
    """Return the parameters that several stages have, in calls or outside of them (``outer``)."""
    stages: dict[int, dict[int, str]] = defaultdict(dict)
    for stage, own in enumerate(calls):
        modules = {flow.calls[k].name for k in own}
        needed = {id(model.get_parameter(name)) for name in outer[stage]}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in needed or any(name.startswith(f"{x}.") for x in modules):
                stages[id(parameter)].setdefault(stage, name)
    result = [(p, stages[id(p)]) for p in model.parameters() if len(stages[id(p)]) > 1]
    for parameter, names in result:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ArgumentError(
                f"stages {sorted(names)} have copies of {next(iter(names.values()))!r}, whose "
                "hooks would run for one of them; remove its hooks, or cut so that one stage has it"
            )
    return result


def copies(shared: Iterable[Shared], stage: int) -> dict[int, nn.Parameter]:
    """Return the copies that a stage has of parameters of earlier stages, by the ids of these."""
    return {
        id(p): nn.Parameter(p.detach().clone(), p.requires_grad)
        for p, names in shared
        if stage in names and stage != min(names)
    }


def tied_groups(shared: Iterable[Shared]) -> Iterator[TiedGroup]:
    """Yield the copies of each shared parameter that is trained."""
    for parameter, names in shared:
        if parameter.requires_grad:
            yield tuple((stage, f"model.{names[stage]}") for stage in sorted(names))


Loss = Callable[[Any], Tensor]
#: Each trained parameter of a model, with its copies.
Parameters = Sequence[Sequence[nn.Parameter]]


class Differences(NamedTuple):
    """Largest differences of stages to their model, relative to largest elements.

    They are infinite if one has a tensor that the other has not.
    """

    outputs: float
    loss: float
    gradients: float
    buffers: float

    @property
    def largest(self) -> float:
        """The largest of them; NaN if one is."""
        return _worst(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} by {x:.1e}" for name, x in self._asdict().items() if x != 0)


class _Result(NamedTuple):
    outputs: list[Tensor]
    loss: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    random_state: Tensor


def tolerance(model: nn.Module) -> float:
    """Return the difference that rounding may make: the root of the coarsest type's precision."""
    types = {x.dtype for x in model.parameters() if x.is_floating_point()}
    return sqrt(max((torch.finfo(x).eps for x in types), default=torch.finfo(torch.float32).eps))


def compared(
    model: nn.Module,
    stages: Sequence[nn.Module],
    run_model: Callable[[], Any],
    run_stages: Callable[[], Any],
    parameters: Parameters,
    loss_fn: Loss | None,
    draws: str = "",
) -> Differences:
    """Run a model and its stages, each from the same state, and compare.

    The loss of an output is by default the sum of squares of all floating-point values. ``draws``
    tells where the model's forward draws random numbers.
    """

    def result(run: Callable[[], Any], copies: Parameters) -> _Result:
        with unchanged(model, *stages, guard=False):  # all draw the same random numbers
            return _result(model, run, copies, loss_fn)

    alone = [row[:1] for row in parameters]
    whole = result(run_model, alone)
    try:
        parts = result(run_stages, parameters)
    except PipeError:
        raise
    except Exception as error:  # of the user's code, with other values than in the model
        raise ExecutionError(
            f"stages fail where the model does not: {type(error).__name__}: "
            f"{str(error).strip():.100}{line_of_error(error)}; modules of other stages are "
            "stand-ins there: let the forward use their results alone, not their types or methods"
        ) from error
    differences = _differences(whole, parts)
    if differences.largest != 0 and _differences(whole, result(run_model, alone)).largest != 0:
        raise ArgumentError(
            f"two forwards of {type(model).__name__} differ, with equal states of torch's random "
            "numbers, so that its stages cannot be compared with it; let it draw no other random "
            "numbers, and keep nothing but buffers from one forward to the next"
        )
    if not torch.equal(whole.random_state, parts.random_state):
        raise ArgumentError(
            f"the stages draw other random numbers than {type(model).__name__}, as its forward "
            f"draws some outside of its modules{draws}; use a module such as nn.Dropout, or call "
            "model.eval() and split again, to compare without dropout"
        )
    return differences


def _result(
    model: nn.Module, run: Callable[[], Any], parameters: Parameters, loss_fn: Loss | None
) -> _Result:
    """Run one forward and backward; gradients of copies add to those of their parameters."""
    output = run()
    loss = _sum_of_squares(output) if loss_fn is None else _given_loss(loss_fn, output)
    gradients: list[Tensor | None] = []
    if loss.requires_grad:
        leaves = [p for row in parameters for p in row if p.requires_grad]
        try:
            own = dict(zip(map(id, leaves), torch.autograd.grad(loss, leaves, allow_unused=True),
                           strict=True))  # fmt: skip
        except PipeError:
            raise
        except Exception as error:  # such as that of reentrant checkpoints
            raise ArgumentError(
                f"gradients of {type(model).__name__} cannot be compared by torch.autograd.grad: "
                f"{str(error).strip():.80}; let that work for its parameters, such as by "
                "use_reentrant=False of checkpoints"
            ) from error
        gradients = [_sum([own.get(id(p)) for p in row]) for row in parameters]
    return _Result(
        [x.detach().clone() for x in tensors_in(output)],
        [loss.detach()],
        gradients,
        [x.clone() for x in model.buffers() if not x.is_meta],
        torch.get_rng_state(),
    )


def _given_loss(loss_fn: Loss, output: Any) -> Tensor:
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
    return loss


def _sum_of_squares(output: Any) -> Tensor:
    values = [x.square().sum().float() for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack(values).sum() if values else torch.zeros(())


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients, without those that are missing."""
    values = [x for x in gradients if x is not None]
    return torch.stack(values).sum(0) if len(values) > 1 else next(iter(values), None)


def _differences(a: _Result, b: _Result) -> Differences:
    return Differences(
        _largest(a.outputs, b.outputs),
        _largest(a.loss, b.loss),
        _largest(a.gradients, b.gradients, together=True),
        _largest(a.buffers, b.buffers),
    )


def _largest(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None], *, together: bool = False
) -> float:
    """Return the largest difference of tensors, relative to the largest element of each, or of all.

    It is infinite if forms differ or one is missing.
    """
    if len(first) != len(second):
        return float("inf")
    rows = [_difference(a, b) for a, b in zip(first, second, strict=True)]
    if together:
        size = max((x for _, x in rows), default=0.0)
        rows = [(x, size) for x, _ in rows]
    return _worst([x / size if size and x else x for x, size in rows])


def _worst(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if one is."""
    worst: float = next((x for x in values if isnan(x)), max(values, default=0.0))
    return worst


def _difference(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest element of the first."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf"), 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf"), 0.0
    if not a.numel() or torch.equal(a, b):
        return 0.0, 0.0 if not a.numel() else float(a.abs().max())
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf"), 0.0
    is_nan = a.isnan()
    if not torch.equal(is_nan, b.isnan()):
        return float("nan"), 0.0
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max()), float(a.abs().max())


class SplitFacts:
    """Facts about a split that all its stages share.

    ``ordered`` returns a batch whose tensors are in the order in which the first stage takes them.
    ``draws`` are lines of the forward that draw random numbers outside of modules. ``edges`` are
    those between stages, empty for a chain.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        edges: Edges,
        ordered: Callable[[Any], Any],
        tied: tuple[TiedGroup, ...],
        draws: tuple[str, ...] = (),
    ) -> None:
        self.n_stages, self.ordered, self.tied, self.draws = len(routes), ordered, tied, draws
        self.edges = edges
        #: Numbers of the inputs of the model that each first stage needs; of others, the shapes.
        self._inputs = {
            stage: {k for k, border in enumerate(routes[stage].receives) if border.whole}
            for stage in entry_stages(edges, len(routes))
        }

    def __deepcopy__(self, _: dict[int, Any]) -> SplitFacts:
        return self  # copies of stages do not copy the model

    def inputs(self, batch: Any) -> Any:
        """Return a batch as a `Pipeline` takes it: by stage, if several have none before them.

        A stage that needs the shape of a tensor alone gets one without data.
        """
        ordered = self.ordered(batch)
        if len(self._inputs) == 1:
            return ordered
        rows = list(enumerate(tensors_in(ordered)))
        return {
            stage: with_tensors(ordered, [x if k in own else shape_alone(x) for k, x in rows])
            for stage, own in self._inputs.items()
        }

    def stage_inputs(self, stage: int, batch: Any, outputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the tensors that a stage takes, from outputs of the stages before it."""
        if stage in self._inputs:
            inputs = self.inputs(batch)
            return tensors_in(inputs if len(self._inputs) == 1 else inputs[stage])
        pairs = stage_pairs(self.edges, self.n_stages).tolist()
        return tensors_in([outputs[a] for a, b in pairs if b == stage])

    def compared(
        self,
        stages: Sequence[SplitStage],
        batch: Any,
        loss_fn: Callable[[Any], Tensor] | None = None,
    ) -> Differences:
        """Return the differences of all stages to the model, for a batch; see `compared`."""
        model = stages[0].whole
        args, kwargs = call_arguments(batch)
        places = {id(p): [p] for p in model.parameters() if p.requires_grad}
        for group in self.tied:
            first, *others = (stages[stage].get_parameter(name) for stage, name in group)
            places[id(first)] += others
        return compared(
            model,
            stages,
            lambda: model(*own_tensors(args), **own_tensors(kwargs)),
            lambda: self.run(stages, own_tensors(batch)),
            list(places.values()),
            loss_fn,
            f", at {self.draws[0]}" if self.draws else "",
        )

    def run(self, stages: Sequence[SplitStage], batch: Any) -> Any:
        """Return the output of all stages, one after the other."""
        outputs: list[Any] = []
        for number, stage in enumerate(stages):
            outputs.append(stage(*self.stage_inputs(number, batch, outputs)))
        return outputs[-1]

    def check(self, stages: Sequence[SplitStage], batch: Any, *, training: bool) -> float:
        """Return the largest difference of all stages to the model in a mode, if it is rounding."""
        model = stages[0].whole
        with unchanged(model, *stages):
            for module in (model, *stages):
                if module.training != training:
                    module.train(training)
            differences = self.compared(stages, batch)
        if not differences.largest <= tolerance(model):
            raise ExecutionError(
                f"the stages differ from {type(model).__name__} in "
                f"{'training' if training else 'evaluation'} mode: {differences}; its forward "
                "reads or keeps facts that px.split does not see, such as strides, requires_grad "
                "or new buffers. Let it not, or give check=False to run the stages nevertheless"
            )
        return differences.largest


def split_facts(stages: Sequence[nn.Module | None]) -> SplitFacts | None:
    """Return the facts about a split whose stages these are; None for other modules.

    Stages may be compiled, or in DistributedDataParallel. Those of other processes are None.
    """
    parts = {k: unwrapped(x) for k, x in enumerate(stages) if isinstance(x, nn.Module)}
    split = [(k, x, x.facts) for k, x in parts.items() if isinstance(x, SplitStage) and x.facts]
    if not split or len(split) < len(parts):
        for index, _, facts in split:
            if facts.edges:
                raise ArgumentError(
                    f"stage {index} is one of pipeexec.split(..., chain=False), and other modules "
                    "are beside it; give all stages of the split alone, or split with chain=True"
                )
        return None
    first = split[0][2]
    for index, stage, facts in split:
        if facts is not first or stage.number != index or len(stages) != facts.n_stages:
            raise ArgumentError(
                f"stage {index} of {len(stages)} is stage {stage.number} of {facts.n_stages} of "
                f"{'another' if facts is not first else 'a'} pipeexec.split; give all stages of "
                "one split in their order"
            )
    return first


def tied_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of a name in a module, or in the module that this one wraps."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return unwrapped(module).get_parameter(name)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names; a tied one has several."""
    names: dict[int, str] = {}
    return {
        name: names.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def named_model_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of each parameter of a stage; a shared one once.

    Names are those in the model, for stages of `pipeexec.split`, and else those in the stage. All
    copies of a tied parameter have its first name, as in ``model.named_parameters()``.
    `DistributedDataParallel` and `torch.compile` add nothing to names.
    """
    original = unwrapped(module)
    firsts = first_names(original.whole) if isinstance(original, SplitStage) else {}
    for name, parameter in original.named_parameters():
        model_name = original.model_name(name) if isinstance(original, SplitStage) else name
        yield firsts.get(model_name, model_name).replace(f"{WRAPPED}.", ""), parameter
