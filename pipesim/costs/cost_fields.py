"""Fields of `pipesim.Costs` with rules of their own: workload, exchanges, launches and others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipesim.errors import CostsError, check_count, check_name, number
from pipesim.network.links import Nodes
from pipesim.ops import EXCHANGES, TRANSFERS, Op
from pipesim.utils.texts import in_bytes

if TYPE_CHECKING:
    from pipesim.costs.rows import CostFields


#: Units of the fields that must be finite and above 0.
_UNITS = {"tokens": "tokens", "flops": "FLOPs", "peak_flops": "FLOP/s", "memory": "bytes"}


@dataclass(frozen=True)
class Workload:
    """Tokens and FLOPs of a micro-batch, and the GPUs that compute them.

    `Timeline.tokens_per_second`, `Timeline.mfu` and `Timeline.memory.limit` follow from it. ``==``
    compares tokens, FLOPs, GPUs and memory alone.

    Attributes
    ----------
    tokens
        Tokens of one micro-batch of one replica.
    flops
        Model FLOPs of one micro-batch: forward and backward of all stages and of all GPUs, without
        recompute.
    gpus_per_device
        Number of GPUs that act as one device, such as a tensor-parallel group.
    peak_flops
        FLOP/s of one GPU as its data sheet gives them; None if unknown.
    memory
        Bytes of memory of one GPU; None if unknown. ``Costs`` have the bytes of one GPU too.
    settings
        Arguments with which `pipesim.Costs.transformer` returns these costs again, except for
        their network, as values of JSON; None if there are none.
    n_slices
        Number of slices of a sequence, if a micro-batch is one of them; None (the default) if not
        known. Costs with this workload price graphs of as many slices only.
    n_microbatches
        Number of micro-batches that the tokens and FLOPs are averages of; None (the default) for
        any. Costs with this workload price graphs of as many only.
    nodes
        Nodes of the network that the seconds of collectives between the GPUs of a device follow
        from, as a `Nodes` or a mapping of its fields; None if there are no such collectives.

    Examples
    --------
    A step has two micro-batches of 3000 tokens, and takes 3 s.

    >>> import pipesim as ps
    >>> from pipesim.costs import Workload
    >>> workload = Workload(tokens=3000, flops=6 * 7e9 * 3000)
    >>> graph = ps.lower(ps.schedule("1f1b", n_devices=1, n_microbatches=2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=0.5, backward=1, workload=workload))
    >>> timeline.tokens_per_second
    2000.0
    """

    tokens: float
    flops: float
    gpus_per_device: int = 1
    peak_flops: float | None = None
    memory: float | None = None
    settings: Mapping[str, Any] | None = field(default=None, compare=False)
    nodes: Nodes | Mapping[str, Any] | None = field(default=None, compare=False)
    n_slices: int | None = field(default=None, compare=False)
    n_microbatches: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            if name == "memory":
                value = in_bytes("workload: memory", value)
            if value is None and name in ("peak_flops", "memory"):
                continue
            amount = number(value)
            if amount is None or not 0 < amount < math.inf:
                raise CostsError(
                    f"workload: {name} must be finite {unit} above 0, got {value!r:.60}"
                )
            object.__setattr__(self, name, amount)
        n_gpus = check_count("workload: gpus_per_device", self.gpus_per_device)
        object.__setattr__(self, "gpus_per_device", n_gpus)
        for name in ("n_slices", "n_microbatches"):
            if getattr(self, name) is not None:
                count = check_count(f"workload: {name}", getattr(self, name))
                object.__setattr__(self, name, count)
        object.__setattr__(self, "settings", _checked_settings(self.settings))
        object.__setattr__(self, "nodes", self.built_nodes)

    @property
    def built_nodes(self) -> Nodes | None:
        """``nodes`` as stored: a `Nodes`, or None."""
        if self.nodes is None or isinstance(self.nodes, Nodes):
            return self.nodes
        return Nodes.from_dict(self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML; unset fields are left out.

        Returns
        -------
        dict
            Fields by name, in tokens, FLOPs, FLOP/s and bytes.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["settings"] = _checked_settings(self.settings)  # a copy of its own
        values["nodes"] = None if self.built_nodes is None else self.built_nodes.to_dict()
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Workload:
        """Return the workload in a mapping that `to_dict` returned.

        Parameters
        ----------
        values
            Fields by name; ``tokens`` and ``flops`` are needed, others have their defaults.

        Returns
        -------
        Workload
            Equal to the workload that `to_dict` was called on.
        """
        if not isinstance(values, Mapping):
            raise CostsError(
                f"workload must be a pipesim.costs.Workload or a mapping, got {values!r:.60}; "
                'give such as {"tokens": 2048, "flops": 8.6e13}'
            )
        for key in values:
            check_name("field of a workload", key, [f.name for f in fields(cls)])
        for name in ("tokens", "flops"):
            if name not in values:
                raise CostsError(f"workload: {name} is missing; give those of one micro-batch")
        return cls(**values)


def checked_workload(value: object) -> Workload | None:
    """Return a workload as `Costs` keeps it, from a `Workload`, a mapping, or None."""
    if value is None or isinstance(value, Workload):
        return value
    return Workload.from_dict(value)  # type: ignore[arg-type]  # it checks the type


def _checked_settings(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CostsError(
            "workload: settings must map names to values, as keyword arguments of "
            f"Costs.transformer, got {value!r:.60}"
        )
    try:
        text = json.dumps(dict(value), default=_plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CostsError(
            f"workload: settings must be values of JSON: {error}; give numbers, texts, lists and "
            "mappings"
        ) from error
    copied: dict[str, Any] = json.loads(text)
    return copied


def _plain(value: object) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{value!r:.60} has no form in JSON")


# Bytes of a sharded stage's exchanges for each pair of replicas

Matrix = tuple[tuple[float, ...], ...]
#: For each stage, its exchanges by name: row ``i`` is sent by replica ``i``, column ``j`` to ``j``.
ExchangeBytes = tuple[tuple[int, tuple[tuple[str, Matrix], ...]], ...]


def checked_exchange_bytes(value: object) -> ExchangeBytes | None:
    """Return bytes of exchanges as tuples, by stage and in the order of `pipesim.ops.EXCHANGES`.

    Stages may be texts, as in files.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, (Mapping, tuple)):
            raise TypeError
        stages = {_stage(stage): dict(matrices) for stage, matrices in dict(value).items()}
    except (TypeError, ValueError):
        raise CostsError(
            "exchange_bytes must map stages to the bytes of their exchanges, such as {0: "
            f"keys.exchange_bytes(4, dim=64)}}, got {value!r:.60}"
        ) from None
    result = []
    for stage, matrices in sorted(stages.items()):
        for name in matrices:
            check_name("exchange", name, EXCHANGES)
        names = [name for name in EXCHANGES if name in matrices]
        exchanges = tuple((name, _matrix(stage, name, matrices[name])) for name in names)
        result.append((stage, exchanges))
    return tuple(result)


