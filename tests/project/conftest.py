"""Counts of flipped files, printed at the end of a fuzzing run."""

from __future__ import annotations

import os
from collections import Counter

import pytest

#: By kind of file: how many flips were refused, how many changed nothing, how many changed a value.
COUNTS = pytest.StashKey[dict[str, Counter[str]]]()


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> dict[str, Counter[str]]:
    """Return the counts of all kinds, to add to."""
    return request.config.stash.setdefault(COUNTS, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print a line a kind, where more was flipped than the normal tests do."""
    found = config.stash.get(COUNTS, {})
    if not found or "FUZZ_EXAMPLES" not in os.environ:
        return
    terminalreporter.section("flipped bits")
    for kind, count in found.items():
        parts = ", ".join(f"{count[word]} {word}" for word in ("refused", "same", "other value"))
        terminalreporter.write_line(f"{kind:24} {count.total():5} flips: {parts}")
