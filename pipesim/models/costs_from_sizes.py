"""`costs_from_sizes`: `Costs` from the sizes of a transformer and of its run, in one call."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import signature
from numbers import Integral
from typing import Any

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split, checked_counts
from pipesim.errors import ArgumentError, check_name
from pipesim.models.splits.placed_split import is_word
from pipesim.models.transformer import Transformer


def costs_from_sizes(layers_per_stage: Split, **settings: Any) -> Costs:
    """Return ``Transformer(...).costs(layers_per_stage, ...)``; settings are those of both.

    ``n_layers`` may be left out if the layers of each stage are given.
    """
    sizes = {field.name: field.default for field in fields(Transformer)}
    options = signature(Transformer.costs).parameters
    named = {name: p for name, p in options.items() if p.kind == p.KEYWORD_ONLY}
    for name in settings:
        check_name("setting of a transformer", name, (*sizes, *named))
    is_counted = isinstance(layers_per_stage, Integral) or is_word(layers_per_stage)
    if "n_layers" not in settings and not is_counted:
        counts = checked_counts(layers_per_stage, "layers_per_stage", ends_may_be_empty=True)
        settings = {**settings, "n_layers": sum(counts)}
    needed = [name for name, default in sizes.items() if default is MISSING]
    needed += [name for name, p in named.items() if p.default is p.empty]
    missing = [name for name in needed if name not in settings]
    if missing:
        raise ArgumentError(f"{missing[0]} is missing; a transformer needs {', '.join(needed)}")
    model = Transformer(**{name: value for name, value in settings.items() if name in sizes})
    return model.costs(layers_per_stage, **{k: v for k, v in settings.items() if k in named})
