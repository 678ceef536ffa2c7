"""Step ``sanitizer``: tiny steps under torch's CUDA sanitizer, which sees races of streams."""

from __future__ import annotations

from on_gpu.bench import Bench
from on_gpu.report import Report


def sanitizer(bench: Bench, report: Report) -> None:
    """Placeholder until merged."""
    report.say("nothing")
