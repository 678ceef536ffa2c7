"""Orders of `optimize` against named schedules, the lower bound, and a long run of CP-SAT.

40 random cases: 3 to 8 devices, 6 to 32 micro-batches, whole seconds that are the same for all
stages or uneven, a limit of activations, F and B or F, I and W; linear placements, and some looped
and V-shaped ones. Then linear pipelines of 16, 32 and 64 devices, and many micro-batches.

- "named": the best named schedule that keeps the limit, built with and without the costs.
- "optimize": the order after ``--seconds`` seconds; "bound": what it proves no order goes below.
- "CP-SAT": the least makespan that CP-SAT finds from that order in ``--reference`` seconds, and
  "its bound"; only for the 40 cases.
- "over": "optimize" over the best order known; "gap": over the larger bound.

Each order passes `verify`, takes the same time in both engines and keeps its limit, or the run
stops.

``python benchmarks/optimal_orders.py`` writes results/benchmarks/optimal_orders.txt. With
``--cases 0:10`` it runs some cases alone. Rows are kept in results/benchmarks/optimal_orders.csv,
from which the text is written anew; a row that is run again replaces the older one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import _machine as machine
import numpy as np
import pandas as pd

import pipesim as ps
from pipesim.order_search import evaluate, lane_order, order_problem
from pipesim.planning import OptimizedSchedule
from pipesim.planning.cp_sat_proof import prove
from pipesim.planning.first_orders import named_orders

#: Devices and micro-batches of the large cases; F, I and W where marked.
LARGE = (
    (16, 32, False), (16, 32, True), (16, 64, True), (32, 64, False), (32, 64, True),
    (64, 128, False), (64, 128, True), (8, 2048, True), (32, 1024, True),
)  # fmt: skip
N_RANDOM = 40
#: Columns of the file of rows.
COLUMNS = [
    "case", "placement", "p", "m", "ops", "stages", "limit", "named", "optimize", "bound",
    "proved", "s", "CP-SAT", "its bound",
]  # fmt: skip
FOLDER = machine.ROOT / "results" / "benchmarks"


class Case(NamedTuple):
    """A placement, its costs and its limit in micro-batches of activations a device."""

    kind: str
    placement: ps.Placement
    n_microbatches: int
    costs: ps.Costs
    limit: float


def costs_of(
    random: np.random.Generator, n_stages: int, split: bool, even: bool, latency: float
) -> ps.Costs:
    """Return whole seconds for each stage, and one byte of activations a micro-batch and stage."""

    def draw(low: int, high: int) -> tuple[float, ...]:
        numbers = random.integers(low, high, 1 if even else n_stages)
        return tuple(np.broadcast_to(numbers, n_stages).astype(float).tolist())

    seconds = {"forward": draw(8, 16)}
    if split:
        seconds |= {"input_grad": draw(8, 16), "weight_grad": draw(6, 12)}
    else:
        seconds |= {"backward": draw(16, 32)}
    held = {"activation_bytes": 1.0, "weight_grad_bytes": 1.0}
    return ps.Costs(**seconds, **held, network=ps.Network(latency=latency))


def case(number: int) -> Case:
    """Return a case: the first ones are random, then come the large ones."""
    random = np.random.default_rng(number)
    if number >= N_RANDOM:
        p, m, split = LARGE[number - N_RANDOM]
        costs = costs_of(random, p, split, even=False, latency=1.0)
        return Case("linear", ps.Placement.linear(p), m, costs, float(p))
    p, m = int(random.integers(3, 9)), int(random.integers(6, 33))
    split, even = bool(random.integers(2)), bool(random.random() < 0.3)
    kind = str(random.choice(["linear", "looped", "V"], p=[0.7, 0.15, 0.15]))
    placement = {
        "linear": ps.Placement.linear(p),
        "looped": ps.Placement.looped(p, 2),
        "V": ps.Placement.v_shaped(p),
    }[kind]
    costs = costs_of(random, placement.n_stages, split, even, float(random.integers(0, 3)))
    share = random.choice([0.6, 1.0, 1.0, 1.5])
    chunks = placement.n_stages // p
    return Case(kind, placement, m, costs, float(chunks * max(2, round(share * p))))


def row(number: int, seconds: float, reference: float) -> dict[str, Any]:
    """Return the results of a case."""
    kind, placement, m, costs, limit = case(number)
    problem = order_problem(placement, m, costs, memory_limit=limit)
    best = min((x.value for x in named_orders(problem, placement, costs)), default=np.nan)
    began = time.perf_counter()
    order = ps.optimize(placement, m, costs, limit, seconds=seconds)
    took = time.perf_counter() - began
    check(order, costs, limit)
    result = {
        "case": number, "placement": kind, "p": placement.n_devices, "m": m,
        "ops": "F I W" if costs.weight_grad is not None else "F B",
        "stages": "even" if len(set(np.atleast_1d(costs.forward))) == 1 else "uneven",
        "limit": limit, "named": best, "optimize": order.makespan, "bound": order.lower_bound,
        "proved": order.proved, "s": took,
    }  # fmt: skip
    if number < N_RANDOM:
        longer = prove(
            problem, lane_order(problem, order), order.lower_bound, seconds=reference, n_workers=2
        )
        least = order.makespan
        if longer.order is not None:
            least = evaluate(problem, longer.order).makespan
        result |= {"CP-SAT": least, "its bound": longer.lower_bound}
    return result


def check(order: OptimizedSchedule, costs: ps.Costs, limit: float) -> None:
    """Raise unless an order runs as it claims."""
    ps.verify(order)
    graph = ps.lower(order)
    engines = ("compiled", "simpy") if len(graph) < 50_000 else ("compiled",)
    for engine in engines:
        timeline = ps.simulate(graph, costs, engine=engine, memory_limit=limit)
        if timeline.makespan != order.makespan or not timeline.memory.fits:
            raise RuntimeError(f"{order!r} takes {timeline.makespan} s in engine {engine}")


def with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Add the ratios to the best order known and to the larger bound."""
    best = table[["optimize", "CP-SAT"]].min(axis=1)
    bound = table[["bound", "its bound"]].max(axis=1)
    table["over %"] = 100 * (table["optimize"] / best - 1)
    table["gap %"] = 100 * (table["optimize"] / bound - 1)
    table["gain %"] = 100 * (table["named"] / table["optimize"] - 1)
    table["bound/best %"] = 100 * table["bound"] / best
    return table


