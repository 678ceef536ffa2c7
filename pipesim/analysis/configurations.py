"""`Configuration`: a schedule, its lowering and its costs; changes of each, and those that fit.

`changes_that_fit` checks changes by simulation, within a memory limit.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import each_microbatch, n_priced
from pipesim.costs.rows import ROWS, given_rows
from pipesim.errors import (
    CostsError,
    CostsWarning,
    PipeError,
    PipeWarning,
    ScheduleError,
    TimelineError,
    check_flag,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.parallel import RECOMPUTE
from pipesim.network.network import Network
from pipesim.ops import COMPUTE, COPIES
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import options_of_schedules, schedule_info
from pipesim.scheduling.registry import schedule as build_schedule
from pipesim.scheduling.schedule import Recipe, Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import costs_of, reserved_memory
from pipesim.timeline.memory_limit import static_text
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import bincount
from pipesim.utils.texts import format_time

if TYPE_CHECKING:
    import pandas as pd


#: Settings that may have one value a stage.
_STAGE_SETTINGS = ("optimizer_step", "launch")


@dataclass(frozen=True)
class Configuration:
    """A schedule, the arguments of its lowering, and costs.

    Each method returns a changed copy, or raises a `pipesim.errors.PipeError` if there is none.
    """

    schedule: Schedule
    arguments: Mapping[str, Any]
    costs: Costs

    def graph(self) -> TaskGraph:
        """Return the task graph."""
        return lower(self.schedule, **self.arguments)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Arguments with which `Costs.transformer` gives the costs; empty if there are none."""
        work = self.costs.work
        settings = (None if work is None else work.settings) or {}
        return settings if "layers_per_stage" in settings else {}  # not with encoders

    def with_arguments(self, **changes: Any) -> Configuration:
        """Change arguments of `pipesim.lower`."""
        return replace(self, arguments={**self.arguments, **changes})

    def with_settings(self, **changes: Any) -> Configuration:
        """Change settings of the model; fields that the user changed keep their ratios."""
        before = self._costs_of_settings({})
        after = self._costs_of_settings(changes)
        return replace(self, costs=_carry_over(self.costs, before, after))

    def with_expert_parallel(self, size: int) -> Configuration:
        """Divide experts among another number of GPUs."""
        changed = self.with_settings(expert_parallel=size)
        return changed.with_arguments(expert_replicas=changed.costs.expert_replicas)

    def with_schedule(self, name: str) -> Configuration:
        """Take another named schedule on as many devices, with costs for its stages."""
        other = self._named(name, self.schedule.n_microbatches, {})
        stages_differ = other.n_stages != self.schedule.n_stages
        named = ("skips", "sharded", "tied")
        if stages_differ and any(self.arguments[name] for name in named):
            raise ScheduleError("skips, sharded and tied name stages of another schedule")
        changed = replace(self, costs=self._costs_of_schedule(other))
        if "costs" in schedule_info(name).options:
            other = changed._named(name, other.n_microbatches, {"costs": changed.costs})
        return replace(changed, schedule=other)

    def with_n_microbatches(self, count: int) -> Configuration:
        """Take another number of micro-batches of the same size; their costs must be equal."""
        n = n_priced(self.costs)
        if n is not None and count != self.schedule.n_microbatches:
            raise CostsError(
                f"the costs have values for {n} micro-batches, so that those of {count} are not "
                "known; simulate with costs.averaged() to compare other numbers of micro-batches"
            )
        recipe = self._recipe()
        return replace(self, schedule=self._named(recipe.name, count, recipe.options))

    def _recipe(self) -> Recipe:
        """Return name and options of the schedule; raise `ScheduleError` if it has been changed."""
        present, recipe = self.schedule, self.schedule.recipe
        if recipe is not None:
            count, options = present.n_microbatches, recipe.options
            if build_schedule(recipe.name, present.n_devices, count, **options) == present:
                return recipe
        raise ScheduleError("only a named schedule is known for other micro-batches")

    def with_smaller_microbatches(self, factor: int) -> Configuration:
        """Divide micro-batches by ``factor``, and take as many times more of them."""
        recipe = self._recipe()
        size, rest = divmod(self.settings.get("microbatch_size", factor), factor)
        if rest:
            raise CostsError(f"a micro-batch cannot be divided by {factor}")
        if self.settings and n_priced(self.costs) is None:
            changed = self.with_settings(microbatch_size=size)
        else:
            changed = replace(self, costs=_divided(self.costs, factor))
        count = factor * self.schedule.n_microbatches
        other = changed._named(recipe.name, count, recipe.options)
        sync = self.arguments["grad_sync"]
        changed = changed.with_arguments(grad_sync=_scaled_groups(sync, factor))
        return replace(changed, schedule=other)

    def _costs_of_schedule(self, other: Schedule) -> Costs:
        """Return the costs of the stages of another schedule.

        If it has another number of stages, the layers are balanced again for its placement. Costs
        that are not just what settings give are shared by the stages of a device.
        """
        settings, n_stages = self.settings, other.n_stages
        of_stages = [name for name in _STAGE_SETTINGS if isinstance(settings.get(name), list)]
        is_free = "optimizer_step" not in of_stages or "gpu" in settings  # it follows from a GPU
        if (
            n_stages == self.schedule.n_stages
            or not (settings and is_free)
            or "launch" in of_stages
            or self.costs != self._costs_of_settings({})
        ):
            return _suited(self.costs, self.schedule, other)
        kept = {name: value for name, value in settings.items() if name not in of_stages}
        return _placed_costs(json.dumps(kept), other.placement, self.costs.network)

    def _named(self, name: str, n_microbatches: int, options: Mapping[str, Any]) -> Schedule:
        """Return a named schedule for as many devices; orders by costs take these costs.

        Raise `ScheduleError` unless it updates the weights like the present one.
        """
        if "costs" in options:
            options = {**options, "costs": self.costs}
        present = self.schedule
        if present.placement.has_replicas:
            raise ScheduleError(f"schedule {name!r} has no replicas as paths of its placement")
        other = build_schedule(name, present.n_devices, n_microbatches, **options)
        if (other.n_batches, other.weight_versions) != (present.n_batches, present.weight_versions):
            raise ScheduleError(f"schedule {other.name!r} updates the weights in another way")
        if other.n_slices != present.n_slices:
            raise ScheduleError(f"schedule {other.name!r} cuts sequences in another way")
        return other

    def _costs_of_settings(self, changes: Mapping[str, Any]) -> Costs:
        """Return the costs of each stage that the settings give, with some of them changed."""
        with warnings.catch_warnings():  # the user has had them for the settings themselves
            warnings.simplefilter("ignore", CostsWarning)
            costs = Costs.transformer(**{**self.settings, **changes}, network=self.costs.network)
        n_stages, placement = len(self.settings["layers_per_stage"]), self.schedule.placement
        if n_stages == placement.n_stages:
            return costs
        return costs.in_chunks(placement, "device")  # raises unless they are those of devices


