"""A step of `pipeexec.ShardedEmbedding` over two processes against torchrec's, and a replica's.

A step is forward, backward, and SGD of 26 tables, whose sizes are those of the Criteo data of
Kaggle, none larger than ``--most`` rows. Each process has a batch of its own, with one key a table.
Keys are uniform, or skewed (the rank of a key in popularity is rows * u**4, u uniform; which keys
are popular is drawn). All take turns in the same two processes over gloo, each with one thread, and
begin each step together; who goes first changes from round to round. A step takes as long as the
slower process; its ratio is that to the other's step of that round.

- ours: gradients sparse, ``torch.optim.SGD``; bags of one key.
- torchrec: EmbeddingBagCollection (bags of one key) and EmbeddingCollection, tables row-wise, with
  its default kernel, which fuses SGD into the backward. Left out where torchrec is not installed:
  ``pip install --no-deps --target FOLDER torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3
  tensordict pyre-extensions lightning-utilities pyvers orjson typing-inspect mypy-extensions``, and
  FOLDER in PYTHONPATH; these are the releases for torch 2.13.
- replica: every process has all rows, in one `torch.nn.EmbeddingBag`; its gradient is all-reduced.

Before anything is timed, all must have the same outputs after a step.

``python benchmarks/sharded_embedding.py`` prints medians over the rounds, the median of the ratios,
and its 95 % confidence interval (order statistics), and writes them to
results/benchmarks/sharded_embedding.txt.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
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
from torch import Tensor, nn

import pipeexec as px

N_RANKS = 2
WARM_UP = 3
RATE = 0.1
#: Rows of the 26 tables: distinct values of the categorical columns of Criteo's Kaggle data.
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
          14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]  # fmt: skip
#: Runs a step on keys (batch, tables), with the gradient of the output; returns the output.
Step = Callable[[Tensor, Tensor], Tensor]


class EmbeddingCase(NamedTuple):
    """A row of the table: how long vectors are, how large a process's batch, which keys."""

    dim: int
    batch: int
    skewed: bool

    @property
    def label(self) -> str:
        """Name of its rows."""
        return f"{self.dim}  {self.batch}  {'skewed' if self.skewed else 'uniform'}"


CASES = [
    EmbeddingCase(16, 512, True),
    EmbeddingCase(16, 2048, True),
    EmbeddingCase(64, 512, True),
    EmbeddingCase(64, 2048, True),
    EmbeddingCase(64, 2048, False),
]


def draw(case: EmbeddingCase, n_rows: list[int], generator: torch.Generator) -> Tensor:
    """Return keys of one batch."""
    columns = []
    for table, rows in enumerate(n_rows):
        drawn = torch.rand(case.batch, generator=generator, dtype=torch.float64)
        place = (drawn ** (4 if case.skewed else 1) * rows).long()
        popular = torch.randperm(rows, generator=torch.Generator().manual_seed(table))
        columns.append(popular[place])
    return torch.stack(columns, 1)


def own_step(full: list[Tensor]) -> Step:
    """Return the step of our module."""
    module = px.ShardedEmbedding.from_full(full, combiner="sum", gradients="mean", sparse=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step(keys: Tensor, grad: Tensor) -> Tensor:
        optimizer.zero_grad()
        output: Tensor = module(keys[..., None])
        output.backward(grad)
        optimizer.step()
        return output.detach()

    return step


def replica(full: list[Tensor]) -> Step:
    """Return the step of one module that has all rows of all tables."""
    module = nn.EmbeddingBag.from_pretrained(torch.cat(full), freeze=False, mode="sum")
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    starts = torch.tensor([0, *map(len, full)][:-1]).cumsum(0)

    def step(keys: Tensor, grad: Tensor) -> Tensor:
        optimizer.zero_grad()
        output: Tensor = module((keys + starts).reshape(-1, 1))
        output.backward(grad.view_as(output))
        gradient = module.weight.grad
        assert gradient is not None
        dist.all_reduce(gradient.div_(N_RANKS))
        optimizer.step()
        return output.detach().view_as(grad)

    return step


def torchrec_step(full: list[Tensor], *, pooled: bool) -> Step:
    """Return the step of a collection of torchrec, row-wise."""
    import torchrec
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    cpu, names = torch.device("cpu"), [f"key{i}" for i in range(len(full))]
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    tables = [
        config(name=f"t{i}", embedding_dim=rows.shape[1], num_embeddings=len(rows),
               feature_names=[names[i]])
        for i, rows in enumerate(full)
    ]  # fmt: skip
    kind = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    module = kind(tables=tables, device=cpu)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
    sharder: Any = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
    plan = sharding_plan.construct_module_sharding_plan(
        module, {table.name: sharding_plan.row_wise() for table in tables}, sharder=sharder,
        local_size=N_RANKS, world_size=N_RANKS, device_type="cpu",
    )  # fmt: skip
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), cpu)
    for name, held in sharded.state_dict().items():
        table = full[int(name.split(".")[-2][1:])]
        for shard in held.local_shards():
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(table[first : first + len(shard.tensor)])

    def step(keys: Tensor, grad: Tensor) -> Tensor:
        lengths = torch.ones(keys.numel(), dtype=torch.int64)
        values = keys.t().reshape(-1)
        vectors = sharded(
            torchrec.KeyedJaggedTensor.from_lengths_sync(names, values, lengths)
        ).wait()
        if pooled:
            output = vectors.values().view_as(grad)
        else:
            output = torch.stack([vectors[name].values() for name in names], 1)
        output.backward(grad)
        return output.detach()

    return step


