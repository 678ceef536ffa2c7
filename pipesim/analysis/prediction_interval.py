"""`prediction_interval`: where a step will be, given where published ones were.

Quotients of measured over predicted seconds of published steps are in ``published_quotients.json``,
by framework and family of GPUs. ``benchmarks/published_steps.py`` writes them. An interval has its
ends at quantiles of the quotients of its framework and family, or, for a framework with few of
them, of all frameworks of the family. For other GPUs and frameworks without a name it is the band
between two frameworks: one that fuses and hides what any preset does, and one that fuses and hides
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipesim.errors import TimelineError
from pipesim.models.data_sheets import DATA_SHEETS
from pipesim.models.framework import BEST_CASE, Framework, as_framework
from pipesim.models.gpu import GPU
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import Fraction, checked

_FILE = Path(__file__).with_name("published_quotients.json")
#: Least number of published steps whose quantiles say where others will be.
_LEAST = 20
#: A framework that fuses and hides all, and one that does neither.
_BEST = Framework(attention_kernel="fa3", tensor_overlap="userbuffers")
_WORST = Framework(
    attention_kernel="fa1", fused_rotary=False, fused_activation=False, fused_norm=False,
    norm_bytes=4, separate_gate=True, attention_copies=True, fused_sums="none",
    exchange_element_bytes=4, gradient_exchange="all_reduce", exchange_copies=26,
)  # fmt: skip


class Interval(NamedTuple):
    """Where the seconds of a step are expected.

    Attributes
    ----------
    low, high
        Ends (s).
    share
        Share of steps expected between them; NaN for a band, which has none.
    basis
        What the ends rest on, in words.
    """

    low: float
    high: float
    share: float
    basis: str

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} s ({self.basis})"


@checked
def prediction_interval(timeline: Timeline, share: Fraction = 0.8) -> Interval:
    """Return where the step is expected that a timeline predicts from data sheets.

    Parameters
    ----------
    timeline
        Simulated, with costs of ``Transformer.costs(gpu=...)``.
    share
        Share of steps that the interval is to hold, 0 to 1; 0.8 by default.

    Returns
    -------
    Interval
        Ends in seconds, and what they rest on.

    Raises
    ------
    TimelineError
        If the costs are not those of a GPU's data sheet: measured costs have errors of their own,
        which `pipeexec.validate` tells.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 4, 8))
    >>> costs = ps.Transformer.preset("llama3_8b").costs(
    ...     "balanced", gpu="h100_sxm", microbatch_size=1, flash_attention=True, placement=graph)
    >>> timeline = ps.simulate(graph, costs)
    >>> interval = timeline.interval(0.8)
    >>> interval.low <= timeline.makespan <= interval.high
    True
    """
    costs, settings = timeline.costs, None
    if costs is not None and costs.work is not None:
        settings = costs.work.settings
    if costs is None or not settings or "gpu" not in settings:
        raise TimelineError(
            f"costs of timeline {timeline.name!r} are not those of a GPU's data sheet, whose "
            "errors are known from published steps; for measured costs, pipeexec.validate tells "
            "theirs"
        )
    steps = _known_steps(as_framework(settings.get("framework")), GPU(**settings["gpu"]))
    seconds = timeline.makespan
    if steps.quotients:
        low, high = np.quantile(steps.quotients, [(1 - share) / 2, (1 + share) / 2]).tolist()
        return Interval(seconds * low, seconds * high, share, f"{share:.0%} of {steps.text}")
    others = [costs.rebuilt(framework=other.to_dict()) for other in (_BEST, _WORST)]
    band = [seconds, *(predict_timeline(timeline.graph, other).makespan for other in others)]
    basis = f"from all fused and hidden to nothing, as there are {steps.text}"
    return Interval(min(band), max(band), math.nan, basis)


def published_errors(framework: Framework, gpu: GPU) -> str:
    """Return in a sentence how published steps differed from predictions."""
    steps = _known_steps(framework, gpu)
    if not steps.quotients:
        return f"There are {steps.text}: timeline.interval() gives a band."
    low, high = np.quantile(steps.quotients, [0.1, 0.9]).tolist()
    return f"80 % of {steps.text} took {low:.2f} to {high:.2f} times as long as predicted."


class _KnownSteps(NamedTuple):
    """Measured over predicted seconds of published steps, none if they are too few; and a name."""

    quotients: Sequence[float]
    text: str


def _known_steps(framework: Framework, gpu: GPU) -> _KnownSteps:
    """Return published steps of a framework, or else of all, on a family of GPUs."""
    family, sheet = gpu.name.partition("_")[0], DATA_SHEETS.get(gpu.name)
    text = f"too few published steps of {framework.name or 'this framework'} on {family or 'it'}"
    if sheet is None or gpu.flops != sheet.flops * sheet.flops_efficiency:
        return _KnownSteps((), f"no published steps of {gpu.name or 'a GPU'} with these rates")
    is_best_case = framework == BEST_CASE
    name = "" if is_best_case else framework.name
    own = _published().get(name, {}).get(family, ()) if name or is_best_case else ()
    if len(own) >= _LEAST:
        kind = "without their framework" if is_best_case else f"of {name}"
        return _KnownSteps(own, f"{len(own)} published steps {kind} on {family}")
    if not name:
        return _KnownSteps((), text)
    every = [x for key, rows in _published().items() if key for x in rows.get(family, ())]
    if len(every) < _LEAST:
        return _KnownSteps((), text)
    return _KnownSteps(every, f"{len(every)} published steps of all frameworks on {family}")


@cache
def _published() -> Mapping[str, Mapping[str, Sequence[float]]]:
    values: dict[str, Any] = json.loads(_FILE.read_text())
    return values
