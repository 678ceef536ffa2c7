"""Step ``features``: features of pipeexec that no other step runs, each once, tiny.

Each runs on slices and on CPU workers, from the same weights. Losses, a prediction, the loss of an
evaluation and all parameters are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipeexec as px
import pipesim as ps
from on_gpu.attempts import attempt
from on_gpu.bench import Bench, noted_warnings, sgd
from on_gpu.report import Report
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.devices.device import DeviceLike
from pipeexec.devices.thread_settings import one_thread

#: Largest difference, relative to the largest element of a tensor.
LIMIT = 2e-4
_WIDTH, _SEQUENCE = 64, 32
#: Norm of gradients at which they are clipped, less than a half of what they have.
_NORM = 0.5
#: Makes a number of devices.
Devices = Callable[[int], Sequence[DeviceLike]]
Batch = tuple[Tensor, Tensor]
#: Runs a feature, and returns tensors on the CPU.
Feature = Callable[[Devices], list[Tensor]]


def features(bench: Bench, report: Report) -> None:
    """Compare each feature on slices with CPU workers; one that raises costs only itself."""
    report.add(f"{len(FEATURES)} features on {'CPU workers' if bench.dry else 'slices'} and on CPU "
               "workers, from the same weights: largest difference of losses, prediction and "
               "parameters, relative to the largest of each")  # fmt: skip
    with one_thread(), noted_warnings(report.add):
        for name, feature in FEATURES.items():
            report.begin()
            if not attempt(report, name, _compare, bench, report, name, feature):
                report.record("features", feature=name, error=None, limit=LIMIT, seconds=None)


def _compare(bench: Bench, report: Report, name: str, feature: Feature) -> None:
    start = perf_counter()
    error = largest_difference(feature(bench.devices), feature(_cpu_workers))
    seconds = perf_counter() - start
    report.record("features", feature=name, error=error, limit=LIMIT, seconds=seconds)
    report.check(error <= LIMIT, f"{name}: {error:.1e} (limit {LIMIT:g}), {seconds:.1f} s")


def largest_difference(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest element of a tensor; NaN if any is."""
    differences = [
        (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6)
        for a, b in zip(actual, wanted, strict=True)
    ]
    return float(torch.stack(differences).max())


def _cpu_workers(n: int) -> Sequence[DeviceLike]:
    return ["cpu"] * n


# Models and batches


def _dense(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [_two_layers() for _ in range(n)]


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))


def _transformer() -> nn.Sequential:
    return gpt(n_layers=2, d_model=_WIDTH, n_heads=2, sequence=_SEQUENCE)


def _numbers(seed: int = 0) -> Batch:
    """Return inputs, and targets so large that three steps change parameters by percents."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, 32, _WIDTH, generator=generator)
    return inputs, 30 * targets


def _tokens() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (8, _SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# Features


def _run(
    devices: Devices, stages: Sequence[nn.Module], graph: ps.TaskGraph, batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] = mse_loss, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return losses of three steps, a prediction, the loss of an evaluation, and parameters."""
    with _pipeline(devices, stages, graph, loss, **options) as subject:
        outcome = [subject.step(*batch).loss for _ in range(3)]
        outcome += [subject.predict(batch[0]), subject.evaluate(*batch).loss]
    return _on_cpu(outcome, stages)


def _pipeline(
    devices: Devices, stages: Sequence[nn.Module], graph: ps.TaskGraph,
    loss: Callable[[Tensor, Tensor], Tensor] = mse_loss, **options: Any,
) -> px.Pipeline:  # fmt: skip
    """Return a pipeline that raises soon if a step hangs."""
    places, optimizer = devices(graph.n_devices), partial(sgd, lr=0.05)
    return px.Pipeline(stages, graph, places, loss, optimizer, timeout=10.0, **options)


def _on_cpu(outcome: Sequence[Tensor], stages: Sequence[nn.Module]) -> list[Tensor]:
    parameters = [p for stage in stages for p in stage.parameters()]
    return [x.detach().cpu() for x in (*outcome, *parameters)]


def _split(devices: Devices) -> list[Tensor]:
    """Stages by `pipeexec.split`."""
    batch = _tokens()
    stages = list(px.split(_transformer(), 2, sample=(batch[0],)))
    return _run(devices, stages, ps.lower(ps.schedule("1f1b", 2, 4)), batch, cross_entropy)