def configuration(timeline: Timeline) -> Configuration:
    """Return the configuration of a timeline with costs, whose graph is from `pipesim.lower`."""
    source = timeline.graph.options.source
    if source is None:
        raise TimelineError(
            f"the graph of timeline {timeline.name!r} is not from pipesim.lower, so that its "
            "schedule is unknown; simulate(lower(schedule), costs) gives one that is"
        )
    return Configuration(source.schedule, source.arguments, costs_of(timeline))


@lru_cache(maxsize=16)
def _placed_costs(settings: str, placement: Placement, network: Network) -> Costs:
    """Return the costs of a model whose layers are balanced for a placement; settings in JSON.

    Several schedules have one placement, and to search its split takes the most time.
    """
    with warnings.catch_warnings():  # the user has had them
        warnings.simplefilter("ignore", CostsWarning)
        return Costs.transformer(
            **{**json.loads(settings), "layers_per_stage": placement.n_stages},
            placement=placement,
            network=network,
        )


def _carry_over(costs: Costs, before: Costs, after: Costs) -> Costs:
    """Return ``after``, with the differences of ``costs`` from ``before``.

    Numbers keep their ratio to those of ``before``, or their value where that is 0. Other fields
    keep their value.
    """
    if costs.n_microbatches is not None:
        return each_microbatch(_carry_over, costs, before, after)
    changed: dict[str, Any] = {}
    for name, row in ROWS.items():
        own, old, new = (getattr(x, name) for x in (costs, before, after))
        if own == old or name in ("network", "workload"):
            continue
        if row.item not in ("stage", "group") or own is None or old is None or new is None:
            changed[name] = own
            continue
        own, old, new = np.broadcast_arrays(*(np.array(x, dtype=float) for x in (own, old, new)))
        ratio = np.divide(own, old, out=np.ones(own.shape), where=old > 0)
        changed[name] = np.where(old > 0, new * ratio, own)
    work, own_work = after.work, costs.work
    if work is not None and own_work is not None:
        changed["workload"] = replace(work, memory=own_work.memory, peak_flops=own_work.peak_flops)
    return replace(after, **changed)


