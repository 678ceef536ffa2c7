"""Devices, sizes and models of the steps of ``benchmarks/gpu.py``."""

from __future__ import annotations

import copy
import gc
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
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.layer_costs import LayerCosts, layer_costs
from pipeexec.demo_models.registry import cross_entropy, split
from pipeexec.devices.device import DeviceLike
from pipeexec.executor.step_capture import Recorder
from pipeexec.validation import Validation
from pipesim.ops import COMPUTE, SENDS

#: Schedules that place the same stages on the same devices, and so share costs: name and options.
GROUPS: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("gpipe", {}), ("1f1b", {}), ("zb_h1", {})),
    (("interleaved_1f1b", {"n_chunks": 2}),),
    (("zbv", {}),),
)


class Bench:
    """Where steps run, and how large they are.

    Parameters
    ----------
    out
        Folder of the files that the step writes; made when it writes the first.
    dry
        On CPU workers, tiny, to see that everything runs; targets then do not count.
    brief
        Without the rows and rounds that a quarter of an hour has no room for.

    Attributes
    ----------
    dtype
        Type of parameters and activations.
    """

    def __init__(self, out: Path, dry: bool, brief: bool = True) -> None:
        self.out, self.dry, self.brief = out, dry, brief
        self._layers: dict[int, nn.Sequential] = {}
        self._layer_costs: dict[int, LayerCosts] = {}
        self.gpu = torch.device("cpu" if dry else "cuda:0")
        self.dtype = torch.float32
        self.slice_counts = (2,) if dry else (2, 4) if brief else (2, 4, 8)
        #: Whether steps are CUDA graphs, of which a dry run has none.
        self.kinds = (False,) if dry else (True, False)
        self.width, self.heads, self.sequence = (32, 2, 16) if dry else (1024, 16, 256)
        if not dry:  # float32 as it is: no TF32
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def pick(self, on_gpu: int, dry: int, brief: int | None = None) -> int:
        """Return a count, or that of a dry run, or of a brief run."""
        if self.dry:
            return dry
        return brief if self.brief and brief is not None else on_gpu

    def devices(self, n: int, link: ps.Network | None = None) -> Sequence[DeviceLike]:
        """Return slices of the GPU; a pipeline closes them, so they are made for each."""
        return ["cpu"] * n if self.dry else px.slices("cuda:0", n, link=link)

    def captures(self, wanted: bool) -> bool:
        """Return whether steps become CUDA graphs, where that is wanted."""
        return wanted and not self.dry

    def layers(self, n_blocks: int) -> nn.Sequential:
        """Return the layers of a transformer of ``n_blocks``; made once, as that takes a second."""
        if n_blocks not in self._layers:
            self._layers[n_blocks] = gpt(
                n_layers=n_blocks, d_model=self.width, n_heads=self.heads, sequence=self.sequence
            )
        return self._layers[n_blocks]

    def layer_costs(self, n: int) -> LayerCosts:
        """Return the work of the layers of ``n`` slices, a micro-batch; counted once, as above."""
        if n not in self._layer_costs:
            tokens, _ = self.batch(self.samples(n))
            self._layer_costs[n] = layer_costs(self.layers(2 * n), tokens)
        return self._layer_costs[n]

    def balance(self, n_stages: int, n_blocks: int) -> list[int]:
        """Return the layers of each stage; the first has the embedding, the last norm and head."""
        counts = [n_blocks // n_stages] * n_stages
        counts[0] += 1
        counts[-1] += 1
        return counts

    def stages(self, n_stages: int, n_blocks: int) -> list[nn.Sequential]:
        """Return a transformer of ``n_blocks`` in equal stages; the same at every call."""
        layers = copy.deepcopy(self.layers(n_blocks)).to(self.dtype)
        return split(layers, n_stages, balance=self.balance(n_stages, n_blocks))

    def batch(self, n_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random tokens, and the ones to predict, on the host."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(256, (n_samples, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def samples(self, n: int) -> int:
        """Return the samples of a micro-batch that make tasks of ``n`` slices equally long."""
        return self.pick(16 // n, 1)

    def release(self) -> int:
        """Give memory that nothing refers to back to the GPU; return the bytes still allocated."""
        gc.collect()
        if self.dry:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def keep(self, validation: Validation, name: str, **record: Any) -> None:
        """Write the run directory of a validation; figures are drawn elsewhere, from these."""
        self.out.mkdir(parents=True, exist_ok=True)
        validation.save(self.out / name, record=record, figures=False)

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
        ) as pipeline:  # fmt: skip
            yield pipeline
        del pipeline
        self.release()


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


def hidden_share(timeline: ps.Timeline) -> float:
    """Return the share of the SENDs' time in which their device computes."""
    graph = timeline.graph
    total = hidden = 0.0
    for device in range(graph.n_devices):
        own = graph.device == device
        sends, busy = (
            np.stack([timeline.start[chosen], timeline.end[chosen]], axis=1)
            for chosen in (own & graph.is_op(SENDS), own & graph.is_op(COMPUTE))
        )
        total += float((sends[:, 1] - sends[:, 0]).sum())
        begin = np.maximum(sends[:, None, 0], busy[None, :, 0])
        end = np.minimum(sends[:, None, 1], busy[None, :, 1])
        hidden += float(np.clip(end - begin, 0.0, None).sum())
    return hidden / total if total else 0.0


@contextmanager
def noted_warnings(write: Callable[[str], None]) -> Iterator[None]:
    """Write each warning once, in place of printing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for text in dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught):
                write(f"warning {text}")


@contextmanager
def messages_timed_once(bench: Bench) -> Iterator[None]:
    """Time messages between the same slices once: they do not depend on stages or CUDA graphs.

    Of the network, only the bandwidth is taken from them; each calibration finds its own latency.
    """
    profile = importlib.import_module(
        "pipeexec.profiling.calibration"
    )  # `pipeexec.profile` is a function too
    measure, tables = profile.measure_transfers, dict[tuple[tuple[int, int], ...], pd.DataFrame]()
    options: dict[str, Any] = {"sizes": (1 << 12, 1 << 16), "repeat": 1} if bench.dry else {}

    def once(pipeline: px.Pipeline, pairs: Sequence[tuple[int, int]]) -> pd.DataFrame:
        key = tuple(pairs)
        if key not in tables:
            tables[key] = measure(pipeline, pairs, **options)
        return tables[key]

    profile.measure_transfers = once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        profile.measure_transfers = measure  # type: ignore[attr-defined]
