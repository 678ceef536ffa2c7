"""Settings of every test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings

import pipesim as ps
from pipesim.simulate import ENGINES

# No deadline: machines that run tests are shared. The rest is hypothesis' own choice, which is
# reproducible where it sees continuous integration.
settings.register_profile("project", parent=settings(), deadline=None, max_examples=30)
settings.load_profile("project")


@pytest.fixture(scope="module", params=sorted(ENGINES))
def each_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests once with each engine as the one that `ps.simulate` takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ps, "simulate", partial(ps.simulate, engine=request.param))
        yield request.param
