"""Loops over arrays: run as Python at first, compiled by numba once they have work to do.

The only file that imports numba. A `kernel` is an ordinary function of arrays and numbers. Its
first elements are worked through as Python, so that small examples neither load compiled code
(0.7 s in all) nor compile (some ten seconds in all, once: the result is cached on disk). Without
numba, with one that cannot be imported, or with ``NUMBA_DISABLE_JIT=1``, everything stays Python:
the same answers, slowly.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
import zlib
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import numpy as np

from pipesim.errors import EngineWarning

__all__ = ["Kernel", "available", "kernel"]

P = ParamSpec("P")
T = TypeVar("T")

#: Elements that a kernel works through as Python, at about a microsecond each, before it is loaded
#: from the cache, and before it is compiled where it is not cached.
PLAIN_ELEMENTS, PLAIN_ELEMENTS_UNCACHED = 10_000, 100_000


def available() -> bool:
    """Whether numba is there, switched on, and not known to be broken."""
    switched_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    if switched_off or importlib.util.find_spec("numba") is None:
        return False
    was_imported = _numba.cache_info().currsize > 0
    return not was_imported or _numba() is not None


@cache
def _numba() -> Any:
    """Import numba; return None, and warn once, if it is there but cannot be imported.

    As one whose release does not know that of numpy.
    """
    try:
        import numba
        import numba.extending
    except Exception as error:  # raised by numba or by any of its imports
        warnings.warn(
            f"numba cannot be imported ({type(error).__name__}: {error}): loops run as plain "
            "Python, with the same answers some hundred times more slowly; install a release of "
            "numba that suits this numpy",
            EngineWarning,
            stacklevel=4,
        )
        return None
    return numba


def _jitted(function: Callable[P, T], numba: Any, options: dict[str, bool]) -> Callable[P, T]:
    """Return a function that numba compiles at its first call."""
    compiled: Callable[P, T]
    try:
        compiled = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder that it may write to: compiled anew in each process
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


class Kernel(Generic[P, T]):
    """A function that is compiled when it is worth it; see `kernel`."""

    def __init__(
        self,
        function: Callable[P, T],
        helpers: tuple[Callable[..., object], ...],
        *,
        allocates: bool = True,
    ):
        self.function = function
        self.helpers = helpers
        self.allocates = allocates
        self._n_elements = 0
        self._compiled: Callable[P, T] | None = None
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._qualname = function.__qualname__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run, as Python or compiled."""
        if self._compiled is None:
            self._n_elements += max(map(_largest, args), default=0)
            if self._n_elements <= PLAIN_ELEMENTS or (
                self._n_elements <= PLAIN_ELEMENTS_UNCACHED and not self.cached
            ):
                return self.function(*args, **kwargs)
            self.compile()
        assert self._compiled is not None
        return self._compiled(*args, **kwargs)

    @cached_property
    def cached(self) -> bool:
        """Whether numba seems to have compiled the function before."""
        code = self.function.__code__
        name = f"{Path(code.co_filename).stem}.{code.co_name}*-{code.co_firstlineno}.*.nbi"
        folders = [Path(code.co_filename).parent / "__pycache__"]
        if "NUMBA_CACHE_DIR" in os.environ:
            folders = list(Path(os.environ["NUMBA_CACHE_DIR"]).glob("*"))
        return any(next(folder.glob(name), None) is not None for folder in folders)

    def compile(self) -> None:
        """Compile from the next call on, however small it is."""
        if self._compiled is not None:
            return
        numba = _numba() if available() else None
        if numba is None:
            self._compiled = self.function
            return
        stamps = [*self._file_stamps(), *_layouts(self.function)]
        if stamps:
            stamp = f"{zlib.crc32(repr(stamps).encode()):08x}"
            self.function.__qualname__ = f"{self._qualname}_{stamp}"
        options = {} if self.allocates else {"_nrt": False}  # off: numba's counting of references
        for helper in self.helpers:
            inlined = {"forceinline": not self.allocates}
            numba.extending.register_jitable(**options, **inlined)(helper)
        self._compiled = _jitted(self.function, numba, options)

    def _file_stamps(self) -> list[int]:
        """Return the times of the helpers' other files (ns).

        numba's cache checks the kernel's own file alone.
        """
        files = {helper.__code__.co_filename for helper in self.helpers}
        other_files = sorted(files - {self.function.__code__.co_filename})
        return [os.stat(path).st_mtime_ns for path in other_files]


def _largest(value: object) -> int:
    """Return the number of elements of the largest array in an argument; 0 without one."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, tuple):
        return max(map(_largest, value), default=0)
    return 0


def _layouts(function: Callable[..., object]) -> list[tuple[str, ...]]:
    """Return the field names of each NamedTuple among a function's parameters.

    Compiled code reads fields by position. numba's cache knows their types but not their order.
    """
    hints = get_type_hints(function)
    fields = [getattr(hints[name], "_fields", ()) for name in sorted(hints)]
    return [names for names in fields if names]


def kernel(
    *helpers: Callable[..., object],
    allocates: bool = True,
) -> Callable[[Callable[P, T]], Kernel[P, T]]:
    """Make the decorated function a `Kernel`.

    Parameters
    ----------
    *helpers
        Plain functions that it calls.
    allocates
        Whether it or a helper makes arrays. Without that, numba counts no references, and helpers
        become part of the kernel. A kernel that hands whole NamedTuples to its helpers needs this:
        otherwise each call counts references to every array in them, and the engines' loops take
        8 to 100 times as long. The caller then makes all arrays, and keeps them while it runs.
    """
    return lambda function: Kernel(function, helpers, allocates=allocates)
