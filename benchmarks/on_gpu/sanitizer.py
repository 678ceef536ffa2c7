"""Step ``sanitizer``: tiny steps under torch's CUDA sanitizer, which sees races between streams.

Torch reads ``TORCH_CUDA_SANITIZER`` when it is imported, so that this step has it from the start.
CUDA graphs and imposed links are left out: the sanitizer sees neither replays nor kernels that are
no operators. It does not see memory that is freed too early either:
``tests/pipeexec/executor/test_races.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.report import Report
from pipeexec.devices.cuda_streams import CudaStream

_WIDTH = 16
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "pipedream", "pipedream_2bw")
#: Error of the sanitizer; a pipeline's own error names it as its cause.
_RACE = "CUDASanitizerErrors"


def sanitizer(bench: Bench, report: Report) -> None:
    """Run three steps of each case; a race is an error of the operator that completes it."""
    if bench.dry:
        report.add("no GPU: the same steps without the sanitizer")
    else:
        plain = partial(_pipeline, bench, _lowered("1f1b"), 2)
        with patch.object(CudaStream, "wait_event", lambda stream, event: None):
            race = _raised(plain)
        report.check(_RACE in race, f"a wait that is dropped is seen: {race[:100] or 'no'}")
        torch.cuda.synchronize()
    for name, run in islice(_cases(bench), 0, None, bench.pick(1, 6)):
        error = _raised(run)
        report.record("sanitizer", case=name, race=_RACE in error, error=error)
        report.check(not error, f"{name}: {error or 'no race'}")
        bench.release()


def _cases(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield names and what to run."""
    for name, overlap in product(SCHEDULES, (True, False)):
        words = f"{name}, overlap={overlap}"
        yield words, partial(_pipeline, bench, _lowered(name, overlap=overlap), 2)
    if not bench.dry:
        chimera = ps.lower(ps.schedule("chimera", 4, 4))
        yield "chimera", partial(_pipeline, bench, chimera, 4)
    for mode in ("last", "every", "bucketed"):
        schedule = ps.schedule("gpipe", 1, 2)
        graph = ps.lower(schedule, n_replicas=2, grad_sync=mode, n_buckets=2)  # type: ignore[arg-type]
        yield f"replicas, {mode}", partial(_pipeline, bench, graph, 2)
    for copies, dependencies, checkpoint in product(
        (True, False), (True, False), ("except_last", "never")
    ):
        options = {"copy_streams": copies, "dependencies": dependencies, "checkpoint": checkpoint}
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        yield f"GPipe, {words}", partial(_gpipe, bench, options)


def _lowered(name: str, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, 2, 4), **options)


def _stages(n: int) -> list[nn.Sequential]:
    return [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(n)]


def _pipeline(bench: Bench, graph: ps.TaskGraph, n: int) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    stages, devices = _stages(graph.n_stages), bench.devices(n)
    with px.Pipeline(stages, graph, devices, nn.functional.mse_loss, sgd) as pipeline:
        for _ in range(3):
            pipeline.step(torch.randn(16, _WIDTH), torch.randn(16, _WIDTH))


def _gpipe(bench: Bench, options: dict[str, Any]) -> None:
    layers = nn.Sequential(*_stages(4))
    model = px.GPipe(layers, [2, 2], devices=bench.devices(2), chunks=4, **options)
    for _ in range(3):
        inputs = torch.randn(8, _WIDTH, device=bench.gpu, requires_grad=True)
        model(inputs).square().mean().backward()
    bench.wait()


def _raised(run: Callable[[], None]) -> str:
    """Return what a case raised as one line; empty for nothing."""
    try:
        run()
    except Exception as error:
        causes = [error, *filter(None, [error.__cause__])]
        races = [str(race) for cause in causes for race in getattr(cause, "errors", ())[:1]]
        texts = [*(f"{type(cause).__name__}: {cause}" for cause in causes), *races]
        return "; ".join(texts).replace("\n", " ")[:2000]
    return ""
