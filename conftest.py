"""Settings of tests and of the examples in docstrings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipesim.scheduling.registry import _REGISTRY


@pytest.fixture(scope="module", autouse=True)
def _own_schedules() -> Iterator[None]:
    """Forget the schedules that a module's tests or examples register."""
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)