def _stage(stage: Any) -> int:
    if isinstance(stage, str) and stage.isdecimal():
        return int(stage)
    if isinstance(stage, bool) or not isinstance(stage, (int, np.integer)) or stage < 0:
        raise ValueError
    return int(stage)


def _matrix(stage: int, name: str, values: object) -> Matrix:
    try:
        matrix = np.asarray(in_bytes("exchange_bytes", values), dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise CostsError(
            f"exchange_bytes of {name} of stage {stage} must be a square matrix, one row a sending "
            f"replica, got {values!r:.60}"
        )
    for i, j in np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))[:1].tolist():
        raise CostsError(
            f"exchange_bytes of {name} of stage {stage}, from replica {i} to {j}, must be finite "
            f"bytes >= 0, got {matrix[i, j]}"
        )
    return tuple(map(tuple, matrix.tolist()))


# Seconds of the host to issue tasks of some operations

LaunchByOp = tuple[tuple[str, float], ...]
#: Key that stands for SEND_F, RECV_F, SEND_B and RECV_B.
_MESSAGES = "messages"


def checked_launch_by_op(value: object) -> LaunchByOp | None:
    """Return pairs of an operation and its seconds, in the order of `pipesim.Op`."""
    if value is None:
        return None
    try:
        if not isinstance(value, (Mapping, tuple)) or value == ():
            raise TypeError
        mapping = dict(value)
    except (TypeError, ValueError):
        raise CostsError(
            'launch_by_op must map operations, or "messages", to the seconds of a host to issue '
            f'one of their tasks, such as {{"messages": 0}}, got {value!r:.60}'
        ) from None
    names = [*Op.__members__, _MESSAGES]
    seconds: dict[Op, float] = {}
    for key, amount in mapping.items():
        name = key if isinstance(key, Op) else check_name("operation of launch_by_op", key, names)
        checked = number(amount)
        if checked is None or not 0 <= checked < math.inf:
            raise CostsError(
                f"launch_by_op of {name} must be finite seconds >= 0, got {amount!r:.60}"
            )
        for op in sorted(TRANSFERS) if name == _MESSAGES else [Op[str(name)]]:
            if op in seconds:
                raise CostsError(f"launch_by_op gives {op} twice: itself and as one of messages")
            seconds[op] = checked
    return tuple((str(op), seconds[op]) for op in sorted(seconds)) or None


# Buckets of gradients

#: For each stage, its buckets of gradients as pairs. First the share of the bytes, or of measured
#: seconds, which sum to more than 1 where overlap slows reductions. Then the share of the backward
#: after which the bucket is complete.
Buckets = tuple[tuple[tuple[float, float], ...], ...]


