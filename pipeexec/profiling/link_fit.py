"""A latency and a bandwidth from how long messages of several sizes took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.replay import message_times
from pipesim.network.links import Link
from pipesim.network.network import Network
from pipesim.ops import RECVS
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ALL", "STATES", "Fit", "Pair", "by_pair", "fit", "fits", "network_of", "with_fits"]

Floats = NDArray[np.float64]
#: Numbers of two devices, sender first; and what stands for all pairs together.
Pair = tuple[int, int]
ALL: Pair = (-1, -1)
#: What the other devices do meanwhile.
STATES = ("idle", "loaded")
#: How much smaller a deviation must be for a slope to be believed.
_CLEARLY = 0.5
#: Mean relative deviation of a pair from the fit of all beyond which its link is one of its own.
_UNLIKE = 0.3


@dataclass(frozen=True)
class Fit:
    """Seconds of a message as ``latency + nbytes / bandwidth``.

    Attributes
    ----------
    latency
        Seconds, never negative.
    bandwidth
        Bytes a second; ``math.inf`` where messages take as long whatever their size, as when they
        are handed over by reference: the largest spends less than half of its time on its bytes,
        or a constant deviates less than twice as much.
    residual
        Mean of how far the fit is from each measured size, as a ratio: 1 for half or twice as long.
    r2
        Share of the variance of the seconds that the fit explains; NaN if they do not vary.
    """

    latency: float
    bandwidth: float
    residual: float
    r2: float

    def seconds(self, nbytes: Floats | float) -> Floats:
        """Return how long messages take."""
        return self.latency + np.asarray(nbytes, dtype=np.float64) / self.bandwidth


def fit(nbytes: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Fit:
    """Fit a latency and a bandwidth to what messages of several sizes took.

    The best of all lines through two of the points, through one without latency, and through one
    without a slope: that from which the points are off least, on average, as a ratio. So small
    messages count as much as large ones, too short as much as too long, and an odd value little.
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    lines = [(0.0, b / a) for a, b in zip(x, y, strict=True) if a] + [(float(b), 0.0) for b in y]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            slope = (y[j] - y[i]) / (x[j] - x[i])
            lines.append((float(y[i] - slope * x[i]), float(slope)))
    deviation, latency, slope = min(
        (_off(a + b * x, y), a, b) for a, b in lines if a >= 0 and b >= 0
    )
    flat = min((_off(np.full_like(y, a), y), float(a)) for a in y)
    if slope * float(x.max()) <= latency or deviation >= _CLEARLY * flat[0]:
        (deviation, latency), slope = flat, 0.0
    rest, spread = float(((latency + slope * x - y) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return Fit(
        latency=latency,
        bandwidth=1 / slope if slope else math.inf,
        residual=deviation,
        r2=1 - rest / spread if np.ptp(y) > 0 else math.nan,
    )


def _off(fitted: Floats, seconds: Floats) -> float:
    """Return by how much values are off on average: 1 for half, or for twice, as long."""
    with np.errstate(divide="ignore"):
        return float((np.maximum(fitted / seconds, seconds / fitted) - 1).mean())


def fits(transfers: pd.DataFrame) -> dict[tuple[Pair, str], Fit]:
    """Fit what `measure_transfers` found: by pair and state, and by `ALL` pairs and state."""
    groups = by_pair(transfers)
    if groups:
        groups[ALL] = transfers
    return {
        (pair, state): fit(group["nbytes"].to_numpy(), group[state].to_numpy())
        for pair, group in groups.items()
        for state in STATES
    }


def by_pair(transfers: pd.DataFrame) -> dict[Pair, pd.DataFrame]:
    """Return the rows of each pair of devices."""
    ends = zip(transfers["source"].tolist(), transfers["target"].tolist(), strict=True)
    return {
        pair: transfers[(transfers["source"] == pair[0]) & (transfers["target"] == pair[1])]
        for pair in sorted(set(ends))
    }


def with_fits(
    transfers: pd.DataFrame, fitted: Mapping[tuple[Pair, str], Fit]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return transfers beside the seconds that the fit of their pair says; and a table of fits."""
    import pandas as pd

    said = transfers.assign(**{f"{state}_fit": math.nan for state in STATES})
    for pair, group in by_pair(transfers).items():
        for state in STATES:
            seconds = fitted[pair, state].seconds(group["nbytes"].to_numpy())
            said.loc[group.index, f"{state}_fit"] = seconds
    rows = [
        {"source": pair[0], "target": pair[1], "state": state} | vars(of)
        for (pair, state), of in fitted.items()
    ]
    columns = ["source", "target", "state", "latency", "bandwidth", "residual", "r2"]
    return said, pd.DataFrame(rows, columns=columns).set_index(columns[:3])


def network_of(
    transfers: pd.DataFrame, fitted: Mapping[tuple[Pair, str], Fit], timelines: Iterable[Timeline]
) -> Network:
    """Return the network that messages meet under load.

    Bandwidths are those of the fits. A latency is the mean of what messages of ``timelines`` took
    beyond their bytes, from their SEND to a consumer that waited for them; that of the fit where
    none was waited for. All pairs have one latency and bandwidth, unless some pair's messages are
    on average 30 % off the fit of all, and less than half as much off that of their own: then each
    pair has a link, and pairs that were not measured have the slowest latency and bandwidth.
    """
    waited = _waited(timelines)
    every = [row for rows in waited.values() for row in rows]
    if not fitted:
        return _speed(every, 0.0, math.inf)
    of_all = fitted[ALL, "loaded"]
    network = _speed(every, of_all.latency, of_all.bandwidth)
    groups = by_pair(transfers)
    if not any(_unlike(group, of_all, fitted[pair, "loaded"]) for pair, group in groups.items()):
        return network
    links = []
    for pair in groups:
        own = fitted[pair, "loaded"]
        speed = _speed(waited.get(pair, []), own.latency, own.bandwidth)
        links.append(Link(speed.latency, speed.bandwidth, (pair,)))
    slowest = min(link.bandwidth for link in links)
    return Network(max(link.latency for link in links), slowest, tuple(links))


def _unlike(group: pd.DataFrame, of_all: Fit, own: Fit) -> bool:
    """Tell whether messages of a pair take clearly longer or shorter than those of all."""
    seconds = of_all.seconds(group["nbytes"].to_numpy())
    off = float(np.abs(seconds / group["loaded"].to_numpy() - 1).mean())
    return off > max(_UNLIKE, 2 * own.residual)


def _speed(waited: list[tuple[float, float]], latency: float, bandwidth: float) -> Network:
    """Return a bandwidth with the latency of bytes and seconds that were waited for, if any."""
    if waited:
        nbytes, seconds = np.array(waited).T
        latency = max(0.0, float((seconds - nbytes / bandwidth).mean()))
    return Network(latency=latency, bandwidth=bandwidth)


def _waited(timelines: Iterable[Timeline]) -> dict[Pair, list[tuple[float, float]]]:
    """Return bytes and seconds of the messages that were waited for, by their pair of devices."""
    found: dict[Pair, list[tuple[float, float]]] = {}
    for timeline in timelines:
        graph, seconds = timeline.graph, message_times(timeline, waited_only=True)
        for recv in np.flatnonzero(graph.is_op(RECVS) & ~np.isnan(seconds)).tolist():
            ends = int(graph.device[graph.pair[recv]]), int(graph.device[recv])
            row = float(timeline.nbytes[recv]), float(seconds[recv])
            found.setdefault(ends, []).append(row)
    return found
