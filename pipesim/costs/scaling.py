"""`scaled`: costs of faster or slower operations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import each_microbatch, n_stages_of
from pipesim.costs.rows import ADDED, COMPUTED, STAGE_ROWS, given_rows
from pipesim.errors import CostsError, check_count, check_name, number
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_stages

Floats = NDArray[np.float64]


def scaled(
    costs: Costs, factor: float, op: Op | str | None, stage: int | None, n_stages: int | None
) -> Costs:
    """Return costs of faster or slower operations; see `Costs.scaled`."""
    if costs.n_microbatches is not None:
        return each_microbatch(lambda own: scaled(own, factor, op, stage, n_stages), costs)
    value = number(factor)
    if value is None or not 0 <= value < math.inf:
        raise CostsError(f"factor must be finite and >= 0, got {factor!r}")
    n_stages = _common_stages(costs, stage, n_stages)
    if stage is not None and n_stages is None:
        raise CostsError(
            "costs are the same for all stages, however many; give one value a stage, or "
            f"scaled({value:g}, stage={stage!r}, n_stages=...), to scale one of them"
        )
    if stage is not None and check_count("stage", stage, 0) >= (n_stages or 0):
        raise CostsError(f"there is no stage {stage} in costs of {n_stages} stages")
    check_stages(n_stages or 1)
    factors = np.ones(n_stages or 1)
    factors[slice(None) if stage is None else stage] = value
    with np.errstate(over="ignore"):  # infinite seconds are refused below
        if op is None:
            names = [name for name, row in given_rows(costs).items() if row.computes]
            seconds = {name: costs.per_stage(name, len(factors)) * factors for name in names}
        else:
            name = op.name if isinstance(op, Op) else op
            names = list(dict.fromkeys(computing.name for computing, _ in COMPUTED))
            own = Op[check_name("operation", name, names)]
            seconds = _scaled_operation(costs, own, factors)
    changed: dict[str, Any] = {}
    for name, values in seconds.items():
        if np.isinf(values).any():
            raise CostsError(
                f"{name} must be finite seconds, and factor={value!r} makes them too large a "
                "number; give a smaller factor"
            )
        is_one = n_stages is None or (stage is None and isinstance(getattr(costs, name), float))
        changed[name] = float(values[0]) if is_one else tuple(values.tolist())
    return replace(costs, **changed)


def _scaled_operation(costs: Costs, op: Op, factors: Floats) -> dict[str, Floats]:
    """Return the fields that change if the tasks of one operation take ``factors`` as long.

    A field that follows from one that changes is given the value that it has now.
    """
    n = len(factors)
    own = [name for (computing, _), name in COMPUTED.items() if computing == op]
    name = own[0]
    if getattr(costs, name) is None and not STAGE_ROWS[name].substitutes:
        raise CostsError(f"{name} is missing, so that {op.name} cannot be scaled; give its seconds")
    if op is Op.B:  # B is I and W together
        own += [half for half in STAGE_ROWS[name].substitutes if getattr(costs, half) is not None]
    own += [more for more, other in ADDED.items() if other is op and getattr(costs, more)]
    changed = {other: costs.per_stage(other, n) * factors for other in own}
    for other in COMPUTED.values():
        follows = getattr(costs, other) is None and not {*own}.isdisjoint(
            STAGE_ROWS[other].substitutes
        )
        if follows and other not in own:
            changed[other] = costs.per_stage(other, n)
    before = costs.per_stage(name, n)
    if op in (Op.F, Op.B) and costs.overlapped is not None:
        separate = costs.per_stage("forward", n) + costs.per_stage("backward", n)
        share = np.divide(before, separate, out=np.full(n, 0.5), where=separate > 0)
        changed["overlapped"] = costs.per_stage("overlapped", n) * (1 + share * (factors - 1))
    return changed


def _common_stages(costs: Costs, stage: int | None, n_stages: int | None) -> int | None:
    """Return the number of stages of costs, or None if they have one value for all."""
    sizes = {n for name in STAGE_ROWS if (n := n_stages_of(getattr(costs, name)))}
    if n_stages is not None:
        sizes.add(check_count("n_stages", n_stages))
    if len(sizes) > 1 and (stage is not None or n_stages is not None):
        raise CostsError(
            f"costs, and n_stages, are of {' and of '.join(map(str, sorted(sizes)))} stages; give "
            "the same number to all"
        )
    return max(sizes, default=None)
