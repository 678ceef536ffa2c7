"""Reports of validations, training steps and profiles: tables as text, in ms and MiB."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.analysis.error_attribution import PARTS

if TYPE_CHECKING:
    import pandas as pd

    from pipeexec.cli.measured_steps import MeasuredSteps
    from pipeexec.profiling.profile import Profile
    from pipeexec.validation.result import Validation


def report(validation: Validation, *, details: bool = False) -> str:
    """Return the report of a validation: an error a row, costs; with ``details`` its parts, too."""
    parts = [_table_text(validation.table, details=details)]
    differences = validation.differences
    clear = differences[differences["beyond_noise"]]
    if len(clear):
        parts.append(
            f"order of rows: {int(clear['right'].sum())} of {len(clear)} differences beyond noise "
            "predicted with the right sign"
        )
    meaning = "error: predicted over measured makespan, minus 1 (median of the steps"
    if details:
        counts = {len(row.predictions) for row in validation.rows.values()} - {0}
        sample = f"{max(counts)} repeats" if counts else (
            "the steps of one calibration (--repeat tells how calibrations vary)"
        )  # fmt: skip
        parts.append(
            f"{meaning}; worst of any step)\nreplay: the same for each step simulated from its own "
            "durations\nmean (95 %): mean error and its confidence interval, by Student's t over "
            f"{sample}"
        )
        parts += _parts_text(validation.parts)
        parts += _ops_text(validation.ops)
    else:
        parts.append(f"{meaning}); pipeexec show DIRECTORY --details has its intervals and parts")
    if validation.profile is not None:
        parts.append(_costs_text(validation.profile))
        parts += _fits_text(validation.profile.fits.query("source < 0"))
    return "\n\n".join(parts)


def steps_report(steps: MeasuredSteps) -> str:
    """Return the report of training steps: makespans, and errors of their prediction."""
    makespans = np.array(steps.makespans) * 1e3
    low, middle, high = np.quantile(makespans, (0.1, 0.5, 0.9))
    lines = [
        f"{len(makespans)} steps: makespan {middle:.1f} ms (median; {low:.1f} to {high:.1f} ms "
        f"without the outer tenths), bubble {steps.measured.bubble_fraction:.1%}, "
        f"loss {steps.losses[0]:.4f} to {steps.losses[-1]:.4f}"
    ]
    if steps.predicted is not None:
        errors = np.array(steps.errors)
        lines.append(
            f"predicted {steps.predicted.makespan * 1e3:.1f} ms: error {np.median(errors):+.1%} "
            f"(median), {errors[np.abs(errors).argmax()]:+.1%} (worst step)"
        )
    for rank, clock in enumerate(steps.clocks[1:], start=1):
        lines.append(
            f"clock of rank {rank}: {clock['offset'] * 1e6:+.0f} us from rank 0's, drift "
            f"{clock['drift'] * 1e6:+.2f} us/s, residual {clock['residual'] * 1e6:.0f} us, round "
            f"trip {clock['round_trip'] * 1e6:.0f} us"
        )
    return "\n".join(lines)


def profile_report(profile: Profile) -> str:
    """Return the report of a profile: costs, and the fit of each pair of devices."""
    return "\n\n".join([_costs_text(profile), *_fits_text(profile.fits)])


def _parts_text(parts: pd.DataFrame) -> list[str]:
    """Return the parts of each error, in percent of the measured makespan."""
    if parts.empty:
        return []
    shares = parts[["error", *PARTS]].div(parts["measured"], axis=0)
    text = shares.map("{:+.1%}".format).rename_axis(None).to_string()
    return [
        "what the error consists of (mean over the steps, of the measured makespan; above 0: the "
        f"prediction was longer)\n{text}\n"
        "durations: an operation's mean in its stage; spread: single tasks around that mean; "
        "transfers: messages, until used;\nhost: when tasks were issued; hand_over: between "
        "streams; unexplained: the rest"
    ]


def _ops_text(ops: pd.DataFrame) -> list[str]:
    """Return the error of each operation and stage, a column a graph."""
    if ops.empty:
        return []
    half = (ops["high"] - ops["low"]) / 2
    cells = ops["error"].map("{:+.1%}".format)
    for row, (error, own) in enumerate(zip(ops["error"], half, strict=True)):
        if not math.isnan(own):
            decimals = _decimals(own)
            cells.iloc[row] = f"{error:+.{decimals}%} ±{own:.{decimals}%}"
    table = cells.unstack("graph", sort=False).fillna("")
    names = [name for name in ops.index.unique("graph") if name in table]
    text = table[names].rename_axis(columns=None).to_string()
    return [
        "error of each operation and stage: predicted over measured mean seconds, minus 1, and "
        f"its 95 % interval\n(SEND: until used)\n{text}"
    ]


def _costs_text(profile: Profile) -> str:
    table = profile.table
    lines = table.assign(**{c: table[c] * 1e3 for c in ("loaded", "isolated")})
    return (
        "costs (ms; loaded: all stages running, isolated: one at a time)\n"
        + lines.round(3).to_string()
        + _host_text(profile)
    )


def _host_text(profile: Profile) -> str:
    """Return the host's seconds to issue a task, if they were measured."""
    if math.isnan(profile.host_share) or not isinstance(profile.costs.launch, float):
        return ""
    return (
        f"\nhost: {profile.costs.launch * 1e6:.1f} us a task (launch), which is "
        f"{profile.launch_share:.0%} of a loaded step; with the time in which full queues of GPUs "
        f"blocked it {profile.host_share:.0%}"
    )


