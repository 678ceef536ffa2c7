"""A fixture of the tests of `px.GPipe`."""

from collections.abc import Iterator

import pytest
from small_pipelines import one_thread


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that sums have one order."""
    with one_thread():
        yield
