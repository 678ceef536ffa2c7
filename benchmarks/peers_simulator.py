"""Schedule to makespan: ours against torch's dry run, bare SimPy and networkx, in one run.

``python benchmarks/peers_simulator.py`` simulates 1F1B, F = 1 s, B = 2 s, without transfers and
with, and writes ``results/benchmarks/peers_simulator.txt``. All run in one process on one
core and take turns round by round, so that a machine that slows down slows all. Every makespan
is held against ours. A peer that is not installed is named, with how to install it.
``--quick`` runs (8, 64) only, and writes no file unless ``--out`` names one.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import _machine as machine

import pipesim as ps

FORWARD, BACKWARD = 1.0, 2.0
LATENCY, SECONDS = 0.001, 0.25  # of a message, where there are transfers
PHASES = ("generate", "lower", "simulate")
#: CPU seconds of peers from their repositories, measured earlier on one such core.
EARLIER = (
    ("Victarry/PP-Schedule-Visualization", 0.0044, 9.2, ""),
    ("Primus' simulator", 0.017, 4.0, ""),
    ("sapp (MindSpore)", 0.010, 2.4, "with communication growing as n^1.5"),
    ("vTrain's replay", 0.023, 2.4, ""),
    ("minPP", 0.032, 33.0, ""),
    ("zero-bubble's add_time", 0.018, 3.8, ""),
    ("zero-bubble's own order", 0.075, 11.8, ""),
)
NO_SIMULATOR = (
    ("pipenaut 0.1.6", "runs processes; the simulation in its drawing ends at 8 micro-batches"),
    ("zbpp_light 0.0.1", "patches Megatron-LM's training loop; simulates nothing"),
)
Orders = list[list[tuple[str, int]]]


@dataclass
class Round:
    """What one simulation took, phase by phase, and what came out."""

    seconds: tuple[float, float, float]
    n_tasks: int
    makespan: float


Peer = Callable[[int, int], Round]


def in_turn(*calls: Callable[[Any], Any]) -> tuple[tuple[float, float, float], list[Any]]:
    """Call each with what the one before returned; return seconds of each, and the results."""
    gc.collect()
    value, seconds, values = None, [], []
    for call in calls:
        start = perf_counter()
        value = call(value)
        seconds.append(perf_counter() - start)
        values.append(value)
    return (seconds[0], seconds[1], seconds[2]), values


def one_f_one_b(p: int, m: int) -> Orders:
    """Return each device's order, for peers that take one."""
    orders: Orders = []
    for device in range(p):
        warm_up = min(p - 1 - device, m)
        order = [("F", i) for i in range(warm_up)]
        for i in range(m - warm_up):
            order += [("F", warm_up + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(m - warm_up, m)])
    return orders


def pipesim_peer(engine: str, transfers: bool) -> Peer:
    """Simulate with pipesim; messages are tasks in any case, here with or without a duration."""
    network = ps.Network(LATENCY, 1 / SECONDS) if transfers else ps.Network()
    costs = ps.Costs(FORWARD, BACKWARD, output_bytes=1.0, network=network)

    def simulate(p: int, m: int) -> Round:
        seconds, (_, graph, makespan) = in_turn(
            lambda _: ps.schedule("1f1b", p, m),
            lambda schedule: ps.lower(schedule, step="none"),
            lambda graph: ps.simulate(graph, costs, engine=engine).makespan,
        )
        return Round(seconds, len(graph), makespan)

    return simulate


def torch_dry_run() -> Peer:
    """Use what torch checks its schedules with. It knows no durations, so there is no makespan."""
    import torch.distributed.pipelining.schedules as torch_schedules

    # Private: torch has no public simulator. Attributes by name, as they may change.
    t: Any = torch_schedules
    kind = {"F": t._ComputationType.FORWARD, "B": t._ComputationType.FULL_BACKWARD}

    def generate(p: int, m: int) -> dict[int, list[Any]]:
        orders = one_f_one_b(p, m)  # torch's own listing gives the last device forwards alone
        return {
            rank: [t._Action(rank, kind[op], i) for op, i in order]
            for rank, order in enumerate(orders)
        }

    def simulate(p: int, m: int) -> Round:
        seconds, (_, tasks, _) = in_turn(
            lambda _: generate(p, m),
            lambda orders: t._add_send_recv(orders, lambda stage: stage, p),
            lambda orders: t._simulate_comms_compute(orders, lambda stage: stage, p),
        )
        return Round(seconds, sum(map(len, tasks.values())), math.nan)

    return simulate


