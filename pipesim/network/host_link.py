"""`HostLink`: the link between a device and the memory of its host, over which OFFLOADs go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pipesim.errors import NetworkError, check_count
from pipesim.network.links import (
    MAX_DEVICE,
    bandwidth_from_json,
    bandwidth_to_json,
    check_keys,
    checked_speed,
)


@dataclass(frozen=True)
class HostLink:
    """Link between devices and the memory of their host, such as PCIe; each direction has its own.

    Link k is that of the devices from ``k * devices_per_link`` on. An OFFLOAD holds the link to the
    host, and a RELOAD the link from it, for ``latency + bytes / bandwidth``. Copies of one link are
    served one at a time (rule 8).

    Attributes
    ----------
    latency
        Seconds of a copy besides its bytes.
    bandwidth
        Bytes a second in each direction; ``math.inf`` (the default) for latency alone.
    devices_per_link
        Devices that share a link, such as the GPUs of one PCIe switch.

    Raises
    ------
    NetworkError
        For a latency or a bandwidth out of range.

    See Also
    --------
    pipesim.Network : A network, which may have a host link.
    pipesim.lower : Lower a schedule with activations in host memory.

    Examples
    --------
    PCIe switches of two GPUs each, and the link of a device of two GPUs:

    >>> import pipesim as ps
    >>> ps.HostLink(latency=10e-6, bandwidth=32e9, devices_per_link=2).grouped(2)
    HostLink(latency=1e-05, bandwidth=16000000000.0, devices_per_link=1)
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    devices_per_link: int = 1

    def __post_init__(self) -> None:
        latency, bandwidth = checked_speed("host", self.latency, self.bandwidth)
        count = check_count("host: devices_per_link", self.devices_per_link)
        if count > MAX_DEVICE:
            raise NetworkError(f"host: devices_per_link must be at most {MAX_DEVICE}, got {count}")
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)
        object.__setattr__(self, "devices_per_link", count)

    def grouped(self, gpus_per_device: int) -> HostLink:
        """Return this link for groups of GPUs that act as one device, and bytes of one GPU each.

        GPUs of one device that share a link have an equal part of its bandwidth each.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device: a divisor or a multiple of ``devices_per_link``.

        Returns
        -------
        HostLink
            The link of the groups; its bandwidth is the part of one GPU.

        Raises
        ------
        NetworkError
            If groups and links of several GPUs do not fit into each other.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.HostLink(bandwidth=32e9, devices_per_link=2).grouped(4).bandwidth
        16000000000.0
        """
        size, per_link = check_count("gpus_per_device", gpus_per_device), self.devices_per_link
        if size % per_link and per_link % size:
            raise NetworkError(
                f"devices of {size} GPUs cannot share host links of {per_link} GPUs each evenly"
            )
        shared = min(size, per_link)
        return replace(
            self, bandwidth=self.bandwidth / shared, devices_per_link=max(1, per_link // size)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite bandwidth is None.

        Returns
        -------
        dict
            ``latency`` (s), ``bandwidth`` (bytes/s) and ``devices_per_link``.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.HostLink(latency=1e-05).to_dict()
        {'latency': 1e-05, 'bandwidth': None, 'devices_per_link': 1}
        """
        return asdict(self) | {"bandwidth": bandwidth_to_json(self.bandwidth)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostLink:
        """Return the link in a mapping such as `to_dict` returns.

        Parameters
        ----------
        values
            Fields by name; missing ones have their defaults.

        Returns
        -------
        HostLink
            Equal to the link that `to_dict` was called on.

        Raises
        ------
        NetworkError
            Naming an unknown key, or one that is out of range.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.HostLink.from_dict({"latency": 1e-5, "bandwidth": 64e9})
        HostLink(latency=1e-05, bandwidth=64000000000.0, devices_per_link=1)
        """
        check_keys("host", values, [f.name for f in fields(cls)])
        bandwidth = bandwidth_from_json(values.get("bandwidth"))
        return cls(**{**values, "bandwidth": bandwidth})


def scaled_link(link: HostLink, latency: float, bandwidth: float) -> HostLink:
    """Return a link with latency and bandwidth multiplied by factors."""
    return replace(link, latency=link.latency * latency, bandwidth=link.bandwidth * bandwidth)
