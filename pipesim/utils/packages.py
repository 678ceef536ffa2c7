"""Packages that take long to import: each is imported when a function needs it, and as a whole.

``from pipesim.utils.packages import pandas as pd`` within the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipesim.utils.interrupts import uninterrupted

if TYPE_CHECKING:
    import joblib as joblib
    import matplotlib as matplotlib
    import pandas as pandas
    from matplotlib import pyplot as pyplot
    from matplotlib.figure import Figure as Figure
    from ortools.sat.python import cp_model as cp_model
    from tqdm.auto import tqdm as tqdm


#: Module of each name, and its attribute if the name is not of the module itself.
_MODULES = {
    "Figure": ("matplotlib.figure", "Figure"),
    "cp_model": ("ortools.sat.python.cp_model", ""),
    "joblib": ("joblib", ""),
    "matplotlib": ("matplotlib", ""),
    "pandas": ("pandas", ""),
    "pyplot": ("matplotlib.pyplot", ""),
    "tqdm": ("tqdm.auto", "tqdm"),
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
