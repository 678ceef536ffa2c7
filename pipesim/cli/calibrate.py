"""The command that fits constants of a GPU to measured steps."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import fields
from typing import TYPE_CHECKING

from pipesim.calibration.calibration import Calibration
from pipesim.calibration.calibration_warnings import steps_text
from pipesim.cli.figures import write_accuracy
from pipesim.models.gpu import GPU
from pipesim.utils.files import write_whole
from pipesim.utils.text_tables import align_columns
from pipesim.utils.units import format_numbers

if TYPE_CHECKING:
    import pandas as pd


_MS = 1e-3
#: Rows with the largest errors that are printed.
_WORST = 5


def calibrate(args: argparse.Namespace) -> None:
    """Fit constants of a GPU to measured steps; print them, and the errors of predictions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fitted = GPU.fit(args.rows, gpu=args.gpu, network=args.network, constants=args.constants)
    write_accuracy(args.plot, fitted)
    if args.csv:
        write_whole(args.csv, lambda file: fitted.rows.to_csv(file, index=False))
    if args.json:
        fitted.save(args.json)
    place = f" in {args.network}" if args.network else ""
    steps = steps_text("steps", len(fitted.rows), fitted.rows["configuration"].nunique())
    print(
        f"{len(fitted.constants)} constants fitted to {steps}, from "
        f"{args.gpu}{place}\n\n{_constants(fitted.constants)}\n\n{_errors(fitted.errors)}\n\n"
        f"{_worst(fitted.rows)}"
    )
    texts = dict.fromkeys(str(warning.message) for warning in caught)
    print("".join(f"\nwarning: {text}" for text in texts), end="\n" if texts else "")
    print(f"\n{_statement(fitted, args.network)}")


def _constants(table: pd.DataFrame) -> str:
    """Return the table of constants as text."""
    determined = [
        "no" if not yes else note if note.startswith("weakly") else f"yes, {note}".rstrip(", ")
        for yes, note in zip(table["determined"], table["note"], strict=True)
    ]
    return align_columns(
        {
            "constant": [str(name) for name in table.index],
            "value": [f"{value:.4g}" for value in table["value"]],
            "start": [f"{value:.4g}" for value in table["start"]],
            "standard error": [f"{error:.1%}" for error in table["standard_error"]],
            "determined": determined,
        }
    )


def _errors(table: pd.DataFrame) -> str:
    """Return the table of errors as text."""
    columns = {str(name): [f"{error:.1%}" for error in table[name]] for name in table}
    return align_columns({"error of steps": [str(kind) for kind in table.index]} | columns)


def _worst(rows: pd.DataFrame) -> str:
    """Return the rows with the largest errors when left out, as text."""
    order = rows["error_left_out"].abs().sort_values(ascending=False, kind="stable").index
    worst = rows.loc[order[:_WORST]]
    return align_columns(
        {
            "worst steps": [str(label) for label in worst["label"]],
            "measured (ms)": format_numbers(worst["measured"], _MS),
            "predicted (ms)": format_numbers(worst["predicted"], _MS),
            "error": [f"{error:+.1%}" for error in worst["error"]],
            "left out": [f"{error:+.1%}" for error in worst["error_left_out"]],
        }
    )


def _statement(fitted: Calibration, network: str | None) -> str:
    """Return Python that makes the fitted GPU and network, and costs of them."""
    gpu = fitted.gpu
    values = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    texts = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in values.items()
    ]
    lines = [f"gpu = ps.GPU({', '.join(texts)})"]
    if network:
        share = f"efficiency={fitted.network_efficiency:.4g}"
        scaled = f".scaled(latency={fitted.network_latency:.4g})"
        scaled = scaled if fitted.network_latency != 1 else ""
        lines.append(
            f"network = ps.Network.preset({network!r}, {share}, gpus_per_device=1){scaled}"
        )
    argument = ", network=network" if network else ""
    lines.append(f"costs = model.costs(n_stages, microbatch_size=1, gpu=gpu{argument})")
    return "\n".join(lines)
