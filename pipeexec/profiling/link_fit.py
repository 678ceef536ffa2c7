"""Fit latency and bandwidth to measured seconds of messages of several sizes."""

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


Floats = NDArray[np.float64]
#: Numbers of two devices, sender first. `ALL` stands for all pairs together.
Pair = tuple[int, int]
ALL: Pair = (-1, -1)
#: State of the devices while messages are timed.
STATES = ("idle", "loaded")
#: A slope is accepted if it lowers the deviation to less than this share of that without slope.
_SLOPE_GAIN = 0.5
#: Mean relative deviation of a pair from the fit of all pairs above which it has a separate link.
_PAIR_DEVIATION = 0.3


@dataclass(frozen=True)
class Fit:
    """Seconds of a message as ``latency + nbytes / bandwidth``.

    Attributes
    ----------
    latency
        Seconds, never negative.
    bandwidth
        Bytes per second; ``math.inf`` if the size of messages does not matter, as when they are
        passed by reference. That is so if the largest message spends less than half of its time
        on its bytes, or if a constant deviates less than twice as much as the line.
    residual
        Mean relative deviation of the fit from each measured size: 1 for half or twice as long.
    r2
        Share of the variance of the seconds that the fit explains; NaN if they do not vary.
    """

    latency: float
    bandwidth: float
    residual: float
    r2: float

    def seconds(self, nbytes: Floats | float) -> Floats:
        """Return the seconds of messages."""
        return self.latency + np.asarray(nbytes, dtype=np.float64) / self.bandwidth


def fit(nbytes: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Fit:
    """Fit a latency and a bandwidth to the seconds of messages of several sizes.

    Candidates are all lines through two points, through one point without latency, and through one
    point without slope. The fit is the line with the least mean relative deviation. Small messages
    therefore count as much as large ones, too short as much as too long, and outliers little.
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    lines = [(0.0, b / a) for a, b in zip(x, y, strict=True) if a] + [(float(b), 0.0) for b in y]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            slope = (y[j] - y[i]) / (x[j] - x[i])
            lines.append((float(y[i] - slope * x[i]), float(slope)))
    deviation, latency, slope = min(
        (_deviation(a + b * x, y), a, b) for a, b in lines if a >= 0 and b >= 0
    )
    flat = min((_deviation(np.full_like(y, a), y), float(a)) for a in y)
    if slope * float(x.max()) <= latency or deviation >= _SLOPE_GAIN * flat[0]:
        (deviation, latency), slope = flat, 0.0
    rest, spread = float(((latency + slope * x - y) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return Fit(
        latency=latency,
        bandwidth=1 / slope if slope else math.inf,
        residual=deviation,
        r2=1 - rest / spread if np.ptp(y) > 0 else math.nan,
    )


def _deviation(fitted: Floats, seconds: Floats) -> float:
    """Return the mean relative deviation of fitted seconds: 1 for half, or twice, as long."""
    with np.errstate(divide="ignore"):
        return float((np.maximum(fitted / seconds, seconds / fitted) - 1).mean())


def fits(transfers: pd.DataFrame) -> dict[tuple[Pair, str], Fit]:
    """Fit the table of `measure_transfers`: by pair and state, and by `ALL` pairs and state."""
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
    """Return transfers with columns of the seconds by the fit of their pair, and the fits."""
    from pipesim.utils.packages import pandas as pd

    extended = transfers.assign(**{f"{state}_fit": math.nan for state in STATES})
    for pair, group in by_pair(transfers).items():
        for state in STATES:
            seconds = fitted[pair, state].seconds(group["nbytes"].to_numpy())
            extended.loc[group.index, f"{state}_fit"] = seconds
    rows = [
        {"source": pair[0], "target": pair[1], "state": state} | vars(line)
        for (pair, state), line in fitted.items()
    ]
    columns = ["source", "target", "state", "latency", "bandwidth", "residual", "r2"]
    return extended, pd.DataFrame(rows, columns=columns).set_index(columns[:3])


def network_of(
    transfers: pd.DataFrame, fitted: Mapping[tuple[Pair, str], Fit], timelines: Iterable[Timeline]
) -> Network:
    """Return the network of messages under load.

    Bandwidths are those of the fits. A latency is a mean over the messages of ``timelines`` for
    which a consumer waited: the seconds from SEND to consumer, less those of the bytes. If no
    consumer waited, it is the latency of the fit.

    All pairs share one latency and bandwidth, unless some pair deviates on average by more than
    30 % from the fit of all pairs and by less than half as much from its own fit. Then each pair
    has a link, and unmeasured pairs have the largest latency and the smallest bandwidth.
    """
    messages = _awaited_messages(timelines)
    all_messages = [row for rows in messages.values() for row in rows]
    if not fitted:
        return _speed(all_messages, 0.0, math.inf)
    common = fitted[ALL, "loaded"]
    network = _speed(all_messages, common.latency, common.bandwidth)
    groups = by_pair(transfers)
    if not any(_differs(group, common, fitted[pair, "loaded"]) for pair, group in groups.items()):
        return network
    links = []
    for pair in groups:
        own = fitted[pair, "loaded"]
        speed = _speed(messages.get(pair, []), own.latency, own.bandwidth)
        links.append(Link(speed.latency, speed.bandwidth, (pair,)))
    slowest = min(link.bandwidth for link in links)
    return Network(max(link.latency for link in links), slowest, tuple(links))


def _differs(group: pd.DataFrame, common: Fit, own: Fit) -> bool:
    """Return whether messages of a pair take clearly longer or shorter than those of all pairs."""
    seconds = common.seconds(group["nbytes"].to_numpy())
    deviation = float(np.abs(seconds / group["loaded"].to_numpy() - 1).mean())
    return deviation > max(_PAIR_DEVIATION, 2 * own.residual)


def _speed(messages: list[tuple[float, float]], latency: float, bandwidth: float) -> Network:
    """Return a network of this bandwidth; its latency is that of the messages, if any."""
    if messages:
        nbytes, seconds = np.array(messages).T
        latency = max(0.0, float((seconds - nbytes / bandwidth).mean()))
    return Network(latency=latency, bandwidth=bandwidth)


def _awaited_messages(timelines: Iterable[Timeline]) -> dict[Pair, list[tuple[float, float]]]:
    """Return bytes and seconds of messages that a consumer waited for, by pair of devices."""
    messages: dict[Pair, list[tuple[float, float]]] = {}
    for timeline in timelines:
        graph, seconds = timeline.graph, message_times(timeline, waited_only=True)
        for recv in np.flatnonzero(graph.is_op(RECVS) & ~np.isnan(seconds)).tolist():
            ends = int(graph.device[graph.pair[recv]]), int(graph.device[recv])
            row = float(timeline.nbytes[recv]), float(seconds[recv])
            messages.setdefault(ends, []).append(row)
    return messages
