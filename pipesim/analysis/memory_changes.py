"""`changes_that_fit`: changes of a configuration that fit in memory, checked by simulation."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.configurations import Configuration, configuration
from pipesim.errors import PipeError, PipeWarning, TimelineError
from pipesim.models.transformer import RECOMPUTE
from pipesim.scheduling.registry import options_of_schedules
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory_limit import reserved_memory, static_text
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


#: Tasks that all simulations of one call have together, about; a few seconds.
MOST_TASKS = 4_000_000


class Change(NamedTuple):
    """One change of a configuration.

    Attributes
    ----------
    kind
        Changes of one kind exclude each other.
    text
        What to change, in the words of the library.
    make
        Function that returns the changed configuration, or raises a `PipeError`.
    """

    kind: int
    text: str
    make: Callable[[Configuration], Configuration]


class Trial(NamedTuple):
    """A simulated change: seconds, bytes of the fullest device, and whether it fits.

    ``pressure`` is the largest share of its limit that a device needs. ``layers_per_stage`` are
    those of the changed model, if they differ from the present ones, or else None.
    """

    changes: tuple[Change, ...]
    makespan: float
    peak_memory: float
    fits: bool
    pressure: float
    layers_per_stage: Sequence[int] | None

    @property
    def text(self) -> str:
        """The changes as text."""
        text = " and ".join(change.text for change in self.changes)
        if self.layers_per_stage is None:
            return text
        return f"{text}, layers_per_stage={list(self.layers_per_stage)}"


class _Search:
    """Simulate changes of a configuration, until a number of tasks is used up."""

    def __init__(self, timeline: Timeline, most_tasks: int) -> None:
        self.limit = _limit(timeline)
        self.start = configuration(timeline)
        self.tasks_per_action = len(timeline.graph) / len(self.start.schedule)
        self.left = most_tasks
        self.n_untried = 0
        self.makespan = self._trial(()).makespan

    def trials(self, candidates: Sequence[tuple[Change, ...]]) -> list[Trial]:
        """Return the trials of the candidates that are possible."""
        trials = []
        for changes in candidates:
            if self.left <= 0:
                self.n_untried += 1
                continue
            try:
                trials.append(self._trial(changes))
            except PipeError:  # there is no such configuration
                continue
        return trials

    def _trial(self, changes: tuple[Change, ...]) -> Trial:
        """Simulate the configuration with these changes."""
        changed = self.start
        with warnings.catch_warnings():  # they are for users who make these changes
            warnings.simplefilter("ignore", PipeWarning)
            for change in changes:
                changed = change.make(changed)
            self.left -= int(self.tasks_per_action * len(changed.schedule))
            graph, limit = changed.graph(), self.limit.tolist()
            timeline = predict_timeline(graph, changed.costs, memory_limit=limit)
        unlimited = np.full(len(self.limit), math.inf)
        shares = np.divide(reserved_memory(timeline), self.limit, unlimited, where=self.limit > 0)
        peak = float(timeline.peak_memory.max())
        fits, pressure = bool(timeline.fits), float(shares.max())
        layers = changed.settings.get("layers_per_stage")
        if layers == self.start.settings.get("layers_per_stage"):
            layers = None
        return Trial(changes, timeline.makespan, peak, fits, pressure, layers)


def changes_that_fit(timeline: Timeline, *, quick: bool, every: bool) -> pd.DataFrame:
    """Return changes of a timeline's configuration; see `Timeline.changes_that_fit`."""
    from pipesim.utils.packages import pandas as pd

    search = _Search(timeline, MOST_TASKS)
    changes = [x for x in _changes(search.start) if not (quick and x.kind == _SCHEDULE)]
    trials = search.trials([(change,) for change in changes])
    if not quick and not any(trial.fits for trial in trials):
        trials += search.trials(_pairs(trials))
    rows = [
        {
            "change": trial.text,
            "makespan": trial.makespan,
            "relative": trial.makespan / search.makespan if search.makespan else math.nan,
            "peak_memory": trial.peak_memory,
            "fits": trial.fits,
        }
        for trial in sorted(trials, key=lambda trial: (not trial.fits, trial.makespan))
        if trial.fits or every
    ]
    types = {"change": object, "makespan": float, "relative": float, "peak_memory": float}
    table = pd.DataFrame(rows, columns=[*types, "fits"]).astype({**types, "fits": bool})
    table.attrs["n_untried"] = search.n_untried
    table.attrs["advice"] = "" if any(trial.fits for trial in trials) else static_text(timeline)
    return table


def _limit(timeline: Timeline) -> NDArray[np.float64]:
    """Return the memory limit of a timeline; raise `TimelineError` if it has none."""
    if timeline.memory_limit is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no memory limit for changes to stay within; give "
            "simulate(graph, costs, memory_limit=...), in bytes"
        )
    return timeline.memory_limit


