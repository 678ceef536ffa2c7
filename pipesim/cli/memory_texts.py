"""Lines that the command prints of a timeline: its graph, memory limits, tokens a second, MFU."""

from __future__ import annotations

from pipesim.analysis.compare import known_results
from pipesim.cli.tables import GIB
from pipesim.costs.workload import Workload
from pipesim.timeline.memory_limit import excess_text, excesses
from pipesim.timeline.timeline import Timeline
from pipesim.utils.text_tables import align_columns
from pipesim.utils.units import format_numbers

_MS = 1e-3
_FITS = {True: "fits", False: "does not fit", None: "unknown whether it fits: costs have no bytes"}


def graph_line(timeline: Timeline) -> str:
    """Return a line with the schedule's name, the numbers of devices and others, and recompute."""
    graph = timeline.graph
    work = None if timeline.costs is None else timeline.costs.workload
    devices, recompute = f"{graph.n_devices} devices", f"recompute {graph.recompute}"
    if isinstance(work, Workload) and work.gpus_per_device > 1:
        n_gpus = graph.n_devices * work.gpus_per_device
        devices += f" of {work.gpus_per_device} GPUs ({n_gpus} GPUs)"
    settings = work.settings if isinstance(work, Workload) else None
    if settings and (layers := settings.get("recompute", "none")) != "none":
        recompute = f"recompute {layers} in backwards, {graph.recompute} as tasks"
    return (
        f"{timeline.name}: {devices}, {graph.n_stages} stages, {graph.n_microbatches} "
        f"micro-batches, {recompute}"
    )


def result_lines(timeline: Timeline) -> str:
    """Return a line for each of limit, tokens a second and MFU that is known; "" for none."""
    results = known_results(timeline)
    lines = []
    if "memory_limit" in results:
        limit = format_numbers([results["memory_limit"]], GIB)[0]
        lines.append(f"limit        {limit} GiB, {_FITS[timeline.fits]}")
    if "tokens_per_second" in results:
        lines.append(f"tokens       {format_numbers([results['tokens_per_second']])[0]} tokens/s")
    if "mfu" in results:
        lines.append(f"MFU          {results['mfu']:.1%}")
    return "".join(f"{line}\n" for line in lines)


def memory_changes_text(timeline: Timeline) -> str:
    """Return the devices that need too much, a line each, and a table of changes that fit."""
    lines = [excess_text(excess) for excess in excesses(timeline)]
    table = timeline.changes_that_fit()
    if table.empty:
        if table.attrs["advice"]:
            lines.append(table.attrs["advice"])
        return "\n".join(
            [*lines, "none of the changes that were tried fits, alone or with another"]
        )
    columns = {
        "change that fits": [str(change) for change in table["change"]],
        "makespan (ms)": format_numbers(table["makespan"], _MS),
        "relative": [f"{ratio:.3f}" for ratio in table["relative"]],
        "peak memory (GiB)": format_numbers(table["peak_memory"], GIB),
    }
    return "\n".join([*lines, "", align_columns(columns)])
