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
    report.add(f"{n} slices with imposed links: share of the SENDs' time in which their slice "
               "computes, and the makespan; medians of 5 steps")  # fmt: skip
    for number, (link_name, link) in enumerate(links.items()):
        for name in ("gpipe", "1f1b") if number == 0 else ("1f1b",):
            for cuda_graph in bench.kinds:
                shares, makespans = {}, {}
                for overlaps in (True, False):
                    graph = lowered(name, n, m, overlaps)
                    with (
                        noted_warnings(report.add),
                        bench.pipeline(graph, bench.stages(n, 2 * n), cuda_graph=cuda_graph,
                                       link=link, optimizer=sgd) as subject,
                    ):  # fmt: skip
                        n_steps = bench.pick(8, 2)
                        lines = [subject.step(*batch).timeline for _ in range(n_steps)][-5:]
                    lines.sort(key=lambda timeline: timeline.makespan)
                    middle = lines[len(lines) // 2]
                    shares[overlaps] = statistics.median(map(hidden_share, lines))
                    makespans[overlaps] = middle.makespan
                    if number == 0 and cuda_graph == bench.kinds[-1]:
                        bench.out.mkdir(parents=True, exist_ok=True)
                        middle.save(bench.out / f"{name}-{'on' if overlaps else 'off'}.csv")
                report.record(
                    "overlap", link=link_name, schedule=name, cuda_graph=cuda_graph,
                    hidden_on=shares[True], hidden_off=shares[False], makespan_on=makespans[True],
                    makespan_off=makespans[False],
                )  # fmt: skip
                report.time(
                    shares[True] > 0.3 and shares[False] < 0.01,
                    f"{link_name}, {name}{', graph' if cuda_graph else ''}: on {shares[True]:.0%} "
                    f"{makespans[True] * 1e3:.2f} ms, off {shares[False]:.0%} "
                    f"{makespans[False] * 1e3:.2f} ms",
                )
