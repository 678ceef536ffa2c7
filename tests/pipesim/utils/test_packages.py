"""Packages that functions import: as a whole, whatever Ctrl-C does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pipesim
from pipesim.utils import packages

CALLS = """
import os, signal, sys
import pipesim as ps

os.environ["MPLBACKEND"] = "agg"
signal.signal(signal.SIGINT, signal.default_int_handler)
costs = ps.Costs(forward=1, backward=2)
timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), costs)
calls = {
    "frame": lambda: len(timeline.frame),
    "plot": lambda: timeline.plot().get_title(),
    "optimize": lambda: ps.optimize(ps.Placement.linear(2), 3, costs, progress=False).makespan,
    "sweep": lambda: len(ps.sweep([{"schedule": "1f1b"}], progress=False, n_jobs=1, base={
        "n_devices": 2, "n_microbatches": 4, "costs": costs})),
}
call, module = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
try:
    calls[call]()
except KeyboardInterrupt:
    print("interrupted")
calls[call]()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "module"),
    [
        ("frame", "pandas._libs.tslibs"),
        ("plot", "matplotlib.transforms"),
        ("optimize", "asyncio.base_futures"),
        ("sweep", "asyncio.base_futures"),
    ],
)
def test_a_call_works_after_ctrl_c_in_its_imports(call: str, module: str) -> None:
    """Python keeps the inner modules of an import that is interrupted, and later ones fail."""
    ended = subprocess.run(
        [sys.executable, "-c", CALLS, call, module],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def _imports_of_functions(path: Path) -> set[str]:
    """Return the modules that functions of a file import."""
    functions = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef))
    nodes = [node for function in functions for node in ast.walk(function)]
    return {alias.name for x in nodes if isinstance(x, ast.Import) for alias in x.names} | {
        str(x.module) for x in nodes if isinstance(x, ast.ImportFrom)
    }


@pytest.mark.slow
def test_functions_import_long_packages_from_one_place() -> None:
    """Names that `pipesim.utils.packages` has are imported from there."""
    modules = {module for module, _ in packages._MODULES.values()}
    root = Path(pipesim.__file__).parents[1]
    others = {
        str(path.relative_to(root)): imports
        for package in ("pipesim", "pipeexec")
        for path in (root / package).rglob("*.py")
        if (imports := modules & _imports_of_functions(path))
    }
    assert not others
