"""Which settings a problem allows: why others are impossible, and which ones a plan tries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

from pipesim.errors import PipeError
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.planning.choice import (
    ENCODER_SCHEDULES,
    PlanChoice,
    choice_facts,
    hides_exchanges,
)
from pipesim.planning.problem import PlanProblem, kept
from pipesim.scheduling.registry import schedule_info

#: Most F and B of a replica; beyond it a single schedule takes many seconds and gigabytes.
_MOST_TASKS = 500_000
#: A reason, and the settings that it is about.
_Reason = tuple[str, tuple[str, ...]]
_NONE: _Reason = ("", ())
#: Settings that divide experts, and all that must divide the sizes of a model.
_EXPERTS = ("tensor_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
_SHARD = (*_EXPERTS, "sequence_parallel", "n_slices", "encoder_tensor_parallel")


def setting_reason(problem: PlanProblem, choice: PlanChoice) -> str:
    """Return why a problem has no configuration with these settings; empty if it may have one."""
    tp, model = choice.tensor_parallel, problem.model
    if isinstance(model, Layers):
        if choice.recompute != "none":
            return (
                f"recompute={choice.recompute!r}: measured layers do not say what it takes and "
                "frees"
            )
        if choice.microbatch_size != (problem.measured_size or 1):
            return (
                f"microbatch_size={choice.microbatch_size}: layers were measured with "
                f"{problem.measured_size or 1}"
            )
        if choice_facts(choice).splits_backward and "input_grad" not in model.columns:
            return (
                f"{choice.schedule} has I and W: measured layers lack their columns 'input_grad' "
                "and 'weight_grad'"
            )
    elif choice.sequence_parallel and model.sequence_length % tp:
        return (
            f"sequence_parallel=True: tensor_parallel={tp} does not divide "
            f"sequence_length={model.sequence_length}"
        )
    if choice.schedule in ENCODER_SCHEDULES:
        n, pp = problem.n_encoder_layers, choice.pipeline_parallel
        if not n:
            return (
                f"{choice.schedule} is for encoders on the devices of a language model; give "
                "model=[pipesim.Encoder(...), model]"
            )
        if pp > min(n, problem.n_layers - n + 1):
            return (
                f"{choice.schedule} has layers of both on each of {pp} devices; encoders have {n}, "
                f"and the language model has {problem.n_layers - n}"
            )
    n_tasks = 2 * choice.n_stages * choice.n_scheduled
    if n_tasks > _MOST_TASKS:
        what = "micro-batches" if choice.n_slices == 1 else "slices"
        return (
            f"{choice.n_scheduled} {what} on {choice.n_stages} stages are {n_tasks} "
            f"tasks of F and B; a plan builds at most {_MOST_TASKS}; give larger micro-batches"
        )
    return tensor_reason(problem, tp)


def tensor_reason(problem: PlanProblem, tp: int, encoder: Transformer | None = None) -> str:
    """Return why a size of tensor parallelism is invalid, or that of an encoder; else empty."""
    model, cluster = encoder or problem.model, problem.cluster
    if tp == 1:
        return ""
    if isinstance(model, Layers):
        return f"tensor_parallel={tp}: layers were measured on one GPU"
    if cluster.network().nodes is None:
        return f"tensor_parallel={tp}: the network has no nodes, and so no rate inside a device"
    if cluster.gpus_per_node % tp:
        return f"tensor_parallel={tp} does not divide the {cluster.gpus_per_node} GPUs of a node"
    for name in ("n_heads", "n_kv_heads", "ffn_size", "expert_ffn_size"):
        if getattr(model, name) % tp:
            return f"tensor_parallel={tp} does not divide {name}={getattr(model, name)}"
    return ""


def context_reason(problem: PlanProblem, tp: int, cp: int) -> str:
    """Return why a size of context parallelism is invalid; empty if it is not."""
    if cp == 1:
        return ""
    if isinstance(problem.model, Layers):
        return f"context_parallel={cp}: layers were measured on one GPU"
    if problem.cluster.network().nodes is None:
        return f"context_parallel={cp}: the network has no nodes, and so no rate inside a device"
    if problem.cluster.n_gpus % (tp * cp):
        return ""  # the listing says so
    try:
        problem.model.shard(tensor_parallel=tp, context_parallel=cp)
        problem.cluster.network(tp * cp)
    except PipeError as error:
        return str(error)
    return ""


@dataclass
class FeatureReasons:
    """Reasons against context and expert parallelism, sharded parameters, offload and slices."""

    problem: PlanProblem

    def reason(self, choice: PlanChoice) -> _Reason:
        """Return why a choice is impossible, and the settings that matter; empty if it is not."""
        tests = (
            (choice.shards_parameters, self._sharding),
            (choice.offload != "none", self._offload),
            (choice.n_slices > 1, self._slices),
            (choice.expert_parallel > 1 or choice.expert_tensor_parallel > 0, self._experts),
            (choice.context_parallel * choice.expert_parallel * choice.n_slices > 1, self._shard),
            (bool(choice.encoder_tensor_parallel), self._encoders),
            (self.problem.lengths is not None, self._lengths),
        )
        return next((reason for used, test in tests if used and (reason := test(choice))[0]), _NONE)

    def _sharding(self, choice: PlanChoice) -> _Reason:
        what, names = f"shard_parameters={choice.shard_parameters!r}", ("shard_parameters",)
        if choice.data_parallel == 1:
            text = f"{what}: there is one replica, which holds all parameters"
            return text, (*names, "data_parallel")
        if choice.shard_optimizer:
            text = f"{what} shards the optimizer already; leave shard_optimizer=True out"
            return text, (*names, "shard_optimizer")
        return self._lacking(what, "parameter_bytes"), names

    def _offload(self, choice: PlanChoice) -> _Reason:
        what, names = f"offload={choice.offload!r}", ("offload", "offload_to")
        if choice.offload_to == "peer":
            if choice.pipeline_parallel == 1:
                text = f'{what}: a pipeline of one device has no peer; give offload_to="host"'
                return text, (*names, "pipeline_parallel")
        elif self.problem.cluster.network().host is None:
            text = (
                f"{what}: the network of the cluster has no link to host memory; give such as "
                "Network(nodes=..., host=HostLink(latency=10e-6, bandwidth=25e9))"
            )
            return text, names
        return self._lacking(what, "activation_bytes"), names

    def _lacking(self, what: str, column: str) -> str:
        """Return that measured layers lack a column, if they do."""
        model = self.problem.model
        if not isinstance(model, Layers) or column in model.columns:
            return ""
        return f"{what}: measured layers lack the column {column!r}"

    def _slices(self, choice: PlanChoice) -> _Reason:
        what, names = f"n_slices={choice.n_slices}", ("n_slices",)
        if isinstance(self.problem.model, Layers):
            return f"{what}: layers were measured with whole sequences", names
        if self.problem.cluster.is_mixed:
            return f"{what}: GPUs of the cluster differ, and costs of slices are of one GPU", names
        return _NONE

    def _experts(self, choice: PlanChoice) -> _Reason:
        if isinstance(self.problem.model, Layers):
            name = "expert_parallel" if choice.expert_parallel > 1 else "expert_tensor_parallel"
            text = "measured layers do not say which parameters are of experts"
            return f"{name}={getattr(choice, name)}: {text}", (name,)
        if (reason := self._shard(choice))[0]:
            return reason
        n = self._expert_replicas(choice)
        if choice.data_parallel % n:
            text = (
                f"expert_parallel={choice.expert_parallel}: the experts of a layer are on {n} "
                f"replicas, which do not divide data_parallel={choice.data_parallel}"
            )
            return text, (*_EXPERTS, "data_parallel")
        return _NONE

    def _lengths(self, choice: PlanChoice) -> _Reason:
        for name in ("microbatch_size", "n_slices"):
            if getattr(choice, name) > 1:
                text = f"{name}={getattr(choice, name)}: each of lengths is a micro-batch"
                return text, (name,)
        return self._shard(choice)

    def _encoders(self, choice: PlanChoice) -> _Reason:
        if choice.n_slices > 1:
            text = "tokens of an encoder attend to all of their sequence, which slices cut"
            return f"n_slices={choice.n_slices}: {text}", ("n_slices",)
        if hides_exchanges(choice):
            text = "exchanges of experts behind pairs of F and B are not priced with encoders"
            return f"expert_parallel={choice.expert_parallel}: {text}", (
                "expert_parallel", "schedule", "merged"
            )  # fmt: skip
        for encoder, size in zip(
            self.problem.encoders, choice.encoder_tensor_parallel, strict=True
        ):
            if choice.gpus_per_device % size:
                break  # the shard says so
            if reason := tensor_reason(self.problem, size, encoder.model):
                return f"encoder: {reason}", ("encoder_tensor_parallel",)
        return self._shard(choice)

    def _shard(self, choice: PlanChoice) -> _Reason:
        """Return why the sizes do not divide the model, in the words of the model."""
        return self._shard_error(choice), _SHARD

    @kept(*_SHARD)
    def _shard_error(self, choice: PlanChoice) -> str:
        try:
            self.problem.check_shards(choice)
        except PipeError as error:
            return str(error)
        return ""

    @kept(*_SHARD)
    def _expert_replicas(self, choice: PlanChoice) -> int:
        return self.problem.expert_replicas(choice)


# Values of parameters that a plan tries where none are given.

#: Schedules that are tried by default: of whole sequences, and of slices.
SCHEDULES = (
    "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
)  # fmt: skip
SLICED = ("seq1f1b", "slimpipe")
#: Numbers of chunks that are always tried, and the most that are.
_CHUNKS, _MOST_CHUNKS = (2, 4), 12
#: Most sequences of a micro-batch that are tried.
_MOST_SEQUENCES = 16


def tensor_sizes(problem: PlanProblem) -> list[int]:
    """Return the sizes of tensor parallelism that fit in a node and divide the model."""
    sizes = _divisors(problem.cluster.gpus_per_node)
    return [tp for tp in sizes if not tensor_reason(problem, tp)]


def depths(problem: PlanProblem, n_devices: int) -> list[int]:
    """Return the numbers of devices of a pipeline that have layers for all."""
    most = problem.n_layers + (problem.n_layers > 1)
    return [pp for pp in _divisors(n_devices) if pp <= most]


def has_experts(problem: PlanProblem) -> bool:
    """Return whether the model is a transformer with experts."""
    return isinstance(problem.model, Transformer) and problem.model.n_experts > 0


def expert_tensor_sizes(problem: PlanProblem, choice: PlanChoice) -> list[int]:
    """Return the numbers of GPUs that share an expert: all of tensor parallelism (0), or 1."""
    folds = has_experts(problem) and choice.tensor_parallel > 1 and choice.sequence_parallel
    return [0, 1] if folds else [0]


def expert_sizes(problem: PlanProblem, choice: PlanChoice, parts: int) -> list[int]:
    """Return the divisors of the number of experts whose groups fill whole replicas."""
    model, n, dp = problem.model, choice.gpus_per_device, choice.data_parallel
    if not isinstance(model, Transformer) or not model.n_experts:
        return [1]
    tensor = parts or choice.tensor_parallel
    sizes = [(ep, ep * tensor) for ep in _divisors(model.n_experts)]
    return [ep for ep, x in sizes if n % x == 0 or (x % n == 0 and dp % (x // n) == 0)]


def encoder_sizes(problem: PlanProblem, choice: PlanChoice) -> list[tuple[int, ...]]:
    """Return the GPUs that share the layers of each encoder: its own, or all that divide heads."""
    n = choice.gpus_per_device
    sizes = [
        encoder.tensor_parallel
        if isinstance(encoder.tensor_parallel, tuple)
        else [t for t in _divisors(n) if not tensor_reason(problem, t, encoder.model)]
        for encoder in problem.encoders
    ]
    return list(itertools.product(*sizes))


def sequence_counts(problem: PlanProblem, n: int) -> list[int]:
    """Return the sizes of micro-batches of n sequences."""
    if isinstance(problem.model, Layers):
        return [problem.measured_size or 1]
    if problem.lengths is not None:
        return [1]
    return [size for size in _divisors(n) if size <= _MOST_SEQUENCES]


def recomputes(problem: PlanProblem) -> Sequence[str]:
    """Return the modes of recompute."""
    return ("none",) if isinstance(problem.model, Layers) else ("none", "selective", "full")


def chunk_counts(problem: PlanProblem, name: str, pp: int) -> list[int]:
    """Return numbers of chunks: those that divide the layers evenly, and a few more.

    A schedule that has one chunk by default has no more.
    """
    if signature(schedule_info(name).build).parameters["n_chunks"].default == 1:
        return [1]
    n = problem.n_layers
    most = min(n // pp, _MOST_CHUNKS)
    return [v for v in range(2, most + 1) if v in _CHUNKS or n % (pp * v) == 0]


def layer_stages(problem: PlanProblem) -> int:
    """Return the stages of one device that gathers layer by layer; embedding and head are two."""
    return problem.n_layers + 2 * isinstance(problem.model, Transformer)


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
