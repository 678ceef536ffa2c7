"""Kernels: loops over arrays that run as Python for small inputs and are compiled by numba later.

This is the only file that imports numba. A `kernel` is an ordinary function of arrays and numbers.
Its first elements run as Python. So small examples neither load compiled code (0.7 s in all) nor
compile (some ten seconds in all, once: the result is cached on disk).

Kernels stay Python, with the same results but slower, in three cases: numba is not installed, its
import fails, or ``NUMBA_DISABLE_JIT=1`` is set.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_type_hints

import numpy as np

from pipesim.errors import EngineWarning
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.packages import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")

#: Elements that a kernel processes as Python, at about a microsecond each: before it is loaded from
#: the cache, and, if it is not cached, before it is compiled.
PLAIN_ELEMENTS, PLAIN_ELEMENTS_UNCACHED = 10_000, 100_000


def available() -> bool:
    """Return whether numba is installed and enabled, and has not failed to import."""
    switched_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    if switched_off or importlib.util.find_spec("numba") is None:
        return False
    was_imported = _numba.cache_info().currsize > 0
    return not was_imported or _numba() is not None


@cache
def _numba() -> Any:
    """Import numba; return None, and warn once, if the import fails.

    It fails, for example, if the release of numba does not support that of numpy.
    """
    try:
        with uninterrupted():
            import numba
            import numba.extending
    except Exception as error:  # raised by numba or by any of its imports
        warn_caller(
            f"numba cannot be imported ({type(error).__name__}: {error}): loops run as plain "
            "Python, with the same results but some hundred times more slowly; install a release "
            "of numba that supports this numpy",
            EngineWarning,
        )
        return None
    return numba


def _jitted(function: Callable[P, T], numba: Any, options: dict[str, bool]) -> Callable[P, T]:
    """Return a function that numba compiles at its first call.

    Ctrl-C waits for the compilation: numba would lose the types and functions that it registers.
    """
    compiled: Any
    try:
        compiled = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no writable cache folder: each process compiles anew
        compiled = numba.njit(nogil=True, **options)(function)
    compiled.compile = uninterrupted()(compiled.compile)
    return cast("Callable[P, T]", compiled)


class Kernel(Generic[P, T]):
    """Function that is compiled after enough elements; see `kernel`."""

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
        """Run the function, as Python or compiled."""
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
        """Whether the cache on disk has an index of the compiled function."""
        code = self.function.__code__
        name = f"{Path(code.co_filename).stem}.{code.co_name}*-{code.co_firstlineno}.*.nbi"
        folders = [Path(code.co_filename).parent / "__pycache__"]
        if "NUMBA_CACHE_DIR" in os.environ:
            folders = list(Path(os.environ["NUMBA_CACHE_DIR"]).glob("*"))
        return any(next(folder.glob(name), None) is not None for folder in folders)

    def compile(self) -> None:
        """Run compiled from the next call on, however small its arguments are."""
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
        options = {} if self.allocates else {"_nrt": False}  # off: numba's reference counting
        for helper in self.helpers:
            inlined = {"forceinline": not self.allocates}
            numba.extending.register_jitable(**options, **inlined)(helper)
        self._compiled = _jitted(self.function, numba, options)

    def _file_stamps(self) -> list[int]:
        """Return the modification times of the helpers' files (ns), without the kernel's own file.

        numba's cache only checks the kernel's own file.
        """
        files = {helper.__code__.co_filename for helper in self.helpers}
        other_files = sorted(files - {self.function.__code__.co_filename})
        return [os.stat(path).st_mtime_ns for path in other_files]


def _largest(value: object) -> int:
    """Return the number of elements of the largest array in an argument; 0 without arrays."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, tuple):
        return max(map(_largest, value), default=0)
    return 0


def _layouts(function: Callable[..., object]) -> list[tuple[str, ...]]:
    """Return module, name and field names of each NamedTuple among a function's parameters.

    - Compiled code reads fields by position. numba's cache knows their types but not their order.
    - numba cannot read an index of its cache that names a class which was renamed or moved.
    """
    hints = get_type_hints(function)
    types = [hints[name] for name in sorted(hints) if hasattr(hints[name], "_fields")]
    return [(kind.__module__, kind.__qualname__, *kind._fields) for kind in types]


def kernel(
    *helpers: Callable[..., object],
    allocates: bool = True,
) -> Callable[[Callable[P, T]], Kernel[P, T]]:
    """Make the decorated function a `Kernel`.

    Parameters
    ----------
    *helpers
        Plain functions that the kernel calls.
    allocates
        Whether the kernel or a helper allocates arrays. If False, numba counts no references and
        inlines the helpers, and the caller must allocate all arrays and keep them while the kernel
        runs. A kernel that passes whole NamedTuples to its helpers needs False: otherwise each call
        counts references to every array in them, and the engines' loops take 8 to 100 times as
        long.
    """
    return lambda function: Kernel(function, helpers, allocates=allocates)
