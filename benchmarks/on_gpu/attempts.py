"""Parts of a step that fail alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from on_gpu.report import Report


def attempt(report: Report, name: str, call: Callable[..., None], *arguments: Any) -> bool:
    """Call; if that raises, report a missed target. Return whether it returned."""
    try:
        call(*arguments)
    except Exception as error:
        report.add(traceback.format_exc())
        report.check(False, f"{name}: {type(error).__name__}: {error}")
        return False
    return True
