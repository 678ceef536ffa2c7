"""`CostFields`: one row a field of `Costs`, which says what kind of value it is.

Prices, files, flags, tables of layers and changes of costs loop over `ROWS`, so that a new cost is
one line here. `Costs` has the meaning of each field.
"""

# ruff: noqa: RUF009 - each call makes a field

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from pipesim.costs.cost_fields import (
    Buckets,
    ExchangeBytes,
    LaunchByOp,
    Segments,
    Workload,
    checked_buckets,
    checked_exchange_bytes,
    checked_launch_by_op,
    checked_segments,
    checked_workload,
)
from pipesim.errors import CostsError, check_count, check_flag, check_name, number
from pipesim.graph.options import Tied, checked_tied, tied_text
from pipesim.graph.skips import SkipBytes, checked_skip_bytes, skip_text
from pipesim.network.collectives import ALL_REDUCE
from pipesim.network.network import Network
from pipesim.ops import LISTED, Op
from pipesim.utils.texts import parse_bytes

#: One value for all stages, one a stage, or one a stage and micro-batch.
PerStage = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


class Row(NamedTuple):
    """Kind of value of a field of `Costs`.

    Attributes
    ----------
    check
        Returns the value of a field, by its name, as costs keep it; raises `CostsError` otherwise.
    default
        Value if none is given.
    item
        Part of a pipeline that each value is of; ``""`` for a field with a form of its own.
    unit
        Unit of its numbers.
    op, part
        Operation that takes these seconds, and the name of its part.
    added_to
        Operation that takes these seconds in addition to others, and whole on each replica.
    computes
        Whether they are seconds in which a device computes. Other seconds of an operation are
        measured ones, in place of those that follow from the network.
    varies
        Whether micro-batches may have values of their own.
    constant
        Whether smaller micro-batches have the same value though micro-batches may differ.
    whole
        Whether each stage of a device has the whole value of the device, and not a share.
    substitutes
        Fields whose sum stands for a missing value.
    sizes
        Bytes from which the network says how long it takes, if it was not measured.
    is_rare
        Whether files leave out the default, and command lines and tables of layers the field.
    write
        Returns a value as values of JSON.
    """

    check: Callable[[str, Any], Any]
    default: Any = MISSING
    item: Literal["stage", "group", "skip", ""] = ""
    unit: str = ""
    op: Op | None = None
    part: str = ""
    added_to: Op | None = None
    computes: bool = False
    varies: bool = False
    constant: bool = False
    whole: bool = False
    substitutes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    is_rare: bool = False
    write: Callable[[Any], Any] = lambda value: value


def _checked_numbers(name: str, value: object) -> PerStage:
    item = ROWS[name].item
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (tuple, list)):
        return _checked_number(name, value, "")
    if not value:
        raise CostsError(f"{name} is empty; give one value, or one a {item}")
    if any(isinstance(row, (tuple, list, np.ndarray)) for row in value):
        return _checked_rows(name, value)
    are_floats = isinstance(value, tuple) and {*map(type, value)} == {float}
    if are_floats and all(map(math.isfinite, value)) and min(value) >= 0:
        return tuple(value)
    return tuple(_checked_number(name, v, f" of {item} {s}") for s, v in enumerate(value))


def _checked_rows(name: str, rows: Sequence[Any]) -> PerStage:
    """Return one tuple a stage, with a value a micro-batch; a number is that of all of them."""
    if not ROWS[name].varies:
        item = ROWS[name].item
        raise CostsError(
            f"{name} is of a whole {item}, but was given a value for each micro-batch; give one "
            f"value, or one a {item}"
        )
    sizes = {len(row) for row in rows if isinstance(row, (tuple, list, np.ndarray))}
    if len(sizes) > 1 or 0 in sizes:
        raise CostsError(
            f"{name} has {' and '.join(map(str, sorted(sizes)))} values of different stages; give "
            "each stage one value a micro-batch"
        )
    (n,) = sizes
    return tuple(
        tuple(
            _checked_number(name, value, f" of stage {stage}, micro-batch {number}")
            for number, value in enumerate(row)
        )
        if isinstance(row, (tuple, list, np.ndarray))
        else (_checked_number(name, row, f" of stage {stage}"),) * n
        for stage, row in enumerate(rows)
    )


def _checked_number(name: str, value: object, where: str) -> float:
    result = number(value)
    if isinstance(value, str) and ROWS[name].unit == "bytes":
        result = parse_bytes(value)
    if result is None or result < 0 or math.isinf(result):
        raise CostsError(f"{name}{where} must be finite {ROWS[name].unit} >= 0, got {value!r}")
    return result


def _checked_reserve(value: object) -> float:
    result = number(value)
    if result is None or not 0 <= result < math.inf:
        raise CostsError(
            f"memory_reserve must be a finite share >= 0 of the bytes of tensors, got "
            f"{value!r:.60}; give such as 0.05 for 5 %, or bytes as a smaller "
            "memory_limit"
        )
    return result


