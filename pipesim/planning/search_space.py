"""`SearchSpace`: the values that a plan may choose for each parameter, and its configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Real
from typing import Any, get_args

from pipesim.costs.layer_split import checked_split, layout_modules
from pipesim.errors import ArgumentError, check_count, check_flag, check_list, check_name
from pipesim.framework.framework import schedule_reason
from pipesim.graph.options import OffloadTarget, StageOffload, checked_offload
from pipesim.lowering.parameter_shards import ShardParameters, checked_shard_parameters
from pipesim.models.parallel import RECOMPUTE
from pipesim.models.transformer import Transformer
from pipesim.named_schedules.patterns import Merged, checked_merged
from pipesim.planning import possible_settings
from pipesim.planning.choice import (
    ENCODER_SCHEDULES,
    Evaluation,
    PlanChoice,
    invalid,
    microbatches_text,
    order_facts,
    partial_choice,
    schedule_options,
    takes_slices,
    with_settings,
)
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.plan_tables import SETTINGS
from pipesim.planning.possible_settings import (
    FeatureReasons,
    context_reason,
    setting_reason,
    tensor_reason,
)
from pipesim.planning.problem import PlanProblem
from pipesim.scheduling.registry import schedule_info


@dataclass(frozen=True)
class SearchSpace:
    """Values of each parameter; None for all sensible ones.

    Attributes are those of `pipesim.plan`, each a tuple.
    """

    tensor_parallel: tuple[int, ...] | None = None
    pipeline_parallel: tuple[int, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    microbatch_size: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    n_chunks: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    shard_optimizer: tuple[bool, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    context_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    expert_tensor_parallel: tuple[int, ...] | None = None
    shard_parameters: tuple[ShardParameters, ...] | None = None
    offload: tuple[str, ...] | None = None
    n_slices: tuple[int, ...] | None = None
    merged: tuple[Merged, ...] | None = None
    group_size: tuple[int, ...] | None = None
    encoder_tensor_parallel: tuple[tuple[int, ...], ...] | None = None
    offload_to: tuple[OffloadTarget, ...] | None = None

    @classmethod
    def checked(cls, **values: Any) -> SearchSpace:
        """Return the space of values that are fixed, listed, or None."""
        checks = {
            "schedules": _schedule, "recompute": lambda _, x: check_name("recompute", x, RECOMPUTE),
            "shard_optimizer": check_flag, "sequence_parallel": check_flag,
            "shard_parameters": lambda _, x: checked_shard_parameters(x), "offload": _offload,
            "expert_tensor_parallel": partial(check_count, minimum=0),
            "merged": lambda _, x: checked_merged(x),
            "offload_to": lambda _, x: check_name("offload_to", x, get_args(OffloadTarget)),
        }  # fmt: skip
        return cls(
            **{
                name: None if value is None else _listed(name, value, checks.get(name, check_count))
                for name, value in values.items()
            }
        )

    def measured_size(self, problem: PlanProblem) -> int | None:
        """Return the sequences of the micro-batch of measured layers; None for a transformer."""
        if isinstance(problem.model, Transformer):
            return None
        sizes = self.microbatch_size or (1,)
        if len(sizes) > 1:
            raise ArgumentError(
                f"microbatch_size must be one value, got {sizes!r:.60}: layers were measured with "
                "micro-batches of one size; plan once for the measurement of each size"
            )
        return sizes[0]

    def choices(self, problem: PlanProblem) -> tuple[list[PlanChoice], list[Evaluation]]:
        """Return all configurations without their splits, and the combinations that are invalid."""
        listing = Listing(self, problem)
        listing.fill()
        return listing.choices, listing.invalid


def _schedule(_: str, name: object) -> str:
    """Return the name of a schedule that a plan can use."""
    info = schedule_info(name)
    n_slices = 4 if takes_slices(info.name) else 1
    options = schedule_options(info, 2, n_slices)
    counts = ((p, m * n_slices) for p in (2, 4, 1, 3) for m in range(p, 2 * p + 1))
    devices = next((p for p, m in counts if info.allows(p, m, **options)), None)
    if devices is not None:
        order_facts(info.name, devices, 2, n_slices)
    return info.name


def _offload(name: str, value: object) -> str:
    """Return the text of one value of ``offload`` that holds for all stages."""
    if isinstance(value, str) and "/" in value:
        raise ArgumentError(
            f"{name}={value!r:.60} has a value a stage, and a plan has pipelines of several "
            'depths; give values for all stages, such as "longest:0.5"'
        )
    if isinstance(value, (list, tuple, Mapping)):
        raise ArgumentError(f"{name} must be one value or a list of values, got {value!r:.60}")
    checked = checked_offload(value, 1)  # type: ignore[arg-type]  # it checks the type
    assert isinstance(checked, StageOffload)  # for mypy
    return checked.text


def _listed(name: str, value: Any, check: Any) -> tuple[Any, ...]:
    """Return one value, or the values of a list, checked."""
    if isinstance(value, (str, bool, int)) or not isinstance(value, Iterable):
        value = [value]
    values = check_list(name, value, "one value or a list")
    if not values:
        raise ArgumentError(f"{name} is empty; give a value, or None for all sensible ones")
    return tuple(dict.fromkeys(check(name, x) for x in values))


@dataclass
class Listing:
    """Configurations of a space, without their splits, and combinations that are invalid."""

    space: SearchSpace
    problem: PlanProblem
    choices: list[PlanChoice] = field(default_factory=list)
    invalid: list[Evaluation] = field(default_factory=list)
    _reasons: set[tuple[object, ...]] = field(default_factory=set)
    _replicas: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._features = FeatureReasons(self.problem)

    def fill(self) -> None:
        """List all combinations."""
        n_gpus = self.problem.cluster.n_gpus
        for tp in self.space.tensor_parallel or possible_settings.tensor_sizes(self.problem):
            reason = tensor_reason(self.problem, tp)
            if reason or n_gpus % tp:
                reason = reason or f"{n_gpus} GPUs do not divide by tensor_parallel={tp}"
                self._rule_out(reason, tensor_parallel=tp)
                continue
            for cp in self.space.context_parallel or (1,):
                self._fill_device(tp, cp)
        self._rule_out_replicas()

    def _fill_device(self, tp: int, cp: int) -> None:
        n_gpus = self.problem.cluster.n_gpus
        reason = context_reason(self.problem, tp, cp)
        if reason or n_gpus % (tp * cp):
            reason = reason or f"{n_gpus} GPUs do not divide by {_sizes(tp, cp)}"
            self._rule_out(reason, tensor_parallel=tp, context_parallel=cp)
            return
        depths = self.space.pipeline_parallel
        for pp in depths or possible_settings.depths(self.problem, n_gpus // (tp * cp)):
            self._fill_depth(tp, cp, pp)

    def _rule_out_replicas(self) -> None:
        """Rule out numbers of replicas that no sizes of the other kinds of parallelism make."""
        names = ("tensor_parallel", "context_parallel", "pipeline_parallel")
        fixed = [f"{x}={' or '.join(map(str, v))}" for x in names if (v := getattr(self.space, x))]
        condition = f"with {' and '.join(fixed)}, " if fixed else ""
        possible = ", ".join(map(str, sorted(self._replicas)))
        replicas = "replica" if self._replicas == {1} else "replicas"
        for dp in self.space.data_parallel or ():
            if self._replicas and dp not in self._replicas:
                n_gpus = self.problem.cluster.n_gpus
                reason = f"{condition}{n_gpus} GPUs can make {possible} {replicas}"
                self._rule_out(f"data_parallel={dp}: {reason}", data_parallel=dp)

    def _fill_depth(self, tp: int, cp: int, pp: int) -> None:
        n_gpus, batch = self.problem.cluster.n_gpus, self.problem.global_batch
        sizes = {"tensor_parallel": tp, "context_parallel": cp, "pipeline_parallel": pp}
        if n_gpus % (tp * cp * pp):
            reason = f"{n_gpus} GPUs do not divide by {_sizes(tp, cp)} x pipeline_parallel={pp}"
            self._rule_out(reason, **sizes)
            return
        dp = n_gpus // (tp * cp * pp)
        self._replicas.add(dp)
        if self.space.data_parallel is not None and dp not in self.space.data_parallel:
            return
        sizes["data_parallel"] = dp
        if batch % dp:
            self._rule_out(f"{dp} replicas do not divide global_batch={batch}", **sizes)
            return
        counts = self.space.microbatch_size
        for size in counts or possible_settings.sequence_counts(self.problem, batch // dp):
            if (batch // dp) % size:
                self._rule_out(
                    f"microbatch_size={size} does not divide the {batch // dp} sequences of a "
                    f"replica (global_batch={batch}, {dp} replicas)",
                    **sizes, microbatch_size=size,
                )  # fmt: skip
                continue
            for name, chunks, slices, modes in self._orders(pp):
                in_groups = "group_size" in schedule_info(name).options
                for groups in (self.space.group_size if in_groups else None) or (None,):
                    self._fill_order(PlanChoice(
                        tp, pp, dp, size, batch // dp // size, name, chunks, "none", False, False,
                        (), context_parallel=cp, n_slices=slices, group_size=groups,
                    ), modes)  # fmt: skip

    def _fill_order(self, base: PlanChoice, modes: Sequence[ShardParameters]) -> None:
        info = schedule_info(base.schedule)
        n_layers = self.problem.n_layers
        if base.n_stages > max(n_layers, 1) + 1 + (base.pipeline_parallel == 1):
            reason = (
                f"{n_layers} layers are too few for {base.n_stages} stages, of which each device "
                f"has n_chunks={base.n_chunks}"
            )
            self.invalid.append(invalid(base, reason))
            return
        if not info.allows(base.pipeline_parallel, base.n_scheduled, **base.options):
            what = "slices" if base.n_slices > 1 else "micro-batches"
            reason = (
                f"{base.schedule} takes {info.counts.text}; got {base.pipeline_parallel} devices "
                f"and {base.n_scheduled} {what}" + f" (n_slices={base.n_slices})" * (what[0] == "s")
                + (f" in groups of {base.group_size}" if base.group_size else "")
            )  # fmt: skip
            self.invalid.append(invalid(base, reason))
            return
        if reason := setting_reason(self.problem, base):
            self.invalid.append(invalid(base, reason))
            return
        for choice in self._variants(base, modes):
            reason, names = self._features.reason(choice)
            if reason:
                settings = {name: getattr(choice, name) for name in names}
                self._rule_out_once(partial_choice(**settings), reason)
            elif reason := setting_reason(self.problem, choice):
                mode = "" if choice.sequence_parallel else choice.recompute
                fact = partial_choice(
                    tensor_parallel=base.tensor_parallel, recompute=mode,
                    sequence_parallel=choice.sequence_parallel,
                )  # fmt: skip
                self._rule_out_once(fact, reason)
            else:
                self.choices.append(choice)

    def _variants(self, base: PlanChoice, modes: Sequence[ShardParameters]) -> Iterator[PlanChoice]:
        """Yield configurations with the same order that differ in their other settings."""
        space, dp, tp = self.space, base.data_parallel, base.tensor_parallel
        model = self.problem.model
        splits_sequence = (
            isinstance(model, Transformer)
            and tp > 1
            and (space.sequence_parallel is not None or model.sequence_length % tp == 0)
        )
        values = itertools.product(
            space.recompute or possible_settings.recomputes(self.problem),
            self._flags("shard_optimizer", dp > 1),
            self._flags("sequence_parallel", splits_sequence),
            modes,
            [
                (offload, target)
                for offload in space.offload or ("none",)
                for target in (space.offload_to if offload != "none" else None) or ("host",)
            ],
        )
        sharded_alone = space.shard_optimizer is None or False in space.shard_optimizer
        for recompute, shard, sequence, parameters, (offload, target) in values:
            if shard and parameters != "none" and sharded_alone:
                continue  # listed with shard_optimizer=False
            choice = with_settings(
                base, recompute=recompute, shard_optimizer=shard, sequence_parallel=sequence,
                shard_parameters=parameters, offload=offload, offload_to=target,
            )  # fmt: skip
            for parts, experts in self._expert_sizes(choice):
                for merged, encoders in itertools.product(
                    self._merged(base.schedule, experts), self._encoder_sizes(choice)
                ):
                    yield with_settings(
                        choice, expert_parallel=experts, expert_tensor_parallel=parts,
                        merged=merged, encoder_tensor_parallel=encoders,
                    )  # fmt: skip

    def _encoder_sizes(self, choice: PlanChoice) -> Sequence[tuple[int, ...]]:
        """Return the GPUs that share a layer of each encoder."""
        listed = self.space.encoder_tensor_parallel
        return listed or possible_settings.encoder_sizes(self.problem, choice)

    def _expert_sizes(self, choice: PlanChoice) -> Iterator[tuple[int, int]]:
        """Yield GPUs that share an expert, and GPUs that divide the experts of a layer."""
        space, problem = self.space, self.problem
        for parts in space.expert_tensor_parallel or possible_settings.expert_tensor_sizes(
            problem, choice
        ):
            if parts == choice.tensor_parallel and possible_settings.has_experts(problem):
                parts = 0  # the default in other words
            for experts in space.expert_parallel or possible_settings.expert_sizes(
                problem, choice, parts
            ):
                yield parts, experts

    def _merged(self, name: str, experts: int) -> Sequence[Merged]:
        """Return which tasks of an order are merged, of the listed: alone where exchanges hide."""
        listed = self.space.merged or (False,)
        takes = "merged" in schedule_info(name).options
        if not takes and False not in listed:
            self._rule_out_once(partial_choice(schedule=name), f"{name} merges no F and B")
            return ()
        gains = takes and (experts > 1 or False not in listed)
        return listed if gains else (False,)

    def _rule_out(self, reason: str, **settings: int) -> None:
        self.invalid.append(invalid(partial_choice(**settings), reason))

    def _rule_out_once(self, choice: PlanChoice, reason: str) -> None:
        if (choice, reason) not in self._reasons:
            self._reasons.add((choice, reason))
            self.invalid.append(invalid(choice, reason))

    def _flags(self, name: str, applies: bool) -> tuple[bool, ...]:
        """Return the values of a flag; False where it does not apply."""
        values: tuple[bool, ...] | None = getattr(self.space, name)
        return (values or (False, True)) if applies else (False,)

    def _orders(self, pp: int) -> Iterator[tuple[str, int, int, Sequence[ShardParameters]]]:
        """Yield schedules, their numbers of chunks and slices, and how they share parameters.

        One device that shares parameters runs its stages one after the other, by default layers.
        """
        counts, modes = self.space.n_slices or (1,), self.space.shard_parameters or ("none",)
        shared = [mode for mode in modes if mode != "none"]
        if pp == 1 and shared and 1 in counts:
            for chunks in self.space.n_chunks or (possible_settings.layer_stages(self.problem),):
                yield "naive", chunks, 1, shared
        for name in self._names(pp, counts):
            if reason := schedule_reason(self.problem.framework, name, pp):
                self._rule_out_once(partial_choice(schedule=name), reason)
                continue
            slices = [n for n in counts if (n > 1) == takes_slices(name)]
            if not slices:
                self._rule_out_slices(name, counts)
            for n in slices:
                own = [x for x in modes if pp > 1 or n > 1 or x == "none"]
                for chunks in self._chunks(name, pp, n) if own else ():
                    yield name, chunks, n, own

    def _names(self, pp: int, counts: Sequence[int]) -> Sequence[str]:
        """Return the schedules; without stages to order, 1F1B alone, and Seq1F1B of slices."""
        whole = possible_settings.SCHEDULES if 1 in counts else ()
        of_encoders = ENCODER_SCHEDULES if whole and self.problem.encoders else ()
        sliced = possible_settings.SLICED if max(counts) > 1 else ()
        names = self.space.schedules or (*whole, *of_encoders, *sliced)
        if pp > 1:
            return names
        for single in ("1f1b", "seq1f1b"):
            if single in names:
                is_sliced = takes_slices(single)
                names = tuple(x for x in names if x == single or takes_slices(x) != is_sliced)
        return names

    def _rule_out_slices(self, name: str, counts: Sequence[int]) -> None:
        values = ", ".join(map(str, counts))
        reason = f"{name} runs whole sequences, got n_slices={values}; take seq1f1b or slimpipe"
        if takes_slices(name):
            text = "" if self.space.n_slices is None else f", got n_slices={values}"
            reason = f"{name} runs slices of sequences{text}; give such as n_slices=[2, 4]"
        self._rule_out_once(partial_choice(schedule=name), reason)

    def _chunks(self, name: str, pp: int, n_slices: int) -> Sequence[int]:
        """Return the numbers of chunks of a schedule that are listed, or by default sensible."""
        try:
            chunks = self.problem.chunks_of(name, pp, n_slices)
        except ArgumentError as error:  # too few or too many devices
            self._rule_out_once(partial_choice(pipeline_parallel=pp, schedule=name), str(error))
            return ()
        if chunks is None:
            return self.space.n_chunks or possible_settings.chunk_counts(self.problem, name, pp)
        if self.space.n_chunks is None or chunks in self.space.n_chunks:
            return (chunks,)
        stages = "1 stage" if chunks == 1 else f"{chunks} stages"
        values = ", ".join(map(str, self.space.n_chunks))
        reason = f"{name} has {stages} a device, got n_chunks={values}"
        fact = partial_choice(pipeline_parallel=pp, schedule=name, n_chunks=chunks)
        self._rule_out_once(fact, reason)
        return ()


def _sizes(tp: int, cp: int) -> str:
    text = f"tensor_parallel={tp}"
    return text if cp == 1 else f"{text} x context_parallel={cp}"


# A configuration from its settings, checked as those of a search.

#: Settings that have other defaults than a `PlanChoice`: None if they follow from others.
_DEFAULTS: Mapping[str, Any] = {
    **{field.name: field.default for field in fields(PlanChoice)},
    **dict.fromkeys(("data_parallel", "n_chunks", "n_microbatches", "layers_per_stage")),
}
#: Least value of each count: 1, or the default of one that may be 0.
_COUNTS = {x.name: min(1, vars(PlanChoice)[x.name]) for x in fields(PlanChoice) if x.type == "int"}


def named_choice(problem: PlanProblem, settings: Mapping[str, Any]) -> PlanChoice:
    """Return the configuration of settings; see `Plans.choice`."""
    for name in settings:
        check_name("setting of a configuration", name, SETTINGS)
    single = {**_DEFAULTS, **settings}
    n_microbatches, layers = single.pop("n_microbatches"), single.pop("layers_per_stage")
    encoders = _checked_encoder_sizes(problem, single.pop("encoder_tensor_parallel"))
    ordered = check_flag("ordered_for_costs", single.pop("ordered_for_costs"))
    for name, value in single.items():
        may_be_missing = name in ("data_parallel", "n_chunks", "group_size")
        is_value = isinstance(value, (str, bool, Real))
        if not is_value and not (value is None and may_be_missing):
            raise ArgumentError(f"{name} must be one value, got {value!r:.60}")
    schedules = single.pop("schedule")
    if "microbatch_size" not in settings and problem.measured_size is not None:
        single["microbatch_size"] = problem.measured_size
    space = SearchSpace.checked(schedules=schedules, **single)
    choices, ruled_out = replace(space, encoder_tensor_parallel=(encoders,)).choices(problem)
    if not choices:
        raise ArgumentError(f"no such configuration: {ruled_out[0].reason}")
    if len(choices) > 1:
        raise ArgumentError(f"n_chunks is missing: {schedules} takes any number of chunks")
    choice = replace(choices[0], ordered_for_costs=ordered)
    if ordered and not problem.takes_costs(choice.schedule):
        raise ArgumentError(f"ordered_for_costs=True, but {choice.schedule} takes no costs")
    if n_microbatches is not None and choice.n_microbatches != check_count(
        "n_microbatches", n_microbatches
    ):
        replicas = "replica" if choice.data_parallel == 1 else "replicas"
        raise ArgumentError(
            f"n_microbatches={n_microbatches}, but global_batch={problem.global_batch} on "
            f"{choice.data_parallel} {replicas} is {microbatches_text(choice)}; leave "
            "n_microbatches out"
        )
    return _with_layers(problem, choice, layers)


def _checked_encoder_sizes(problem: PlanProblem, sizes: Any) -> tuple[int, ...]:
    """Return the GPUs that share a layer of each encoder, by default 1."""
    name, n = "encoder_tensor_parallel", len(problem.encoders)
    listed = check_list(name, [sizes] if isinstance(sizes, int) else sizes, "one number an encoder")
    checked = [check_count(name, x) for x in listed] or [1] * n
    if len(checked) != n:
        raise ArgumentError(
            f"{name}={sizes!r:.60} has {len(checked)} numbers for {n} encoders; give one each"
        )
    return tuple(checked)


def _with_layers(problem: PlanProblem, choice: PlanChoice, layers: object) -> PlanChoice:
    """Return a configuration with these layers of each stage; balanced ones for None."""
    if layers is None:
        balanced = Evaluator(problem).with_split(choice)
        if balanced is None:
            raise ArgumentError(
                f"{problem.n_layers} layers are too few for {choice.n_stages} stages"
            )
        return balanced
    name = "layers_per_stage"
    sizes = checked_split(layers, problem.n_layers, name, ends_may_be_empty=True)
    if layout_modules(layers, getattr(problem.model, "mtp_layers", 0)):
        raise ArgumentError(
            f"{name}={layers!r:.60} has multi-token prediction or losses before the last stage, "
            "which plans do not know; price the layout with model.costs, or move m and L to the end"
        )
    if len(sizes) != choice.n_stages:
        raise ArgumentError(
            f"{name} has {len(sizes)} stages; pipeline_parallel={choice.pipeline_parallel} and "
            f"n_chunks={choice.n_chunks} make {choice.n_stages}"
        )
    return replace(choice, layers_per_stage=sizes)


def checked_choice(problem: PlanProblem, choice: PlanChoice) -> PlanChoice:
    """Return a configuration without settings that do not apply, such as sharing by one replica."""
    settings = {name: getattr(choice, name) for name in SETTINGS}
    for name, least in _COUNTS.items():
        check_count(name, settings[name], least)
    batch = choice.data_parallel * choice.n_microbatches * choice.microbatch_size
    if batch != problem.global_batch:
        raise ArgumentError(
            f"the configuration has {choice.data_parallel} replicas of {choice.n_microbatches} "
            f"micro-batches of {choice.microbatch_size} sequences, which are {batch}; the "
            f"plan's global_batch is {problem.global_batch}"
        )
    if choice.n_gpus != problem.cluster.n_gpus:
        sizes = [choice.tensor_parallel, choice.pipeline_parallel, choice.data_parallel]
        sizes[1:1] = [choice.context_parallel] * (choice.context_parallel > 1)
        raise ArgumentError(
            f"the configuration has {choice.n_gpus} GPUs ({' x '.join(map(str, sizes))}); the "
            f"plan's cluster has {problem.cluster.n_gpus}, and all are used"
        )
    return named_choice(problem, settings)