def _suited(costs: Costs, old: Schedule, new: Schedule) -> Costs:
    """Return costs of the stages of another schedule on as many devices.

    Stages of one device share its seconds and bytes evenly, as in `Costs.in_chunks`.
    """
    if old.n_stages == new.n_stages:
        return costs
    if old.n_stages != old.n_devices:
        costs = _of_devices(costs, old.placement)
    return costs if new.n_stages == new.n_devices else costs.in_chunks(new.placement, "device")


def _of_devices(costs: Costs, placement: Placement) -> Costs:
    """Return the costs of all that a device holds, from costs of its stages."""
    if costs.n_microbatches is not None:
        return each_microbatch(lambda own: _of_devices(own, placement), costs)
    device = np.array(placement.device_of)
    changed: dict[str, Any] = {}
    for name, row in given_rows(costs).items():
        values = costs.per_stage(name, placement.n_stages)
        if row.whole:  # each stage has that of the device: the largest counts
            total = np.zeros(placement.n_devices)
            np.maximum.at(total, device, values)
        else:
            total = bincount(device, values, placement.n_devices)
        changed[name] = total
    changed["segments"] = None  # of other stages
    if costs.buckets is not None or costs.exchange_bytes or costs.skip_sizes or costs.tied:
        raise CostsError("buckets, exchange_bytes, skip_bytes and tied are of other stages")
    return replace(costs, **changed)


def _divided(costs: Costs, factor: int) -> Costs:
    """Return costs of smaller micro-batches, if seconds and bytes are proportional to their size.

    Launches, optimizer steps, parameters and reductions do not depend on it. Of micro-batches that
    differ, each is divided into equal ones.
    """
    if costs.exchange_bytes is not None or isinstance(costs.skip_sizes, tuple):
        raise CostsError("exchange_bytes and skip_bytes are of one size of micro-batches")
    changed: dict[str, Any] = {}
    for name, row in given_rows(costs).items():
        value = np.array(getattr(costs, name)) / (factor if row.varies and not row.constant else 1)
        value = np.repeat(value, factor, axis=1) if value.ndim > 1 else value
        changed[name] = value if value.ndim else float(value)
    if costs.skip_bytes is not None:
        changed["skip_bytes"] = costs.skip_bytes / factor  # type: ignore[operator]  # a number
    work = costs.work
    if work is not None:
        n = None if work.n_microbatches is None else factor * work.n_microbatches
        changed["workload"] = replace(
            work, tokens=work.tokens / factor, flops=work.flops / factor, n_microbatches=n
        )
    return replace(costs, **changed)


def _scaled_groups(sync: Any, factor: int) -> Any:
    """Return `grad_sync` with as many tokens between reductions, for more micro-batches."""
    if isinstance(sync, tuple):
        return tuple(_scaled_groups(value, factor) for value in sync)
    if sync == "every":
        return factor
    return sync * factor if isinstance(sync, int) else sync


# Changes that fit in memory.

#: Tasks that all simulations of one call have together, about; a few seconds.
MOST_TASKS = 4_000_000


class Change(NamedTuple):
    """One change of a configuration; changes of one kind exclude each other."""

    kind: int
    text: str  # in the words of the library
    make: Callable[[Configuration], Configuration]  # raises a `PipeError` if there is none


class Trial(NamedTuple):
    """A simulated change: seconds, bytes of the fullest device, and whether it fits.

    ``note`` says why an offload takes longer.
    """

    changes: tuple[Change, ...]
    makespan: float
    peak_memory: float
    fits: bool
    pressure: float  # largest share of its limit that a device needs
    layers_per_stage: Sequence[int] | None  # if they differ from the present ones
    note: str = ""

    @property
    def text(self) -> str:
        """Changes as text."""
        text = " and ".join(change.text for change in self.changes)
        if self.layers_per_stage is None:
            return text
        return f"{text}, layers_per_stage={list(self.layers_per_stage)}"


