"""Steps on two CPU workers, predicted from layers that were profiled on one worker.

Each row is a model and a schedule (two devices, eight micro-batches), in one process of two worker
threads, or in two processes over gloo. In each round the layers are profiled on one worker, with
the other one idle (`px.project`), the stages on both workers at once (`px.measure`), and five steps
of each schedule run on both. Columns:

- measured: median makespan of the steps, in milliseconds;
- projected: makespan from the layers of one worker, and its error, predicted over measured minus 1:
  the median of the rounds, and the worst one;
- busy: the error of a projection from one worker while a second one runs copies of the layers, as
  another thread (``n_busy=1``);
- profiled: the error from the stages on both workers. The difference of both errors is contention:
  of two workers for memory bandwidth, caches and the interpreter;
- contention: mean seconds of F and B of a stage on both workers, over those of its layers on one.

The network between workers is not measured here, as who has one device cannot: messages between
threads take 0.15 ms, between processes 0.3 ms and 2.3 GB/s.

``python benchmarks/projection.py`` writes results/benchmarks/projection.txt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.distributed import Processes
from pipeexec.projection import Projection
from pipesim.errors import PipeWarning

N_MICROBATCHES = 8
SCHEDULES: dict[str, dict[str, int]] = {
    "gpipe": {}, "1f1b": {}, "zb_h1": {}, "interleaved_1f1b": {"n_chunks": 2},
}  # fmt: skip
NETWORKS = {
    "threads": ps.Network(latency=150e-6),
    "processes": ps.Network(latency=300e-6, bandwidth=2.3e9),
}


@dataclass(frozen=True)
class Case:
    """A model, and its batches.

    Attributes
    ----------
    make
        Makes the model.
    batch
        Returns inputs and targets of so many samples.
    size
        Samples of a micro-batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    size: int


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
        layer_type="basic", num_labels=10,
    )  # fmt: skip
    return ResNetForImageClassification(config).eval()  # batch norms with running statistics


def words(n: int, vocabulary: int = 256) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (n, 129), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 96, 96, generator=generator), torch.arange(n) % 10


CASES = {
    "GPT": Case(gpt, words, 1),
    "Llama": Case(llama, partial(words, vocabulary=1000), 1),
    "ResNet": Case(resnet, images, 2),
}


def loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def cluster(where: str) -> ps.Cluster:
    """Return two CPU workers."""
    gpu = ps.GPU(flops=1e11, bandwidth=1e10, memory=16e9)
    return ps.Cluster(n_gpus=2, gpu=gpu, network=NETWORKS[where])


def sizes_of(n_layers: int, n_stages: int) -> list[int]:
    """Return the layers of each stage, the first ones one more."""
    least, rest = divmod(n_layers, n_stages)
    return [least + (k < rest) for k in range(n_stages)]


def rounds_of(
    case: Case, where: str, n_rounds: int, n_steps: int, processes: Processes | None
) -> dict[str, list[list[float]]]:
    """Return measured, projected, busy and profiled makespans, and contention, of each round."""
    torch.manual_seed(0)
    model, is_first = case.make(), processes is None or processes.rank == 0
    sample, sample_targets = case.batch(case.size)
    batch = case.batch(case.size * N_MICROBATCHES)
    hosts = "one" if processes is None else "per_device"
    rows: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    pipelines: dict[str, px.Pipeline] = {}
    for _ in range(n_rounds):
        alone, busy = (
            projected(case, model, sample, sample_targets, where, n) if is_first else None
            for n in (0, 1)
        )
        for name, options in SCHEDULES.items():
            blocks: Any = None
            if alone is not None:
                sizes = sizes_of(len(alone.layers), 2 * options.get("n_chunks", 1))
                blocks = alone.blocks(sizes)
            if name not in pipelines:
                blocks = blocks if processes is None else processes.share(blocks)[0]
                stages = px.split(case.make(), blocks, sample=sample)
                graph = ps.lower(ps.schedule(name, 2, N_MICROBATCHES, **options), hosts=hosts)
                pipelines[name] = px.Pipeline(
                    stages, graph, ["cpu"] * (2 if processes is None else 1), loss,
                    torch.optim.AdamW, processes=processes, timeout=None,
                )  # fmt: skip
                pipelines[name].step(*batch)
            pipeline = pipelines[name]
            profile = px.measure(pipeline, *batch, n_steps=3, warm_up=1)
            steps = [pipeline.gather(pipeline.step(*batch)) for _ in range(n_steps)]
            if alone is None or busy is None:
                continue
            makespans = [
                x.predict(name, 2, N_MICROBATCHES, split=sizes, hosts=hosts, **options).makespan
                for x in (alone, busy)
            ]
            both = ps.simulate(pipeline.graph, profile.costs).makespan
            measured = statistics.median(step.timeline.makespan for step in steps)
            contention = work(profile.costs) / work(alone.costs(sizes))
            rows[name].append([measured, *makespans, both, contention])
    for pipeline in pipelines.values():
        pipeline.close()
    return rows


