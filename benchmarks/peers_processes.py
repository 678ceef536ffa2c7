"""One step of ours over two processes against torch.distributed.pipelining's, in the same two.

Same model, split, micro-batches, order, backend (gloo) and cores: each process has one computing
thread, pinned to a core of its own, under either runtime. Forward, loss and backward; no
optimizer. Both runtimes are made in the same two processes and take turns step by step, the one
that goes first changing from round to round, so that a machine that slows down slows both. A step
takes as long as the slower process; its ratio is that to the other runtime's step of that round.

Our pipeline runs the very order that torch's class runs (``px.from_torch``); rows "own order" run
the order that `pipesim.schedule` makes for it. Warm-up rounds are left out. Torch's thread is
pinned while it steps, as ours is; gloo's threads are free, under both. Ours records when each task
ran; torch's does not.

``python benchmarks/peers_processes.py`` prints, for each schedule, medians over the rounds, the
median of the ratios, its 95 % confidence interval (order statistics) and the middle half of the
ratios, and writes them to results/benchmarks/peers_processes.txt. ``--trivial`` makes the stages
so small that a step is all runtime.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import _machine as machine
import _ranks
import torch
import torch.distributed as dist
from _interval import interval
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split
from pipeexec.distributed import Processes
from pipeexec.torch_pipelining import torch_schedule_order
from pipesim.errors import PipeWarning

N_RANKS = 2
WARM_UP = 3
Step = Callable[[], object]


class ComparedSchedule(NamedTuple):
    """A schedule that both have: its name here and in torch, and how many stages a rank has."""

    name: str
    torch_name: str
    n_chunks: int
    own_order: bool = False

    @property
    def label(self) -> str:
        """Name of its row."""
        return f"{self.name}, own order" if self.own_order else self.name

    def stages(self, rank: int) -> list[int]:
        """Return the stages of a rank: V-shaped for ZBV, else looped."""
        if self.name == "zbv":
            return [rank, 2 * N_RANKS - 1 - rank]
        return [chunk * N_RANKS + rank for chunk in range(self.n_chunks)]


KINDS = [
    ComparedSchedule("gpipe", "GPipe", 1),
    ComparedSchedule("1f1b", "1F1B", 1),
    ComparedSchedule("interleaved_zb", "InterleavedZeroBubble", 2),
    ComparedSchedule("zbv", "ZBVZeroBubble", 2),
    ComparedSchedule("zbv", "ZBVZeroBubble", 2, own_order=True),
]


class Runtimes(NamedTuple):
    """The two runtimes of one schedule in this process."""

    own_step: Step
    torch_step: Step
    zero_grad: Callable[[], None]
    gradients: Callable[[], list[torch.Tensor]]
    close: Callable[[], None]


def make(kind: ComparedSchedule, options: dict[str, Any], processes: Processes) -> Runtimes:
    """Return both runtimes on this rank's stages; they share the modules."""
    rank, n_stages = processes.rank, kind.n_chunks * N_RANKS
    sizes = {key: options[key] for key in ("layers", "width", "sequence")}
    torch.manual_seed(0)
    workload = build_model("gpt", **sizes)
    inputs, targets = workload.make_batch(options["microbatches"] * options["size"], 0)
    modules: list[nn.Module] = list(split(workload.layers, n_stages))
    own = kind.stages(rank)

    peer = torch_step(kind, options["microbatches"], modules, own, workload.loss)
    graph = ps.lower(order_of(kind, options["microbatches"]), step="none")
    pipeline = px.Pipeline(modules, graph, ["cpu"], workload.loss, processes=processes)
    arguments = (inputs if 0 in own else None, targets if n_stages - 1 in own else None)

    def zero_grad() -> None:
        for index in own:
            modules[index].zero_grad()

    def gradients() -> list[torch.Tensor]:
        return [p.grad.clone() for i in own for p in modules[i].parameters() if p.grad is not None]

    return Runtimes(
        lambda: pipeline.step(*arguments),
        lambda: peer(*arguments),
        zero_grad,
        gradients,
        pipeline.close,
    )


def order_of(kind: ComparedSchedule, n_microbatches: int) -> ps.Schedule:
    """Return the order that our pipeline runs."""
    if kind.own_order:
        chunks = {} if kind.name == "zbv" else {"n_chunks": kind.n_chunks}
        return ps.schedule(kind.name, N_RANKS, n_microbatches, **chunks)
    listed = torch_schedule_order(
        kind.torch_name, N_RANKS, n_microbatches, kind.n_chunks, executed=True
    )
    return px.from_torch(listed, name=kind.name)