def bare_simpy(transfers: bool) -> Peer:
    """Write the model in SimPy as its tutorials would: a process a device, a store a dependency.

    With transfers, each message is a process that holds its link and is then under way.
    """
    import simpy

    def simulate(p: int, m: int) -> Round:
        seconds, (_, _, makespan) = in_turn(
            lambda _: one_f_one_b(p, m), lambda orders: orders, lambda orders: run(orders, p, m)
        )
        n_messages = 2 * (p - 1) * m if transfers else 0
        return Round(seconds, 2 * p * m + n_messages, makespan)

    def run(orders: Orders, p: int, m: int) -> float:
        env = simpy.Environment()
        inbox = {
            (op, device, i): simpy.Store(env)
            for op, devices in (("F", range(1, p)), ("B", range(p - 1)))
            for device in devices
            for i in range(m)
        }
        links = {(d, step): simpy.Resource(env) for d in range(p) for step in (1, -1)}

        def message(device: int, step: int, store: Any) -> Generator[Any, Any, None]:
            with links[device, step].request() as request:
                yield request
                yield env.timeout(SECONDS)
            yield env.timeout(LATENCY)
            yield store.put(None)

        def work(device: int, order: list[tuple[str, int]]) -> Generator[Any, Any, None]:
            for op, i in order:
                if store := inbox.get((op, device, i)):
                    yield store.get()
                yield env.timeout(FORWARD if op == "F" else BACKWARD)
                step = 1 if op == "F" else -1
                if store := inbox.get((op, device + step, i)):
                    if transfers:
                        env.process(message(device, step, store))
                    else:
                        yield store.put(None)

        for device, order in enumerate(orders):
            env.process(work(device, order))
        env.run()
        return float(env.now)

    return simulate


def networkx_path() -> Peer:
    """Find the longest path with networkx: no events, no links."""
    import networkx as nx

    duration = {"F": FORWARD, "B": BACKWARD}

    def lower(orders: Orders, p: int) -> Any:
        graph = nx.DiGraph()
        for device, order in enumerate(orders):
            for number, (op, i) in enumerate(order):
                task = op, device, i
                before = device - 1 if op == "F" else device + 1
                if number:
                    graph.add_edge((order[number - 1][0], device, order[number - 1][1]), task)
                if 0 <= before < p:
                    graph.add_edge((op, before, i), task)
        for _, task, data in graph.edges(data=True):
            data["weight"] = duration[task[0]]
        return graph

    def simulate(p: int, m: int) -> Round:
        seconds, (_, graph, makespan) = in_turn(
            lambda _: one_f_one_b(p, m),
            lambda orders: lower(orders, p),
            # The first forward has no edge that leads to it.
            lambda graph: FORWARD + nx.dag_longest_path_length(graph),
        )
        return Round(seconds, len(graph), makespan)

    return simulate


