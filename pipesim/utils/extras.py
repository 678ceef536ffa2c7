"""Optional packages: import one on demand, or say how to install it."""

from __future__ import annotations

from types import ModuleType

from pipesim.errors import ArgumentError
from pipesim.utils.packages import imported

#: Package that each extra of pyproject.toml installs, as users call it.
EXTRAS = {
    "chakra": "protobuf",
    "cluster": "Dask",
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
    """Return an optional module.

    Parameters
    ----------
    module
        Name of the module, such as ``"scipy.optimize"``.
    extra
        The extra of `EXTRAS` that installs its package.
    purpose
        Subject of the message: the task that needs the package, such as ``"a Parquet file"``.
    advice
        Sentence on what works without the package.

    Raises
    ------
    ModuleNotFoundError
        If the package lacks a package of its own.
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