def torch_step(
    kind: ComparedSchedule,
    n_microbatches: int,
    modules: list[nn.Module],
    indices: list[int],
    loss: Callable[..., torch.Tensor],
) -> Callable[[Any, Any], None]:
    """Return a step of torch's on inputs and targets, each None where it is not needed."""
    stages = [PipelineStage(modules[i], i, len(modules), torch.device("cpu")) for i in indices]
    schedule_class: Any = getattr(torch_schedules, f"Schedule{kind.torch_name}")
    schedule = schedule_class(
        stages if kind.n_chunks > 1 else stages[0], n_microbatches, loss_fn=loss
    )
    core = sorted(os.sched_getaffinity(0))[dist.get_rank()]

    def step(inputs: Any, targets: Any) -> None:
        free = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            schedule.step(*([] if inputs is None else [inputs]), target=targets, losses=[])
        finally:
            os.sched_setaffinity(0, free)

    return step


def run_rank(options: dict[str, Any], directory: str) -> None:
    """Be one process: run both, step by step, and write the seconds of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    kinds = [kind for kind in KINDS if kind.name in options["schedules"]]
    with px.join(timeout=60) as processes:
        everyone = [make(kind, options, processes) for kind in kinds]
        seconds: list[list[list[float]]] = [[[], []] for _ in kinds]
        for kind, peers in zip(kinds, everyone, strict=True):
            check(kind, peers)
        gc.freeze()  # collections between steps look at what is new alone
        for number in range(-WARM_UP, options["rounds"]):
            for peers, times in zip(everyone, seconds, strict=True):
                for turn in (number % 2, 1 - number % 2):
                    took = timed((peers.own_step, peers.torch_step)[turn], peers.zero_grad)
                    if number >= 0:
                        times[turn].append(took)
        for peers in everyone:
            peers.close()
        Path(directory, f"{processes.rank}.json").write_text(json.dumps(seconds))


def timed(step: Step, zero_grad: Callable[[], None]) -> float:
    """Return the seconds of a step in this process; all begin together."""
    zero_grad()
    gc.collect()
    dist.barrier()
    start = perf_counter()
    step()
    return perf_counter() - start


def check(kind: ComparedSchedule, peers: Runtimes) -> None:
    """Raise unless both runtimes give the same gradients, up to rounding."""
    gradients = []
    for step in (peers.own_step, peers.torch_step):
        timed(step, peers.zero_grad)
        gradients.append(peers.gradients())
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5, msg=f"{kind.label} differs")


def rows(options: dict[str, Any], directory: Path) -> list[list[str]]:
    """Return the lines of the table."""
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    kinds = [kind for kind in KINDS if kind.name in options["schedules"]]
    lines = []
    for kind, *of_ranks in zip(kinds, *ranks, strict=True):
        own, peer = (
            [max(pair) for pair in zip(*(rank[turn] for rank in of_ranks), strict=True)]
            for turn in (0, 1)
        )
        ratios = sorted(a / b for a, b in zip(own, peer, strict=True))
        low, high = interval(len(ratios))
        quarter = len(ratios) // 4
        lines.append([
            kind.label,
            f"{statistics.median(own) * 1e3:.1f}",
            f"{statistics.median(peer) * 1e3:.1f}",
            f"{statistics.median(ratios):.3f}",
            f"{ratios[low]:.3f} to {ratios[high]:.3f}",
            f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}",
            str(len(ratios)),
        ])  # fmt: skip
    return lines


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {
        "microbatches": 8,
        "size": 4,
        "layers": 4,
        "width": 96,
        "sequence": 64,
        "rounds": 30,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedules", nargs="+", default=[k.name for k in KINDS])
    parser.add_argument("--trivial", action="store_true", help="stages that take no time")
    out = machine.ROOT / "results" / "benchmarks" / "peers_processes.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = vars(parser.parse_args())
    out = options.pop("out")
    if options.pop("trivial"):
        options |= {"size": 1, "width": 8, "sequence": 2}
    with tempfile.TemporaryDirectory() as directory:
        _ranks.spawn(run_rank, N_RANKS, options, directory)
        table = rows(options, Path(directory))
    columns = ["schedule", "ours ms", "torch ms", "ours/torch", "95 % interval", "middle half",
               "rounds"]  # fmt: skip
    sizes = ", ".join(f"{k} {v}" for k, v in options.items() if isinstance(v, int))
    load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
    lines = [*machine.header(["torch"]), load, f"{N_RANKS} processes over gloo; {sizes}", ""]
    machine.publish([*lines, *machine.table(columns, table, 1)], out)


if __name__ == "__main__":
    main()
