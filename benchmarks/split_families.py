"""Families of models, split in two and three stages, against the unsplit models.

Each family has a small model with random weights, mostly of the package transformers. Rows are of
a family and a type:

- float32;
- bfloat16: parameters and floating-point arguments are of this type;
- autocast: parameters of float32, and the step runs under ``torch.autocast("cpu", bfloat16)``.

`pipeexec.split` cuts the model, in training mode and with its dropout, and compares the stages with
it. One step of 1F1B with two micro-batches on CPU workers then gives a loss and gradients. They are
compared with those of the unsplit model for the same micro-batches. The step runs in training mode
if the model draws no random numbers in it. Otherwise, and if the split in training mode is refused,
it runs in evaluation mode.

A verdict is

- "equal", with the largest difference of the loss, relative to the loss, and of gradients, relative
  to the largest element of all gradients;
- "refused", with the message of an error of `pipesim.errors`;
- "SILENT", if the difference is larger than 1e-5, or than 0.03 in 16 bits;
- "BARE", for any other error;
- "the model fails", if the unsplit model does.

``python benchmarks/split_families.py`` prints the table and writes it. ``--only GPT-2 Llama`` runs
some families, and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _machine import ROOT, header, publish, table
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.nesting import leaves
from pipesim.errors import PipeError, StageError

sys.path.append(str(ROOT / "tests" / "helpers"))
from model_families import FAMILIES, Family

OUT = ROOT / "results" / "benchmarks" / "split_families.txt"
N_MICROBATCHES, N_SAMPLES = 2, 2
TYPES = ("float32", "bfloat16", "autocast")
VERDICTS = ("equal", "refused", "SILENT", "BARE", "the model fails")
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.03, "autocast": 0.03}


class Result(NamedTuple):
    """Loss and gradients of a step."""

    loss: Tensor
    gradients: dict[str, Tensor]


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """Return the loss that the model computes; of models without one, a function of all outputs."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss
    total = targets.mean()
    for index, (_, value) in enumerate(leaves(output)):
        if isinstance(value, Tensor) and value.is_floating_point():
            weights = torch.cos(torch.arange(value.numel() // len(value))).view(value.shape[1:])
            total = total + ((value.float() - 0.1 * index) ** 2 * (1 + 0.5 * weights)).mean()
    return total


def autocast(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a step of a type."""
    is_autocast = dtype == "autocast"
    return torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext()


def make(family: Family, dtype: str) -> tuple[nn.Module, torch.dtype]:
    """Return the model, and the type of its floating-point arguments."""
    number = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return family.make().to(number), number


def draws(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Return whether the model in its mode draws random numbers of torch."""
    state = torch.get_rng_state()
    with torch.no_grad():
        model(**batch)
    return not torch.equal(state, torch.get_rng_state())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model; zeros for parameters without one."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def whole_step(family: Family, dtype: str, training: bool) -> Result:
    """Return the result of the unsplit model."""
    model, number = make(family, dtype)
    model.train(training)
    batch = family.batch(N_SAMPLES * N_MICROBATCHES, number)
    losses = []
    for k in range(N_MICROBATCHES):
        part = slice(k * N_SAMPLES, (k + 1) * N_SAMPLES)
        targets = torch.zeros(N_SAMPLES)
        with autocast(dtype):
            loss = loss_fn(model(**{key: x[part] for key, x in batch.items()}), targets)
        (loss / N_MICROBATCHES).backward()
        losses.append(loss.detach())
    return Result(torch.stack(losses).float().mean(), gradients_of(model))


def split_step(stages: px.Stages, batch: dict[str, Tensor], dtype: str) -> Result:
    """Return the result of a step of the stages."""
    graph = ps.lower(ps.schedule("1f1b", len(stages), N_MICROBATCHES), tied=stages.tied_stages)
    devices = ["cpu"] * len(stages)
    targets = torch.zeros(N_SAMPLES * N_MICROBATCHES)
    pipeline = px.Pipeline(stages, graph, devices, loss_fn, pin_threads=False)
    with pipeline, autocast(dtype):
        result = pipeline.step(batch, targets)
    return Result(result.loss, gradients_of(stages.model))


def difference(observed: Result, expected: Result) -> float:
    """Return the largest relative difference; infinite if one has values that are not finite."""
    rows = [(observed.gradients[k], x) for k, x in expected.gradients.items()]
    if not all(x.isfinite().all() for row in rows for x in row) or not expected.loss.isfinite():
        return float("inf")
    largest = max(float(x.float().abs().max()) for _, x in rows)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in rows)
    loss = float((observed.loss.float() - expected.loss).abs() / expected.loss.abs())
    return max(loss, worst / largest)


def described(error: Exception) -> str:
    """Return the verdict on an error; that of a stage is judged by its cause."""
    cause: BaseException = error
    while isinstance(cause, StageError) and cause.__cause__ is not None:
        cause = cause.__cause__
    line = (str(cause).strip().splitlines() or [""])[0]
    if isinstance(cause, PipeError):
        return f"refused: {line}"
    return f"BARE: {type(cause).__name__}: {line:.200}"


def split(family: Family, dtype: str, n: int) -> tuple[px.Stages, str]:
    """Return the stages, and the message if the split is refused in training mode."""
    model, number = make(family, dtype)
    sample = family.batch(N_SAMPLES, number)
    try:
        return px.split(model, n, sample=sample), ""
    except PipeError as error:
        message = str(error)
    return px.split(model.eval(), n, sample=sample), message


def verdict(
    family: Family, dtype: str, n: int, whole: Callable[[bool], Result]
) -> tuple[str, str, str]:
    """Return the mode of the step, the verdict, and a remark.

    ``whole`` returns the result of the unsplit model in training or evaluation mode.
    """
    mode, message = "", ""
    try:
        whole(False)
    except Exception as error:
        return mode, "the model fails", f"{type(error).__name__}: {error!s:.80}"
    try:
        stages, message = split(family, dtype, n)
        model, number = make(family, dtype)
        is_random = draws(model, family.batch(N_SAMPLES, number))
        training = not (is_random or message)
        mode = "training" if training else "evaluation"
        for module in (stages.model, *stages):
            module.train(training)
        batch = family.batch(N_SAMPLES * N_MICROBATCHES, number)
        observed = split_step(stages, batch, dtype)
    except Exception as error:
        return mode, described(error), f"in training mode: {message}" if message else ""
    remarks = [f"in training mode: {message}"] if message else []
    remarks += [f"no check by the split in {k} mode: {x}" for k, x in stages.not_checked.items()]
    worst = difference(observed, whole(training))
    kind = "equal" if worst <= TOLERANCES[dtype] else "SILENT:"
    return mode, f"{kind} {worst:.0e}", "; ".join(remarks)


def rows(name: str) -> list[list[str]]:
    """Return a row for each type of a family."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    family, result = FAMILIES[name], []
    for dtype in TYPES:
        whole = cache(partial(whole_step, family, dtype))
        first, second = (verdict(family, dtype, n, whole) for n in (2, 3))
        remarks = dict.fromkeys(filter(None, (family.remark, first[2], second[2])))
        row = [family.kind, name, dtype, first[0], first[1], second[1], "; ".join(remarks)]
        print(" | ".join(row), file=sys.stderr, flush=True)
        result.append(row)
    return result


def _with_number(cell: str, reasons: dict[str, int]) -> str:
    """Return a verdict with the number of its reason, which stands below the table."""
    kind, colon, reason = cell.partition(": ")
    return f"{kind} ({reasons.setdefault(reason, len(reasons) + 1)})" if colon else cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="*", metavar="FAMILY", choices=list(FAMILIES))
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        table_rows = [row for part in pool.map(rows, options.only or FAMILIES) for row in part]
    counts = Counter(cell.split()[0].strip(":") for row in table_rows for cell in row[4:6])
    counts["the model fails"] = counts.pop("the", 0)
    reasons: dict[str, int] = {}
    for row in table_rows:
        row[4:6] = [_with_number(cell, reasons) for cell in row[4:6]]
    columns = ("kind", "family", "type", "mode", "2 stages", "3 stages", "remark")
    lines = [
        *header(["torch", "transformers"]),
        "equal: largest difference of the loss and of gradients, relative",
        f"{len({row[1] for row in table_rows})} families; splits: "
        + ", ".join(f"{counts[x]} {x}" for x in VERDICTS),
        "",
        *table(columns, table_rows, n_left=len(columns)),
        "",
        *(f"({number}) {reason}" for reason, number in reasons.items()),
    ]
    publish(lines, None if options.only else options.out)


if __name__ == "__main__":
    main()
