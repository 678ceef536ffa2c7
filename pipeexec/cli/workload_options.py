"""The options of a run: its workload, its number of steps, its directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipesim.utils.texts import parse_float, parse_int


def words(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _some_words(text: str) -> list[str]:
    """Return the words between commas, at least one; for argparse."""
    if parts := words(text):
        return parts
    raise argparse.ArgumentTypeError(f"names nothing: {text!r}")


def integer(text: str) -> int:
    """Read a whole number in the digits 0 to 9; for argparse."""
    number = parse_int(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return number


def real(text: str) -> float:
    """Read a number; for argparse."""
    number = parse_float(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}")
    return number


def _counts(text: str) -> list[int]:
    counts = [parse_int(word) for word in _some_words(text)]
    if None in counts:
        raise argparse.ArgumentTypeError(f"not whole numbers: {text!r}")
    return [count for count in counts if count is not None]


def add_workload(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    what: str,
    name: str,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    recompute: Sequence[str] = ("never", "always"),
) -> None:
    """Add the options of a run: its workload, its number of steps, its directory.

    Longer than most functions: it is a list of options.

    Parameters
    ----------
    steps, what
        Default number of steps, and what they are called in the help.
    name
        Default name of the run directory.
    schedules, recompute
        Default schedules and recompute modes.
    """
    add = parser.add_argument
    add("--model", default="gpt", help="gpt or convnet (default: gpt)")
    add(
        "--stages",
        type=integer,
        help="number of devices of a replica, each of which has one stage, or the chunks of a "
        "looped or V-shaped schedule (default: 2, or as --balance or a file has)",
    )
    add("--balance", type=_counts, help="layers of each stage, such as 4,6 (default: even work)")
    add("--microbatches", type=integer, help="of a step (default: 8, or as a file has)")
    add("--batch", type=integer, help="samples of a step of each replica (default: depends on the "
        "model)")  # fmt: skip
    add("--replicas", type=integer, default=1, help="data-parallel replicas of the pipeline, each "
        "on devices of its own (default: 1)")  # fmt: skip
    add("--grad-sync", type=words, default=["last"], help="when replicas sum their gradients "
        "(default: last; of last,every,bucketed, or a number of micro-batches; every/2/last: "
        "one a stage)")  # fmt: skip
    add("--n-buckets", type=integer, default=4, help="of a stage, with bucketed (default: 4)")
    add("--schedules", type=words, default=list(schedules), help="names or files, all with the "
        f"same stages on the same devices (default: {','.join(schedules)})")  # fmt: skip
    add("--recompute", type=words, default=list(recompute), help=f"modes (default: "
        f"{','.join(recompute)}; of never,always,except_last)")  # fmt: skip
    add("--devices", type=_some_words, help="devices to run on, one name each; under torchrun, "
        "those of each process, where cuda is its own GPU (default: cpu for each)")  # fmt: skip
    add("--slices", type=integer, help="cut the GPU that --devices names into so many devices")
    add("--cuda-graph", action="store_true", help="capture each step once, and replay it")
    add("--timeout", type=real, default=60.0, help="seconds without any progress after which a "
        "step is given up (default: 60)")  # fmt: skip
    add(
        "--no-overlap",
        action="store_true",
        help="transfers on the compute stream; over "
        "processes only for orders that survive rendezvous, such as GPipe's",
    )
    add("--steps", type=integer, default=steps, help=f"{what} (default: {steps})")
    add("--warm-up", type=integer, default=2, help="steps before them (default: 2)")
    add("--learning-rate", type=real, default=3e-4, help="of AdamW (default: 3e-4)")
    add("--seed", type=integer, default=0, help="of weights and data (default: 0)")
    add("--name", default=name, help=f"of the run directory (default: {name})")
    add("--results", type=Path, default=Path("results"), help="its parent (default: results)")
    model = parser.add_argument_group("sizes of the model")
    for option in ("layers", "width", "heads", "sequence", "image-size", "classes"):
        model.add_argument(f"--{option}", type=integer)
    model.add_argument("--dropout", type=real)
    model.add_argument("--text", type=Path, help="train on this file, not on Python's library")
