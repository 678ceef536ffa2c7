"""Steps of two replicas, in two processes over gloo, against their predictions.

A model of linear layers whose gradients are reduced after ``every`` micro-batch, or once after the
``last`` one, which both keep a device waiting as DistributedDataParallel does, or ``bucketed``,
beside the last backward; and a DLRM whose tables lie in both processes, as
`pipeexec.demo_models.dlrm` makes it. Each process computes with one thread on a core of its own.
Costs come from calibration steps that take turns with the measured ones (`pipeexec.validate`);
nothing is fitted to a row.

``python benchmarks/data_parallel.py`` prints the tables, what the errors consist of and whether the
predictions tell which row is faster, and writes them to results/benchmarks/data_parallel.txt.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _ranks
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.dlrm import KAGGLE
from pipeexec.distributed import Processes
from pipeexec.validation import Validation
from pipesim.errors import PipeWarning

N_RANKS = 2
K = 4
WIDTH, LAYERS, SAMPLES = 768, 4, 128
#: Of the Kaggle tables; samples of a micro-batch.
SCALE, CLICKS = 1e-2, 512
Batches = Iterator[tuple[Tensor | tuple[Tensor, ...], Tensor]]


def linear(processes: Processes, n_steps: int, repeat: int) -> Validation:
    """Validate the three ways to reduce gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]

    def batches() -> Batches:
        generator = torch.Generator().manual_seed(processes.rank)
        while True:
            x, y = torch.randn(2, K * SAMPLES, WIDTH, generator=generator)
            yield x, y

    schedule = ps.schedule("1f1b", 1, K)  # the order of accumulation, F0 B0 F1 B1
    graphs = {
        mode: ps.lower(
            schedule,
            n_replicas=N_RANKS,
            grad_sync=mode,
            overlap=mode == "bucketed",
            hosts="per_device",
        )
        for mode in ("every", "last", "bucketed")
    }
    return _validated(
        [nn.Sequential(*layers)],
        graphs,
        nn.functional.mse_loss,
        batches(),
        n_steps=n_steps,
        repeat=repeat,
        processes=processes,
    )


def recommender(processes: Processes, n_steps: int, repeat: int) -> Validation:
    """Validate a DLRM with sharded tables."""
    torch.manual_seed(0)
    model = KAGGLE.scaled(SCALE)

    def batches() -> Batches:
        generator = torch.Generator().manual_seed(processes.rank)
        while True:
            yield model.batch(K * CLICKS, generator)

    graph = ps.lower(
        ps.schedule("looped_bfs", 1, K, n_chunks=2),
        n_replicas=N_RANKS,
        sharded=[0],
        hosts="per_device",
    )
    return _validated(
        model.stages(processes),
        {"sharded embedding": graph},
        nn.functional.binary_cross_entropy_with_logits,
        batches(),
        n_steps=n_steps,
        repeat=repeat,
        processes=processes,
    )


def _validated(
    stages: Sequence[nn.Module],
    graphs: Mapping[str, ps.TaskGraph],
    loss: Any,
    batches: Batches,
    **options: Any,
) -> Validation:
    """Validate on one device a process, with SGD."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 1e-3)

    return px.validate(stages, graphs, ["cpu"], loss, batches, sgd, **options)


def run(folder: str, n_steps: int, repeat: int) -> None:
    """Be a rank; rank 0 leaves the text in a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    lines = []
    with px.join(120) as processes:
        for validate in (linear, recommender):
            validation = validate(processes, n_steps, repeat)
            lines += [_table(validation), ""]
            if len(validation.rows) > 1:
                order = validation.differences
                right = int((order["right"] | ~order["beyond_noise"]).sum())
                lines += [f"order right, or within the noise, in {right} of {len(order)} pairs:"]
                lines += [order.to_string(float_format=lambda x: f"{x * 1e3:.2f} ms"), ""]
            lines += ["what the errors consist of (ms):", _ms(validation.parts), ""]
        if processes.rank == 0:
            (Path(folder) / "text").write_text("\n".join(lines))


def _table(validation: Validation) -> str:
    rows = [f"{'':18}{'predicted':>11}{'measured':>10}{'error':>8}{'mean, 95 % interval':>28}"]
    for name, row in validation.table.iterrows():
        interval = f"{row['error_mean']:+.1%} ({row['error_low']:+.1%} to {row['error_high']:+.1%})"
        rows.append(
            f"{name:18}{row['predicted'] * 1e3:8.2f} ms{row['measured'] * 1e3:7.2f} ms"
            f"{row['error']:+8.1%}{interval:>28}"
        )
    return "\n".join(rows)


def _ms(parts: object) -> str:
    return (parts * 1e3).to_string(float_format=lambda x: f"{x:.2f}")  # type: ignore[operator, no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    _ranks.publish_text(run, N_RANKS, "data_parallel", arguments.steps, arguments.repeat)


if __name__ == "__main__":
    main()