def _pairs(trials: Sequence[Trial]) -> list[tuple[Change, ...]]:
    """Return pairs of changes of different kinds, those that should need least memory first."""
    pairs = [
        (a.pressure * b.pressure, (*a.changes, *b.changes))
        for a, b in itertools.combinations(trials, 2)
        if a.changes[0].kind != b.changes[0].kind
    ]
    return [changes for _, changes in sorted(pairs, key=lambda pair: pair[0])]


#: Kinds of changes.
(
    _LAYERS, _ATTENTION, _SEQUENCE, _EXPERTS, _MICROBATCHES, _SCHEDULE, _LOWERING, _OFFLOAD,
    _OPTIMIZER,
) = range(9)  # fmt: skip


def _changes(start: Configuration) -> Iterator[Change]:
    """Yield the changes of a configuration that may need less memory.

    Of two changes the first is made first: the model's settings are of the stages as they are.
    """
    yield from _model_changes(start)
    count = start.schedule.n_microbatches
    for factor, word in ((2, "half"), (4, "quarter")):
        size = f"n_microbatches={factor * count}"
        if start.settings:
            text = f"microbatch_size={start.settings['microbatch_size'] // factor}, {size}"
        else:
            text = f"{size}, at a {word} of the seconds and bytes of a micro-batch"
        yield Change(_MICROBATCHES, text, _smaller(factor))
    for name in options_of_schedules():
        recipe = start.schedule.recipe
        if recipe is None or name != recipe.name:
            yield Change(_SCHEDULE, f"schedule={name!r}", _schedule(name))
    arguments, costs = start.arguments, start.costs
    has_link = costs.network.host is not None or None not in (costs.offload, costs.reload)
    if arguments["offload"] == "none" and has_link:
        yield Change(_OFFLOAD, "offload='all'", _argument("offload", "all"))
    if arguments["n_replicas"] > 1 and arguments["shard_parameters"] == "none":
        if not arguments["shard_optimizer"]:
            yield Change(_OPTIMIZER, "shard_optimizer=True", _argument("shard_optimizer", True))
        for mode in ("step", "every"):
            yield Change(_OPTIMIZER, f"shard_parameters={mode!r}", _shards(mode))


def _model_changes(start: Configuration) -> Iterator[Change]:
    """Yield changes of the model's settings, or R tasks if there are no settings."""
    settings = start.settings
    if not settings:
        if start.arguments["recompute"] != "always":
            yield Change(_LOWERING, "lower(recompute='always')", _argument("recompute", "always"))
        return
    now = RECOMPUTE.index(settings.get("recompute", "none"))
    for mode in RECOMPUTE[now + 1 :]:
        yield Change(_LAYERS, f"recompute={mode!r}", _setting("recompute", mode))
    if not settings.get("flash_attention", False):
        yield Change(_ATTENTION, "flash_attention=True", _setting("flash_attention", True))
    if settings.get("tensor_parallel", 1) > 1 and not settings.get("sequence_parallel", False):
        yield Change(_SEQUENCE, "sequence_parallel=True", _setting("sequence_parallel", True))
    present, n_experts = settings.get("expert_parallel", 1), settings.get("n_experts", 0)
    for factor in (2, 4):
        if n_experts and n_experts % (factor * present) == 0:
            size = factor * present
            yield Change(_EXPERTS, f"expert_parallel={size}", _expert_parallel(size))


def _setting(name: str, value: object) -> Callable[[Configuration], Configuration]:
    """Return the change of one setting of the model."""
    return lambda start: start.with_settings(**{name: value})


def _argument(name: str, value: object) -> Callable[[Configuration], Configuration]:
    """Return the change of one argument of `pipesim.lower`."""
    return lambda start: start.with_arguments(**{name: value})


def _shards(mode: str) -> Callable[[Configuration], Configuration]:
    """Return the change to replicas that share parameters, and so the optimizer, too."""
    return lambda start: start.with_arguments(shard_parameters=mode, shard_optimizer=False)


def _expert_parallel(size: int) -> Callable[[Configuration], Configuration]:
    """Return the change to experts that are divided among other numbers of GPUs."""

    def make(start: Configuration) -> Configuration:
        changed = start.with_settings(expert_parallel=size)
        return changed.with_arguments(expert_replicas=changed.costs.expert_replicas)

    return make


def _schedule(name: str) -> Callable[[Configuration], Configuration]:
    """Return the change to another named schedule."""
    return lambda start: start.with_schedule(name)


def _smaller(factor: int) -> Callable[[Configuration], Configuration]:
    """Return the change to smaller micro-batches."""
    return lambda start: start.with_smaller_microbatches(factor)
