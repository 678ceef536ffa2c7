"""Predicted times of published training steps: presets alone, and constants fitted to a few rows.

- **Presets**: `pipesim.GPU.preset` and `pipesim.Network.preset` at 0.7 of nominal bandwidths, no
  constant fitted. The efficiencies of A100 and B200 rest on the sets Selene and B200 themselves
  (see `pipesim.gpus`); those of vTrain and of zero bubble were not used. Rates of fused attention
  and latencies of B200 rest on published kernels.
- **A fifth of the rows**: `pipesim.GPU.fit` on each of five disjoint fifths, drawn with seed 0, and
  errors on the other four fifths. Sets of few rows are fitted to all rows but those of one model,
  and to all rows but one, too.
- **Five rows**: `pipesim.GPU.fit` on five rows of sets of `_published_runs`, with the framework and
  drawn with seed 0; errors on the set's other rows before and after it.
- **Ablation**: the same by one of the fifths, with one term of the costs removed and constants
  fitted again.
- **Frameworks**: sets of `_published_runs`, from data sheets with the framework that they ran on,
  in the best case, and with one attribute at a time as in the best case. Quotients of measured
  over predicted seconds are written to ``pipesim/analysis/published_quotients.json``, those of
  dense models in 16 bits, and apart those with experts; `Timeline.interval` takes its ends from
  them. Coverage is the share of a set's rows in the interval of 80 % that the rows of other sets
  give. Steps with experts are listed with what they are made of.
- **Regret**: how much longer the step takes that is predicted to be the fastest of its group,
  relative to the fastest that was measured; groups of at least four rows.

Errors are predicted over measured, minus 1. The rows in this repository are a part of those that
the sources published; the terms were built with these rows at hand, so that errors on other rows
may be larger.

``python benchmarks/published_steps.py`` prints the tables and writes them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from _machine import ROOT, publish, table
from _published_runs import best_case, published_runs, with_framework
from _published_steps import PublishedSteps, fifths, fit_set, published_steps
from numpy.typing import NDArray

import pipesim as ps
from pipesim.calibration.measured_steps import StepPrediction
from pipesim.errors import CalibrationWarning

Floats = NDArray[np.float64]
#: Measured over predicted seconds by framework and family of GPUs.
QUOTIENTS = ROOT / "pipesim" / "analysis" / "published_quotients.json"
#: Least rows of a group that counts for the regret; rows below which sets have other folds too.
_LEAST, _FEW = 4, 10
#: Rows of a small fit, draws of them, and least rows of a set for it.
_SMALL, _DRAWS, _SPARE = 5, 5, 20
#: A rate so high that what it prices takes no time.
_FREE = 1e30


def accuracy(predicted: Floats, measured: Floats) -> list[str]:
    """Return mean, median and worst error, their mean with sign, and the rank correlation."""
    errors = predicted / measured - 1
    sizes = np.abs(errors)
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, measured)]
    return [
        f"{sizes.mean():.1%}",
        f"{np.median(sizes):.1%}",
        f"{sizes.max():.1%}",
        f"{errors.mean():+.1%}",
        f"{np.corrcoef(ranks)[0, 1]:.3f}",
    ]


_ACCURACY = ["mean", "median", "worst", "signed", "rank corr."]


def regret(predicted: Floats, steps: PublishedSteps) -> str:
    """Return mean regret, the share of groups whose best was found, and that of a random choice."""
    groups = defaultdict(list)
    for row, group in enumerate(steps.groups):
        groups[group].append(row)
    chosen, random = [], []
    for rows in groups.values():
        if len(rows) >= _LEAST:
            seconds = steps.seconds[rows] / steps.seconds[rows].min() - 1
            chosen.append(seconds[np.argmin(predicted[rows])])
            random.append(seconds.mean())
    if not chosen:
        return "-"
    hits = np.mean(np.array(chosen) == 0)
    return f"{np.mean(chosen):.1%}, {hits:.0%} of {len(chosen)}; random {np.mean(random):.0%}"


def presets(steps: PublishedSteps) -> Floats:
    """Return predictions from data sheets."""
    return steps.predicted(ps.GPU.preset(steps.gpu), steps.network)


def preset_lines(sets: Sequence[PublishedSteps]) -> list[str]:
    """Return the table of errors with presets alone."""
    body = []
    for steps in sets:
        predicted = presets(steps)
        body.append([
            steps.name, str(len(steps.rows)), *accuracy(predicted, steps.seconds),
            regret(predicted, steps), steps.published,
        ])  # fmt: skip
    first = sets[0]
    predicted = one_rate(first)
    body.append([
        f"{first.name}, one rate", str(len(first.rows)), *accuracy(predicted, first.seconds),
        regret(predicted, first), "",
    ])  # fmt: skip
    head = ["set", "rows", *_ACCURACY, "regret, best found", "published"]
    return [
        "Presets alone, nothing fitted. One rate: costs(flops_per_second=...), the rate fitted:",
        *table(head, body, 1),
    ]


def one_rate(steps: PublishedSteps) -> Floats:
    """Return predictions by one FLOP/s for all kernels, with the median error 0."""
    seconds = np.array([
        ps.simulate(step.graph, step.model.costs(
            step.layers_per_stage, flops_per_second=1e14,
            network=steps.network.grouped(step.gpus_per_device), **step.options,
        )).makespan
        for step in steps.steps
    ])  # fmt: skip
    factor: Floats = seconds * np.median(steps.seconds / seconds)
    return factor


def held_out(
    steps: PublishedSteps, folds: Sequence[Sequence[int]], *, test_on_fold: bool, **fit: Any
) -> tuple[Floats, Floats]:
    """Return predictions of all rows by each fold's constants, and which rows were not fitted.

    Parameters
    ----------
    steps
        The set.
    folds
        Rows of each fold.
    test_on_fold
        Whether each fold is predicted from all other rows, or all other rows from it.
    **fit
        Arguments of `pipesim.GPU.fit`, instead of the set's.

    Returns
    -------
    tuple
        Predicted seconds, shape ``(n_folds, n_rows)``; and the same, NaN for rows that were fitted.
    """
    predicted = np.empty((len(folds), len(steps.rows)))
    unseen = np.full_like(predicted, np.nan)
    for number, fold in enumerate(folds):
        others = [row for row in range(len(steps.rows)) if row not in set(fold)]
        train, test = (others, fold) if test_on_fold else (fold, others)
        fitted = fit_set(steps.some(train), **fit)
        predicted[number] = steps.predicted_with(fitted)
        unseen[number, test] = predicted[number, test]
    return predicted, unseen


def by_group(steps: PublishedSteps) -> list[list[int]]:
    """Return the rows of each group."""
    names = dict.fromkeys(steps.groups)
    return [[k for k, group in enumerate(steps.groups) if group == name] for name in names]


def fold_errors(unseen: Floats, steps: PublishedSteps) -> list[str]:
    """Return errors over the rows of all folds that were not fitted."""
    fold, row = np.nonzero(~np.isnan(unseen))
    return accuracy(unseen[fold, row], steps.seconds[row])


def fitted_lines(sets: Sequence[PublishedSteps]) -> list[str]:
    """Return the errors of rows that were not fitted, and the regret by each fold's constants."""
    body, choices = [], ["Regret by constants of each fifth:"]
    for steps in sets:
        constants = ", ".join(steps.constants)
        predicted, unseen = held_out(steps, fifths(len(steps.rows)), test_on_fold=False)
        errors = fold_errors(unseen, steps)
        body.append([steps.name, "a fifth", constants, *errors, steps.published])
        if len(steps.rows) < _FEW:
            _, unseen = held_out(steps, by_group(steps), test_on_fold=True)
            errors = fold_errors(unseen, steps)
            body.append([steps.name, "all but a model", constants, *errors, steps.published])
            _, unseen = held_out(
                steps, [[row] for row in range(len(steps.rows))], test_on_fold=True
            )
            errors = fold_errors(unseen, steps)
            body.append([steps.name, "all but a row", constants, *errors, steps.published])
        else:
            choices += [f"  {steps.name}: {regret(seconds, steps)}" for seconds in predicted]
    head = ["set", "fitted to", "constants", *_ACCURACY, "published"]
    return ["Errors of the rows that were not fitted:", *table(head, body, 3), "", *choices]


