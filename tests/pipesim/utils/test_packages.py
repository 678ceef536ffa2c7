"""Packages that functions import: as a whole, whatever Ctrl-C does."""

from __future__ import annotations

import ast
import re
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

class Interrupt:
    def __init__(self, module):
        self.module = module

    def find_spec(self, name, *_):
        if name == self.module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

for call, module in CASES.items():
    if os.fork():
        os.wait()
        continue
    sys.meta_path.insert(0, Interrupt(module))
    try:
        calls[call]()
    except KeyboardInterrupt:
        calls[call]()
        print(call, flush=True)
    os._exit(0)
"""
#: A module whose import is interrupted in each call.
CASES = {
    "frame": "pandas._libs.tslibs",
    "plot": "matplotlib.transforms",
    "optimize": "tqdm._monitor",
    "sweep": "asyncio.base_futures",
}


@pytest.mark.slow
def test_a_call_works_after_ctrl_c_in_its_imports() -> None:
    """Python keeps the inner modules of an import that is interrupted, and later ones fail."""
    ended = subprocess.run(
        [sys.executable, "-c", f"CASES = {CASES!r}\n{CALLS}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout.splitlines() == list(CASES), ended.stderr


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
    names = "|".join(map(re.escape, modules))
    mentioned = re.compile(rf"^ +(import|from) ({names})\b", re.MULTILINE)
    root = Path(pipesim.__file__).parents[1]
    others = {
        str(path.relative_to(root)): imports
        for package in ("pipesim", "pipeexec")
        for path in (root / package).rglob("*.py")
        if mentioned.search(path.read_text()) and (imports := modules & _imports_of_functions(path))
    }
    assert not others