def report(table: pd.DataFrame, settings: str) -> list[str]:
    """Return the lines of all rows and their summary."""
    lines = [
        *machine.header(["numpy", "numba", "ortools"]),
        settings,
        "",
        *table.to_string(index=False, na_rep="-", float_format="{:.6g}".format).split("\n"),
    ]
    small = table[table["case"] < N_RANDOM]
    if len(small):
        over, bound, gain = small["over %"], small["bound/best %"], small["gain %"]
        lines += [
            "",
            f"{len(small)} random cases, {int(small['proved'].sum())} proved",
            f"over the best order: mean {over.mean():.3f} %, most {over.max():.3f} %, "
            f"more than 0.5 % in {int((over > 0.5).sum())}",
            f"bound over the best order: mean {bound.mean():.2f} %, least {bound.min():.2f} %",
            f"gain over the best named schedule: median {gain.median():.2f} %, most "
            f"{gain.max():.2f} %",
        ]
    return lines


def main() -> None:
    """Run the cases, and write their table after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=f"0:{N_RANDOM + len(LARGE)}", help="first:last, or one")
    parser.add_argument("--seconds", type=float, default=20.0, help="of optimize")
    parser.add_argument("--reference", type=float, default=60.0, help="seconds of CP-SAT")
    options = parser.parse_args()
    first, _, last = options.cases.partition(":")
    rows = FOLDER / "optimal_orders.csv"
    for number in range(int(first), int(last) if last else int(first) + 1):
        table = pd.DataFrame([row(number, options.seconds, options.reference)])
        if rows.exists():
            older = pd.read_csv(rows)
            table = pd.concat([older[older["case"] != number], table])
        table = table.reindex(columns=COLUMNS).sort_values("case")
        table.to_csv(rows, index=False)
        settings = f"{options.seconds:g} s of optimize, {options.reference:g} s of CP-SAT"
        machine.publish(report(with_ratios(table), settings), FOLDER / "optimal_orders.txt")


if __name__ == "__main__":
    main()
