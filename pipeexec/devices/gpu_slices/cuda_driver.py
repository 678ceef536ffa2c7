"""The CUDA driver's functions that green contexts need.

The driver is called through `cuda.bindings.driver`, or where that is not installed through
`LibCuda`, which has the few functions needed in the same form.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any, ClassVar

from pipesim.errors import ExecutionError

__all__ = ["GreenContextsMissingError", "LibCuda", "call_driver", "find_driver", "load_driver"]


class GreenContextsMissingError(ExecutionError):
    """The driver, or the GPU, has no green contexts; slices then share SMs."""


def call_driver(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver; return what it returns beside the error, which is none."""
    try:
        error, *found = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as missing:  # a driver, or bindings, from before 12.4
        raise GreenContextsMissingError(f"the driver has no {name} ({missing})") from missing
    if int(error) != 0:
        raise GreenContextsMissingError(f"{name} answered with CUDA error {int(error)}")
    return tuple(found)


@cache
def find_driver() -> Any:
    """Return `cuda.bindings.driver`, or what stands in for it.

    Raises
    ------
    GreenContextsMissingError
        If there is no driver.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except (
        ImportError,
        AttributeError,
        OSError,
        RuntimeError,
    ):  # not there, or not for this driver
        return load_driver()


def load_driver() -> LibCuda:
    """Return the driver itself.

    Raises
    ------
    GreenContextsMissingError
        If there is none.
    """
    try:
        return LibCuda(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise GreenContextsMissingError(f"there is no CUDA driver ({error})") from error


class _Sm(ctypes.Structure):
    """The union in `CUdevResource`: 48 bytes, of which the first four count SMs."""

    _fields_: ClassVar = [("smCount", ctypes.c_uint), ("_rest", ctypes.c_ubyte * 44)]


class Resource(ctypes.Structure):
    """`CUdevResource` of cuda.h 12.4 to 13.0 (RESOURCE_ABI_VERSION 1): 144 bytes.

    What the driver keeps in the padding goes with it as it is copied whole.
    """

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("_internal_padding", ctypes.c_ubyte * 92),
        ("sm", _Sm),
    ]


class _ResourceType:
    CU_DEV_RESOURCE_TYPE_SM = 1


class LibCuda:
    """The driver's functions as `cuda.bindings.driver` has them: they return (error, results...).

    Parameters
    ----------
    library
        `libcuda.so.1`, loaded.
    """

    CUdevResourceType = _ResourceType

    def __init__(self, library: Any) -> None:
        self._library = library

    def cuInit(self, flags: int) -> tuple[int]:
        """Initialize the driver."""
        return (self._library.cuInit(ctypes.c_uint(flags)),)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        """Return a handle of a GPU."""
        device = ctypes.c_int()
        error = self._library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
        return error, device.value

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[int, Resource]:
        """Return the SMs of a GPU."""
        found = Resource()
        error = self._library.cuDeviceGetDevResource(
            ctypes.c_int(device), ctypes.byref(found), ctypes.c_int(kind)
        )
        return error, found

    def cuDevSmResourceSplitByCount(
        self, n_groups: int, whole: Resource, flags: int, n_sms: int
    ) -> tuple[int, list[Resource], int, Resource]:
        """Return groups of SMs, their number, and what is left over."""
        groups, rest = (Resource * n_groups)(), Resource()
        count = ctypes.c_uint(n_groups)
        error = self._library.cuDevSmResourceSplitByCount(
            groups,
            ctypes.byref(count),
            ctypes.byref(whole),
            ctypes.byref(rest),
            ctypes.c_uint(flags),
            ctypes.c_uint(n_sms),
        )
        return error, list(groups)[: count.value], count.value, rest

    def cuDevResourceGenerateDesc(
        self, resources: list[Resource], count: int
    ) -> tuple[int, ctypes.c_void_p]:
        """Return the description of which a green context is made."""
        description = ctypes.c_void_p()
        error = self._library.cuDevResourceGenerateDesc(
            ctypes.byref(description), (Resource * count)(*resources), ctypes.c_uint(count)
        )
        return error, description

    def cuGreenCtxCreate(
        self, description: ctypes.c_void_p, device: int, flags: int
    ) -> tuple[int, ctypes.c_void_p]:
        """Return a green context."""
        context = ctypes.c_void_p()
        error = self._library.cuGreenCtxCreate(
            ctypes.byref(context), description, ctypes.c_int(device), ctypes.c_uint(flags)
        )
        return error, context

    def cuGreenCtxStreamCreate(
        self, context: ctypes.c_void_p, flags: int, priority: int
    ) -> tuple[int, int]:
        """Return the handle of a stream of a green context."""
        stream = ctypes.c_void_p()
        error = self._library.cuGreenCtxStreamCreate(
            ctypes.byref(stream), context, ctypes.c_uint(flags), ctypes.c_int(priority)
        )
        return error, stream.value or 0