class _ChangeSearch:
    """Simulate changes of a configuration, until `MOST_TASKS` are used up."""

    def __init__(self, timeline: Timeline) -> None:
        if timeline.memory.limit is None:
            raise TimelineError(
                f"timeline {timeline.name!r} has no memory limit for changes to stay within; give "
                "simulate(graph, costs, memory_limit=...), in bytes"
            )
        self.limit = timeline.memory.limit
        self.start = configuration(timeline)
        self.tasks_per_action = len(timeline.graph) / len(self.start.schedule)
        self.left = MOST_TASKS
        self.n_untried = 0
        self.makespan = math.inf
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
        peak = float(timeline.memory.peak.max())
        fits, pressure = bool(timeline.memory.fits), float(shares.max())
        layers = changed.settings.get("layers_per_stage")
        if layers == self.start.settings.get("layers_per_stage"):
            layers = None
        is_slower = timeline.makespan > self.makespan
        note = copies_note(timeline) if is_slower and graph.is_op(COPIES).any() else ""
        return Trial(changes, timeline.makespan, peak, fits, pressure, layers, note)


def copies_note(timeline: Timeline) -> str:
    """Return the seconds of copies of the device that copies longest, and those that hide.

    Copies hide where the device computes at the same time.
    """
    graph, seconds = timeline.graph, timeline.duration
    copies, computes = graph.is_op(COPIES), graph.is_op(COMPUTE)
    device = int(bincount(graph.device, seconds * copies, graph.n_devices).argmax())
    own = np.flatnonzero(computes & (graph.device == device))
    own = own[np.argsort(timeline.start[own], kind="stable")]
    ends = np.maximum.accumulate(timeline.end[own])  # halves of one action overlap
    starts = np.maximum(timeline.start[own], np.concatenate([[0.0], ends[:-1]]))
    times = np.stack([starts, ends], axis=1).ravel()
    busy = np.cumsum(ends - starts)
    computed = np.stack([busy - (ends - starts), busy], axis=1).ravel()
    moved = copies & (graph.device == device)
    start, end = (np.interp(x[moved], times, computed) for x in (timeline.start, timeline.end))
    whole = format_time(float(seconds[moved].sum()))
    hidden = format_time(float((end - start).sum()))
    return f"copies of device {device} take {whole}, of which {hidden} hide behind compute"


