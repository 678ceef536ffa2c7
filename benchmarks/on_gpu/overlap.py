"""Step ``overlap``: copies beside compute, by timelines, and their absence."""

from __future__ import annotations

import statistics

import pipesim as ps
from on_gpu.bench import Bench, hidden_share, lowered, noted_warnings, sgd
from on_gpu.report import Report


def overlap(bench: Bench, report: Report) -> None:
    """Show by timelines that copies run beside compute, and with ``overlap=False`` do not."""
    n = bench.pick(4, 2)
    m, batch = 2 * n, bench.batch(2 * n)  # tasks of a millisecond
    links = {"50 GB/s, 10 us": ps.Network(10e-6, 50e9), "5 GB/s, 10 us": ps.Network(10e-6, 5e9)}
    report.say(f"{n} slices with imposed links: share of the SENDs' time in which their slice "
               "computes, and the makespan; medians of 5 steps")  # fmt: skip
    for link_name, link in links.items():
        for name in ("gpipe", "1f1b") if "50" in link_name else ("1f1b",):
            for cuda_graph in (False, True):
                shares, makespans = {}, {}
                for overlaps in (True, False):
                    graph = lowered(name, n, m, overlaps)
                    with (
                        noted_warnings(report.say),
                        bench.pipeline(graph, bench.stages(n, 2 * n), cuda_graph=cuda_graph,
                                       link=link, optimizer=sgd) as subject,
                    ):  # fmt: skip
                        steps = [subject.step(*batch) for _ in range(bench.pick(8, 2))][-5:]
                    lines = [step.timeline for step in steps]
                    shares[overlaps] = statistics.median(map(hidden_share, lines))
                    makespans[overlaps] = statistics.median(x.makespan for x in lines)
                report.check(
                    bench.dry or (shares[True] > 0.3 and shares[False] < 0.01),
                    f"{link_name}, {name}{', graph' if cuda_graph else ''}: on {shares[True]:.0%} "
                    f"{makespans[True] * 1e3:.2f} ms, off {shares[False]:.0%} "
                    f"{makespans[False] * 1e3:.2f} ms",
                )
