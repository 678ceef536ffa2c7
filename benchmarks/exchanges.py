"""How evenly the exchanges of a sharded embedding are spread over four processes, on Zipf keys.

Three tables, of which each process draws as many keys a micro-batch, by Zipf's law; which rows are
frequent is drawn too. For each placement of rows (modulo, hash, frequency), with unique keys and
with every duplicate sent:

- load: keys that the busiest owner receives over the mean of all owners. Measured: mean over
  ``--batches`` of what four processes over gloo receive; predicted: `pipesim.Keys.busiest`. Beside
  it the prediction for 64 owners.
- keys: those that a process sends to others a micro-batch, measured and predicted.
- lookup: largest difference of vectors, and of rows after a step of SGD, to one `nn.Embedding` a
  table with the keys of all processes.
- pipeline: of rows after two steps of K = 4 micro-batches of a pipeline of two stages to the same
  model in one process, over the rows' largest change. Work around the exchanges are tasks of their
  own, keys are exchanged early, and gradients of all micro-batches once.
- sums: gradients that a process sends to others in such a step, each row once, in kB; measured and
  predicted.

Then seconds of a step, simulated for four GPUs in four nodes, by the way in which it exchanges.
Four processes that share the cores of one machine say nothing of such seconds: none are measured.

``python benchmarks/exchanges.py`` prints the tables and writes them to
results/benchmarks/exchanges.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.costs.keys import PLACEMENTS
from pipesim.ops import EXCHANGES

N_RANKS, DIM, K, RATE = 4, 16, 4, 0.1
ROWS, N_KEYS, EXPONENT = [20_000, 3_000, 200], 1024, 1.05
KEYS = ps.Keys.zipf(ROWS, N_KEYS, exponent=EXPONENT)
CASES = [(placement, unique) for placement in PLACEMENTS for unique in (True, False)]
LOWERING: dict[str, Any] = {
    "exchange_work": "compute", "prefetch_keys": True, "sparse_grad_sync": "last"
}  # fmt: skip


def drawn(rank: int, batch: int) -> Tensor:
    """Return the keys of a rank's micro-batch, of shape (samples, tables)."""
    columns = KEYS.draw(1 + rank + N_RANKS * batch)
    return torch.stack([torch.from_numpy(column) for column in columns], 1)


