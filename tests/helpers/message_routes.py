"""Links that carry the messages of a network."""

from __future__ import annotations

from typing import Any

import numpy as np

import pipesim as ps


def resolve(network: ps.Network, *pairs: tuple[int, int], n_devices: int = 4) -> list[Any]:
    """Return links (a frozen set), latency and bandwidth of each pair's message."""
    source, target = np.array(pairs).T
    routes = network.resolve(source, target, n_devices)
    assert routes.links.dtype == np.int64
    assert routes.links.shape[0] == len(pairs) == len(routes.latency) == len(routes.bandwidth)
    assert routes.links.shape[1] >= 1
    held = []
    for row in routes.links.tolist():
        links = [link for link in row if link >= 0]
        assert row == links + [-1] * (len(row) - len(links)), "padded at the end"
        assert len(set(links)) == len(links)
        held.append(frozenset(links))
    return list(zip(held, routes.latency.tolist(), routes.bandwidth.tolist(), strict=True))
