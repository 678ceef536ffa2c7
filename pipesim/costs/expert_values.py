"""Checks of the fields of `pipesim.Costs` about experts and copies of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipesim.errors import CostsError, check_count

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


#: For each stage, shares of F, of B and of I between its exchanges of experts.
Segments: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
#: Values of fields that files leave out.
EXPERT_DEFAULTS = {
    **dict.fromkeys(("expert_layers", "dispatch_bytes", "combine_bytes", "reduce_copies"), 0.0),
    **{f"expert_{name}_bytes": 0.0 for name in ("parameter", "gradient", "optimizer")},
    "reduced_share": 1.0,
}
#: Fields with one value a stage that are about experts and copies of parameters.
EXPERT_FIELDS = (*EXPERT_DEFAULTS, "exchange_dispatch", "exchange_combine")
_FORM = (
    "segments must have, for each stage, the shares of F, of B and of I between its exchanges of "
    "experts, such as [[(0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.2, 0.3, 0.5)]]"
)
#: Operations that have segments.
_OPERATIONS = ("F", "B", "I")
#: Largest difference of a sum of shares from 1.
_TOLERANCE = 1e-6


def checked_experts(costs: Costs) -> dict[str, Any]:
    """Return ``expert_replicas`` and ``segments`` as `pipesim.Costs` keeps them.

    Raises
    ------
    CostsError
        For layers that are no whole numbers, shares above 1, parts of experts that exceed the
        whole, and segments that do not suit the layers.
    """
    check_whole_layers(costs.expert_layers)
    if np.max(costs.reduced_share) > 1:
        raise CostsError(f"reduced_share must be at most 1, got {costs.reduced_share!r:.60}")
    for name in ("parameter", "gradient", "optimizer"):
        _check_part(costs, f"expert_{name}_bytes", f"{name}_bytes")
    return {
        "expert_replicas": check_count("expert_replicas", costs.expert_replicas),
        "segments": _checked_segments(costs.segments, costs.expert_layers),
    }


def check_whole_layers(layers: object) -> None:
    """Raise `CostsError` for numbers of layers that are not whole."""
    values = np.atleast_1d(np.asarray(0.0 if layers is None else layers, dtype=float))
    for stage in np.flatnonzero(values % 1)[:1]:
        raise CostsError(
            f"expert_layers of stage {stage} must be a whole number of layers, got {values[stage]}"
        )


def _check_part(costs: Costs, part: str, whole: str) -> None:
    """Raise `CostsError` if bytes of experts exceed those of which they are a part."""
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


def _checked_segments(value: object, layers: Any) -> Segments | None:
    """Return segments as tuples; raise `CostsError` unless they are shares that sum to 1."""
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        segments = tuple(
            tuple(tuple(map(float, shares)) for shares in stage)
            for stage in value  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise CostsError(f"{_FORM}, got {value!r:.60}") from None
    counts = [layers] * len(segments) if isinstance(layers, float) else layers
    if not segments or len(counts) != len(segments):
        raise CostsError(
            f"segments are of {len(segments)} stages, but expert_layers of {len(counts)}; give "
            "those of each stage"
        )
    for stage, (operations, n) in enumerate(zip(segments, counts, strict=True)):
        _check_stage(stage, operations, 2 * int(n) + 1)
    return segments


def _check_stage(stage: int, operations: tuple[tuple[float, ...], ...], n: int) -> None:
    """Raise `CostsError` unless a stage has n shares of each operation."""
    if len(operations) != len(_OPERATIONS):
        raise CostsError(f"{_FORM}; stage {stage} has {len(operations)} operations")
    for name, shares in zip(_OPERATIONS, operations, strict=True):
        where = f"segments of {name} of stage {stage}"
        if len(shares) != n:
            raise CostsError(
                f"{where} must be {n} shares, one more than exchanges of its layers with experts, "
                f"got {len(shares)}"
            )
        is_valid = all(0 <= x <= 1 + _TOLERANCE for x in shares)
        if not is_valid or not math.isclose(sum(shares), 1, abs_tol=_TOLERANCE):
            raise CostsError(f"{where} must be shares >= 0 that sum to 1, got {shares!r:.80}")