def make(case: EmbeddingCase, options: dict[str, Any]) -> dict[str, Step]:
    """Return all steps; all begin with the same rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = [min(rows, options["most"]) for rows in CRITEO]
    full = [torch.randn(rows, case.dim, generator=generator) for rows in sizes]
    steps = {"ours": own_step(full)}
    if options["has_torchrec"]:
        steps["torchrec bags"] = torchrec_step(full, pooled=True)
        steps["torchrec"] = torchrec_step(full, pooled=False)
    return {**steps, "replica": replica(full)}


def run_rank(options: dict[str, Any], directory: str) -> None:
    """Be one process: run all, step by step, and write the seconds of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    seconds: list[dict[str, list[float]]] = []
    for case in CASES:
        steps = make(case, options)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        sizes = [min(rows, options["most"]) for rows in CRITEO]
        batches = [draw(case, sizes, generator) for _ in range(8)]
        grad = torch.randn(case.batch, len(sizes), case.dim, generator=generator) * 1e-2
        check(steps, batches, grad)
        gc.freeze()  # collections between steps look at what is new alone
        times: dict[str, list[float]] = {name: [] for name in steps}
        names = list(steps)
        for number in range(-WARM_UP, options["rounds"]):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                took = timed(steps[name], batches[number % len(batches)], grad)
                if number >= 0:
                    times[name].append(took)
        seconds.append(times)
        del steps
        gc.unfreeze()
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def check(steps: dict[str, Step], batches: list[Tensor], grad: Tensor) -> None:
    """Raise unless all have the same outputs, before and after a step, up to rounding."""
    for keys in (batches[0], batches[0]):
        outputs = {name: step(keys, grad) for name, step in steps.items()}
        for name, output in outputs.items():
            torch.testing.assert_close(
                output, outputs["ours"], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def timed(step: Step, keys: Tensor, grad: Tensor) -> float:
    """Return the seconds of a step in this process; all begin together."""
    gc.collect()
    dist.barrier()
    start = perf_counter()
    step(keys, grad)
    return perf_counter() - start


def rows(directory: Path) -> list[list[str]]:
    """Return the lines of the table."""
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    lines = []
    for case, *of_ranks in zip(CASES, *ranks, strict=True):
        slowest = {
            name: [max(pair) for pair in zip(*(times[name] for times in of_ranks), strict=True)]
            for name in of_ranks[0]
        }
        own = slowest.pop("ours")
        for name, peer in slowest.items():
            ratios = sorted(a / b for a, b in zip(own, peer, strict=True))
            low, high = interval(len(ratios))
            lines.append([
                str(case.dim), str(case.batch), "skewed" if case.skewed else "uniform", name,
                f"{statistics.median(own) * 1e3:.1f}", f"{statistics.median(peer) * 1e3:.1f}",
                f"{statistics.median(ratios):.3f}", f"{ratios[low]:.3f} to {ratios[high]:.3f}",
            ])  # fmt: skip
    return lines


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=50_000, help="rows of a table, at most")
    parser.add_argument("--rounds", type=int, default=40)
    out = machine.ROOT / "results" / "benchmarks" / "sharded_embedding.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = vars(parser.parse_args())
    out = options.pop("out")
    options["has_torchrec"] = importlib.util.find_spec("torchrec") is not None
    with tempfile.TemporaryDirectory() as directory:
        _ranks.spawn(run_rank, N_RANKS, options, directory)
        table = rows(Path(directory))
    columns = ["dim", "batch", "keys", "other", "ours ms", "other ms", "ours/other",
               "95 % interval"]  # fmt: skip
    n_rows = sum(min(rows, options["most"]) for rows in CRITEO)
    lines = [
        *machine.header(["torch", "torchrec", "fbgemm-gpu-cpu"]),
        f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}",
        f"{N_RANKS} processes over gloo, one thread each; {len(CRITEO)} tables, {n_rows:,} rows, "
        f"{options['rounds']} rounds",
        "",
        *machine.table(columns, table, 4),
    ]
    machine.publish(lines, out)


if __name__ == "__main__":
    main()