def projected(
    case: Case, model: nn.Module, sample: Any, targets: Tensor, where: str, n_busy: int
) -> Projection:
    return px.project(
        model, sample, cluster(where), targets=targets, loss_fn=loss, optimizer=torch.optim.AdamW,
        microbatch_size=case.size, n_busy=n_busy, n_steps=5,
    )  # fmt: skip


def work(costs: ps.Costs) -> float:
    """Return the seconds of F and B of all stages."""
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.backward, tuple)
    return sum(costs.forward) + sum(costs.backward)


def run_rank(names: Iterable[str], n_rounds: int, n_steps: int, path: str) -> None:
    """Be one of two processes; the first one writes the rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    with px.join(timeout=600) as processes:
        rows = {
            name: rounds_of(CASES[name], "processes", n_rounds, n_steps, processes)
            for name in names
        }
        if processes.rank == 0:
            Path(path).write_text(json.dumps(rows))


def lines_of(where: str, rows: dict[str, dict[str, list[list[float]]]]) -> list[list[str]]:
    """Return the lines of the table."""
    lines = []
    for model, schedules in rows.items():
        for name, rounds in schedules.items():
            measured, projection, *others, contention = zip(*rounds, strict=True)
            errors, of_busy, of_profile = (
                [p / m - 1 for p, m in zip(column, measured, strict=True)]
                for column in (projection, *others)
            )
            lines.append(
                [
                    model, where, name,
                    f"{1e3 * statistics.median(measured):.1f}",
                    f"{1e3 * statistics.median(projection):.1f}",
                    f"{statistics.median(errors):+.1%}",
                    f"{max(errors, key=abs):+.1%}",
                    f"{statistics.median(of_busy):+.1%}",
                    f"{statistics.median(of_profile):+.1%}",
                    f"{statistics.median(contention):.2f}",
                ]
            )  # fmt: skip
    return lines


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = machine.ROOT / "results" / "benchmarks"
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--where", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=folder / "projection.txt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    lines = []
    if "threads" in options.where:
        rows = {
            name: rounds_of(CASES[name], "threads", options.rounds, options.steps, None)
            for name in options.models
        }
        lines += lines_of("threads", rows)
    if "processes" in options.where:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "rows.json")
            _ranks.spawn(run_rank, 2, options.models, options.rounds, options.steps, str(path))
            lines += lines_of("processes", json.loads(path.read_text()))
    columns = ["model", "workers", "schedule", "measured ms", "projected ms", "error", "worst",
               "busy", "profiled", "contention"]  # fmt: skip
    text = [
        *machine.header(["torch", "transformers"]),
        "",
        f"{options.rounds} rounds of {options.steps} steps",
        *machine.table(columns, lines, 3),
    ]
    machine.publish(text, options.out)


if __name__ == "__main__":
    main()
