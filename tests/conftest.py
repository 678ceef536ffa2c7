"""Settings of every test."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from places import BENCHMARKS, HELPERS

import pipesim as ps
from pipesim.simulation.simulate import ENGINES

if TYPE_CHECKING:
    from fake_cuda import FakeCuda
    from ranks import Ranks

# No deadline: machines that run tests are shared. The rest is hypothesis' own choice, which is
# reproducible where it sees continuous integration.
settings.register_profile("project", parent=settings(), deadline=None, max_examples=30)
settings.load_profile("project")


# The shell starts jobs in the background with SIGINT ignored, and so would they their children: a
# test that interrupts one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_NOTEBOOKS = pytest.StashKey[tuple[subprocess.Popen[bytes], Path]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the notebooks that tests ask for: they run beside the tests before theirs."""
    asked = [
        str(item.callspec.params["notebook"])
        for item in session.items
        if isinstance(item, pytest.Function) and "notebooks" in item.fixturenames
    ]
    if not asked or session.config.option.collectonly:
        return
    outcomes = Path(tempfile.mkdtemp())
    script = HELPERS / "run_notebooks.py"
    process = subprocess.Popen([sys.executable, str(script), str(outcomes), *asked])
    session.config.stash[_NOTEBOOKS] = process, outcomes


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End notebooks that nobody waits for."""
    if _NOTEBOOKS in session.config.stash:
        process, outcomes = session.config.stash[_NOTEBOOKS]
        process.terminate()
        process.wait()
        shutil.rmtree(outcomes, ignore_errors=True)


@pytest.fixture
def notebooks(pytestconfig: pytest.Config) -> tuple[subprocess.Popen[bytes], Path]:
    """The process that runs the notebooks, and the folder of their outcomes."""
    return pytestconfig.stash[_NOTEBOOKS]


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
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the stand-in for CUDA in torch's place."""
    from fake_cuda import FakeCuda

    fake = FakeCuda()
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
