"""Step ``memory``: allocated memory over a step and the simulator's, with offload and without."""

from __future__ import annotations

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench, messages_timed_once, noted_warnings, sgd
from on_gpu.report import Report


def memory(bench: Bench, report: Report) -> None:
    """Save the memory that the allocator counts over a step, and the simulator's.

    Figures are drawn elsewhere, from these.
    """
    with messages_timed_once(bench):
        _measure(bench, report)


def _measure(bench: Bench, report: Report) -> None:
    """Do this for schedules with the same stages, one after the other."""
    n = bench.pick(4, 2)
    m = 2 * n
    batch = bench.batch(m * bench.samples(n))
    active: dict[str, int] = {}
    for name, schedule, offload in (
        ("gpipe", "gpipe", "none"), ("gpipe-offload", "gpipe", "all"), ("1f1b", "1f1b", "none"),
    ):  # fmt: skip
        report.begin()
        graph = ps.lower(ps.schedule(schedule, n, m), offload=offload)
        with (
            noted_warnings(report.add),
            bench.pipeline(graph, bench.stages(n, 2 * n), optimizer=sgd) as subject,
        ):
            for _ in range(3):  # after two, waits for OFFLOADs are where memory is as predicted
                subject.step(*batch)
            costs = px.profile(subject, *batch, n_steps=bench.pick(3, 1), warm_up=1)
            predicted = ps.simulate(graph, costs)
            if bench.dry:
                report.add(f"{name}: no GPU whose allocator could be asked")
                continue
            allocated = subject.allocated(*batch)
        frame = allocated.frame
        before, most = frame["nbytes"].iloc[0], frame["nbytes"].max()
        rise = _rise(predicted)
        gradients = sum(p.nbytes for module in subject.modules for p in module.parameters())
        active[name] = max(allocated.most_active.values())
        report.record(
            "memory", schedule=name, before=float(before), most=float(most),
            most_active=active[name], rise=float(most - before), predicted_rise=rise,
            gradients=gradients,
        )  # fmt: skip
        before, most, in_use, rise, gradients = (
            x / 2**20 for x in (before, most, active[name], rise, gradients)
        )
        report.add(f"{name}: allocated {before:.0f} MiB before the step, {most:.0f} at most (with "
                   f"blocks that streams may still read {in_use:.0f}); rise {most - before:.0f} "
                   f"MiB, predicted {rise:.0f} and at most {gradients:.0f} of gradients, which a "
                   "step begins without")  # fmt: skip
        bench.out.mkdir(parents=True, exist_ok=True)
        frame.to_csv(bench.out / f"{name}-allocated.csv", index=False)
        allocated.timeline.save(bench.out / f"{name}-timeline.csv")
        predicted.save(bench.out / f"{name}-predicted.csv")
        costs.save(bench.out / f"{name}-costs.json")
    if active:
        saved = active["gpipe"] - active["gpipe-offload"]
        report.check(saved > 0, f"offload takes {saved / 2**20:.0f} MiB from the most active bytes")


def _rise(predicted: ps.Timeline) -> float:
    """Return the bytes by which the memory of all devices together rises over a step."""
    held = predicted.memory()
    held["change"] = held.groupby("device")["nbytes"].diff().fillna(0.0)
    return float(held.sort_values("time", kind="stable")["change"].cumsum().max())