def _checked_ratio(value: object) -> float:
    result = number(value)
    if result is None or not 0 < result < math.inf:
        raise CostsError(
            "exchanged_gradients must be finite and above 0: bytes of gradients while replicas "
            f"exchange them over gradient_bytes; got {value!r:.60}"
        )
    return result


def _checked_loss(value: object) -> float:
    result = number(value)
    if result is None or not 0 <= result <= 1:
        raise CostsError(
            "overlap_cost must be 0 to 1: the share of its speed that compute loses beside a fast "
            f"collective, such as 0.43; got {value!r:.60}"
        )
    return result


def _checked_network(_: str, value: object) -> Network:
    if not isinstance(value, Network):
        raise CostsError(f"network must be a pipesim.Network, got {value!r}")
    return value


def _numbers(unit: str, default: float | None = 0.0, **kind: Any) -> Any:
    """Return a field with one number a stage, or one for all."""
    row = Row(_checked_numbers, default, "stage", unit)._replace(**kind)
    return field(default=default, metadata={"row": row})


def _work(op: Op | None, part: str = "", default: float | None = None, **kind: Any) -> Any:
    """Return a field with the seconds in which a device computes, of each micro-batch."""
    kind = {"varies": True, **kind}
    return _numbers("seconds", default, op=op, part=part, computes=True, **kind)


def _measured(op: Op, part: str = "", *sizes: str, varies: bool = True, **kind: Any) -> Any:
    """Return a field with measured seconds of a collective or a copy."""
    return _numbers("seconds", None, op=op, part=part, sizes=sizes, varies=varies, **kind)


def _exchange(part: str, size: str, **kind: Any) -> Any:
    """Return a field with measured seconds of an exchange of a sharded stage."""
    return _measured(Op.ALL_TO_ALL, part, size, "exchange_bytes", **kind)


def _form(check: Callable[[Any], Any], **kind: Any) -> Any:
    """Return a field with a form of its own, None unless given."""
    row = Row(lambda _, value: check(value), None, is_rare=True)._replace(**kind)
    return field(default=row.default, metadata={"row": row})


