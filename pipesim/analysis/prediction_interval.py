"""`prediction_interval`: where a step will be, given where published ones were.

Quotients of measured over predicted seconds of published steps are in ``published_quotients.json``,
by framework and family of GPUs, and those of models with experts apart.
``benchmarks/published_steps.py`` writes them. An interval has its ends at quantiles of the
quotients of its framework and family, or, for a framework with few of them, of all frameworks of
the family. That of a model with experts is of steps with experts alone: as they are few, of all
frameworks on all GPUs. For other GPUs, number formats of 8 and 4 bits and frameworks
without a name it is the band between two frameworks: one that fuses and hides what any preset does,
and one that fuses and hides nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipesim.errors import TimelineError
from pipesim.framework.framework import BEST_CASE, OVERLAP_COST, Framework, as_framework
from pipesim.models.data_sheets import DATA_SHEETS
from pipesim.models.gpu import GPU
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import Fraction, checked
from pipesim.utils.texts import format_time

_FILE = Path(__file__).with_name("published_quotients.json")
#: Least number of published steps whose quantiles say where others will be.
_LEAST = 15
#: A framework that fuses and hides all, and one that does neither.
_BEST = Framework(
    attention_kernel="fa3", tensor_overlap="userbuffers", fused_sums="all", fused_router=True,
    shared_expert_overlap=True,
)  # fmt: skip
_WORST = Framework(
    attention_kernel="fa1", fused_rotary=False, fused_activation=False, fused_norm=False,
    norm_bytes=4, separate_gate=True, attention_copies=True, fused_sums="none",
    exchange_element_bytes=4, gradient_exchange="all_reduce", exchange_copies=26,
    overlap_cost=OVERLAP_COST, expert_products="sequential", fused_permute=False,
    fused_expert_bias=False, expert_padding=True,
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

    def __repr__(self) -> str:
        return f"<Interval: {self}>"


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
        If there are no costs, as in a file, or they are not those of a GPU's data sheet: measured
        costs have errors of their own, which `pipeexec.validate` tells.

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
    steps = steps_like(timeline)
    if timeline.costs is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no costs, which say what an interval rests on; a file "
            "has none: give costs= to Timeline.load"
        )
    if steps is None:
        raise TimelineError(
            f"costs of timeline {timeline.name!r} are not those of a GPU's data sheet, whose "
            "errors are known from published steps; for measured costs, pipeexec.validate tells "
            "theirs"
        )
    seconds = timeline.makespan
    if steps.quotients:
        low, high = steps.ends(seconds, share)
        return Interval(low, high, share, f"{share:.0%} of {steps.text}")
    others = [timeline.costs.rebuilt(framework=other.to_dict()) for other in (_BEST, _WORST)]
    band = [seconds, *(predict_timeline(timeline.graph, other).makespan for other in others)]
    basis = f"from all fused and hidden to nothing, as there are {steps.text}"
    return Interval(min(band), max(band), math.nan, basis)


class KnownSteps(NamedTuple):
    """Measured over predicted seconds of published steps, none if they are too few; and a name."""

    quotients: Sequence[float]
    text: str

    def ends(self, seconds: float, share: float = 0.8) -> tuple[float, float]:
        """Return the seconds between which a share of such steps is; NaN without quotients."""
        if not self.quotients:
            return math.nan, math.nan
        low, high = np.quantile(self.quotients, [(1 - share) / 2, (1 + share) / 2]).tolist()
        return seconds * low, seconds * high

    def __str__(self) -> str:
        if not self.quotients:
            return f"There are {self.text}: timeline.interval() gives a band."
        low, high = self.ends(1.0)
        return f"80 % of {self.text} took {low:.2f} to {high:.2f} times as long as predicted."


def steps_like(timeline: Timeline) -> KnownSteps | None:
    """Return published steps like that of a timeline; None without costs of a GPU's data sheet."""
    work = None if timeline.costs is None else timeline.costs.work
    settings = None if work is None else work.settings
    if not settings or "bandwidth" not in (settings.get("gpu") or ()):
        return None  # a workload that was written by hand may have any settings
    return known_steps(
        as_framework(settings.get("framework")),
        GPU(**settings["gpu"]),
        settings.get("precision", "bf16"),
        has_experts=bool(settings.get("n_experts")),
    )


def published_ends(timeline: Timeline) -> tuple[float, float] | None:
    """Return the ends of the interval of 80 % (s); None if published steps do not give it."""
    steps = steps_like(timeline)
    return None if steps is None or not steps.quotients else steps.ends(timeline.makespan)


def ends_text(timeline: Timeline) -> str:
    """Return the ends of the interval of 80 %, such as " (1.9 s to 2.4 s)"; "" if not known."""
    ends = published_ends(timeline)
    return "" if ends is None else f" ({' to '.join(map(format_time, ends))})"


def known_steps(framework: Framework, gpu: GPU, precision: str, *, has_experts: bool) -> KnownSteps:
    """Return published steps of a framework, or else of all, on a family of GPUs.

    Of models with experts they are on all GPUs if there are too few; those in 8 bits are among
    them.
    """
    published = _published()["experts" if has_experts else "dense"]
    steps = "published steps with experts" if has_experts else "published steps"
    family = gpu.name.partition("_")[0]
    text = f"too few {steps} of {framework.name or 'this framework'} on {family or 'it'}"
    preset = GPU.preset(gpu.name) if gpu.name in DATA_SHEETS else None
    if preset is None or replace(gpu, memory=preset.memory) != preset:
        return KnownSteps((), f"no published steps of {gpu.name or 'a GPU'} with these rates")
    if precision not in ("bf16", "fp16"):
        return KnownSteps((), f"too few published steps in {precision} on {family}")
    is_best_case = replace(framework, name="", source="") == BEST_CASE
    name = "" if is_best_case else framework.name
    if not name and not is_best_case:
        return KnownSteps((), text)
    kind = f"of {name}" if name else "without their framework"
    wider = "of all frameworks" if name else kind
    others = [key for key in published if key] if name else [""]
    searches = [
        ([name], [family], f"{kind} on {family}"),
        (others, [family], f"{wider} on {family}"),
    ]
    if has_experts:
        families = list(dict.fromkeys(x for key in others for x in published[key]))
        runs = f"of {', '.join(others)}" if name else kind
        searches.append((others, families, f"{runs} on {', '.join(families)}"))
    for names, families, where in searches:
        rows = (published.get(key, {}).get(x, ()) for key in names for x in families)
        quotients = [x for row in rows for x in row]
        if len(quotients) >= _LEAST:
            return KnownSteps(quotients, f"{len(quotients)} {steps} {where}")
    return KnownSteps((), text)


@cache
def _published() -> Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]:
    """Return quotients of ``"dense"`` models and ``"experts"``, by framework and family of GPUs."""
    values: dict[str, Any] = json.loads(_FILE.read_text())
    return values
