"""What the steps of ``benchmarks/gpu.py`` share: devices, a model, reports, comparisons."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.capture import Recorder
from pipeexec.devices import DeviceLike
from pipeexec.models import cross_entropy, gpt, split
from pipesim.ops import COMPUTE, SENDS

#: Schedules that place the same stages on the same devices, and so share costs: name and options.
GROUPS: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("gpipe", {}), ("1f1b", {}), ("zb_h1", {})),
    (("interleaved_1f1b", {"n_chunks": 2}),),
    (("zbv", {}),),
)
#: Relative to the largest element of a parameter's gradient: kernels and numbers are those of the
#: unsplit model in float32, but micro-batches are summed in the schedule's order.
GRADIENTS = 1e-4


class Missed(Exception):
    """A target was missed; everything ran."""


class Report:
    """Lines that are in their file as soon as they are said, and targets that were met or not.

    Parameters
    ----------
    path
        The file.
    head
        Its first lines.
    """

    def __init__(self, path: Path, head: Sequence[str] = ()) -> None:
        self.path = path
        self.missed: list[str] = []
        path.write_text("".join(f"{line}\n" for line in head))

    def say(self, line: str = "") -> None:
        """Add a line."""
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def check(self, met: bool, what: str) -> None:
        """Add a line that says whether a target was met."""
        self.say(f"{'ok    ' if met else 'MISSED'} {what}")
        if not met:
            self.missed.append(what)

    def end(self) -> None:
        """Raise `Missed` if a target was."""
        if self.missed:
            raise Missed(f"{len(self.missed)} targets missed, first: {self.missed[0]}")


class Bench:
    """Where steps run, and how large they are.

    Parameters
    ----------
    out
        The folder of the results.
    dry
        On CPU workers, tiny, to see that everything runs; targets then do not count.
    """

    def __init__(self, out: Path, dry: bool) -> None:
        self.out, self.dry = out, dry
        self.gpu = torch.device("cpu" if dry else "cuda:0")
        self.slice_counts = (2,) if dry else (2, 4, 8)
        self.width, self.heads, self.sequence = (32, 2, 16) if dry else (1024, 16, 256)
        if not dry:  # float32 as it is: no TF32
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def pick(self, on_gpu: int, dry: int) -> int:
        """Return a count, or that of a dry run."""
        return dry if self.dry else on_gpu

    def devices(self, n: int, link: ps.Network | None = None) -> Sequence[DeviceLike]:
        """Return slices of the GPU; a pipeline closes them, so they are made for each."""
        return ["cpu"] * n if self.dry else px.slices("cuda:0", n, link=link)

    def captures(self, wanted: bool) -> bool:
        """Return whether steps become CUDA graphs, where that is wanted."""
        return wanted and not self.dry

    def stages(self, n_stages: int, n_blocks: int) -> list[nn.Sequential]:
        """Return a transformer of ``n_blocks`` in equal stages; the same at every call."""
        layers = gpt(
            n_layers=n_blocks, d_model=self.width, n_heads=self.heads, sequence=self.sequence
        )
        each = n_blocks // n_stages
        counts = [each] * n_stages
        counts[0] += 1  # the embedding
        counts[-1] += 1  # norm and head
        return split(layers, n_stages, balance=counts)

    def batch(self, n_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random tokens, and the ones to predict, on the host."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(256, (n_samples, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def samples(self, n: int) -> int:
        """Return the samples of a micro-batch that make tasks of ``n`` slices equally long."""
        return self.pick(16 // n, 1)

    def wait(self) -> None:
        """Wait for the GPU."""
        if not self.dry:
            torch.cuda.synchronize()

    @contextmanager
    def pipeline(
        self, graph: ps.TaskGraph, stages: Sequence[nn.Module], *, cuda_graph: bool = False,
        link: ps.Network | None = None, optimizer: Any = None,
    ) -> Iterator[px.Pipeline]:  # fmt: skip
        """Give a pipeline on slices."""
        with px.Pipeline(
            stages, graph, self.devices(graph.n_devices, link), cross_entropy, optimizer,
            cuda_graph=self.captures(cuda_graph),
        ) as made:  # fmt: skip
            yield made


def sgd(parameters: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return an optimizer that keeps nothing on the host."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def lowered(name: str, n: int, m: int, overlap: bool = True, **options: Any) -> ps.TaskGraph:
    """Return the graph of a schedule."""
    return ps.lower(ps.schedule(name, n_devices=n, n_microbatches=m, **options), overlap=overlap)


@contextmanager
def counted_replays() -> Iterator[Callable[[], int]]:
    """Give a function that says how many steps ran as CUDA graphs within the block."""
    launch, count = Recorder.launch, 0

    def counting(self: Recorder, graph: torch.cuda.CUDAGraph) -> float:
        nonlocal count
        count += 1
        return launch(self, graph)

    Recorder.launch = counting  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        Recorder.launch = launch  # type: ignore[method-assign]


def unsplit_gradients(
    stages: Sequence[nn.Module], batch: tuple[Tensor, Tensor], m: int, device: torch.device
) -> list[Tensor]:
    """Return the gradients of the whole model, micro-batch by micro-batch on one stream."""
    whole = nn.Sequential(*copy.deepcopy(list(stages))).to(device)
    parts = zip(*(x.to(device).tensor_split(m) for x in batch), strict=True)
    for inputs, targets in parts:
        (cross_entropy(whole(inputs), targets) / m).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def gradient_error(bench: Bench, name: str, n: int, cuda_graph: bool, **options: Any) -> float:
    """Return how far the gradients of a step are from the unsplit model's, relative to the largest.

    The last of four steps, which a CUDA graph replays; its optimizer changes nothing.
    """
    m = 2 * n
    graph = lowered(name, n, m, **options)
    stages = bench.stages(graph.n_stages, 2 * n)
    batch = bench.batch(m)
    wanted = unsplit_gradients(stages, batch, m, bench.gpu)

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with (
        counted_replays() as replays,
        bench.pipeline(graph, stages, cuda_graph=cuda_graph, optimizer=still) as subject,
    ):
        for _ in range(4):
            subject.step(*batch)
        if bench.captures(cuda_graph) and not replays():
            raise RuntimeError(f"no step of {name} ran as a CUDA graph")
    found = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
        for a, b in zip(found, wanted, strict=True)
    )


def hidden_share(timeline: ps.Timeline) -> float:
    """Return the share of the SENDs' time in which their device computes."""
    graph = timeline.graph
    total = hidden = 0.0
    for device in range(graph.n_devices):
        mine = graph.device == device
        sends, busy = (
            np.stack([timeline.start[chosen], timeline.end[chosen]], axis=1)
            for chosen in (mine & graph.is_op(SENDS), mine & graph.is_op(COMPUTE))
        )
        total += float((sends[:, 1] - sends[:, 0]).sum())
        begin = np.maximum(sends[:, None, 0], busy[None, :, 0])
        end = np.minimum(sends[:, None, 1], busy[None, :, 1])
        hidden += float(np.clip(end - begin, 0.0, None).sum())
    return hidden / total if total else 0.0


@contextmanager
def noted_warnings(say: Callable[[str], None]) -> Iterator[None]:
    """Say each warning once, in place of printing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for text in dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught):
                say(f"warning {text}")


@contextmanager
def messages_timed_once(bench: Bench) -> Iterator[None]:
    """Time messages between the same slices once: they do not depend on stages or CUDA graphs.

    Of the network, only the bandwidth is taken from them; each calibration finds its own latency.
    """
    profile = importlib.import_module("pipeexec.profile")  # `pipeexec.profile` is a function too
    measure, found = profile.measure_transfers, dict[tuple[tuple[int, int], ...], pd.DataFrame]()
    options: dict[str, Any] = {"sizes": (1 << 12, 1 << 16), "repeat": 1} if bench.dry else {}

    def once(pipeline: px.Pipeline, pairs: Sequence[tuple[int, int]]) -> pd.DataFrame:
        key = tuple(pairs)
        if key not in found:
            found[key] = measure(pipeline, pairs, **options)
        return found[key]

    profile.measure_transfers = once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        profile.measure_transfers = measure  # type: ignore[attr-defined]
