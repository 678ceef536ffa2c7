"""Settings of every test."""

from __future__ import annotations

import fcntl
import gc
import importlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from forked import start_server, use_server
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import engine
from kernels import compile_in_turn
from places import BENCHMARKS, ROOT

import pipesim as ps
from pipesim.simulation.simulate import ENGINES

if TYPE_CHECKING:
    from fake_cuda import FakeCuda
    from ranks import Ranks

# No deadline: machines that run tests are shared. The rest is hypothesis' own choice, which is
# reproducible where it sees continuous integration. Every run draws other examples, and `make fuzz`
# many more.
settings.register_profile(
    "project",
    parent=settings(),
    deadline=None,
    max_examples=4,
    phases=set(Phase) - {Phase.explain},  # which traces every line, and takes as long as the rest
)
settings.register_profile("fuzz", parent=settings.get_profile("project"), max_examples=100)
settings.load_profile("project")

# Shrink a failing example for 20 s at most. Hypothesis would go on for five minutes, in which a
# large graph gets little smaller. Settings have no such limit: hypothesis documents this constant.
engine.MAX_SHRINKING_SECONDS = min(20, engine.MAX_SHRINKING_SECONDS)


# The shell starts jobs in the background with SIGINT ignored, and so would they their children: a
# test that interrupts one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _TestLock:
    """Lock of all workers of a test run: shared by tests, exclusive for one that measures time.

    A worker takes the lock of a first file while it waits for that of the second: no further test
    starts before one that measures time. See `fcntl.flock`.
    """

    def __init__(self) -> None:
        self._queue, self._tests = (ROOT / "Makefile").open(), (ROOT / "pyproject.toml").open()
        self.is_exclusive = False

    def acquire(self, operation: int) -> None:
        """Hold the lock, shared or exclusive; a lock that this worker holds is released first."""
        self.release()
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._tests, operation)
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        self.is_exclusive = operation == fcntl.LOCK_EX

    def release(self) -> None:
        """Release the lock for other workers."""
        fcntl.flock(self._tests, fcntl.LOCK_UN)
        self.is_exclusive = False


_LOCK = pytest.StashKey[_TestLock]()


def pytest_configure(config: pytest.Config) -> None:
    """Open the lock in workers of pytest-xdist, which run tests at the same time."""
    if hasattr(config, "workerinput"):
        config.stash[_LOCK] = _TestLock()
        compile_in_turn()
        if "fork_server" in config.workerinput:
            use_server(config.workerinput["fork_server"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of pytest-xdist fork processes from one, which loads torch for ten seconds.

    Tests that fork are slow ones.
    """
    if "not slow" not in node.config.option.markexpr:
        node.workerinput["fork_server"] = start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose fixtures take long; begin with what measures time, then what is slow.

    Workers of pytest-xdist begin with equal shares of the list and take tests from the end of each
    other's. So the first worker measures before others run long tests, for whose end it would wait.
    Tests of ten seconds and more, all in tests/project, begin early, and short ones fill the rest:
    all workers end at about the same time.
    """
    for item in items:
        if {"two_ranks", "four_ranks", "quiet_machine"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    items.sort(key=_sort_key)


def _sort_key(item: pytest.Item) -> tuple[bool, ...]:
    """Return the sort key of a test: those with the smallest run first."""
    is_measured = "quiet_machine" in getattr(item, "fixturenames", ())
    is_slow = item.get_closest_marker("slow") is not None
    is_long = is_slow and ROOT / "tests" / "project" in item.path.parents
    return not _measures_time(item), not is_measured, not is_slow, not is_long


def pytest_collection_finish() -> None:
    """Leave what is loaded by now, all tests among it, out of later collections of garbage.

    Later ones are rare: torch.export and numba make many objects, and with the thresholds of
    Python a tenth of the time went into looking through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


def _measures_time(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("measures_time") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Run tests that measure time alone, although pytest-xdist runs others at the same time.

    A worker keeps the lock from one such test to the next: else it would wait, each time, for the
    tests that other workers start in between.
    """
    lock = item.config.stash.get(_LOCK, None)
    if lock is None:
        return (yield)
    if not _measures_time(item):
        lock.acquire(fcntl.LOCK_SH)
    elif not lock.is_exclusive:
        lock.acquire(fcntl.LOCK_EX)
    try:
        return (yield)
    finally:
        if not (_measures_time(item) and _measures_time(nextitem)):
            lock.release()


@pytest.fixture(scope="session")
def quiet_machine(pytestconfig: pytest.Config) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which a fixture measures time, while no other test runs."""
    lock = pytestconfig.stash.get(_LOCK, None)

    @contextmanager
    def block() -> Iterator[None]:
        if lock is None or lock.is_exclusive:
            yield
            return
        lock.acquire(fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.acquire(fcntl.LOCK_SH)

    return block


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
def few_messages() -> Iterator[None]:
    """Let calibrations time few messages."""
    import few_messages as helper

    with helper.few_messages():
        yield


@pytest.fixture
def empty_figures() -> Iterator[None]:
    """Let figures be saved as empty files."""
    import empty_figures as helper

    with helper.empty_figures():
        yield


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
