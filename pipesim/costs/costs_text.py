"""`costs_text`: costs in one line, with the seconds and bytes of stages as ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pipesim.costs.microbatch_costs import n_stages_of
from pipesim.utils.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


#: Fields of the line, and their names there.
_SHOWN = {
    "forward": "F",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
    "output_bytes": "messages",
    "activation_bytes": "activations",
    "parameter_bytes": "parameters",
    "optimizer_bytes": "optimizer",
}


def costs_text(costs: Costs) -> str:
    """Return such as ``<Costs of 4 stages: F 10.2 to 12.1 ms, B 20.4 ms, messages 32.0 MiB>``.

    Fields that are not given, and bytes that are 0, are left out.
    """
    parts = []
    for name, shown in _SHOWN.items():
        value = getattr(costs, name)
        is_bytes = name.endswith("bytes")
        if value is not None and not (is_bytes and np.max(value) == 0):
            parts.append(f"{shown} {_range_text(value, format_bytes if is_bytes else format_time)}")
    n_stages = n_stages_of_costs(costs)
    count = "any number of" if n_stages is None else n_stages
    n = costs.n_microbatches
    parts += [f"{n} micro-batches"] * (n is not None)
    return f"<Costs of {count} stage{'s' * (n_stages != 1)}: {', '.join(parts)}>"


def n_stages_of_costs(costs: Costs) -> int | None:
    """Return the number of stages of costs; None if they have one value for all."""
    from pipesim.costs.costs import STAGE_FIELDS

    sizes = (n for name in STAGE_FIELDS if (n := n_stages_of(getattr(costs, name))))
    return max(sizes, default=None)


def _range_text(value: float | tuple[float, ...], form: Callable[[float], str]) -> str:
    """Return the smallest and the largest of a field's values as text."""
    low, high = form(float(np.min(value))), form(float(np.max(value)))
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"