def _train(devices: Devices) -> list[Tensor]:
    """Training with evaluations, which a second pipeline continues from a checkpoint."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), grad_norm=True)
    batches, evaluation = [_numbers(seed) for seed in range(4)], [_numbers(9)]
    with tempfile.TemporaryDirectory() as folder:
        for n_steps in (2, 4):
            stages = _dense(2)
            with _pipeline(devices, stages, graph, max_grad_norm=_NORM) as subject:
                run = px.train(
                    subject, batches, n_steps=n_steps, directory=f"{folder}/run",
                    checkpoint_every=2, evaluation=evaluation, evaluate_every=2, progress=False,
                )  # fmt: skip
    return _on_cpu([torch.tensor(run.losses), torch.tensor(run.evaluations["loss"])], stages)


def _clipped(devices: Devices) -> list[Tensor]:
    """Clipped gradients, whose norm is a task."""
    graph = ps.lower(ps.schedule("zbv", 2, 4), grad_norm=True)
    return _run(devices, _dense(4), graph, _numbers(), max_grad_norm=_NORM)


def _experts(devices: Devices) -> list[Tensor]:
    """Tokens that go to experts of another replica."""
    torch.manual_seed(0)
    layer = px.Experts(_two_layers, _WIDTH, n_experts=4, experts_per_token=2, residual=True)
    stage = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), layer, nn.Linear(_WIDTH, _WIDTH))
    graph = ps.lower(ps.schedule("gpipe", 1, 4), n_replicas=2, expert_layers=1)
    return _run(devices, [stage], graph, _numbers())


def _offloaded(devices: Devices) -> list[Tensor]:
    """Activations that wait in the memory of the host."""
    graph = ps.lower(ps.schedule("gpipe", 2, 8), offload="all")
    return _run(devices, _dense(2), graph, _numbers())


def _sliced(devices: Devices) -> list[Tensor]:
    """Sequences in slices, whose forwards are recomputed."""
    layers = list(_transformer())
    stages = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    graph = ps.lower(ps.schedule("seq1f1b", 2, 8, n_slices=2), recompute="always")
    return _run(devices, stages, graph, _tokens(), cross_entropy)


def _tied(devices: Devices) -> list[Tensor]:
    """Stages that share a parameter, which counts once in the norm of gradients."""
    torch.manual_seed(0)
    stages = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2)]
    stages[1].load_state_dict(stages[0].state_dict())
    graph = ps.lower(ps.schedule("1f1b", 2, 4), tied=[(0, 1)], grad_norm=True)
    tied = [[(0, "weight"), (1, "weight")]]
    return _run(devices, stages, graph, _numbers(), tied=tied, max_grad_norm=_NORM)


def _scaled(devices: Devices) -> list[Tensor]:
    """Losses that a gradient scaler scales."""
    (device,) = devices(1)
    kind = "cpu" if isinstance(device, str) else device.torch_device.type
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    graph = ps.lower(ps.schedule("1f1b", 2, 4), grad_norm=True)
    return _run(devices, _dense(2), graph, _numbers(), grad_scaler=scaler, max_grad_norm=_NORM)


def _accumulated(devices: Devices) -> list[Tensor]:
    """Gradients of two batches for each step of the optimizer."""
    stages = _dense(2)
    with _pipeline(devices, stages, ps.lower(ps.schedule("1f1b", 2, 4))) as subject:
        losses = [subject.step(*_numbers(k), accumulate=k % 2 == 0).loss for k in range(4)]
    return _on_cpu(losses, stages)


def _threads(devices: Devices) -> list[Tensor]:
    """A host thread a device, which issues its tasks."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), hosts="per_device", host_threads=True)
    return _run(devices, _dense(2), graph, _numbers())


#: Those that matter most first.
FEATURES: dict[str, Feature] = {
    "px.split": _split,
    "px.train": _train,
    "clipped gradients": _clipped,
    "experts": _experts,
    "offload": _offloaded,
    "sequence slices": _sliced,
    "tied parameters": _tied,
    "gradient scaler": _scaled,
    "accumulate=True": _accumulated,
    "host threads": _threads,
}