def changes_that_fit(
    timeline: Timeline, *, quick: bool = False, every: bool = False
) -> pd.DataFrame:
    """Simulate changes of the configuration; return those that stay in the memory limit.

    Changes:

    - recompute, fused attention and sequence parallelism of the layers, if the costs are from
      `Costs.transformer`, or else R tasks;
    - experts on more GPUs;
    - micro-batches of a half or a quarter of the size;
    - the other named schedules of as many modules;
    - activations in host memory, if the network has a link to it; or of 4 devices or more on
      the paired device (BPipe);
    - a sharded optimizer; or instead of it parameters that replicas share too, gathered once a
      step or for every use.

    If none fits alone, two at a time are tried. Everything else stays as it was, such as
    options of `pipesim.lower`. Fields of the costs stay if they differ from those that the
    model's settings give.

    Schedules that take ``costs`` are ordered for those of the timeline. If a schedule has
    another number of stages, the layers of `Costs.transformer` are balanced again for it; other
    costs are shared evenly by the stages of a device. Costs without settings are proportional
    to the size of a micro-batch here: real kernels get slower.

    The simulations have about four million tasks together. ``attrs["n_untried"]`` of the table
    is the number of changes that were left out for this. If no change fits, the table is empty.
    If parameters, gradients and optimizer alone exceed the limit, ``attrs["advice"]`` is a text
    that says so: more devices, tensor parallelism or a sharded optimizer are needed then.

    Parameters
    ----------
    quick
        Whether to leave out other schedules and changes in pairs, which take most of the time.
    every
        Whether to list changes that do not fit too.

    Returns
    -------
    pandas.DataFrame
        One row a change, by makespan, those that fit first: ``change``, as arguments of
        `Costs.transformer`, `pipesim.schedule` or `pipesim.lower`, with the layers of each
        stage where they are balanced again; ``makespan`` (s);
        ``relative``, to the configuration as it is; ``peak_memory`` (bytes of the fullest
        device); ``room``, the share of its limit that the tightest device has left (below 0 if it
        does not fit); ``fits``; ``note``, the seconds of copies and those that hide, of an offload
        that takes longer.

    Raises
    ------
    TimelineError
        If the timeline has no memory limit or no costs, or if its graph is not from
        `pipesim.lower`, such as one that was loaded.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs, memory_limit=2)
    >>> table = timeline.memory.changes_that_fit(quick=True)
    >>> print(table[["makespan", "peak_memory"]].set_index(table["change"]).tail(1))
                               makespan  peak_memory
    change
    lower(recompute='always')      11.0          1.0
    """
    from pipesim.utils.packages import pandas as pd

    quick, every = check_flag("quick", quick), check_flag("every", every)
    search = _ChangeSearch(timeline)
    changes = [x for x in _changes(search.start) if not (quick and x.kind == _SCHEDULE)]
    trials = search.trials([(change,) for change in changes])
    if not quick and not any(trial.fits for trial in trials):
        pairs = [
            (a.pressure * b.pressure, (*a.changes, *b.changes))
            for a, b in itertools.combinations(trials, 2)
            if a.changes[0].kind != b.changes[0].kind
        ]  # those that should need least memory first
        trials += search.trials([both for _, both in sorted(pairs, key=lambda pair: pair[0])])
    rows = [
        {
            "change": trial.text,
            "makespan": trial.makespan,
            "relative": trial.makespan / search.makespan if search.makespan else math.nan,
            "peak_memory": trial.peak_memory,
            "room": 1 - trial.pressure,
            "fits": trial.fits,
            "note": trial.note,
        }
        for trial in sorted(trials, key=lambda trial: (not trial.fits, trial.makespan))
        if trial.fits or every
    ]
    numbers = ("makespan", "relative", "peak_memory", "room")
    types = {"change": object, **dict.fromkeys(numbers, float), "fits": bool, "note": object}
    table = pd.DataFrame(rows, columns=[*types]).astype(types)
    table.attrs["n_untried"] = search.n_untried
    table.attrs["advice"] = "" if any(trial.fits for trial in trials) else static_text(timeline)
    return table


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
        yield Change(_MICROBATCHES, text, methodcaller("with_smaller_microbatches", factor))
    recipe = start.schedule.recipe
    names = options_of_schedules()
    n_modules = 1
    if recipe is not None and recipe.name in names:  # not one that another process registered
        n_modules = schedule_info(recipe.name).n_modules
    for name in names:
        if schedule_info(name).n_modules == n_modules and (recipe is None or name != recipe.name):
            yield Change(_SCHEDULE, f"schedule={name!r}", methodcaller("with_schedule", name))
    arguments, costs = start.arguments, start.costs
    has_link = costs.network.host is not None or None not in (costs.offload, costs.reload)
    if arguments["offload"] == "none" and has_link:
        yield Change(_OFFLOAD, "offload='all'", methodcaller("with_arguments", offload="all"))
    if arguments["offload"] == "none" and start.schedule.n_devices > 3:
        offload = {"offload": f"above:{start.schedule.n_devices // 2 + 1}", "offload_to": "peer"}
        text = ", ".join(f"{name}={value!r}" for name, value in offload.items())
        yield Change(_OFFLOAD, text, methodcaller("with_arguments", **offload))
    if arguments["n_replicas"] > 1 and arguments["shard_parameters"] == "none":
        if not arguments["shard_optimizer"]:
            yield Change(
                _OPTIMIZER,
                "shard_optimizer=True",
                methodcaller("with_arguments", shard_optimizer=True),
            )
        for mode in ("step", "every"):
            make = methodcaller("with_arguments", shard_parameters=mode, shard_optimizer=False)
            yield Change(_OPTIMIZER, f"shard_parameters={mode!r}", make)


def _model_changes(start: Configuration) -> Iterator[Change]:
    """Yield changes of the model's settings, or R tasks if there are no settings."""
    settings = start.settings
    if not settings:
        if start.arguments["recompute"] != "always":
            yield Change(
                _LOWERING,
                "lower(recompute='always')",
                methodcaller("with_arguments", recompute="always"),
            )
        return
    now = RECOMPUTE.index(settings.get("recompute", "none"))
    for mode in RECOMPUTE[now + 1 :]:
        yield Change(_LAYERS, f"recompute={mode!r}", methodcaller("with_settings", recompute=mode))
    if not settings.get("flash_attention", False):
        yield Change(
            _ATTENTION, "flash_attention=True", methodcaller("with_settings", flash_attention=True)
        )
    if settings.get("tensor_parallel", 1) > 1 and not settings.get("sequence_parallel", False):
        yield Change(
            _SEQUENCE,
            "sequence_parallel=True",
            methodcaller("with_settings", sequence_parallel=True),
        )
    present, n_experts = settings.get("expert_parallel", 1), settings.get("n_experts", 0)
    for factor in (2, 4):
        if n_experts and n_experts % (factor * present) == 0:
            size = factor * present
            yield Change(
                _EXPERTS, f"expert_parallel={size}", methodcaller("with_expert_parallel", size)
            )
