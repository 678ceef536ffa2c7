"""The host that issues the tasks of each device (rule 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, UnknownNameError, check_name

#: One host, a host a device, or the number of each device's host.
Hosts = Literal["one", "per_device"] | Sequence[int] | NDArray[np.integer[Any]]
HOSTS = ("one", "per_device")
_ADVICE = "give the number of each device's host"


def host_of_devices(hosts: object, n_devices: int) -> NDArray[np.int64]:
    """Return the number of the host of each device; shape ``(n_devices,)``.

    Parameters
    ----------
    hosts
        ``"one"``, ``"per_device"``, or the number of each device's host: whole numbers from 0
        without gaps. Also as text, ``"0,0,1,1"``.
    n_devices
        Number of devices, those of all replicas included.
    """
    numbers, example = _numbers(hosts), [device // 2 for device in range(min(n_devices, 4))]
    if numbers is None:
        try:
            is_one = check_name("hosts", hosts, HOSTS) == "one"
        except UnknownNameError as error:
            raise UnknownNameError(f"{error}; or {_ADVICE}, such as {example}") from None
        return np.zeros(n_devices, np.int64) if is_one else np.arange(n_devices)
    if len(numbers) != n_devices:
        raise ArgumentError(
            f"hosts has {len(numbers)} numbers, for a graph of {n_devices} devices (of all "
            f"replicas); {_ADVICE}, such as {example}"
        )
    for device, value in enumerate(numbers):
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_whole or not 0 <= value < n_devices:
            raise ArgumentError(
                f"hosts: device {device} has host {value!r:.40}; hosts have whole numbers from 0 "
                f"to {n_devices - 1} at most: {_ADVICE}, such as {example}"
            )
    missing = set(range(max(numbers))).difference(numbers)
    if missing:
        raise ArgumentError(
            f"hosts names host {max(numbers)}, but no device has host {min(missing)}; number "
            "hosts from 0 without gaps"
        )
    return np.array(numbers, dtype=np.int64)


def _numbers(hosts: object) -> list[Any] | None:
    """Return the numbers in a list, an array or a text; None for anything else."""
    if isinstance(hosts, str):
        words = hosts.replace(",", " ").split()
        are_numbers = all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words)
        return [int(word) for word in words] if words and are_numbers else None
    if isinstance(hosts, np.ndarray):
        return hosts.tolist() if hosts.ndim == 1 else None
    return list(hosts) if isinstance(hosts, (list, tuple, range)) else None


def hosts_text(host: NDArray[np.int64]) -> str:
    """Return ``one``, ``per_device``, or numbers such as ``0 0 1 1``, for `host_of_devices`."""
    if not host.any():
        return "one"
    return "per_device" if (host == np.arange(len(host))).all() else " ".join(map(str, host))
