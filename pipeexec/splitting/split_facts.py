"""`SplitFacts`: facts about a split, read from its stages, also from wrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.nesting import call_arguments, own_tensors, tensors_in
from pipeexec.splitting.comparison import Differences, compared, tolerance
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.splitting.tied import TiedGroup
from pipesim.errors import ArgumentError, ExecutionError


class SplitFacts:
    """Facts about a split that all its stages share.

    Parameters
    ----------
    n_stages
        Number of stages.
    ordered
        Returns a batch whose tensors are in the order in which the first stage takes them.
    tied
        Parameters that several stages have, and train; see `Stages`.
    draws
        Lines of the forward that draw random numbers outside of modules.
    """

    def __init__(
        self,
        n_stages: int,
        ordered: Callable[[Any], Any],
        tied: tuple[TiedGroup, ...],
        draws: tuple[str, ...] = (),
    ) -> None:
        self.n_stages, self.ordered, self.tied, self.draws = n_stages, ordered, tied, draws

    def __deepcopy__(self, _: dict[int, Any]) -> SplitFacts:
        return self  # copies of stages do not copy the model

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
        values: Any = tensors_in(self.ordered(batch))
        for stage in stages:
            values = stage(*values)
        return values

    def check(self, stages: Sequence[SplitStage], batch: Any, *, training: bool) -> float:
        """Return the largest difference of all stages to the model in a mode.

        Raises
        ------
        ExecutionError
            If they differ by more than rounding.
        """
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


def first_tied_stage(stages: Sequence[nn.Module | None]) -> int | None:
    """Return the number of the first stage with parts of a split model that has tied parameters."""
    return next(
        (
            index
            for index, stage in enumerate(stages)
            if isinstance(stage, nn.Module)
            for part in stage.modules()
            if isinstance(part, SplitStage) and part.facts is not None and part.facts.tied
        ),
        None,
    )