def few_rows_lines(sets: Sequence[PublishedSteps]) -> list[str]:
    """Return mean errors of other rows, from data sheets and with constants of five rows."""
    body = []
    for steps in sets:
        n_rows, draws = len(steps.rows), np.random.default_rng(0)
        if n_rows < _SPARE:
            continue
        folds = [draws.permutation(n_rows)[:_SMALL].tolist() for _ in range(_DRAWS)]
        _, unseen = held_out(steps, folds, test_on_fold=False, constants=None)
        sheet = np.where(np.isnan(unseen), np.nan, presets(steps))
        before, after = (
            np.nanmean(np.abs(predicted / steps.seconds - 1), axis=1)
            for predicted in (sheet, unseen)
        )
        body.append([steps.name, f"{before.mean():.1%}", f"{after.mean():.1%}",
                     f"{100 * (after - before).max():+.1f}"])  # fmt: skip
    head = ["set", "data sheet", "five rows", "worst change, points"]
    return [f"Errors of the other rows of a set, means of {_DRAWS} draws of {_SMALL} rows:",
            *table(head, body, 1)]  # fmt: skip


def ablation_lines(steps: PublishedSteps) -> list[str]:
    """Return errors of rows that one fifth does not have, with one term removed at a time."""
    gpu = ps.GPU.preset(steps.gpu)
    nodes = steps.network.nodes
    assert nodes is not None
    free = replace(nodes, port_bandwidth=_FREE, port_latency=0.0, collectives=None)
    terms: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "all terms": ({}, ()),
        "launches": ({"gpu": replace(gpu, launch=0.0)}, ("launch",)),
        "bytes of kernels": ({"gpu": replace(gpu, bandwidth=_FREE)}, ("bandwidth",)),
        "overhead of kernels": ({"gpu": replace(gpu, overhead=0.0)}, ("overhead",)),
        "depth of products": ({"gpu": replace(gpu, half_depth=0.0)}, ("half_depth",)),
        "waves of tiles": ({"gpu": replace(gpu, multiprocessors=0)}, ()),
        "synchronization": ({}, ("synchronization",)),
        "rates inside a node": (
            {"network": replace(steps.network, nodes=free)},
            ("network_latency", "network_efficiency"),
        ),
    }  # fmt: skip
    body = []
    for name, (changes, removed) in terms.items():
        left = tuple(name for name in steps.constants if name not in removed)
        _, unseen = held_out(
            steps, fifths(len(steps.rows))[:1], test_on_fold=False, constants=left,
            **{"gpu": gpu, **changes},
        )  # fmt: skip
        body.append([name, *fold_errors(unseen, steps)])
    head = ["without", *_ACCURACY]
    return [f"{steps.name}, terms removed one by one, and constants fitted again:",
            *table(head, body, 1)]  # fmt: skip


