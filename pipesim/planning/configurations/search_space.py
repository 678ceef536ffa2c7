"""`SearchSpace`: the values that a plan may choose, and the configurations that they make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_flag, check_list, check_name
from pipesim.models.layers import Layers
from pipesim.models.transformer import RECOMPUTE, Transformer
from pipesim.planning.configurations.choice import Evaluation, PlanChoice, Status
from pipesim.planning.configurations.problem import PlanProblem, order_facts
from pipesim.planning.configurations.setting_reasons import setting_reason, tensor_reason
from pipesim.scheduling.registry import schedule_info

__all__ = ["SCHEDULES", "SearchSpace", "invalid"]

#: Schedules that are tried by default.
SCHEDULES = (
    "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
)  # fmt: skip
#: Numbers of chunks that are always tried, and the most that are.
_CHUNKS, _MOST_CHUNKS = (2, 4), 12
#: Most sequences of a micro-batch that are tried.
_MOST_SEQUENCES = 16


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

    @classmethod
    def checked(cls, **values: Any) -> SearchSpace:
        """Return the space of values that are fixed, listed, or None.

        Raises
        ------
        ArgumentError
            For values of another type, empty lists, and unknown names.
        """
        checks = {
            "schedules": _schedule, "recompute": lambda _, x: check_name("recompute", x, RECOMPUTE),
            "shard_optimizer": check_flag, "sequence_parallel": check_flag,
        }  # fmt: skip
        return cls(
            **{
                name: None if value is None else _listed(name, value, checks.get(name, check_count))
                for name, value in values.items()
            }
        )

    def measured_size(self, problem: PlanProblem) -> int | None:
        """Return the sequences of the micro-batch of measured layers; None for a transformer.

        Raises
        ------
        ArgumentError
            For several sizes.
        """
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
        listing = _Listing(self, problem)
        listing.fill()
        return listing.choices, listing.invalid


def invalid(choice: PlanChoice, reason: str, status: Status = "invalid") -> Evaluation:
    """Return a configuration that is ruled out before anything is known of it."""
    nan = math.nan
    return Evaluation(choice, nan, nan, nan, nan, status, reason)


def _schedule(_: str, name: object) -> str:
    """Return the name of a schedule that a plan can use."""
    info = schedule_info(name)
    options = {"n_chunks": 2} if "n_chunks" in info.options else {}
    counts = ((p, m) for p in (2, 4, 1, 3) for m in range(p, 2 * p + 1))
    devices = next((p for p, m in counts if info.allows(p, m, **options)), None)
    if devices is not None:
        order_facts(info.name, devices, 2)
    return info.name


def _listed(name: str, value: Any, check: Any) -> tuple[Any, ...]:
    """Return one value, or the values of a list, checked."""
    if isinstance(value, (str, bool, int)) or not isinstance(value, Iterable):
        value = [value]
    values = check_list(name, value, "one value or a list")
    if not values:
        raise ArgumentError(f"{name} is empty; give a value, or None for all sensible ones")
    return tuple(dict.fromkeys(check(name, x) for x in values))


@dataclass
class _Listing:
    """Configurations of a space, and those that are invalid."""

    space: SearchSpace
    problem: PlanProblem
    choices: list[PlanChoice] = field(default_factory=list)
    invalid: list[Evaluation] = field(default_factory=list)
    _reasons: set[tuple[object, ...]] = field(default_factory=set)
    _replicas: set[int] = field(default_factory=set)

    def fill(self) -> None:
        """List all combinations."""
        n_gpus = self.problem.cluster.n_gpus
        for tp in self.space.tensor_parallel or self._tensor_sizes():
            reason = tensor_reason(self.problem, tp)
            if reason or n_gpus % tp:
                self._rule_out(reason or f"{n_gpus} GPUs do not divide by tensor_parallel={tp}", tp)
                continue
            for pp in self.space.pipeline_parallel or self._depths(n_gpus // tp):
                self._fill_depth(tp, pp)
        self._rule_out_replicas()

    def _rule_out_replicas(self) -> None:
        """Rule out numbers of replicas that no sizes of tensor and pipeline parallelism make."""
        names = ("tensor_parallel", "pipeline_parallel")
        fixed = [f"{x}={' or '.join(map(str, v))}" for x in names if (v := getattr(self.space, x))]
        condition = f"with {' and '.join(fixed)}, " if fixed else ""
        possible = ", ".join(map(str, sorted(self._replicas)))
        replicas = "replica" if self._replicas == {1} else "replicas"
        for dp in self.space.data_parallel or ():
            if self._replicas and dp not in self._replicas:
                n_gpus = self.problem.cluster.n_gpus
                reason = f"{condition}{n_gpus} GPUs can make {possible} {replicas}"
                self._rule_out(f"data_parallel={dp}: {reason}", dp=dp)

    def _fill_depth(self, tp: int, pp: int) -> None:
        """List the configurations with these sizes."""
        n_gpus, batch = self.problem.cluster.n_gpus, self.problem.global_batch
        if n_gpus % (tp * pp):
            reason = f"{n_gpus} GPUs do not divide by tensor_parallel={tp} x pipeline_parallel={pp}"
            self._rule_out(reason, tp, pp)
            return
        dp = n_gpus // (tp * pp)
        self._replicas.add(dp)
        if self.space.data_parallel is not None and dp not in self.space.data_parallel:
            return
        if batch % dp:
            self._rule_out(f"{dp} replicas do not divide global_batch={batch}", tp, pp, dp)
            return
        for size in self.space.microbatch_size or self._sequences(batch // dp):
            if (batch // dp) % size:
                self._rule_out(
                    f"microbatch_size={size} does not divide the {batch // dp} sequences of a "
                    f"replica (global_batch={batch}, {dp} replicas)",
                    tp, pp, dp, size,
                )  # fmt: skip
                continue
            for name, chunks in self._orders(pp):
                self._fill_order(PlanChoice(tp, pp, dp, size, batch // dp // size, name, chunks,
                                            "none", False, False, ()))  # fmt: skip

    def _fill_order(self, base: PlanChoice) -> None:
        """List the configurations with one schedule."""
        info = schedule_info(base.schedule)
        options = self.problem.options(base)
        n_layers = self.problem.n_layers
        if base.n_stages > max(n_layers, 1) + 1:
            reason = (
                f"{n_layers} layers are too few for {base.n_stages} stages, of which each device "
                f"has n_chunks={base.n_chunks}"
            )
            self.invalid.append(invalid(base, reason))
            return
        if not info.allows(base.pipeline_parallel, base.n_microbatches, **options):
            reason = (
                f"{base.schedule} takes {info.counts.text}; got {base.pipeline_parallel} devices "
                f"and {base.n_microbatches} micro-batches"
            )
            self.invalid.append(invalid(base, reason))
            return
        if reason := setting_reason(self.problem, base):
            self.invalid.append(invalid(base, reason))
            return
        shards = self._flags("shard_optimizer", base.data_parallel > 1)
        sequences = self._flags("sequence_parallel", self._splits_sequence(base.tensor_parallel))
        values = itertools.product(self.space.recompute or self._recomputes(), shards, sequences)
        for recompute, shard, sequence in values:
            choice = replace(
                base, recompute=recompute, shard_optimizer=shard, sequence_parallel=sequence
            )
            if reason := setting_reason(self.problem, choice):
                mode = "" if sequence else recompute
                fact = PlanChoice(base.tensor_parallel, 0, 0, 0, 0, "", 0, mode,
                                  False, sequence, ())  # fmt: skip
                self._rule_out_once(fact, reason)
            else:
                self.choices.append(choice)

    def _rule_out(
        self, reason: str, tp: int = 0, pp: int = 0, dp: int = 0, microbatch_size: int = 0
    ) -> None:
        """Add a combination that is invalid; 0 stands for values that do not matter."""
        choice = PlanChoice(tp, pp, dp, microbatch_size, 0, "", 0, "", False, False, ())
        self.invalid.append(invalid(choice, reason))

    def _rule_out_once(self, choice: PlanChoice, reason: str) -> None:
        """Add a combination that is invalid, unless the list has it."""
        if (choice, reason) not in self._reasons:
            self._reasons.add((choice, reason))
            self.invalid.append(invalid(choice, reason))

    def _tensor_sizes(self) -> Iterator[int]:
        """Yield the sizes of tensor parallelism that fit in a node and divide the model."""
        for tp in _divisors(self.problem.cluster.gpus_per_node):
            if not tensor_reason(self.problem, tp):
                yield tp

    def _depths(self, n_devices: int) -> list[int]:
        """Return the numbers of devices of a pipeline that have layers for all."""
        most = self.problem.n_layers + (self.problem.n_layers > 1)
        return [pp for pp in _divisors(n_devices) if pp <= most]

    def _sequences(self, n: int) -> list[int]:
        """Return the sizes of micro-batches of n sequences."""
        if isinstance(self.problem.model, Layers):
            return [self.problem.measured_size or 1]
        return [size for size in _divisors(n) if size <= _MOST_SEQUENCES]

    def _recomputes(self) -> Sequence[str]:
        """Return the modes of recompute."""
        return (
            ("none",) if isinstance(self.problem.model, Layers) else ("none", "selective", "full")
        )

    def _splits_sequence(self, tp: int) -> bool:
        """Return whether tensors may be split along the sequence, if that is fixed or possible."""
        model = self.problem.model
        if not isinstance(model, Transformer) or tp == 1:
            return False
        return self.space.sequence_parallel is not None or model.sequence_length % tp == 0

    def _flags(self, name: str, applies: bool) -> tuple[bool, ...]:
        """Return the values of a flag; False where it does not apply."""
        values: tuple[bool, ...] | None = getattr(self.space, name)
        return (values or (False, True)) if applies else (False,)

    def _orders(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield schedules and their numbers of chunks; without stages to order, 1F1B alone."""
        names = self.space.schedules or SCHEDULES
        if pp == 1 and "1f1b" in names:
            names = ("1f1b",)
        for name in names:
            try:
                chunks = self.problem.chunks_of(name, pp)
            except ArgumentError as error:  # too few or too many devices
                base = PlanChoice(0, pp, 0, 0, 0, name, 0, "", False, False, ())
                self._rule_out_once(base, str(error))
                continue
            if chunks is not None:
                if self.space.n_chunks is None or chunks in self.space.n_chunks:
                    yield name, chunks
                else:
                    stages = "1 stage" if chunks == 1 else f"{chunks} stages"
                    values = ", ".join(map(str, self.space.n_chunks))
                    reason = f"{name} has {stages} a device, got n_chunks={values}"
                    base = PlanChoice(0, pp, 0, 0, 0, name, chunks, "", False, False, ())
                    self._rule_out_once(base, reason)
                continue
            for count in self.space.n_chunks or self._chunks(pp):
                yield name, count

    def _chunks(self, pp: int) -> list[int]:
        """Return numbers of chunks: those that divide the layers evenly, and a few more."""
        n = self.problem.n_layers
        most = min(n // pp, _MOST_CHUNKS)
        return [v for v in range(2, most + 1) if v in _CHUNKS or n % (pp * v) == 0]


def _divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
