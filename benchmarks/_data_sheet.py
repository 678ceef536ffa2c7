"""Steps on Tesla P40s, predicted from what their layers compute and from data sheets.

A prediction has one scalar: the part of the nominal rates that is reached, of operations and bytes
a second on a GPU and of bytes a second on the link between two. All else is counted
(`pipeexec.demo_models.layer_costs`), or as in the published script. Optimizer steps are left out:
SGD moves some 16 bytes a parameter, which is milliseconds of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from _torchgpipe import Figures, PublishedRow

import pipesim as ps

#: Tesla P40 (NVIDIA's data sheet): 3,840 cores at 1.531 GHz, two operations a clock; 384 bits of
#: GDDR5. PyTorch takes about 10 us to launch a kernel, and a kernel about 2 us beside its work;
#: both are assumed.
P40 = ps.GPU(flops=11.76e12, bandwidth=346e9, launch=10e-6, overhead=2e-6)
#: cuDNN has Winograd's algorithm for 3 x 3 convolutions; that it took this form of it is assumed.
WINOGRAD = 2.25
#: PCIe 3.0 x16, one way: 16 lanes of 8 GT/s, 128 bits of 130. A copy begins after about 10 us
#: (assumed).
PCIE, LATENCY = 15.75e9, 10e-6


class LinkedGPU(NamedTuple):
    """A GPU, and the link of each.

    Attributes
    ----------
    device
        Rates that the GPU sustains.
    link
        Bytes a second in each direction.
    winograd
        Counted operations over executed ones of 3 x 3 convolutions with stride 1.
    """

    device: ps.GPU
    link: float
    winograd: float = WINOGRAD


#: The machine, given the part of its nominal rates that is reached.
Reached = Callable[[float], LinkedGPU]


def reached(part: float) -> LinkedGPU:
    """Return a machine that reaches this part of its nominal rates."""
    return LinkedGPU(P40.scaled(part), PCIE * part)


def costs_of(row: PublishedRow, machine: LinkedGPU) -> ps.Costs:
    """Return what a row's tasks and messages take."""
    layers = row.layers(row.batch // row.n_microbatches, machine.winograd)
    ports = ps.Nodes(len(row.balance), port_latency=LATENCY, port_bandwidth=machine.link)
    costs = layers.costs(row.balance, machine.device, network=ps.Network(nodes=ports))
    skips = layers.skip_bytes(row.balance)
    return replace(costs, skip_bytes=skips) if skips else costs


def skips_of(costs: ps.Costs) -> dict[tuple[int, int], float]:
    """Return the bytes of each skip; none where no skips have bytes."""
    return dict(costs.skip_sizes) if isinstance(costs.skip_sizes, tuple) else {}


def predict(row: PublishedRow, machine: LinkedGPU) -> Figures:
    """Return the figures of a row's simulated step."""
    n, m, costs = len(row.balance), row.n_microbatches, costs_of(row, machine)
    graph = ps.lower(
        ps.schedule("gpipe", n, m), recompute=row.recompute, step="none",
        skips=skips_of(costs), **row.switches,
    )  # fmt: skip
    return figures(row, costs, ps.simulate(graph, costs))


def figures(row: PublishedRow, costs: ps.Costs, timeline: ps.Timeline) -> Figures:
    """Return the figures of a simulated step."""
    n, m = len(row.balance), row.n_microbatches
    recomputed = m if row.recompute == "always" else m - 1
    forward, backward = costs.per_stage("forward", n), costs.per_stage("backward", n)
    computed = (forward * (m + recomputed) + backward * m).sum()
    memory = float(sum(timeline.memory.peak))
    return Figures(row.batch / timeline.makespan, computed / n / timeline.makespan, memory / 2**30)


def fit(rows: Sequence[PublishedRow], machine: Reached = reached) -> float:
    """Return the part with which the predicted speeds are the published ones in geometric mean."""

    def excess(part: float) -> float:
        return sum(
            math.log(predict(row, machine(part)).speed / row.published.speed) for row in rows
        )

    return _root(excess, 0.02, 2.0)


def fit_link(compute: PublishedRow, copies: PublishedRow) -> LinkedGPU:
    """Fit GPU and link apart: with the one row's part for the GPU, the other's for the link."""

    def fitted(link: float) -> LinkedGPU:
        part = fit([compute], lambda part: LinkedGPU(P40.scaled(part), link))
        return LinkedGPU(P40.scaled(part), link)

    def excess(link: float) -> float:
        return predict(copies, fitted(link)).speed - copies.published.speed

    return fitted(_root(excess, 6e9, 60e9))


def fit_busy(row: PublishedRow) -> float:
    """Return the part of the GPU with which its stages compute as long as was published."""
    published = row.published.utilization / row.published.speed

    def excess(part: float) -> float:  # busy seconds do not depend on the link
        got = predict(row, LinkedGPU(P40.scaled(part), PCIE))
        return published - got.utilization / got.speed

    return _root(excess, 0.02, 2.0)


def fit_link_alone(row: PublishedRow, part: float) -> float:
    """Return the link's bytes a second with which the speed is the published one.

    Raises
    ------
    ValueError
        If it is too slow even on endless links, or too fast on any.
    """

    def excess(link: float) -> float:
        return predict(row, LinkedGPU(P40.scaled(part), link)).speed - row.published.speed

    return _root(excess, 0.5e9, 1e12)


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is 0, by bisection of the ratio."""
    if excess(low) > 0 or excess(high) < 0:
        raise ValueError(f"none from {low:g} to {high:g} fits")
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        if excess(middle) < 0:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