def peers(transfers: bool) -> Iterator[tuple[str, Peer | str]]:
    """Return each peer by name, or how to install it."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    for engine in ("compiled", "simpy"):
        try:
            ps.simulate(graph, ps.Costs(1.0, 2.0), engine=engine)
        except ps.errors.PipeError as error:
            yield f"pipesim, {engine}", f"not there: {error}"
        else:
            yield f"pipesim, {engine}", pipesim_peer(engine, transfers)
    how = "a process a message" if transfers else "a store a dependency"
    wanted: list[tuple[str, str, Callable[[], Peer]]] = [
        (f"bare SimPy, {how}", "simpy", lambda: bare_simpy(transfers))
    ]
    if not transfers:
        wanted.append(("networkx, longest path", "networkx", networkx_path))
        wanted.append(("torch, lock-step, no durations", "torch", torch_dry_run))
    for name, package, make in wanted:
        try:
            importlib.import_module(package)
            yield name, make()
        except ImportError:
            yield name, f"not installed: pip install {package}"


def compare(p: int, m: int, transfers: bool, n_rounds: int) -> list[str]:
    """Measure one problem; return its table."""
    contestants = dict(peers(transfers))
    rounds: dict[str, list[Round]] = {
        name: [] for name, peer in contestants.items() if callable(peer)
    }
    reference = next(iter(rounds))
    for number in range(n_rounds + 1):  # the first touches new memory, and is not counted
        for name, peer in contestants.items():
            if callable(peer):
                done = peer(p, m)
                rounds[name] += [done] if number else []
    own = [sum(r.seconds) for r in rounds[reference]]
    expected = rounds[reference][0].makespan
    body = []
    for name, peer in contestants.items():
        if isinstance(peer, str):
            body.append([name, peer])
            continue
        times = [sum(r.seconds) for r in rounds[name]]
        last = rounds[name][-1]
        phases = [statistics.median(r.seconds[i] for r in rounds[name]) for i in range(3)]
        # A phase that a peer does not have takes no time.
        rates = [machine.number(last.n_tasks / s / 1e6 if s > 1e-5 else None) for s in phases]
        total = statistics.median(times)
        ratio = statistics.median(b / a for a, b in zip(own, times, strict=True))
        pairs = zip(rounds[reference], rounds[name], strict=True)
        engines = statistics.median(b.seconds[2] / a.seconds[2] for a, b in pairs)
        if math.isnan(last.makespan):
            agrees = "none"
        else:
            agrees = "as first" if math.isclose(last.makespan, expected) else f"{last.makespan:.9g}"
        cells = [*rates, machine.number(last.n_tasks / total, 1e6), machine.number(total)]
        ratios = [f"{machine.number(value)}x" for value in (ratio, engines)]
        body.append([name, f"{last.n_tasks:,}", *cells, *ratios, agrees])
    columns = ("", "tasks", *PHASES, "all", "seconds", "ours/this", "simulate", "makespan")
    what = f"with transfers of {SECONDS} s + {LATENCY} s" if transfers else "no communication"
    return [
        "",
        f"({p}, {m}), {what}; median of {n_rounds} rounds",
        *machine.table(columns, body, 1),
    ]


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="(8, 64) only")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/peers_simulator.txt")
    options = parser.parse_args()
    default = None if options.quick else machine.ROOT / "results/benchmarks/peers_simulator.txt"
    machine.pin(1)
    pace = machine.pace()
    lines = machine.header(("numpy", "numba", "simpy", "networkx", "torch", "pipesim"))
    lines += [
        "1F1B on (p devices, m micro-batches), F = 1 s, B = 2 s, one core. Million tasks a second,",
        "each counting its own tasks: generate the order, lower it to what is simulated, simulate.",
        "ours/this: speed on the same problem, our first row over this row, round by round, from",
        "schedule to makespan; simulate beside it: the same for the phase simulate alone.",
    ]
    for p, m in ((8, 64),) if options.quick else ((8, 64), (64, 1024)):
        for transfers in (False, True):
            n_rounds = 11 if p == 8 else 3
            lines += compare(p, m, transfers, n_rounds)
    drift = f"{pace * 1e9:.0f} ns before this run, {machine.pace() * 1e9:.0f} ns after it"
    lines += ["", f"An addition in a Python loop, which shows drift: {drift}"]
    lines += ["", "From their repositories: CPU seconds measured earlier on one such core, without"]
    lines += ["communication, not in this run; so no ratio is given"]
    body = [[name, f"{a:g}", f"{b:g}", note] for name, a, b, note in EARLIER]
    lines += machine.table(("", "(8, 64)", "(64, 1024)", ""), body, 1)
    lines += ["", "In a registry, but nothing in them to compare with"]
    lines += [f"{name}: {why}" for name, why in NO_SIMULATOR]
    machine.publish([line.rstrip() for line in lines], options.out or default)


if __name__ == "__main__":
    main()
