"""Plans in tables, texts and HTML: ranked, ruled out, and the front of time and memory."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.errors import check_count
from pipesim.planning.choice import (
    Evaluation,
    PlanChoice,
    layers_text,
    merged_text,
    offload_text,
    sharding_text,
    sizes_text,
)
from pipesim.planning.problem import PlanProblem, mean_peak
from pipesim.plot.html_tables import note_html, table_html
from pipesim.utils.texts import COLUMNS, align_columns, format_numbers, format_time

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.planning.plans import Plan, Plans


#: Columns of the settings of a configuration.
SETTINGS = tuple(field.name for field in fields(PlanChoice))
_GIB = 2.0**30


def ranked_table(problem: PlanProblem, rows: Sequence[Evaluation], *, noisy: bool) -> pd.DataFrame:
    """Return one row a ranked configuration; see `Plans.table`."""
    from pipesim.utils.packages import pandas as pd

    steps = np.array([row.step for row in rows])
    noisy_steps = np.array([row.noisy_step for row in rows])
    seconds = np.where(np.isnan(noisy_steps), steps, noisy_steps)
    bounds = np.array([row.bound for row in rows])
    columns: dict[str, Any] = {"step": steps}
    if noisy:
        columns["noisy_step"] = noisy_steps
    columns |= {end: np.array([getattr(row, end) for row in rows]) for end in ("low", "high")}
    columns["tokens_per_second"] = problem.step_tokens / seconds
    peak = mean_peak(problem.cluster) or math.nan
    n_gpus = np.array([row.choice.n_gpus for row in rows])
    columns["mfu"] = problem.step_flops / (seconds * n_gpus * peak)
    columns["bubble"] = [row.bubble for row in rows]
    columns["memory"] = [row.memory for row in rows]
    columns["room"] = [_room(problem, row) for row in rows]
    columns["gap"] = steps / bounds - 1
    columns |= _setting_columns(rows)
    columns["status"] = [row.status for row in rows]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(rows), name="rank"))


def _room(problem: PlanProblem, row: Evaluation) -> float:
    """Return the share of its limit that the fullest device has left; NaN for unlike limits."""
    least, *others = sorted({*problem.device_limits(row.choice)})
    return math.nan if others else 1 - row.memory / least


def ruled_out_table(rows: Sequence[Evaluation]) -> pd.DataFrame:
    """Return one row a configuration that is not ranked; see `Plans.ruled_out`."""
    from pipesim.utils.packages import pandas as pd

    columns: dict[str, Any] = {
        "status": [row.status for row in rows],
        "reason": [row.reason for row in rows],
        "bound": [row.bound for row in rows],
        "memory": [row.memory for row in rows],
    }
    return pd.DataFrame(columns | _setting_columns(rows))


def _setting_columns(rows: Sequence[Evaluation]) -> dict[str, list[Any]]:
    return {name: [getattr(row.choice, name) for row in rows] for name in SETTINGS}


def front_ranks(seconds: Sequence[float], memory: Sequence[float]) -> list[int]:
    """Return the configurations of which none is better in time or memory and no worse in both.

    They are positions in the sequences, by ascending seconds. NaN is on no front.
    """
    order = np.lexsort((memory, seconds))
    front, least = [], math.inf
    for row in order.tolist():
        if memory[row] < least and not math.isnan(seconds[row]):
            front.append(row)
            least = memory[row]
    return front


def shown_columns(table: pd.DataFrame, names: Sequence[str]) -> dict[str, list[str]]:
    """Return rows of a ranked table as text, with ``names`` of their configurations."""

    def shares(column: str) -> list[str]:
        return ["-" if value != value else f"{value:.1%}" for value in table[column]]

    columns = {"rank": [str(rank) for rank in table.index]}
    columns["step"] = list(map(format_time, table["step"]))
    if "noisy_step" in table:
        columns["noisy"] = list(map(format_time, table["noisy_step"]))
    if table["high"].notna().any():
        columns["low"], columns["high"] = (
            list(map(format_time, table[x])) for x in ("low", "high")
        )
    return {
        **columns,
        "tokens/s": ["-" if x != x else f"{x:.0f}" for x in table["tokens_per_second"]],
        "MFU": shares("mfu"),
        "bubble": shares("bubble"),
        "memory (GiB)": format_numbers(table["memory"], _GIB),
        "room": shares("room"),
        "gap": shares("gap"),
        "configuration": list(names),
    }


#: Rows of a table in a notebook.
_BEST = 5
#: Words for the number of configurations with each status.
_STATUSES = {
    "simulated": "simulated",
    "cannot win": "pruned by bounds",
    "does not fit": "do not fit in memory",
    "invalid": "invalid",
}


def short_names(choices: Sequence[PlanChoice]) -> list[str]:
    """Return short names of configurations; those that would be equal have more of the settings."""
    names = list(map(_short_name, choices))
    for detail in _DETAILS:
        shared = {name for name, count in Counter(names).items() if count > 1}
        names = [
            name + detail(choice) * (name in shared)
            for name, choice in zip(names, choices, strict=True)
        ]
    return names


def _short_name(choice: PlanChoice) -> str:
    """Return parallel sizes, chunks, micro-batch and recompute of a configuration, in short."""
    name = sizes_text(choice)
    name += f", {choice.n_chunks} chunks" if choice.n_chunks > 1 else ""
    name += ", for costs" * choice.ordered_for_costs
    name += f", b{choice.microbatch_size}" if choice.microbatch_size > 1 else ""
    name += f", {choice.n_slices} slices" if choice.n_slices > 1 else ""
    return name + (f", {choice.recompute}" if choice.recompute != "none" else "")


#: Further settings of short names, one after the other until names differ.
_DETAILS: tuple[Callable[[PlanChoice], str], ...] = (
    lambda choice: f", {choice.schedule}",
    merged_text,
    lambda choice: ", distributed optimizer" * choice.shard_optimizer,
    lambda choice: f", {sharding_text(choice)}" * choice.shards_parameters,
    lambda choice: f", {offload_text(choice)}" * (choice.offload != "none"),
    lambda choice: ", sequence parallel" * choice.sequence_parallel,
    lambda choice: f", {layers_text(choice.layers_per_stage)} layers",
)


def plans_line(plans: Plans) -> str:
    """Return the number of configurations by status, and the seconds of the search."""
    parts = [f"{plans.counts[key]:,} {text}" for key, text in _STATUSES.items()]
    count = len(plans.evaluations)
    ended = "" if plans.complete else ", interrupted"
    seconds = "" if plans.seconds != plans.seconds else f"; {format_time(plans.seconds)}{ended}"
    return f"{count:,} configurations: {', '.join(parts)}{seconds}"


def plans_text(plans: Plans, n_best: int) -> str:
    """Return the line, the notes and a table of the best; see `Plans.summary`."""
    check_count("n_best", n_best)
    lines = [plans_line(plans), *plans.notes]
    if len(plans):
        lines.append("")
        columns = _columns(plans, n_best)
        names = ["configuration", *columns.pop("configuration")]
        indent = " " * len("rank  ")
        wrap = textwrap.TextWrapper(COLUMNS, indent, indent, break_on_hyphens=False)
        for row, name in zip(align_columns(columns).splitlines(), names, strict=True):
            lines += [row, wrap.fill(name)]
    return "\n".join(lines)


def plans_html(plans: Plans) -> str:
    """Return the line, the notes and a table of the best as HTML."""
    notes = "".join(note_html(text) for text in (plans_line(plans), *plans.notes))
    if not len(plans):
        return notes
    columns = _columns(plans, _BEST)
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return notes + table_html(list(columns), rows)


def plan_html(plan: Plan) -> str:
    """Return one configuration as two tables: its results, if it was simulated, and its settings.

    Nothing is simulated. Without a simulation there is a note of the reason.
    """
    evaluation, problem = plan.evaluation, plan.problem
    sequences = f"{problem.global_batch:,} sequence{'s' * (problem.global_batch > 1)} a step"
    cluster = repr(problem.cluster)[1:-1]
    notes = [f"Plan {plan.choice}", f"{sequences}. {cluster:.200}."]
    results = ""
    if not math.isnan(evaluation.step):
        noisy = not math.isnan(evaluation.noisy_step)
        table = ranked_table(problem, [evaluation], noisy=noisy)
        columns = shown_columns(table, [plan.choice.schedule])
        columns = {"schedule": columns.pop("configuration"), **columns}
        del columns["rank"]
        results = table_html(list(columns), [[cells[0] for cells in columns.values()]])
    elif evaluation.reason:
        notes.append(f"{evaluation.status}: {evaluation.reason}")
    else:
        notes.append("Not simulated yet; plan.timeline simulates it.")
    settings = {name: _setting(getattr(plan.choice, name)) for name in SETTINGS}
    sizes = ", ".join(map(str, plan.choice.encoder_tensor_parallel))
    settings["encoder_tensor_parallel"] = sizes or "no encoder"
    rows = list(map(list, settings.items()))
    return "".join(map(note_html, notes)) + results + table_html(["setting", "value"], rows)


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return layers_text(value) if isinstance(value, tuple) else str(value)


def _columns(plans: Plans, n_best: int) -> dict[str, list[str]]:
    table = plans.table.head(n_best)
    return shown_columns(table, [str(plans.ranked[rank].choice) for rank in table.index])
