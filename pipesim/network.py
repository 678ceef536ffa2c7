"""Links between devices: how long a message takes, and which messages share a link."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import NetworkError, check_count, number

__all__ = ["Link", "Network"]


def _check_speed(where: str, latency: object, bandwidth: object) -> None:
    seconds, rate = number(latency), number(bandwidth)
    if seconds is None or not 0 <= seconds < math.inf:
        raise NetworkError(f"{where}: latency must be finite and >= 0 s, got {latency!r}")
    if rate is None or rate <= 0:
        raise NetworkError(
            f"{where}: bandwidth must be > 0 bytes/s (math.inf for pure latency), got {bandwidth!r}"
        )


@dataclass(frozen=True)
class Link:
    """One link and the directed pairs of devices whose messages it carries, one at a time.

    Attributes
    ----------
    latency
        Seconds.
    bandwidth
        Bytes a second; ``math.inf`` for pure latency.
    pairs
        ``(sender, receiver)`` pairs. Several pairs of one link share it (rule 8).
    """

    latency: float
    bandwidth: float
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", _checked_pairs(self.pairs))
        _check_speed(f"link of {list(self.pairs)}", self.latency, self.bandwidth)
        for a, b in self.pairs:
            if a == b:
                raise NetworkError(f"link of {list(self.pairs)}: no link leads from {a} to {b}")


class Routes(NamedTuple):
    """Links (n, k), latency (n,), bandwidth (n,) of messages."""

    links: NDArray[np.int64]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """Every directed pair of devices has a link of its own, unless ``links`` says otherwise.

    Attributes
    ----------
    latency
        Seconds, of every pair that ``links`` does not name.
    bandwidth
        Bytes a second, likewise; ``math.inf`` (the default) makes messages pure latency.
    links
        Links of particular pairs, which may be shared.

    Raises
    ------
    NetworkError
        For a negative or non-finite latency, a bandwidth that is not positive, a pair that is
        named twice or leads from a device to itself.

    Examples
    --------
    Two nodes of two devices; between them one slow link each way, shared by both pairs:

    >>> slow = [Link(10e-6, 12e9, ((0, 2), (1, 2))), Link(10e-6, 12e9, ((2, 0), (2, 1)))]
    >>> network = Network(latency=2e-6, bandwidth=200e9, links=slow)
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        _check_speed("network", self.latency, self.bandwidth)
        if not isinstance(self.links, (tuple, list)) or not all(
            isinstance(link, Link) for link in self.links
        ):
            raise NetworkError(f"links must be a sequence of Link, got {self.links!r}")
        object.__setattr__(self, "links", tuple(self.links))
        pairs = [pair for link in self.links for pair in link.pairs]
        twice = {pair for pair in pairs if pairs.count(pair) > 1}
        if twice:
            raise NetworkError(f"pair {min(twice)} is on more than one link; name it once")

    def resolve(self, source: NDArray[Any], target: NDArray[Any], n_devices: int) -> Routes:
        """Return number, latency (s) and bandwidth (bytes/s) of the link of each message.

        Links that `links` names are numbered first; a pair without one has number
        ``len(links) + source * n_devices + target``.
        """
        own = len(self.links)
        number = own + source.astype(np.int64) * n_devices + target
        latency = np.full(len(number), float(self.latency))
        bandwidth = np.full(len(number), float(self.bandwidth))
        for index, link in enumerate(self.links):
            for a, b in link.pairs:
                if max(a, b) >= n_devices:
                    raise NetworkError(
                        f"link {index} names device {max(a, b)}; there are {n_devices} devices, "
                        f"0..{n_devices - 1}"
                    )
                carried = (source == a) & (target == b)
                number[carried] = index
                latency[carried], bandwidth[carried] = link.latency, link.bandwidth
        return Routes(number[:, None], latency, bandwidth)

    def all_reduce(self, nbytes: float, devices: NDArray[Any]) -> float:
        """Return seconds of a ring all-reduce (rule 9): ``2(n-1)/n * bytes/bandwidth + ...``."""
        n_members = len(devices)
        share = 2 * (n_members - 1)
        return share / n_members * nbytes / self.bandwidth + share * self.latency

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; endless bandwidth is None."""
        return {
            **_speed_to_dict(self.latency, self.bandwidth),
            "links": [
                {**_speed_to_dict(k.latency, k.bandwidth), "pairs": [list(p) for p in k.pairs]}
                for k in self.links
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Network:
        """Read what `to_dict` wrote.

        Raises
        ------
        NetworkError
            Naming an unknown key or a missing one.
        """
        check_keys("network", values, ("latency", "bandwidth", "links"))
        links = values.get("links", ())
        if not isinstance(links, (tuple, list)) or not all(isinstance(x, Mapping) for x in links):
            raise NetworkError(f"links must be a list of tables, got {links!r}")
        for link in links:
            check_keys("link", link, ("latency", "bandwidth", "pairs"))
            if "pairs" not in link:
                raise NetworkError(f"link {dict(link)} names no pairs; add pairs = [[0, 1]]")
        return cls(
            **_speed_from_dict(values),
            links=tuple(Link(**_speed_from_dict(link), pairs=link["pairs"]) for link in links),
        )


def _checked_pairs(pairs: object) -> tuple[tuple[int, int], ...]:
    """Return pairs of device numbers as tuples."""
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
    ):
        raise NetworkError(
            f"pairs must be a list of (sender, receiver), such as [[0, 1]], got {pairs!r}"
        )
    return tuple(
        (check_count("sender of a link", a, 0), check_count("receiver of a link", b, 0))
        for a, b in pairs
    )


def check_keys(what: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for a key that ``what`` does not have."""
    if not isinstance(values, Mapping):
        raise NetworkError(f"{what} must be a table, got {values!r}")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise NetworkError(f"{what} has no {unknown[0]!r} (it has: {', '.join(known)})")


def _speed_to_dict(latency: float, bandwidth: float) -> dict[str, float | None]:
    return {"latency": latency, "bandwidth": None if math.isinf(bandwidth) else bandwidth}


def _speed_from_dict(values: Mapping[str, Any]) -> dict[str, float]:
    bandwidth = values.get("bandwidth")
    return {
        "latency": values.get("latency", 0.0),
        "bandwidth": math.inf if bandwidth is None else bandwidth,
    }
