"""`LRSchedulers`: one learning-rate schedule for the optimizers of all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pipeexec.executor.pipeline import Pipeline
from pipesim.errors import ArgumentError, check_function, check_type
from pipesim.utils.checks import checked_names

#: Makes the learning-rate scheduler of an optimizer.
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

#: Key of the states of schedulers that differ, by stage.
_BY_STAGE = "by_stage"


@checked_names
class LRSchedulers:
    """A torch learning-rate scheduler for each optimizer of a pipeline, used as if it were one.

    Replicas of a stage in this process have one each, as they have optimizers. In a pipeline of
    several processes, each process makes this object, and calls its methods alike.

    Parameters
    ----------
    pipeline
        The pipeline; pipelines of other graphs made by `Pipeline.with_graph` have its optimizers.
    factory
        Called with an optimizer, returns its `torch.optim.lr_scheduler.LRScheduler`.

    Attributes
    ----------
    schedulers
        Schedulers by number of the stage, replica after replica; None for stages without an
        optimizer and those of other processes.

    Notes
    -----
    `pipeexec.train` takes them as its ``scheduler``.

    With ``cuda_graph``, a step before which a learning rate has changed is replayed only if the
    rate is a tensor: give the optimizer ``lr=torch.tensor(1e-3, device="cuda")``.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> from torch.optim.lr_scheduler import StepLR
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
    ...     scheduler = px.LRSchedulers(pipeline, lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    ...     _ = pipeline.step(x, x)
    ...     scheduler.step()
    >>> scheduler.get_last_lr()
    [0.0005]
    """

    def __init__(self, pipeline: Pipeline, factory: SchedulerFactory) -> None:
        check_type("pipeline", pipeline, Pipeline, "give the pipeline whose optimizers step")
        check_function("factory", factory, "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer)")
        if not pipeline.zero_grad:
            raise ArgumentError(
                "pipeline has no optimizer, whose learning rates could be scheduled; make it with "
                "optimizer="
            )
        self._n_stages = pipeline.graph.n_stages
        self.schedulers = tuple(
            None if optimizer is None else _scheduler(factory, optimizer, slot % self._n_stages)
            for slot, optimizer in enumerate(pipeline.optimizers)
        )

    def _by_slot(self) -> dict[int, LRScheduler]:
        return {k: x for k, x in enumerate(self.schedulers) if x is not None}

    def step(self, *args: Any) -> None:
        """Step all schedulers.

        In several processes, arguments must be the same everywhere, such as
        ``pipeline.gather(result).loss``.

        Parameters
        ----------
        *args
            Those of the torch scheduler, such as the loss for ``ReduceLROnPlateau``.
        """
        for scheduler in self._by_slot().values():
            scheduler.step(*args)

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group.

        They are those of the first stage that has any.

        Returns
        -------
        list
            Numbers, or tensors if the optimizer's rates are. Empty in a process whose stages have
            no parameters.
        """
        return next((x.get_last_lr() for x in self._by_slot().values()), [])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedulers.

        Usually they all have the same one. It is that of a torch scheduler, and loads into another
        number of stages, or into the torch scheduler of a model without stages. If the factory
        gives stages different schedules, the state of each stage is in ``"by_stage"``, and loads
        into as many stages. A process whose stages have no parameters has an empty state.

        Returns
        -------
        dict
            State of a torch scheduler, or states by stage.
        """
        slots = self._by_slot()
        states = {k: x.state_dict() for k, x in slots.items()}
        first: dict[str, Any] = next(iter(states.values()), {})
        if all(_equal(first, state) for state in states.values()):
            return first
        return {_BY_STAGE: {str(k % self._n_stages): x for k, x in states.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also that of the torch scheduler of a model without stages.

        Learning rates are part of the optimizers' state, as in torch: load that too.

        Parameters
        ----------
        state_dict
            Result of `state_dict`, or state of a torch scheduler of the same class.
        """
        check_type("state_dict", state_dict, dict, "give the result of state_dict")
        slots = self._by_slot()
        if slots and not state_dict:
            raise ArgumentError(
                "state_dict is empty: a process whose stages have no parameters saved it; load "
                "that of a process that has parameters"
            )
        states = {k: _state(state_dict, k % self._n_stages) for k in slots}
        for slot, scheduler in slots.items():
            _check_fits(scheduler, states[slot], slot % self._n_stages)
        for slot, scheduler in slots.items():
            scheduler.load_state_dict(dict(states[slot]))

    def __repr__(self) -> str:
        names = sorted({type(x).__name__ for x in self._by_slot().values()})
        return f"<LRSchedulers: {len(self._by_slot())} {' and '.join(names)}>"


def _scheduler(
    factory: SchedulerFactory, optimizer: torch.optim.Optimizer, stage: int
) -> LRScheduler:
    try:
        scheduler = factory(optimizer)
    except Exception as error:  # of the user's code, or of torch
        raise ArgumentError(
            f"factory fails for the optimizer of stage {stage}: {type(error).__name__}: "
            f"{error!s:.300}"
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise ArgumentError(
            f"factory returned {scheduler!r:.60} for the optimizer of stage {stage}; it must "
            "return a torch.optim.lr_scheduler.LRScheduler"
        )
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(
            f"factory returned a scheduler of another optimizer than that of stage {stage}; make "
            "it for the optimizer that the factory is called with"
        )
    return scheduler


def _state(state_dict: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    by_stage = state_dict.get(_BY_STAGE)
    if by_stage is None:
        return state_dict
    state = by_stage.get(str(stage)) if isinstance(by_stage, Mapping) else None
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"state_dict has a schedule for each stage, but none for stage {stage}: schedules that "
            "differ load into as many stages as saved them"
        )
    return state


def _check_fits(scheduler: LRScheduler, state: Mapping[str, Any], stage: int) -> None:
    own = scheduler.state_dict()
    names, saved = ({str(k) for k in x if not str(k).startswith("_")} for x in (own, state))
    if missing := sorted(names ^ saved - {"verbose"}):  # of older versions of torch
        raise ArgumentError(
            f"state_dict is not that of {type(scheduler).__name__}, the scheduler of stage "
            f"{stage}: one of them has no {', '.join(missing)}"[:300]
        )
    for name in ("base_lrs", "_last_lr"):
        sizes = [len(x) for x in (own.get(name), state.get(name)) if isinstance(x, list)]
        if len(set(sizes)) > 1:
            raise ArgumentError(
                f"the optimizer of stage {stage} has {sizes[0]} parameter groups, state_dict is "
                f"of {sizes[1]}; make the same groups for every stage, also if one has no "
                "parameters"
            )


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states are equal; tensors by their values."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (a is b)
