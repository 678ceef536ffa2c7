"""Settings of tests and of the examples in docstrings."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from pipesim.scheduling.registry import _REGISTRY


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only in modules that have a prompt: the others take seconds."""
    nodes = yield
    if file_path.suffix == ".py" and b">>> " not in file_path.read_bytes():
        return [node for node in nodes if type(node).__name__ != "DoctestModule"]
    return nodes


@pytest.fixture(scope="module", autouse=True)
def _own_schedules() -> Iterator[None]:
    """Forget the schedules that a module's tests or examples register."""
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)
