"""Compare timelines bit for bit, and timelines of every kind of graph that files must keep."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import pipesim as ps


def same(one: ps.Timeline, two: ps.Timeline) -> bool:
    """Tell whether two timelines agree bit for bit, the wiring of their graphs included."""
    a, b = one.graph, two.graph
    columns = ("op", "device", "stage", "microbatch", "stream", "pair", "replica", "part")
    return (
        len(a) == len(b)
        and all((getattr(a, column) == getattr(b, column)).all() for column in columns)
        and a.streams == b.streams
        and all(
            getattr(a, count) == getattr(b, count)
            for count in ("n_devices", "n_stages", "n_microbatches", "n_replicas", "n_batches")
        )
        and all(
            np.array_equal(x.ptr, y.ptr) and np.array_equal(x.values, y.values)
            for x, y in (
                (a.dependencies, b.dependencies),
                (a.queues, b.queues),
                (a.collectives, b.collectives),
            )
        )
        and all(
            np.array_equal(getattr(one, column), getattr(two, column), equal_nan=True)
            for column in ("start", "end", "nbytes")
        )
    )  # fmt: skip


COSTS = ps.Costs(
    1.0, 2.0, input_grad=1.0, weight_grad=1.1, output_bytes=8.0, activation_bytes=4.0, launch=1e-3,
    parameter_bytes=5.0, gradient_bytes=5.0,
    network=ps.Network(1e-3, 25e9, host=ps.HostLink(1e-3, 25e9)),
)  # fmt: skip
#: Name of the schedule, and options of `ps.lower`, by the name of a kind.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("1f1b", {}),
    "rendezvous": ("1f1b", {"rendezvous": True, "hosts": "per_device", "host_threads": True}),
    "replicas": ("1f1b", {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2}),
    "skips": ("1f1b", {"skips": "0-3", "portals": False}),
    "portals": ("gpipe", {"skips": "0-3"}),
    "tied": ("1f1b", {"tied": "0-3"}),
    "offload": ("1f1b", {"offload": 0.5, "prefetch": 2}),
    "forward only": ("gpipe", {"forward_only": True}),
    "mini-batches": ("pipedream", {}),
    "recompute": ("1f1b", {"recompute": "always"}),
    "overlapped": ("dualpipev", {}),
    "shards": ("1f1b", {"n_replicas": 2, "shard_parameters": "every"}),
    "experts": ("1f1b", {"n_replicas": 2, "expert_layers": 2, "expert_replicas": 2}),
    "overlapped experts": (
        "dualpipev",
        {"n_replicas": 2, "expert_layers": 1, "expert_replicas": 2},
    ),
}


@cache
def timeline_of_kind(kind: str) -> ps.Timeline:
    """Return a simulated timeline; of ``failed``, the second half did not run."""
    schedule, options = ("1f1b", {}) if kind == "failed" else KINDS[kind]
    graph = ps.lower(ps.schedule(schedule, 4, 8), **options)
    exchanged = {"dispatch_bytes": 1.0, "combine_bytes": 1.0, "expert_replicas": 2}
    layers = options.get("expert_layers")
    costs = replace(COSTS, expert_layers=layers, **exchanged) if layers else COSTS
    timeline = ps.simulate(graph, costs)
    if kind != "failed":
        return timeline
    start, end, half = timeline.start.copy(), timeline.end.copy(), len(graph) // 2
    end[half:] = start[half + 1 :] = np.nan
    return ps.Timeline(graph, start, end, timeline.nbytes)
