"""The CUDA driver's functions that green contexts need.

They are called through `cuda.bindings.driver`, or if it is not installed through `LibCuda`, which
has these functions in the same form. Not yet measured on hardware.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any, ClassVar

from pipesim.errors import ExecutionError


class GreenContextsMissingError(ExecutionError):
    """The driver or the GPU has no green contexts; slices then share SMs."""


def call_driver(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver; return its results without the error code.

    Raises
    ------
    GreenContextsMissingError
        If the driver lacks the function, or returns an error.
    """
    try:
        error, *results = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as missing:  # a driver, or bindings, from before 12.4
        raise GreenContextsMissingError(f"the driver has no {name} ({missing})") from missing
    if int(error) != 0:
        raise GreenContextsMissingError(f"{name} answered with CUDA error {int(error)}")
    return tuple(results)


@cache
def find_driver() -> Any:
    """Return `cuda.bindings.driver`, or `LibCuda` in its place.

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
    ):  # missing, or made for another driver
        return load_driver()


def load_driver() -> LibCuda:
    """Return the driver's library through `LibCuda`.

    Raises
    ------
    GreenContextsMissingError
        If there is no driver.
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

    The driver's data in the padding is kept, since a resource is copied as a whole.
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
        resource = Resource()
        error = self._library.cuDeviceGetDevResource(
            ctypes.c_int(device), ctypes.byref(resource), ctypes.c_int(kind)
        )
        return error, resource

    def cuDevSmResourceSplitByCount(
        self, n_groups: int, whole: Resource, flags: int, n_sms: int
    ) -> tuple[int, list[Resource], int, Resource]:
        """Return groups of SMs, their number, and the remaining SMs."""
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
        """Return the description from which a green context is made."""
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
