"""Imported last by the process that forks others: what it loads and compiles, they have at once."""

from __future__ import annotations

import gc

import pipesim as ps

_GRAPH = ps.lower(ps.schedule("1f1b", 16, 64), n_replicas=2)  # large enough to load kernels
ps.simulate(_GRAPH, ps.Costs(1, 2)).memory.peak  # noqa: B018
_GRAPH.precedence  # noqa: B018

gc.collect()
gc.freeze()  # collections in forked processes leave out what all have
