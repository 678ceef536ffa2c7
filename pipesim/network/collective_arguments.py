"""Checks of the arguments and the result of a collective's closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, number
from pipesim.network.links import MAX_DEVICE
from pipesim.network.routes import Router
from pipesim.utils.host_memory import check_memory


def checked_members(
    what: str, nbytes: object, devices: Iterable[Any]
) -> tuple[float, NDArray[np.int64]]:
    """Return the bytes and the members of the collective ``what``, checked.

    Raises
    ------
    NetworkError
        For bytes that are negative or not finite, and members that are no devices or named twice.
    """
    size = number(nbytes)
    if size is None or not 0 <= size < math.inf:
        raise NetworkError(f"{what}: bytes must be finite and >= 0, got {nbytes!r}")
    if isinstance(devices, range):  # a range of any length takes no memory, an array does
        check_memory(f"{what} of {len(devices):,} members", 8 * len(devices), "name fewer members")
    try:
        members = np.asarray(devices)
    except ValueError:  # a ragged sequence
        members = np.empty((0, 0))
    if members.ndim != 1 or not len(members) or members.dtype.kind not in "iu":
        raise NetworkError(
            f"{what}: devices must be a sequence of device numbers, such as [0, 1], got {devices!r}"
        )
    for wrong in members[(members < 0) | (members > MAX_DEVICE)]:
        raise NetworkError(f"{what}: a device must be 0 to {MAX_DEVICE}, got {wrong}")
    distinct, counts = np.unique(members, return_counts=True)
    if len(distinct) < len(members):
        raise NetworkError(
            f"{what}: device {distinct[counts > 1][0]} is named twice; name each member once"
        )
    return size, members.astype(np.int64)


def checked_matrix(nbytes: ArrayLike, n: int) -> NDArray[np.float64]:
    """Return the bytes of each pair of ``n`` members, shape ``(n, n)``, checked.

    Raises
    ------
    NetworkError
        For another shape, and bytes that are negative or not finite.
    """
    sizes: NDArray[np.float64]
    try:
        sizes = np.asarray(nbytes, dtype=np.float64)
    except (TypeError, ValueError):
        sizes = np.empty(0)
    if sizes.shape != (n, n):
        raise NetworkError(
            f"all-to-all: bytes of pairs must be numbers of shape ({n}, {n}), one row a sender, "
            f"got {nbytes!r:.60}"
        )
    for i, j in np.argwhere(~(np.isfinite(sizes) & (sizes >= 0)))[:1].tolist():
        raise NetworkError(
            f"all-to-all: bytes must be finite and >= 0, got {sizes[i, j]} from member {i} to {j}"
        )
    return sizes


def finite_seconds(
    what: str,
    formula: Callable[[Router, Any, NDArray[np.int64]], float],
    router: Router,
    nbytes: float | NDArray[np.float64],
    members: NDArray[np.int64],
) -> float:
    """Return the seconds that ``formula`` gives; 0 for one member.

    Raises
    ------
    NetworkError
        If they are not finite.
    """
    if len(members) == 1:
        return 0.0
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        try:
            seconds = formula(router, nbytes, members)
        except ZeroDivisionError:  # a bandwidth so small that a share of it is 0
            seconds = math.inf
    if not math.isfinite(seconds):
        raise NetworkError(
            f"{what} of {np.sum(nbytes):g} bytes over {len(members)} members would last "
            f"{seconds} s; check bytes, latency (s) and bandwidth (bytes/s)"
        )
    return seconds