def _fits_text(fits: pd.DataFrame) -> list[str]:
    """Return latency and bandwidth of messages."""
    if fits.empty:
        return []
    from pipesim.utils.packages import pandas as pd

    pairs = [
        "all pairs" if source < 0 else f"{source} to {target}" for source, target, _ in fits.index
    ]
    columns = {
        "devices": pairs,
        "state": fits.index.get_level_values("state"),
        "latency us": [f"{s * 1e6:.1f}" for s in fits["latency"]],
        "GB/s": ["inf" if math.isinf(b) else f"{b / 1e9:.2f}" for b in fits["bandwidth"]],
        "off by": [f"{x:.0%}" for x in fits["residual"]],
        "R2": [f"{x:.3f}" for x in fits["r2"]],
    }
    return [
        "messages by size, fitted as latency + bytes / bandwidth (off by: mean relative "
        "deviation of the sizes)\n" + pd.DataFrame(columns).to_string(index=False)
    ]


def _table_text(table: pd.DataFrame, *, details: bool) -> str:
    """Return the table of a validation, in ms and MiB; with ``details``, with all of its errors."""
    from pipesim.utils.packages import pandas as pd

    mib = 1 << 20
    columns: dict[str, Any] = {
        "predicted ms": table["predicted"].map(lambda s: f"{s * 1e3:.1f}"),
        "measured ms": table["measured"].map(lambda s: f"{s * 1e3:.1f}"),
        "error": table["error"].map("{:+.1%}".format),
    }
    if details:
        columns |= {name: table[name].map("{:+.1%}".format) for name in ("worst", "replay")}
        intervals = table[["error_mean", "error_low", "error_high"]].to_numpy().tolist()
        columns["mean (95 %)"] = [_interval_text(*row) for row in intervals]
    columns |= {
        "bubble pred.": table["bubble_predicted"].map("{:.1%}".format),
        "bubble meas.": table["bubble_measured"].map("{:.1%}".format),
        "memory pred. MiB": table["memory_predicted"].map(lambda b: f"{b / mib:.1f}"),
        "memory meas. MiB": table["memory_measured"].map(lambda b: f"{b / mib:.1f}"),
    }
    return str(pd.DataFrame(columns).rename_axis(None).to_string())


def _interval_text(mean: float, low: float, high: float) -> str:
    if math.isnan(low):
        return f"{mean:+.1%}"
    decimals = _decimals((high - low) / 2)
    return f"{mean:+.{decimals}%} ({low:+.{decimals}%} to {high:+.{decimals}%})"


def _decimals(half_width: float) -> int:
    """Return the decimals of a percentage that its interval leaves: none at 5 % or more."""
    return 0 if half_width >= 0.05 else 1
