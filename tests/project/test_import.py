"""The names and modules that `import pipesim` loads."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

import pipesim
from pipeexec.old_names import EXPORTS as EXPORTS_EXEC
from pipesim.old_names import EXPORTS

HEAVY = (
    "torch",
    "numba",
    "matplotlib",
    "pandas",
    "joblib",
    "tqdm",
    "distributed",
    "pyarrow.parquet",
    "anywidget",
    "ipywidgets",
    "networkx",
    "google.protobuf",
)
#: What users import; a change breaks their code.
PUBLIC = """
GPU Action ClosedForm Cluster Comparison Costs Encoder Framework HostLink Keys Layers Layout Link
Network NodeCollectives Nodes Noise Op Parallel Placement Routing Schedule TaskGraph Timeline
Transformer audit autograd_orders balanced_split compare demo frameworks gpus lower lower_bound
machines optimize order_by plan read_megatron read_torchtitan register replay schedule schedules
simulate simulate_many sweep trace transformers verify
"""
PUBLIC_EXEC = """
EmbeddingStage Experts GPipe GradientAccumulation KeyValueCache LRSchedulers Microbatches Pipeline
RunOptions ShardedEmbedding SplitBackward Stages annotate_torch_pipelining autograd_graph
check_equivalent from_torch is_checkpointing is_recomputing join latest_checkpoint load_checkpoint
load_run measure profile project read_checkpoint save_checkpoint slices split to_torch train
validate watch_sync workers
"""
MODULES = [m.name for m in pkgutil.walk_packages(pipesim.__path__, "pipesim.")]


def fresh(code: str) -> str:
    """Run code in a new interpreter and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


#: Code of users, and what of `HEAVY` it loads.
LITTLE = {
    "import pipesim.plot": "",
    "import pipesim.plot.widget.make_widget": "",
    "timeline = ps.simulate(ps.lower(ps.schedule('1f1b', 4, 8), n_replicas=2), ps.Costs(1, 2))\n"
    "timeline.makespan, timeline.bubble_fraction, timeline.memory.peak": "",
    "from pipesim.cli import main; main(['simulate', '--help'])": "",
    "timeline = ps.simulate(ps.lower(ps.schedule('1f1b', 2, 2)), ps.Costs(1, 2))\n"
    "timeline.save('x.csv')": "pandas",
}


@pytest.mark.slow
def test_what_loads_nothing_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that prints a table, or its help, need not wait for what it does not use."""
    code = f"""
import os, sys
import pipesim as ps
for code in ["", *{list(LITTLE)!r}]:
    if not os.fork():
        try:
            exec(code)
        except SystemExit:  # of the help
            pass
        print("loaded:", *[m for m in {HEAVY!r} if m in sys.modules], flush=True)
        os._exit(0)
    os.wait()
"""
    monkeypatch.chdir(tmp_path)
    lines = [x for x in fresh(code).splitlines() if x.startswith("loaded:")]
    assert lines == [f"loaded: {x}".rstrip() for x in ("", *LITTLE.values())]


def test_all_is_what_there_is() -> None:
    """Every name of ``__all__`` exists, once; ruff checks their order."""
    names = pipesim.__all__
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(pipesim, name) is not None


def test_public_names() -> None:
    """Both packages export these names, and list them for completion; loading is quick."""
    code = f"""import sys, pipeexec as p
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print(*p.__all__, '|', *dir(p), '|', *loaded)"""
    exported, listed, loaded = fresh(code).split("|")
    assert pipesim.__all__ == PUBLIC.split()
    assert exported.split() == PUBLIC_EXEC.split()
    assert [name for name in listed.split() if name[0] != "_"] == exported.split()
    assert not loaded.strip()
    others = {name for name in dir(pipesim) if name[0] != "_"} - {*pipesim.__all__}
    assert {"errors", "planning", "plot", "simulation"} <= others
    assert [name for name in others if not isinstance(getattr(pipesim, name), ModuleType)] == []


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, x) for place, names in (EXPORTS | EXPORTS_EXEC).items() for x in names.split()],
)
def test_old_names(place: str, name: str) -> None:
    """Names that moved go on in this release, unlisted, and warn at the caller's line."""
    package = importlib.import_module(place.partition(".")[0])
    text = f"{package.__name__}.{name} is now {place}.{name}"
    with pytest.warns(DeprecationWarning, match=f"^{text}$") as caught:
        value = getattr(package, name)
    assert caught[0].filename == __file__
    assert value is getattr(pkgutil.resolve_name(place), name)
    assert name not in dir(package)


def test_version_of_the_distribution() -> None:
    """Setuptools reads the version from its file, without importing any dependency."""
    code = f"""
import sys
from setuptools.config.pyprojecttoml import read_configuration
project = read_configuration({str(ROOT / "pyproject.toml")!r})["project"]
print(project["version"], [m for m in ("numpy", "pipesim") if m in sys.modules])
"""
    assert fresh(code) == f"{pipesim.__version__} []"


@pytest.mark.slow
def test_names_that_are_listed_can_be_had() -> None:
    """In a fresh Python, of both packages and the namespaces in them; `calibration` too.

    ``ps.schedule`` is the function, whatever is imported later.
    """
    code = f"""
import importlib
from types import ModuleType
import pipeexec, pipesim
assert not hasattr(pipesim, "pipesim")
assert "Calibration" in dir(pipesim.calibration)
for package in (pipesim, pipeexec):
    for name in dir(package):
        value = getattr(package, name)
        if isinstance(value, ModuleType) and value.__name__.startswith(package.__name__):
            for inner in dir(value):
                getattr(value, inner)
for module in {MODULES!r}:
    importlib.import_module(module)
for name in ("schedule", "schedules", "compare", "verify", "lower", "simulate", "sweep"):
    assert callable(getattr(pipesim, name)), name
"""
    fresh(code)


def test_public_names_are_documented() -> None:
    """`help` says something about each."""
    for name in pipesim.__all__:
        assert (getattr(pipesim, name).__doc__ or "").strip(), name
