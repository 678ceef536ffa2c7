"""Settings of every test."""

from __future__ import annotations

import fcntl
import importlib
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import engine
from places import BENCHMARKS, ROOT

import pipesim as ps
from pipesim.simulation.simulate import ENGINES

if TYPE_CHECKING:
    from fake_cuda import FakeCuda
    from ranks import Ranks

# No deadline: machines that run tests are shared. The rest is hypothesis' own choice, which is
# reproducible where it sees continuous integration.
settings.register_profile(
    "project",
    parent=settings(),
    deadline=None,
    max_examples=30,
    phases=set(Phase) - {Phase.explain},  # which traces every line, and takes as long as the rest
)
settings.load_profile("project")

# Shrink a failing example for 20 s at most. Hypothesis would go on for five minutes, in which a
# large graph gets little smaller. Settings have no such limit: hypothesis documents this constant.
engine.MAX_SHRINKING_SECONDS = min(20, engine.MAX_SHRINKING_SECONDS)


# The shell starts jobs in the background with SIGINT ignored, and so would they their children: a
# test that interrupts one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Hold the lock of a file that all processes of a test run share; see `fcntl.flock`."""
    with path.open() as file:
        fcntl.flock(file, operation)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that measures time alone, although pytest-xdist runs others at the same time.

    All tests share the first lock; such a test holds it exclusively. A test takes the second lock
    while it waits for the first: no further test starts before one that measures time.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("measures_time") is not None
    with ExitStack() as stack:
        with _locked(ROOT / "Makefile", fcntl.LOCK_EX):
            operation = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            stack.enter_context(_locked(ROOT / "pyproject.toml", operation))
        return (yield)


@pytest.fixture(scope="module", params=sorted(ENGINES))
def each_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests once with each engine as the one that `ps.simulate` takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ps, "simulate", partial(ps.simulate, engine=request.param))
        yield request.param


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that run what tests give them."""
    from ranks import Ranks  # loads torch, which other tests do without

    ranks = Ranks(2, tmp_path_factory.mktemp("two_ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes that run what tests give them."""
    from ranks import Ranks

    ranks = Ranks(4, tmp_path_factory.mktemp("four_ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def event_delay() -> float:
    """Return the seconds after which an event of the stand-in for CUDA passes."""
    return 0.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, event_delay: float) -> FakeCuda:
    """Put the stand-in for CUDA in torch's place."""
    from fake_cuda import FakeCuda

    fake = FakeCuda(passes_after=event_delay)
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script of ``make gpu`` as a module."""
    benchmarks = BENCHMARKS
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.setattr(sys, "argv", [str(benchmarks / "gpu.py")])
    yield importlib.import_module("gpu")
    for name in list(sys.modules):
        if name.startswith("on_gpu") or name in ("gpu", "_machine", "_interval"):
            del sys.modules[name]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that sums have one order."""
    from pipeexec.devices.thread_settings import one_thread

    with one_thread():
        yield


@pytest.fixture
def no_figures_left() -> Iterator[None]:
    """Let pyplot draw into memory; it has no open figure before and after the test."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    plt.close("all")
    yield
    plt.close("all")
