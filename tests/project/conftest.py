"""Fixtures of these tests, and counts of flipped files, printed at the end of a fuzzing run."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from places import DATA

import pipesim as ps

#: By kind of file: how many flips were refused, how many changed nothing, how many changed a value.
COUNTS = pytest.StashKey[dict[str, Counter[str]]]()


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    """Close the figures that a test leaves open; matplotlib warns of more than twenty."""
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Load and compile what calls need, before calls are limited in time and memory."""
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(1.0, 2.0))
    timeline.why.idle_by_cause()
    ps.Timeline.from_chrome(sorted((DATA / "torch_interleaved").iterdir()))


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> dict[str, Counter[str]]:
    """Return the counts of all kinds, to add to."""
    return request.config.stash.setdefault(COUNTS, {})


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Fail, rather than wait, where a file is waited for."""

    def impatient(*_: object) -> None:
        raise AssertionError("waited for a file")

    before = signal.signal(signal.SIGALRM, impatient)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print a line a kind, where more was flipped than the normal tests do."""
    counts = config.stash.get(COUNTS, {})
    if not counts or "FUZZ_EXAMPLES" not in os.environ:
        return
    terminalreporter.section("flipped bits")
    for kind, count in counts.items():
        parts = ", ".join(f"{count[word]} {word}" for word in ("refused", "same", "other value"))
        terminalreporter.write_line(f"{kind:24} {count.total():5} flips: {parts}")
