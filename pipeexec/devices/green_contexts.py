"""Disjoint parts of a GPU's multiprocessors (SMs): the driver's green contexts.

torch's own green contexts each split the whole GPU, so two of them overlap. Here one call of
`cuDevSmResourceSplitByCount` splits it into all parts at once, which are disjoint. Work on a stream
of a part's context runs on the part's SMs; level-2 cache and memory bandwidth stay shared.

The driver's functions are called through `cuda.bindings.driver`, or if it is not installed through
`LibCuda`, which has these functions in the same form. Not yet measured on hardware.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from pipesim.errors import ArgumentError, ExecutionError

#: By major compute capability: fewest SMs of a part, and the number that divides its SMs
#: (CUDA programming guide, "Green contexts").
_GRANULARITY = {6: (1, 1), 7: (2, 2), 8: (4, 2)}
_SINCE_HOPPER = (8, 8)
_GREEN_CTX_DEFAULT_STREAM = 1  # required
_STREAM_NON_BLOCKING = 1  # required


@dataclass
class GreenContext:
    """A green context on a part of the SMs, with its streams.

    Neither is ever destroyed: torch's allocator remembers the streams that used its memory.
    """

    driver: Any
    context: Any
    n_sms: int
    _streams: dict[object, int] = field(default_factory=dict)

    def stream(self, key: object) -> int:
        """Return the handle of the stream with this key, made on first use."""
        if key not in self._streams:
            (stream,) = _call_driver(
                self.driver, "cuGreenCtxStreamCreate", self.context, _STREAM_NON_BLOCKING, 0
            )
            self._streams[key] = int(stream)
        return self._streams[key]


def _granularity(major: int) -> tuple[int, int]:
    """Return the fewest SMs of a part, and the number that divides its SMs."""
    return _GRANULARITY.get(major, _SINCE_HOPPER)


def part_size(n_sms: int, n_parts: int, major: int) -> int:
    """Return the SMs of each of ``n_parts`` equal parts of a GPU of ``n_sms``.

    Examples
    --------
    A Hopper GPU has 132, in multiples of 8; the remaining 4 belong to no part:

    >>> [part_size(132, n, major=9) for n in (2, 4, 8, 16)]
    [64, 32, 16, 8]
    """
    fewest, multiple = _granularity(major)
    size = n_sms // n_parts // multiple * multiple
    if size < fewest:
        raise ArgumentError(
            f"{n_parts} slices are too many for {n_sms} SMs, which are given out {fewest} or more "
            f"at a time, in multiples of {multiple}; give at most "
            f"{n_sms // max(fewest, multiple)} slices"
        )
    return size


def split_gpu(
    driver: Any, index: int, n_parts: int, major: int
) -> tuple[list[GreenContext], GreenContext | None]:
    """Split a GPU into disjoint parts of one size; return them, and a part of the remaining SMs.

    The size is `part_size`, or less if the driver makes too few parts of it. The driver is that of
    `find_driver`. The GPU's primary context must be active. ``index`` is that of the GPU in CUDA,
    ``major`` the major number of its compute capability.
    """
    _call_driver(driver, "cuInit", 0)
    (device,) = _call_driver(driver, "cuDeviceGet", index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    (whole,) = _call_driver(driver, "cuDeviceGetDevResource", device, kind)
    groups, rest = _largest_groups(driver, whole, n_parts, major)
    parts = [_make_context(driver, device, group) for group in groups]
    return parts, _remaining_context(driver, device, rest)


def _largest_groups(driver: Any, whole: Any, n_parts: int, major: int) -> tuple[list[Any], Any]:
    """Return ``n_parts`` groups of the largest size that the driver makes, and the rest.

    A GPU's SMs lie in clusters (GPCs), whose sizes differ from die to die: one of 14 SMs may give
    only one group of 8. So the driver may make fewer parts of a size than the number of SMs
    suggests.
    """
    largest = part_size(int(whole.sm.smCount), n_parts, major)
    fewest, multiple = _granularity(major)
    errors = []
    for size in range(largest, fewest - 1, -multiple):
        try:
            return _groups_of_size(driver, whole, n_parts, size)
        except GreenContextsMissingError as error:
            errors.append(error)
    raise errors[0]


def _groups_of_size(driver: Any, whole: Any, n_parts: int, size: int) -> tuple[list[Any], Any]:
    """Return ``n_parts`` groups of ``size`` SMs, and the rest."""
    groups, _, rest = _call_driver(driver, "cuDevSmResourceSplitByCount", n_parts, whole, 0, size)
    if len(groups) < n_parts:
        raise GreenContextsMissingError(
            f"the driver made {len(groups)} parts of {size} SMs, not {n_parts}; give fewer slices"
        )
    sizes = [int(group.sm.smCount) for group in groups[:n_parts]]
    # Bindings of another release than the driver's may read a resource wrongly.
    if min(sizes) < size or len(set(sizes)) > 1 or sum(sizes) > int(whole.sm.smCount):
        raise GreenContextsMissingError(f"the driver made parts of {sizes} SMs, not of {size}")
    return groups[:n_parts], rest


def split_with_any_driver(
    driver: Any, index: int, n_parts: int, major: int
) -> tuple[list[GreenContext], GreenContext | None]:
    """Split a GPU as `split_gpu` does, without the bindings if they do not suit the driver."""
    try:
        return split_gpu(driver, index, n_parts, major)
    except GreenContextsMissingError as error:
        if isinstance(driver, LibCuda):
            raise
        try:
            return split_gpu(load_driver(), index, n_parts, major)
        except GreenContextsMissingError:
            raise error from None


def _make_context(driver: Any, device: Any, resource: Any) -> GreenContext:
    (description,) = _call_driver(driver, "cuDevResourceGenerateDesc", [resource], 1)
    (context,) = _call_driver(
        driver, "cuGreenCtxCreate", description, device, _GREEN_CTX_DEFAULT_STREAM
    )
    return GreenContext(driver, context, int(resource.sm.smCount))


def _remaining_context(driver: Any, device: Any, resource: Any) -> GreenContext | None:
    """Return a context on the remaining SMs; None if there are none, or the driver keeps them."""
    try:
        return _make_context(driver, device, resource) if int(resource.sm.smCount) else None
    except GreenContextsMissingError:
        return None


# The driver's functions


class GreenContextsMissingError(ExecutionError):
    """The driver or the GPU has no green contexts; slices then share SMs."""


def _call_driver(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver; return its results without the error code.

    It raises `GreenContextsMissingError` if the driver lacks the function, or returns an error.
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
    """Return `cuda.bindings.driver`, or `LibCuda` in its place."""
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
    """Return the driver's library through `LibCuda`."""
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
    """The functions of `cuda.bindings.driver` in the same form: they return (error, results...)."""

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