def tables() -> list[Tensor]:
    """Return all rows, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, DIM, generator=generator, dtype=torch.float64) for rows in ROWS]


def factors(batch: int) -> Tensor:
    """Return gradients of the vectors of all ranks."""
    shape = N_RANKS, N_KEYS, len(ROWS), DIM
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Top(nn.Module):
    """A linear layer over all vectors of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(len(ROWS) * DIM, 1, dtype=torch.float64)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return one number a sample."""
        output: Tensor = self.layer(torch.tanh(vectors.flatten(1)))
        return output


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(output, target)


def top() -> Top:
    """Return the dense layers, always the same."""
    torch.manual_seed(0)
    return Top()


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return K micro-batches of keys of a rank, and targets."""
    keys = torch.cat([drawn(rank, 1000 + m)[: N_KEYS // K] for m in range(K)])
    targets = torch.randn(len(keys), 1, generator=torch.Generator().manual_seed(rank))
    return keys, targets.double()


def embedding(processes: Processes, placement: str, unique: bool) -> px.ShardedEmbedding:
    """Return the rows of this rank."""
    counts = KEYS if placement == "frequency" else None
    options = {"placement": placement, "unique": unique, "counts": counts}
    return px.ShardedEmbedding.from_full(tables(), processes, **options)


def loads(module: px.ShardedEmbedding, rank: int, n_batches: int) -> dict[str, list[int]]:
    """Return keys that this rank receives, and sends to others, in each micro-batch."""
    counts: dict[str, list[int]] = {"received": [], "sent": []}
    for batch in range(n_batches):
        exchange = module.dispatch(drawn(rank, batch))
        exchange.counts()
        exchange.keys()
        counts["received"].append(exchange.n_received)
        counts["sent"].append(exchange.sent["keys"] // 4)
    return counts


def lookup_error(module: px.ShardedEmbedding, rank: int) -> float:
    """Return the largest difference to `nn.Embedding`, of vectors and of rows after a step."""
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    output = module(drawn(rank, 0))
    (output * factors(0)[rank]).sum().backward()
    optimizer.step()
    whole = [nn.Embedding.from_pretrained(rows, freeze=False) for rows in tables()]
    keys = torch.cat([drawn(rank, 0) for rank in range(N_RANKS)])
    wanted = torch.stack([m(k) for m, k in zip(whole, keys.unbind(1), strict=True)], 1)
    (wanted * factors(0).flatten(0, 1)).sum().backward()
    torch.optim.SGD([m.weight for m in whole], RATE).step()
    own = wanted.view(N_RANKS, N_KEYS, len(ROWS), DIM)[rank]
    rows = zip(module.full_weight(), whole, strict=True)
    errors = [output - own, *(a - b.weight for a, b in rows)]
    return max(float(error.detach().abs().max()) for error in errors)


def pipelined(processes: Processes, placement: str, unique: bool) -> dict[str, float]:
    """Compare two steps of a pipeline with the unsplit model.

    Return the largest difference of rows, as a part of their largest change, and the bytes of
    gradients that this rank has sent in a step.
    """
    module = embedding(processes, placement, unique)
    schedule = ps.schedule("looped_bfs", 1, K, n_chunks=2)
    graph = ps.lower(schedule, n_replicas=N_RANKS, sharded=[0], hosts="per_device", **LOWERING)
    sgd = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
    with px.Pipeline(
        [px.EmbeddingStage(module), top()], graph, ["cpu"], loss_fn, sgd, processes=processes
    ) as pipeline:
        for _ in range(2):
            result = pipeline.step(*batch_of(processes.rank))
    last = (graph.part == EXCHANGES.index("accumulated")) & (graph.replica == processes.rank)
    sent = float(result.timeline.nbytes[last].sum())
    whole, dense = [nn.Embedding.from_pretrained(rows, freeze=False) for rows in tables()], top()
    optimizer = sgd([*dense.parameters(), *(m.weight for m in whole)])
    keys, targets = (torch.cat(x) for x in zip(*map(batch_of, range(N_RANKS)), strict=True))
    for _ in range(2):
        optimizer.zero_grad()
        vectors = torch.stack([m(k) for m, k in zip(whole, keys.unbind(1), strict=True)], 1)
        loss_fn(dense(vectors), targets).backward()
        optimizer.step()
    rows = [m.weight.detach() for m in whole]
    error, change = (
        max(float((a - b).abs().max()) for a, b in zip(others, rows, strict=True))
        for others in (module.full_weight(), tables())
    )
    return {"pipeline": error / change, "sums": sent}


def run_rank(n_batches: int, directory: str) -> None:
    """Be one process: run all cases, and write what is found."""
    torch.set_num_threads(1)
    results = []
    with px.join(timeout=60) as processes:
        for placement, unique in CASES:
            module = embedding(processes, placement, unique)
            case: dict[str, Any] = dict(loads(module, processes.rank, n_batches))
            case["lookup"] = lookup_error(module, processes.rank)
            results.append(case | pipelined(processes, placement, unique))
        Path(directory, f"{processes.rank}.json").write_text(json.dumps(results))
        processes.barrier()


def measured(directory: Path) -> list[list[str]]:
    """Return the lines of the first table."""
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    lines = []
    for (placement, unique), *results in zip(CASES, *ranks, strict=True):
        received = list(zip(*(result["received"] for result in results), strict=True))
        load = sum(max(x) / (sum(x) / N_RANKS) for x in received) / len(received)
        sent = sum(sum(result["sent"]) for result in results) / N_RANKS / len(received)
        predicted = KEYS.busiest(N_RANKS, placement, unique=unique)
        others = to_others(KEYS.sent(N_RANKS, placement, unique=unique))
        sums = sum(result["sums"] for result in results) / N_RANKS
        of_step = ps.Keys(list(KEYS.frequencies), N_KEYS // K).exchange_bytes(
            N_RANKS, DIM, placement=placement, unique=unique, n_microbatches=K, itemsize=8
        )
        lines.append([
            placement, "once" if unique else "all", f"{load:.3f}", f"{predicted:.3f}",
            f"{predicted / load - 1:+.1%}", f"{KEYS.busiest(64, placement, unique=unique):.2f}",
            f"{sent:.0f}", f"{others:.0f}",
            f"{max(result['lookup'] for result in results):.0e}",
            f"{max(result['pipeline'] for result in results):.0e}",
            f"{sums / 1e3:.1f}", f"{to_others(of_step['accumulated']) / 1e3:.1f}",
        ])  # fmt: skip
    return lines


def to_others(matrix: NDArray[np.float64]) -> float:
    """Return what a rank sends to other ranks, on average over all ranks."""
    return float(matrix.sum() - matrix.trace()) / len(matrix)


def simulated() -> list[list[str]]:
    """Return milliseconds of a step on four GPUs, by the way in which it exchanges."""
    keys = ps.Keys.zipf([10_000_000], 65536 * 4, exponent=EXPONENT)
    network = ps.Network(latency=5e-6, bandwidth=25e9)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("as lowered by default", {}),
        ("keys exchanged early", {"prefetch_keys": True}),
        ("gradients exchanged once", {"sparse_grad_sync": "last"}),
        ("work as tasks", {"exchange_work": "compute"}),
        ("all three", LOWERING),
    ]
    lines = []
    for placement, unique in CASES:
        sizes = keys.exchange_bytes(
            N_RANKS, 128, placement=placement, unique=unique, n_microbatches=K
        )
        costs = ps.Costs(
            forward=(0.3e-3, 2e-3), backward=(0.5e-3, 4e-3), dispatch=(0.2e-3, 0),
            reorder=(0.2e-3, 0), reorder_gradients=(0.3e-3, 0), network=network,
            exchange_bytes={0: sizes}, parameter_bytes=(0, 10e6),
        )  # fmt: skip
        seconds = []
        for _, options in ways:
            schedule = ps.schedule("looped_bfs", 1, K, n_chunks=2)
            graph = ps.lower(schedule, n_replicas=N_RANKS, sharded=[0], **options)
            seconds.append(f"{1e3 * ps.simulate(graph, costs).makespan:.2f}")
        lines.append([placement, "once" if unique else "all", *seconds])
    return [["placement", "keys", *(name for name, _ in ways)], *lines]


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    out = machine.ROOT / "results" / "benchmarks" / "exchanges.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        _ranks.spawn(run_rank, N_RANKS, options.batches, directory)
        rows = measured(Path(directory))
    columns = ["placement", "keys", "load", "predicted", "error", "of 64", "keys sent",
               "predicted", "lookup", "pipeline", "sums kB", "predicted"]  # fmt: skip
    head, *ways = simulated()
    lines = [
        *machine.header(["torch", "numpy"]),
        f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}",
        f"{N_RANKS} processes over gloo; tables of {ROWS} rows, {N_KEYS} keys of each a "
        f"micro-batch, Zipf's exponent {EXPONENT}; {options.batches} micro-batches",
        "",
        *machine.table(columns, rows, 2),
        "",
        f"Simulated ms of a step of {N_RANKS} GPUs at 25 GB/s each; seconds of compute tasks are "
        "assumed, those of exchanges follow from bytes",
        *machine.table(head, ways, 2),
    ]
    machine.publish(lines, options.out)


if __name__ == "__main__":
    main()