def checked_buckets(buckets: object) -> Buckets | None:
    """Return buckets as tuples."""
    if buckets is None:
        return None
    try:
        if isinstance(buckets, (str, bytes, Mapping)):
            raise TypeError
        stages = tuple(
            tuple((float(a), float(b)) for a, b in stage)
            for stage in buckets  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise CostsError(
            "buckets must be, of each stage, pairs (share of bytes, share of the backward), such "
            f"as [[(0.5, 0.4), (0.5, 1.0)]], got {buckets!r}"
        ) from None
    for index, stage in enumerate(stages):
        if not all(0 <= a < math.inf and 0 <= b <= 1 for a, b in stage):
            raise CostsError(
                f"buckets of stage {index} must be shares >= 0, those of the backward at most 1, "
                f"got {stage!r}"
            )
        if stage and sum(a for a, _ in stage) < 1 - 1e-6:
            raise CostsError(
                f"buckets of stage {index} have {sum(a for a, _ in stage):g} of its bytes; give "
                "shares that sum to 1, or more if they are shares of measured seconds"
            )
    return stages


# Experts and copies of parameters

#: For each stage, shares of F, of B and of I between its exchanges of experts.
Segments: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
_SEGMENTS_FORM = (
    "segments must have, for each stage, the shares of F, of B and of I between its exchanges of "
    "experts, such as [[(0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.2, 0.3, 0.5)]]"
)
#: Largest difference of a sum of shares from 1.
_TOLERANCE = 1e-6


def check_experts(costs: CostFields) -> None:
    """Raise `CostsError` for fields about experts and copies that contradict others."""
    check_whole_layers(costs.expert_layers)
    if np.max(costs.reduced_share) > 1:
        raise CostsError(f"reduced_share must be at most 1, got {costs.reduced_share!r:.60}")
    for name in ("parameter", "gradient", "optimizer"):
        _check_part(costs, f"expert_{name}_bytes", f"{name}_bytes")
    if costs.segments is None:
        return
    segments: Any = costs.segments
    layers: Any = costs.expert_layers
    counts = [layers] * len(segments) if isinstance(layers, float) else layers
    if not segments or len(counts) != len(segments):
        raise CostsError(
            f"segments are of {len(segments)} stages, but expert_layers of {len(counts)}; give "
            "those of each stage"
        )
    for stage, (operations, n) in enumerate(zip(segments, counts, strict=True)):
        _check_stage(stage, operations, 2 * int(n) + 1)


def check_whole_layers(layers: object) -> None:
    """Raise `CostsError` for numbers of layers that are not whole."""
    values = np.atleast_1d(np.asarray(0.0 if layers is None else layers, dtype=float))
    for stage in np.flatnonzero(values % 1)[:1]:
        raise CostsError(
            f"expert_layers of stage {stage} must be a whole number of layers, got {values[stage]}"
        )


def _check_part(costs: CostFields, part: str, whole: str) -> None:
    if getattr(costs, part) == 0:
        return
    total = getattr(costs, whole)
    total = costs.parameter_bytes if total is None else total
    values, wholes = (np.atleast_1d(np.asarray(x)) for x in (getattr(costs, part), total))
    if 1 not in (len(values), len(wholes)) and len(values) != len(wholes):
        raise CostsError(
            f"{part} has {len(values)} values, but {whole} has {len(wholes)}; give one, or one a "
            "stage"
        )
    if (values > wholes * (1 + _TOLERANCE)).any():
        raise CostsError(
            f"{part}={getattr(costs, part)!r:.60} must be at most {whole}={total!r:.60}, of which "
            "it is a part"
        )


def checked_segments(value: object) -> Segments | None:
    """Return segments as tuples; `check_experts` compares them with ``expert_layers``."""
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        return tuple(
            tuple(tuple(map(float, shares)) for shares in stage)
            for stage in value  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise CostsError(f"{_SEGMENTS_FORM}, got {value!r:.60}") from None


def _check_stage(stage: int, operations: tuple[tuple[float, ...], ...], n: int) -> None:
    """Check that a stage has n shares of each operation, which sum to 1."""
    if len(operations) != 3:
        raise CostsError(f"{_SEGMENTS_FORM}; stage {stage} has {len(operations)} operations")
    for name, shares in zip("FBI", operations, strict=True):
        where = f"segments of {name} of stage {stage}"
        if len(shares) != n:
            raise CostsError(
                f"{where} must be {n} shares, one more than exchanges of its layers with experts, "
                f"got {len(shares)}"
            )
        is_valid = all(0 <= x <= 1 + _TOLERANCE for x in shares)
        if not is_valid or not math.isclose(sum(shares), 1, abs_tol=_TOLERANCE):
            raise CostsError(f"{where} must be shares >= 0 that sum to 1, got {shares!r:.80}")
