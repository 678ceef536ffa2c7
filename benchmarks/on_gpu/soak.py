"""Step ``soak``: hundreds of steps, as CUDA graphs and eagerly."""

from __future__ import annotations

import statistics

import torch
from _machine import resident

from on_gpu.bench import Bench, counted_replays, lowered, sgd
from on_gpu.report import Report


def soak(bench: Bench, report: Report) -> None:
    """Run hundreds of steps, as graphs and eagerly: memory and pace stay, the loss falls."""
    n = bench.pick(4, 2)
    m, batch = 2 * n, bench.batch(2 * n)
    for cuda_graph, n_steps in ((True, bench.pick(250, 6)), (False, bench.pick(150, 6))):
        graph = lowered("1f1b", n, m)
        marks, seconds, losses = [], [], []
        with (
            counted_replays() as replays,
            bench.pipeline(graph, bench.stages(n, 2 * n), cuda_graph=cuda_graph,
                           optimizer=sgd) as subject,
        ):  # fmt: skip
            for number in range(n_steps):
                result = subject.step(*batch)
                seconds.append(result.timeline.makespan)
                losses.append(float(result.loss))
                if number >= n_steps // 5:
                    marks.append(_held(bench))
            count = replays()
        grew = [last - first for first, last in zip(marks[0], marks[-1], strict=True)]
        quarter = n_steps // 4
        early, late = (statistics.median(x) for x in (seconds[-2 * quarter : -quarter],
                                                      seconds[-quarter:]))  # fmt: skip
        kind = "graphs" if cuda_graph else "eager"
        report.record(
            "soak", cuda_graph=cuda_graph, n_steps=n_steps, replays=count, first_loss=losses[0],
            last_loss=losses[-1], allocated_growth=grew[0], reserved_growth=grew[1],
            resident_growth=grew[2], early_makespan=early, late_makespan=late,
        )  # fmt: skip
        report.add(f"{kind}: {n_steps} steps, {count} replays, loss {losses[0]:.3f} to "
                   f"{losses[-1]:.3f}")  # fmt: skip
        report.check(grew[0] <= 1 << 20 and grew[1] <= 64 << 20,
                     f"{kind}: bytes allocated grew by {grew[0]}, reserved by {grew[1]}, the "
                     f"process by {grew[2] >> 20} MiB")  # fmt: skip
        report.time(
            abs(late / early - 1) < 0.03,
            f"{kind}: step {early * 1e3:.3f} ms, later {late * 1e3:.3f} ms",
        )
        report.time(losses[-1] < losses[0], f"{kind}: the loss falls")


def _held(bench: Bench) -> tuple[int, int, int]:
    """Return bytes allocated and reserved on the GPU, and resident on the host."""
    if bench.dry:
        return 0, 0, resident()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident()
