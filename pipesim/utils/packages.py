"""Packages that take long to import, and optional ones: imported when a function needs them.

``from pipesim.utils.packages import pandas as pd`` within the function imports pandas as a whole.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from pipesim.errors import ArgumentError
from pipesim.utils.caller_warnings import warn_caller

if TYPE_CHECKING:
    import joblib as joblib
    import matplotlib as matplotlib
    import pandas as pandas
    from matplotlib import pyplot as pyplot
    from matplotlib.figure import Figure as Figure
    from ortools.sat.python import cp_model as cp_model

    from pipesim.utils.progress import tqdm as tqdm


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handle SIGINT (Ctrl-C) at the end of a block, not within it.

    An import that is interrupted halfway leaves some of its modules behind, and may fail whenever
    it is tried again in the same process. The same holds for numba's first compilation. Other
    threads than the main one get no signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])


#: Module of each name, and its attribute if the name is not of the module itself.
_MODULES = {
    "Figure": ("matplotlib.figure", "Figure"),
    "cp_model": ("ortools.sat.python.cp_model", ""),
    "joblib": ("joblib", ""),
    "matplotlib": ("matplotlib", ""),
    "pandas": ("pandas", ""),
    "pyplot": ("matplotlib.pyplot", ""),
    "tqdm": ("pipesim.utils.progress", "tqdm"),
}


def imported(name: str) -> ModuleType:
    """Return a module; Ctrl-C waits for the end of its first import, see `uninterrupted`."""
    if name in sys.modules:
        return importlib.import_module(name)
    with uninterrupted():
        return importlib.import_module(name)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULES[name]
    return getattr(imported(module), attribute) if attribute else imported(module)


def lazy_names(
    package: ModuleSpec, moved: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, which imports names at their first use.

    The names are those that its ``__init__`` imports below ``if TYPE_CHECKING``. ``moved`` has
    names that the package exported before, by their new place; they go on, with a
    `DeprecationWarning`. ``__dir__`` lists ``__all__`` and the modules that ``__init__`` imports.
    """
    source: str = package.loader.get_source(package.name)  # type: ignore[union-attr]
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    places = {alias.name: node.module for node in nodes for alias in node.names}
    modules = {name for name, place in places.items() if place == package.name and name[0] != "_"}
    old = {name: place for place, names in moved.items() for name in names.split()}

    def load(name: str) -> Any:
        if place := old.get(name):
            warn_caller(f"{package.name}.{name} is now {place}.{name}", DeprecationWarning)
            with uninterrupted():
                return getattr(pkgutil.resolve_name(place), name)
        module = places.get(name)
        if module is None or name in modules:
            raise AttributeError(f"module {package.name!r} has no attribute {name!r}")
        value = getattr(imported(module), name)
        setattr(sys.modules[package.name], name, value)
        return value

    def listed() -> list[str]:
        names = vars(sys.modules[package.name])
        return sorted({*names["__all__"], *modules, *(x for x in names if x.startswith("__"))})

    return load, listed


#: Package that each extra of pyproject.toml installs, as users call it.
EXTRAS = {
    "chakra": "protobuf",
    "cluster": "Dask",
    "completion": "shtab",
    "fit": "SciPy",
    "networkx": "networkx",
    "optimal": "ortools",
    "parquet": "pyarrow",
    "widget": "anywidget",
}


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'pipesim[{extra}]'"


def import_extra(module: str, extra: str, purpose: str, *, advice: str = "") -> ModuleType:
    """Return an optional module, such as ``"scipy.optimize"``, of one of the `EXTRAS`.

    ``purpose`` is the subject of the message: the task that needs the package, such as
    ``"a Parquet file"``. ``advice`` says what works without the package. If the package lacks one
    of its own, that error is raised as it is.
    """
    try:
        return imported(module)
    except ImportError as error:
        problem = f"cannot be imported here: {error}"
        if isinstance(error, ModuleNotFoundError):
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            problem = "is not installed"
        raise ArgumentError(
            f"{purpose} needs {EXTRAS[extra]}, which {problem}; {install_command(extra)}"
            f"{f'. {advice}' if advice else ''}"
        ) from error
