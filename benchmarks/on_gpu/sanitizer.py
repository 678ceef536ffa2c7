"""Step ``sanitizer``: tiny steps under torch's CUDA sanitizer, which sees races between streams.

Torch reads ``TORCH_CUDA_SANITIZER`` when it is imported, so that this step has it from the start.
CUDA graphs and imposed links are left out: the sanitizer sees neither replays nor kernels that are
no operators. It does not see memory that is freed too early either:
``tests/pipeexec/executor/test_races.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.report import Report
from pipeexec.devices.cuda import CudaStream

_WIDTH = 16
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "pipedream", "pipedream_2bw")
#: Error of the sanitizer; a pipeline's own error names it as its cause.
_RACE = "CUDASanitizerErrors"


def sanitizer(bench: Bench, report: Report) -> None:
    """Run three steps of each case; a race is an error of the operator that completes it."""
    if bench.dry:
        report.add("no GPU: the same steps without the sanitizer")
    else:
        plain = partial(_pipeline, bench, _lowered("1f1b"))
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
    """Yield names and what to run; a time limit may cut the end."""
    yield from _schedules(bench, SCHEDULES[:2])
    yield from _features(bench)
    yield from _schedules(bench, SCHEDULES[2:])
    if not bench.dry:
        yield "chimera", partial(_pipeline, bench, ps.lower(ps.schedule("chimera", 4, 4)))
    for mode in ("last", "every", "bucketed"):
        schedule = ps.schedule("gpipe", 1, 2)
        graph = ps.lower(schedule, n_replicas=2, grad_sync=mode, n_buckets=2)  # type: ignore[arg-type]
        yield f"replicas, {mode}", partial(_pipeline, bench, graph)
    for copies, dependencies, checkpoint in product(
        (True, False), (True, False), ("except_last", "never")
    ):
        options = {"copy_streams": copies, "dependencies": dependencies, "checkpoint": checkpoint}
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        yield f"GPipe, {words}", partial(_gpipe, bench, options)


def _schedules(bench: Bench, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, overlap in product(names, (True, False)):
        run = partial(_pipeline, bench, _lowered(name, overlap=overlap))
        yield f"{name}, overlap={overlap}", run


def _features(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    run, clipped = partial(_pipeline, bench), {"max_grad_norm": 0.1}
    for overlap in (True, False):
        graph = ps.lower(
            ps.schedule("1f1b", 1, 2), n_replicas=2, expert_layers=1, grad_norm=True,
            overlap=overlap,
        )  # fmt: skip
        yield f"experts, clipped, overlap={overlap}", partial(run, graph, _experts(), **clipped)
    yield "clipped", partial(run, _lowered("zb_h1", grad_norm=True), **clipped)
    graph = _lowered("1f1b", tied=[(0, 1)], grad_norm=True)
    names = [(0, "0.weight"), (1, "0.weight")]
    yield "tied, clipped", partial(run, graph, _equal_stages(), tied=[names], **clipped)
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2))
    stages, shape = [_Attention(), _Attention()], (4, 8, _WIDTH)
    yield "slices, evaluations", partial(run, graph, stages, use=_evaluations, shape=shape)
    for name, overlap in (("gpipe", True), ("gpipe", False), ("zb_h1", True)):
        graph = _lowered(name, offload="all", overlap=overlap)
        yield f"offload, {name}, overlap={overlap}", partial(run, graph, _offloading())
    yield "evaluations", partial(run, _lowered("1f1b"), use=_evaluations)


def _lowered(name: str, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, 2, 4), **options)


def _stages(n: int) -> list[nn.Sequential]:
    return [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(n)]


def _equal_stages() -> list[nn.Sequential]:
    first, other = _stages(2)
    other.load_state_dict(first.state_dict())
    return [first, other]


def _offloading() -> list[nn.Sequential]:
    """Return stages that do not save their outputs, which other slices read.

    The sanitizer takes `Tensor.set_`, by which OFFLOAD makes a tensor of a storage, for a write.
    """
    return [nn.Sequential(stage, nn.Linear(_WIDTH, _WIDTH)) for stage in _stages(2)]


def _experts() -> list[nn.Sequential]:
    layer = px.Experts(lambda: nn.Linear(_WIDTH, _WIDTH), _WIDTH, 4, 2, residual=True)
    return [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), layer)]


class _Attention(nn.Module):
    """Causal attention to the earlier slices of a sequence too."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.cache = nn.Linear(_WIDTH, 3 * _WIDTH), px.KeyValueCache()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unsqueeze(1).chunk(3, dim=-1)
        return x + self.cache.attend(query, key, value).squeeze(1)


def _pipeline(
    bench: Bench, graph: ps.TaskGraph, stages: Sequence[nn.Module] | None = None, *,
    use: Callable[[px.Pipeline, Tensor, Tensor], None] | None = None,
    shape: Sequence[int] = (16, _WIDTH), **options: Any,
) -> None:  # fmt: skip
    """Run three steps, and use the pipeline after each."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    stages, devices = stages or _stages(graph.n_stages), bench.devices(graph.n_devices)
    with px.Pipeline(stages, graph, devices, nn.functional.mse_loss, sgd, **options) as pipeline:
        for _ in range(3):
            inputs, targets = torch.randn(shape), torch.randn(shape)
            pipeline.step(inputs, targets)
            if use is not None:
                use(pipeline, inputs, targets)


def _evaluations(pipeline: px.Pipeline, inputs: Tensor, targets: Tensor) -> None:
    """Evaluate and predict; the caller's stream changes the output."""
    pipeline.evaluate(inputs, targets)
    pipeline.predict(inputs).mul_(2).sum()


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
