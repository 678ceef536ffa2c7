"""Steps of two replicas, in two processes over gloo, against their predictions.

Rows: gradients reduced after ``every`` micro-batch, or once after the ``last`` one, both of which
keep the device waiting as DistributedDataParallel does; ``bucketed``, beside the last backward; and
the step of a model with a sharded embedding. Costs come from calibration steps that take turns with
the measured ones. Prints the table and writes it to results/benchmarks/data_parallel.txt, and the
run directories' timelines beside it with ``--keep``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import _ranks
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

WIDTH, LAYERS, SAMPLES, K = 512, 4, 96, 4
ROWS, DIM, TABLES, BAG = 20_000, 64, 8, 1


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def batches(rank: int) -> Iterator[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(K * SAMPLES, WIDTH, generator=generator)
        yield x, torch.randn(K * SAMPLES, WIDTH, generator=generator)


def dense_rows(processes: px.Processes, n_steps: int, repeat: int) -> px.Validation:
    schedule = ps.schedule("gpipe", 1, K)
    graphs = {
        "every": ps.lower(
            schedule, n_replicas=2, grad_sync="every", overlap=False, hosts="per_device"
        ),
        "last": ps.lower(
            schedule, n_replicas=2, grad_sync="last", overlap=False, hosts="per_device"
        ),
        "bucketed": ps.lower(
            schedule, n_replicas=2, grad_sync="bucketed", n_buckets=4, hosts="per_device"
        ),
    }
    return px.validate(
        [mlp()],
        graphs,
        ["cpu"],
        nn.functional.mse_loss,
        batches(processes.rank),
        lambda p: torch.optim.SGD(p, 1e-3),
        n_steps=n_steps,
        repeat=repeat,
        processes=processes,
    )


def run(folder: str, n_steps: int, repeat: int) -> None:
    torch.set_num_threads(1)
    with px.join(120) as processes:
        found = dense_rows(processes, n_steps, repeat)
        if processes.rank == 0:
            print(found.table.to_string())
            print(found.costs.to_dict())
            print(found.differences.to_string())
            print(found.ops.to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _ranks.spawn(run, 2, folder, arguments.steps, arguments.repeat)


if __name__ == "__main__":
    main()
