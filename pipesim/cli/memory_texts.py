"""Lines that the command prints of memory limits, tokens a second and MFU."""

from __future__ import annotations

from pipesim.analysis.compare import known_results
from pipesim.cli.tables import GIB, align_columns, format_numbers
from pipesim.timeline.memory_limit import excess_text, excesses
from pipesim.timeline.timeline import Timeline

__all__ = ["memory_changes_text", "result_lines"]

_MS = 1e-3
_FITS = {True: "fits", False: "does not fit", None: "unknown whether it fits: costs have no bytes"}


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