def framework_lines(sets: Sequence[PublishedSteps]) -> tuple[list[str], dict[str, Any]]:
    """Return tables of errors by framework and attribute; and the quotients of `QUOTIENTS`."""
    errors, terms = [], []
    by_kind: dict[str, Any] = {
        kind: defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
        for kind in ("dense", "experts")
    }
    ratios = []
    for steps in sets:
        framework, family = steps.rows[0]["framework"], steps.gpu.partition("_")[0]
        kinds = {"": best_case(steps), framework.name: steps}
        has_experts = steps.name.startswith("Experts")
        kept = [has_experts or row.get("precision", "bf16") == "bf16" for row in steps.rows]
        by_name = by_kind["experts" if has_experts else "dense"]
        for name, own in kinds.items():
            predicted = presets(own)
            quotients = steps.seconds / predicted
            by_name[name][family] += quotients[kept].tolist()
            errors.append([steps.name if not name else "", str(len(steps.rows)), family,
                           name or "best case", *accuracy(predicted, steps.seconds),
                           regret(predicted, steps)])  # fmt: skip
        ratios.append(quotients)
        terms += term_rows(steps, errors[-1][4])
    for number, own in enumerate(ratios):
        others = np.concatenate(ratios[:number] + ratios[number + 1 :])
        low, high = np.quantile(others, [0.1, 0.9])
        inside = np.mean((low <= own) & (own <= high))
        errors[2 * number + 1].append(f"{inside:.0%} in {low:.2f} to {high:.2f}")
        errors[2 * number].append("")
    every = np.concatenate(ratios)
    low, high = np.quantile(every, [0.1, 0.9])
    head = ["set", "rows", "GPU", "framework", *_ACCURACY, "regret, best found", "coverage"]
    return [
        "With the framework, and in its best case; nothing fitted:",
        *table(head, errors, 4),
        "",
        f"All {len(every)} rows: mean {np.abs(1 / every - 1).mean():.1%}, signed "
        f"{(1 / every - 1).mean():+.1%}; 80 % took {low:.2f} to {high:.2f} times as long.",
        "",
        "One attribute of the framework as in the best case, mean error (signed):",
        *table(["set", "attribute", "mean", "signed"], terms, 2),
    ], {
        kind: {
            name: own
            for name, families in by_name.items()
            if (own := {k: sorted(np.round(v, 3).tolist()) for k, v in families.items() if v})
        }
        for kind, by_name in by_kind.items()
    }


