"""The names and modules that `import pipesim` loads."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import textwrap

import pytest
from places import ROOT

import pipesim

HEAVY = (
    "torch",
    "numba",
    "matplotlib.pyplot",
    "pandas",
    "joblib",
    "tqdm",
    "distributed",
    "pyarrow",
    "networkx",
    "google.protobuf",
)
#: What users import; a change breaks their code.
PUBLIC = """
GPU Action AutogradOrders ClosedForm Cluster Comparison CostTable Costs Counts Empirical Failures
HostLink Keys Layers Layout Link LogNormal Network Nodes Noise Normal Op OptimizedSchedule
Overlapped Parallel Placement Plan PlanChoice Plans Routes Routing Scenarios Schedule Shard Task
TaskCosts TaskGraph Tasks Timeline TrainerSettings Transformer Workload audit autograd_orders
balanced_split bidirectional chakra compare gpus hta linear looped lower lower_bound machines
optimize order_by plan read_layout read_megatron read_torchtitan register replay schedule schedules
simulate simulate_many sweep to_html trace transformers v_shaped verify waves widget write_layout
"""
PUBLIC_EXEC = """
EmbeddingStage Equivalence EvaluationResult Experts GPipe GradientAccumulation KeyValueCache
LRSchedulers Microbatches Pipeline Processes Profile Projection RunOptions ShardedEmbedding Slice
Stages StepResult TrainingRun Validation Worker annotate_torch_pipelining check_equivalent
from_torch is_checkpointing is_recomputing join latest_checkpoint load_checkpoint load_run measure
profile project read_checkpoint save_checkpoint scaled_learning_rate slices split sync_report
to_torch torch_schedule_order train validate watch_sync workers
"""
MODULES = [m.name for m in pkgutil.walk_packages(pipesim.__path__, "pipesim.")]


def fresh(code: str) -> str:
    """Run code in a new interpreter and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    """A command that prints a table, or its help, need not wait for what it does not use."""
    code = f"import sys, pipesim; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert fresh(code) == "[]"


def test_simulation_loads_nothing_heavy() -> None:
    """Nor does a simulation, down to the peak memory."""
    code = f"""
import sys
import pipesim as ps
timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), ps.Costs(1, 2, activation_bytes=1))
timeline.makespan, timeline.bubble_fraction, timeline.memory.peak
print([m for m in {HEAVY!r} if m in sys.modules])
"""
    assert fresh(code) == "[]"


def test_all_is_what_there_is() -> None:
    """Every name of ``__all__`` exists, once; ruff checks their order."""
    names = pipesim.__all__
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(pipesim, name) is not None


def test_public_names() -> None:
    """Both packages export these names, and list them for completion, without loading torch."""
    code = "import sys, pipeexec as p; print(*p.__all__, '|', *dir(p), '|', 'torch' in sys.modules)"
    exported, listed, loaded = fresh(code).split("|")
    assert pipesim.__all__ == PUBLIC.split()
    assert exported.split() == PUBLIC_EXEC.split()
    assert set(exported.split()) <= set(listed.split())
    assert loaded.strip() == "False"


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
    """In a fresh Python, of both packages and the namespaces in them; `calibration` too."""
    code = """
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
    """
    fresh(textwrap.dedent(code))


def test_functions_win_over_modules() -> None:
    """``ps.schedule`` is the function, whatever is imported later."""
    code = f"""
import importlib
import pipesim as ps
for module in {MODULES!r}:
    importlib.import_module(module)
print(all(callable(getattr(ps, n)) for n in ("schedule", "schedules", "compare", "verify", "lower",
                                             "simulate", "sweep")))
"""
    assert fresh(code) == "True"


def test_public_names_are_documented() -> None:
    """`help` says something about each."""
    for name in pipesim.__all__:
        assert (getattr(pipesim, name).__doc__ or "").strip(), name