_GRADIENTS = ("gradient_bytes", "parameter_bytes")
#: How replicas that share an optimizer sum gradients.
GRADIENT_EXCHANGES = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class CostFields:
    """Fields of `Costs`, whose docstring describes them."""

    forward: PerStage | None = _work(Op.F)
    backward: PerStage | None = _work(Op.B, substitutes=("input_grad", "weight_grad"))
    input_grad: PerStage | None = _work(Op.I)
    weight_grad: PerStage | None = _work(Op.W)
    overlapped: PerStage | None = _work(None, substitutes=("forward", "backward"))
    recompute: PerStage | None = _work(Op.R, substitutes=("forward",))
    optimizer_step: PerStage = _work(Op.STEP, default=0.0, varies=False)
    dispatch: PerStage = _work(Op.DISPATCH, default=0.0)
    reorder: PerStage = _work(Op.REORDER, "vectors", default=0.0)
    reorder_gradients: PerStage | None = _work(Op.REORDER, "gradients", substitutes=("reorder",))
    launch: PerStage = _numbers("seconds", varies=True, constant=True, whole=True)
    output_bytes: PerStage = _numbers("bytes", varies=True, whole=True)
    output_seconds: PerStage = _numbers("seconds", varies=True, whole=True)
    activation_bytes: PerStage = _numbers("bytes", varies=True)
    weight_grad_bytes: PerStage = _numbers("bytes", varies=True)
    parameter_bytes: PerStage = _numbers("bytes")
    optimizer_bytes: PerStage = _numbers("bytes")
    gradient_bytes: PerStage | None = _numbers("bytes", None, substitutes=("parameter_bytes",))
    reduce_grad: PerStage | None = _measured(Op.REDUCE_GRAD, "", *_GRADIENTS, varies=False)
    unshard: PerStage | None = _measured(Op.UNSHARD, "", "parameter_bytes", varies=False)
    exchange_counts: PerStage | None = _exchange("counts", "key_bytes", constant=True)
    exchange_keys: PerStage | None = _exchange("keys", "key_bytes")
    exchange_vectors: PerStage | None = _exchange("vectors", "vector_bytes")
    exchange_gradients: PerStage | None = _exchange("gradients", "vector_bytes")
    exchange_accumulated: PerStage | None = _exchange("accumulated", "vector_bytes", varies=False)
    key_bytes: PerStage = _numbers("bytes", varies=True)
    vector_bytes: PerStage | None = _numbers(
        "bytes", None, varies=True, substitutes=("output_bytes",)
    )
    buckets: Buckets | None = _form(checked_buckets, sizes=_GRADIENTS)
    exchange_bytes: Mapping[int, Mapping[str, Any]] | ExchangeBytes | None = _form(
        checked_exchange_bytes, unit="bytes", write=lambda x: {str(k): dict(own) for k, own in x}
    )
    skip_bytes: Mapping[tuple[int, int], float] | SkipBytes | None = _form(
        checked_skip_bytes, unit="bytes", item="skip", varies=True,
        write=lambda x: {skip_text(k): v for k, v in x} if isinstance(x, tuple) else x,
    )  # fmt: skip
    tied_bytes: PerStage = _numbers("bytes", item="group", is_rare=True)
    network: Network = field(
        default_factory=Network, metadata={"row": Row(_checked_network, write=Network.to_dict)}
    )
    all_reduce: str = _form(
        lambda name: check_name("all-reduce", name, ALL_REDUCE), default="ring", is_rare=False
    )
    workload: Workload | Mapping[str, Any] | None = _form(checked_workload, write=Workload.to_dict)
    forward_workspace_bytes: PerStage = _numbers("bytes", varies=True, whole=True)
    backward_workspace_bytes: PerStage = _numbers("bytes", varies=True, whole=True)
    kv_cache_bytes: PerStage = _numbers("bytes", varies=True, whole=True, is_rare=True)
    memory_reserve: float = _form(_checked_reserve, default=0.0, unit="shares")
    grad_norm: PerStage = _work(None, default=0.0, varies=False)
    reduce_tied: PerStage | None = _measured(
        Op.REDUCE_TIED, "", "tied_bytes", varies=False, whole=True
    )
    expert_layers: PerStage = _numbers("numbers of layers", is_rare=True)
    dispatch_bytes: PerStage = _numbers("bytes", varies=True, whole=True, is_rare=True)
    combine_bytes: PerStage = _numbers("bytes", varies=True, whole=True, is_rare=True)
    exchange_dispatch: PerStage | None = _measured(
        Op.ALL_TO_ALL, "dispatch", "dispatch_bytes", whole=True, is_rare=True
    )
    exchange_combine: PerStage | None = _measured(
        Op.ALL_TO_ALL, "combine", "combine_bytes", whole=True, is_rare=True
    )
    expert_parameter_bytes: PerStage = _numbers("bytes", is_rare=True)
    expert_gradient_bytes: PerStage = _numbers("bytes", is_rare=True)
    expert_optimizer_bytes: PerStage = _numbers("bytes", is_rare=True)
    reduced_share: PerStage = _numbers("shares", 1.0, whole=True, is_rare=True)
    reduce_copies: PerStage = _work(None, default=0.0, varies=False, is_rare=True, added_to=Op.STEP)
    expert_replicas: int = _form(lambda n: check_count("expert_replicas", n), default=1)
    gradient_exchange: str = _form(
        lambda name: check_name("gradient exchange", name, GRADIENT_EXCHANGES),
        default="reduce_scatter",
    )
    exchanged_gradients: float = _form(_checked_ratio, default=1.0, unit="shares")
    overlap_cost: float = _form(_checked_loss, default=0.0, unit="shares")
    segments: Segments | Sequence[Sequence[Sequence[float]]] | None = _form(checked_segments)
    offload: PerStage | None = _measured(Op.OFFLOAD)
    reload: PerStage | None = _measured(Op.RELOAD)
    offload_bytes: PerStage | None = _numbers("bytes", None, varies=True)
    launch_by_op: Mapping[str, float] | LaunchByOp | None = _form(
        checked_launch_by_op, unit="seconds", write=dict
    )
    tied: Sequence[Sequence[int]] | Tied = _form(checked_tied, default=(), write=tied_text)
    last_logits: bool = _form(lambda flag: check_flag("last_logits", flag), default=False)


#: Kind of each field of `Costs`.
ROWS: dict[str, Row] = {x.name: x.metadata["row"] for x in fields(CostFields)}
#: Those with one number a stage at least.
STAGE_ROWS = {name: row for name, row in ROWS.items() if row.item == "stage"}
_SECONDS = {(row.op, row.part): name for name, row in ROWS.items() if row.op is not None}
#: Field with the seconds of an operation that computes, and of its part.
COMPUTED = {(op, part): name for (op, part), name in _SECONDS.items() if ROWS[name].computes}
#: Fields with further seconds of an operation, and that operation.
ADDED = {name: row.added_to for name, row in ROWS.items() if row.added_to is not None}
#: Field with the measured seconds of a collective or a copy.
MEASURED = {key: name for key, name in _SECONDS.items() if not ROWS[name].computes}
#: Field with the seconds of each operation that layers take.
LAYER_SECONDS = {op: name for (op, _), name in COMPUTED.items() if op in LISTED}


def given_rows(costs: CostFields) -> dict[str, Row]:
    """Return the rows with one number a stage at least whose values are not the default."""
    return {name: row for name, row in STAGE_ROWS.items() if getattr(costs, name) != row.default}
