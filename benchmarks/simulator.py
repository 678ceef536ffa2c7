"""Tasks a second of each phase of a simulation, growth and memory a task, and noise.

``python benchmarks/simulator.py`` measures 1F1B with transfers, for each engine that there is and
two networks, and writes ``results/benchmarks/simulator.txt``. Every row is a fresh process with
one thread on one core. It runs a small problem first, which pays for compilation, then the
row's problem once, which touches new memory, then again and again: medians are of these.
``--quick`` runs small problems only, and writes no file unless ``--out`` names one.

Phases: generate is ``ps.schedule``; lower ``ps.lower``; simulate ``ps.simulate``; metrics makespan,
bubble fraction and peak memory. "end to end" is all four. Parts of simulate, measured apart on
the same graph: costs is ``costs.of(graph)``, engine the engine's function alone. "pace" is what
an addition in a plain Python loop took before and after the row: a shared machine drifts, and
rows of another pace are not comparable as they stand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import _machine as machine
from _rows import ENGINES, PARTS, PHASES, Result, SimulatorCase

NETWORKS = {
    "uniform": "without contention: one link of 25 GB/s and 20 us for each pair of devices",
    "shared": "with contention: the 8 devices of a node share one link of 5 GB/s each way",
}
SIZES = ((8, 64), (64, 1024), (256, 8192), (1024, 16384))
GROWTH = ((16, 1087), (64, 2632), (256, 6527), (1024, 16287))  # 10^5, 10^6, 10^7, 10^8 tasks
NOISE = (((8, 64), 4096), ((64, 1024), 256))
#: A row is left out where one round would take longer (s).
LIMIT = {"compiled": 300.0, "simpy": 60.0}
TIMEOUT = 1800.0
Size = tuple[int, int]


def run_case(case: SimulatorCase, quick: bool) -> Result | str:
    """Measure a case in a process of its own; return why not, if it fails."""
    label = f"{case.engine}, {case.network}, ({case.n_devices}, {case.n_microbatches})"
    print(f"  measuring {label}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=machine.pinned(case.n_cores),
        )
    except subprocess.TimeoutExpired:
        return f"not measured: stopped after {TIMEOUT:.0f} s"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [""])[-1]
        return f"not measured: ended with status {done.returncode} {reason}".rstrip()
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def run_sizes(
    engine: str, network: str, sizes: tuple[Size, ...], quick: bool
) -> Iterator[tuple[SimulatorCase, Result | str]]:
    """Measure rising sizes, as far as time and memory are expected to go."""
    last: Result | None = None
    for p, m in sizes:
        case = SimulatorCase(engine, network, p, m)
        if last is not None:
            times = case.n_tasks / last.n_tasks
            seconds = sum(last.first(name) or 0.0 for name in ("end to end", *PARTS)) * times
            needed = max(last.nbytes.values()) * times
            if seconds > LIMIT[engine]:
                yield case, f"not measured: a round would take about {seconds:.0f} s"
                continue
            if last.n_tasks > 10**5 and needed > machine.memory("MemAvailable"):
                yield case, f"not measured: would need about {needed / 2**30:.0f} GiB"
                continue
        result = run_case(case, quick)
        last = result if isinstance(result, Result) else last
        yield case, result


def available() -> tuple[list[str], bool]:
    """Return the engines that there are, and whether scenarios can be simulated."""
    code = (
        "import json, sys, pipesim as ps\n"
        "large = ps.lower(ps.schedule('1f1b', 64, 1024))\n"  # fills numba's cache
        "ps.simulate(large, ps.Costs(1.0, 2.0)).memory.peak\n"
        "graph, found = ps.lower(ps.schedule('1f1b', 2, 2)), []\n"
        f"for name in {list(ENGINES)}:\n"
        "    try: ps.simulate(graph, ps.Costs(1.0, 2.0), engine=name)\n"
        "    except ps.errors.PipeError as error: print(f'{name}: {error}', file=sys.stderr)\n"
        "    else: found.append(name)\n"
        "print(json.dumps([found, hasattr(ps, 'simulate_many')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    engines, many = json.loads(done.stdout.splitlines()[-1])
    return engines, many


Rows = list[tuple[SimulatorCase, Result | str]]


def phase_table(rows: Rows) -> list[str]:
    """Return million tasks a second of each phase: medians, and the first round."""
    names = (*PHASES, "end to end", *PARTS)
    body = []
    for case, result in rows:
        lead = [case.engine, f"({case.n_devices}, {case.n_microbatches})", f"{case.n_tasks:,}"]
        if isinstance(result, str):
            body.append([*lead, result])
            continue
        picks = {f"median of {result.n_rounds}": result.median, "first": result.first}
        for what, pick in picks.items():
            seconds = [pick(name) for name in names]
            rates = [machine.number(s and result.n_tasks / s, 1e6) for s in seconds]
            body.append([*lead, what, *rates, f"{result.pace * 1e9:.0f} ns"])
    return machine.table(("engine", "(p, m)", "tasks", "round", *names, "pace"), body, 2)


def growth_table(rows: Rows) -> list[str]:
    """Return nanoseconds a task, also relative to the smallest size."""
    names = (*PHASES, "end to end", *PARTS)
    base = next((result for _, result in rows if isinstance(result, Result)), None)
    body = []
    for case, result in rows:
        lead = [case.engine, f"({case.n_devices}, {case.n_microbatches})", f"{case.n_tasks:,}"]
        if isinstance(result, str) or base is None:
            body.append([*lead, str(result)])
            continue
        cells = []
        for name in names:
            now, then = result.median(name), base.median(name)
            if now is None or then is None:
                cells.append("-")
                continue
            nanoseconds = now / result.n_tasks * 1e9
            growth = now / result.n_tasks / (then / base.n_tasks)
            cells.append(f"{machine.number(nanoseconds)} ({growth:.2f}x)")
        body.append([*lead, *cells, f"{result.pace * 1e9:.0f} ns"])
    return machine.table(("engine", "(p, m)", "tasks", *names, "pace"), body, 2)


def memory_table(rows: Rows) -> list[str]:
    """Return bytes a task at the peak of each phase, what is held from before it included."""
    body = []
    for case, result in rows:
        lead = [case.engine, f"({case.n_devices}, {case.n_microbatches})", f"{case.n_tasks:,}"]
        if isinstance(result, str):
            body.append([*lead, result])
            continue
        nbytes = [result.nbytes[name] / result.n_tasks for name in PHASES]
        gib = max(result.nbytes[name] for name in PHASES) / 2**30
        body.append([*lead, *(f"{value:.0f}" for value in (*nbytes, max(nbytes))), f"{gib:.2f}"])
    return machine.table(("engine", "(p, m)", "tasks", *PHASES, "most", "GiB"), body, 2)


def noise_table(engine: str, quick: bool) -> tuple[list[str], float | None]:
    """Return million task-scenarios a second on one and two cores, and the best on two."""
    body, best = [], None
    sizes = (((8, 64), 64),) if quick else NOISE
    for (p, m), n in sizes:
        for cores in (1, 2):
            result = run_case(SimulatorCase(engine, "uniform", p, m, n, cores), quick)
            lead = [f"({p}, {m})", f"{n:,}", f"{cores}"]
            if isinstance(result, str):
                body.append([*lead, result])
                continue
            seconds = result.median("scenarios") or float("nan")
            rate = result.n_tasks * n / seconds
            if cores == 2:
                best = max(best or 0.0, rate)
            first = result.n_tasks * n / result.seconds["scenarios"][0]
            body.append([*lead, machine.number(rate, 1e6), machine.number(first, 1e6)])
    return machine.table(("(p, m)", "scenarios", "cores", "median", "first"), body, 1), best


def aims_table(uniform: Rows, shared: Rows, growth: Rows, noise: float | None) -> list[str]:
    """Return what is aimed at beside what was measured."""

    def get(rows: Rows, size: Size, engine: str = "compiled") -> Result | None:
        for case, result in rows:
            same = (case.engine, case.n_devices, case.n_microbatches) == (engine, *size)
            if same and isinstance(result, Result):
                return result
        return None

    def rate(result: Result | None, name: str) -> float | None:
        return None if result is None else result.rate(name)

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    small, middle, large = (
        get(growth, GROWTH[0]),
        get(growth, GROWTH[1]),
        get(growth, GROWTH[3]),
    )
    own, peer = get(uniform, SIZES[1]), get(uniform, SIZES[1], "simpy")
    spread = over(rate(small, "end to end"), rate(large, "end to end"))
    kind = "M/s"
    aims: list[tuple[str, float, float | None, str]] = [
        ("engine, 10^6 tasks, without contention", 40, rate(middle, "engine"), kind),
        ("engine, 10^8 tasks, without contention", 20, rate(large, "engine"), kind),
        ("engine, (64, 1024), with contention", 10, rate(get(shared, SIZES[1]), "engine"), kind),
        ("engine, (1024, 16384), with contention", 10, rate(get(shared, SIZES[3]), "engine"), kind),
        ("noise: task-scenarios on 2 cores", 300, noise, kind),
        ("schedule to makespan, 10^6 tasks", 10, rate(middle, "end to end"), kind),
        ("schedule to makespan, 10^8 tasks", 10, rate(large, "end to end"), kind),
        ("engine over SimPy's, (64, 1024)", 300, over(rate(own, "engine"), rate(peer, "engine")),
         "x"),
        ("growth of end to end a task, 10^5 to 10^8", 2, spread, "x at most"),
    ]  # fmt: skip
    body = []
    for what, aim, value, unit in aims:
        value = value / 1e6 if value is not None and unit == kind else value
        good = value is not None and (value <= aim if "most" in unit else value >= aim)
        verdict = "not measured" if value is None else "met" if good else "not met"
        body.append([what, f"{aim} {unit}", machine.number(value), verdict])
    return machine.table(("aim", "", "measured", ""), body, 1)


def speed_up(rows: Rows) -> list[str]:
    """Return the compiled engine's speed over SimPy's, where both were measured."""
    results = {(c.n_devices, c.n_microbatches, c.engine): r for c, r in rows}
    names = ("engine", "simulate", "end to end")
    body = []
    for case, peer in rows:
        own = results.get((case.n_devices, case.n_microbatches, "compiled"))
        if case.engine == "simpy" and isinstance(own, Result) and isinstance(peer, Result):
            ratios = [(peer.median(n) or 0.0) / (own.median(n) or float("nan")) for n in names]
            same = "equal" if own.makespan == peer.makespan else "DIFFERENT"
            size = f"({case.n_devices}, {case.n_microbatches})"
            body.append([size, *(f"{machine.number(ratio)}x" for ratio in ratios), same])
    return machine.table(("(p, m)", *names, "makespans"), body, 1) if body else []


def main() -> None:
    """Measure every row and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small problems only")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/simulator.txt")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        from _simulate import measure  # pipesim stays out of the process that prints

        print(json.dumps(asdict(measure(SimulatorCase(**json.loads(options.case)), options.quick))))
        return
    quick = options.quick
    out = options.out or (None if quick else machine.ROOT / "results/benchmarks/simulator.txt")
    engines, many = available()
    sizes = ((8, 64), (16, 128)) if quick else SIZES
    lines = machine.header(("numpy", "numba", "simpy", "pipesim"))
    lines += ["1F1B with transfers, p devices, m micro-batches; one thread on one core a process"]
    lines += ["pace: an addition in a Python loop, before and after the row; it shows drift"]
    lines += [f"engine {name!r}: not there" for name in ENGINES if name not in engines]
    tables: dict[str, Rows] = {}
    for network, what in NETWORKS.items():
        rows = [row for e in engines for row in run_sizes(e, network, sizes, quick)]
        tables[network] = rows
        lines += ["", f"Million tasks a second, {what}", *phase_table(rows)]
        waits = {c.n_tasks: r.queued for c, r in rows if isinstance(r, Result) and r.queued}
        for n_tasks, share in waits.items():
            lines.append(f"{share:.0%} of {n_tasks:,} tasks' SENDs waited for a link in use")
        if ratios := speed_up(rows):
            lines += ["", f"Speed of compiled over simpy, {network} network", *ratios]
    points = ((16, 108),) if quick else GROWTH
    growth = list(run_sizes(engines[0], "uniform", points, quick))
    lines += ["", "Growth: nanoseconds a task, median, and relative to the first row; uniform"]
    lines += growth_table(growth)
    lines += ["", "Memory: bytes a task at the peak of each phase, first round; uniform"]
    lines += memory_table(growth)
    best = None
    if many:
        noise, best = noise_table(engines[0], quick)
        lines += ["", "Million task-scenarios a second, noise of 2 % (log-normal) on each task"]
        lines += noise
    else:
        lines += ["", "Noise: not measured, pipesim has no simulate_many"]
    calls = [r.first_call for rows in (*tables.values(), growth) for _, r in rows
             if isinstance(r, Result)]  # fmt: skip
    lines += ["", "First call: all phases of (16, 16) in a fresh process that has imported pipesim"]
    later = statistics.median(calls[1:]) if len(calls) > 1 else None
    lines += [f"first process {calls[0]:.2f} s, later ones {machine.number(later)} s (median)"]
    if not quick:
        lines += ["", *aims_table(tables["uniform"], tables["shared"], growth, best)]
    machine.publish(lines, out)


if __name__ == "__main__":
    main()