def term_rows(steps: PublishedSteps, mean: str) -> list[list[str]]:
    """Return a row for each attribute of a set's framework that differs from the best case."""
    framework = steps.rows[0]["framework"]
    rows = [[steps.name, "none", mean, ""]]
    for attribute in framework.to_dict():
        if attribute not in ("name", "schedules", "source"):
            changed = with_framework(steps, **{attribute: getattr(ps.Framework(), attribute)})
            mean, _, _, signed, _ = accuracy(presets(changed), steps.seconds)
            rows.append(["", attribute, mean, signed])
    return rows


#: Kinds of kernels, by a pattern of their names; of others, products and kernels of memory.
_KINDS = {
    "attention": "attention|scores|context",
    "experts": "experts (up|down)",
    "copies of tokens": "permutation|expert sort|experts padding",
}


def part_lines(sets: Sequence[PublishedSteps]) -> list[str]:
    """Return of what predicted steps with experts are made, on the mean device of the pipeline.

    The rest is the pipeline's idle time, messages, the optimizer and exchanges between replicas.
    """
    body = []
    for steps in sets:
        if not steps.name.startswith("Experts"):
            continue
        for step, row, seconds in zip(steps.steps, steps.rows, presets(steps), strict=True):
            parts = _parts(step, steps)
            parts["rest"] = seconds - sum(parts.values())
            body.append([
                f"{steps.name}: {row['label']}, {row['precision']}", f"{row['seconds']:.2f}",
                f"{seconds:.2f}", f"{seconds / row['seconds'] - 1:+.1%}",
                *(f"{x:.2f}" for x in parts.values()),
            ])  # fmt: skip
    head = ["step", "measured", "predicted", "error", *_KINDS, "products", "memory", "exchange"]
    return ["Steps with experts by their parts (s):", *table([*head, "rest"], body, 1)]


def _parts(step: StepPrediction, steps: PublishedSteps) -> dict[str, float]:
    """Return the seconds of kernels of each kind, and of exchanges of tokens, of a mean device."""
    own = {field.name for field in fields(ps.Parallel)}
    settings = {k: v for k, v in step.options.items() if k in own}
    kernels = step.model.kernels(ps.GPU.preset(steps.gpu), **settings)
    model, graph = step.model, step.graph
    batches = graph.n_microbatches * graph.n_replicas / graph.n_devices
    experts = model.n_expert_layers + model.mtp_layers
    number = {"expert layer": experts, "layer": model.n_layers - model.n_expert_layers}
    number |= {"head": 1 + model.mtp_layers, "mtp": model.mtp_layers}
    seconds = kernels["seconds"] * batches * kernels["part"].map(number).fillna(1)
    parts, left = {}, np.ones(len(kernels), dtype=bool)
    for kind, pattern in _KINDS.items():
        chosen = left & kernels["kernel"].str.contains(pattern).to_numpy()
        parts[kind] = float(seconds[chosen].sum())
        left &= ~chosen
    is_product = (kernels["flops"] > 0).to_numpy()
    parts["products"] = float(seconds[left & is_product].sum())
    parts["memory"] = float(seconds[left & ~is_product].sum())
    costs = model.costs(
        step.layers_per_stage, gpu=steps.gpu,
        network=steps.network.grouped(step.gpus_per_device), **step.options,
    )  # fmt: skip
    pair = sum(
        costs.per_stage(f"exchange_{x}", graph.n_stages)[-1] for x in ("dispatch", "combine")
    )
    parts["exchange"] = 2 * float(pair) * experts * batches
    return parts


def main() -> None:
    """Print the tables and write them to ``results/benchmarks/published_steps.txt``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="presets alone; nothing is written")
    options = parser.parse_args()
    sets = published_steps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # a fifth may not determine a constant
        lines = preset_lines(sets)
        if options.quick:
            print("\n".join(lines))
            return
        runs = published_runs()
        tables, quotients = framework_lines(runs)
        QUOTIENTS.write_text(json.dumps(quotients, separators=(",", ":")) + "\n")
        lines += [
            "",
            *tables,
            "",
            *part_lines(runs),
            "",
            *fitted_lines(sets),
            "",
            *few_rows_lines(runs),
            "",
            *ablation_lines(sets[0]),
        ]
    folder = ROOT / "results" / "benchmarks"
    publish(["# python benchmarks/published_steps.py", "", *lines], folder / "published_steps.txt")


if __name__ == "__main__":
    main()
