"""Steps of all features have no races, and free no memory that another stream may use.

`test_races.py` has schedules, replicas and `GPipe`; here are experts, offloaded activations, slices
of sequences, norms of gradients, tied parameters, evaluations and loops of training, on slices of
one GPU of the stand-in, or on GPUs. Host threads are left out: the dispatch mode of the checks sees
one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from case_choice import covering
from fake_cuda import FakeEvent, FakeGpu, FakeStream
from sanitizing import check, sanitized
from small_pipelines import cut, data, dense, mse, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.devices.cuda import CudaDevice, CudaStream
from pipesim.ops import Op

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),  # idle threads of torch would wait at full speed
    pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
]

#: Width, samples of a batch, micro-batches.
WIDTH, SAMPLES, K = 16, 12, 3

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int], Batch]
Use = Callable[[px.Pipeline, Batches], None]


# What a pipeline is used for


def steps(pipeline: px.Pipeline, batches: Batches) -> None:
    """Run steps, each of which takes memory that the one before freed."""
    for seed in range(3):
        assert pipeline.step(*batches(seed)).timeline.complete


def evaluations(pipeline: px.Pipeline, batches: Batches) -> None:
    """Evaluate and predict between steps; the caller changes an output, and drops it."""
    for seed in range(2):
        inputs, targets = batches(seed)
        pipeline.step(inputs, targets)
        pipeline.evaluate(inputs, targets)
        pipeline.predict(inputs).mul_(2).sum()
    pipeline.evaluate(*(x[: len(x) // 2] for x in batches(2)))
    pipeline.step(*batches(2))


def accumulated(pipeline: px.Pipeline, batches: Batches) -> None:
    """Let each second step add to the gradients of the first."""
    for seed in range(4):
        pipeline.step(*batches(seed), accumulate=seed % 2 == 0)


def training(pipeline: px.Pipeline, batches: Batches) -> None:
    """Train by `px.train`, with evaluations."""
    rows = [batches(seed) for seed in range(3)]
    px.train(pipeline, rows, evaluation=rows[:1], evaluate_every=2, progress=False)


# Pipelines of the features


def lowered(schedule: str = "1f1b", n_devices: int = 2, **options: Any) -> ps.TaskGraph:
    """Return a small graph."""
    return ps.lower(ps.schedule(schedule, n_devices, options.pop("m", K)), **options)


def run(
    graph: ps.TaskGraph,
    use: Use = steps,
    stages: Any = None,
    loss_fn: Any = mse,
    batches: Batches | None = None,
    gpus: bool = False,
    **options: Any,
) -> None:
    """Use a pipeline of dense stages, or of others; it clips gradients if the graph has a norm."""
    options = {"max_grad_norm": 0.1 if (graph.op == Op.GRAD_NORM).any() else None} | options
    stages = stages or cut(dense(graph.n_stages, WIDTH), [1] * graph.n_stages)
    devices = [FakeGpu(k, k if gpus else None) for k in range(graph.n_devices)]
    with px.Pipeline(stages, graph, devices, loss_fn, sgd, **options) as pipeline:
        use(pipeline, batches or (lambda seed: data(SAMPLES, WIDTH, seed)))


def scaled(graph: ps.TaskGraph, **options: Any) -> None:
    """Scale the loss, which one step overflows."""

    def batches(seed: int) -> Batch:
        x, y = data(SAMPLES, WIDTH, seed)
        return x, y.fill_(1e30) if seed == 1 else y

    run(graph, batches=batches, grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0), **options)


def counted(graph: ps.TaskGraph, use: Use = steps, **options: Any) -> None:
    """Return a sum and a count as the loss."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        chosen = target > 0
        return ((output - target) ** 2 * chosen).sum(), chosen.sum()

    run(graph, use, loss_fn=loss_fn, **options)


def tied(
    schedule: str = "1f1b",
    n_devices: int = 2,
    use: Use = steps,
    **options: Any,
) -> None:
    """Tie a matrix of the first stage to that of the last."""
    last = ps.schedule(schedule, n_devices, K).n_stages - 1
    graph = lowered(schedule, n_devices, tied=[(0, last)], **options)
    stages = cut(dense(last + 1, WIDTH), [1] * (last + 1))
    names = [(stage, f"{stage}.0.weight") for stage in (0, last)]
    first, other = (stages[stage].get_parameter(name) for stage, name in names)
    other.data.copy_(first)
    run(graph, use, stages, tied=[names])


def split(*, is_tied: bool) -> None:
    """Let `px.split` make the stages, of a model whose first and last matrix may be one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if is_tied:
        model[3].weight = model[0].weight
    stages = px.split(model, 2, sample=torch.zeros(4, WIDTH))
    run(lowered(tied=stages.tied_stages), evaluations, stages)


def offload(
    schedule: str,
    n_devices: int,
    use: Use = steps,
    *,
    share: Any = "all",
    saves_output: bool = False,
    gpus: bool = False,
    **options: Any,
) -> None:
    """Offload activations; if a stage saves its output, two devices offload one tensor."""
    graph = lowered(schedule, n_devices, offload=share, **options)
    torch.manual_seed(0)
    end = nn.Tanh if saves_output else nn.Identity
    stages = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), end())
        for _ in range(graph.n_stages)
    ]
    run(graph, use, stages, gpus=gpus)


def slices(schedule: str = "seq1f1b", use: Use = steps, **options: Any) -> None:
    """Cut sequences of a transformer in two: two micro-batches of two slices."""
    graph = ps.lower(ps.schedule(schedule, 2, 4, n_slices=2), **options)
    layers = gpt(n_layers=2, d_model=WIDTH, n_heads=2, sequence=8)
    ends = [round(k * len(layers) / graph.n_stages) for k in range(graph.n_stages + 1)]
    stages = [layers[a:b] for a, b in pairwise(ends)]

    def batches(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(256, (SAMPLES, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    run(graph, use, stages, cross_entropy, batches)


def experts(
    schedule: str, n_devices: int, n_replicas: int = 2, use: Use = steps, **options: Any
) -> None:
    """Put a layer with experts in each stage, which replicas share."""
    graph = lowered(schedule, n_devices, n_replicas=n_replicas, expert_layers=1, **options)
    torch.manual_seed(0)
    stages = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            px.Experts(lambda: nn.Linear(WIDTH, WIDTH), WIDTH, 4, 2, residual=True),
        )
        for _ in range(graph.n_stages)
    ]
    run(graph, use, stages)


CASES: dict[str, Callable[[], None]] = {
    "experts, 1 replica": partial(experts, "1f1b", 2, 1),
    "experts, gpipe, 4 replicas": partial(experts, "gpipe", 1, 4),
    "experts, 1f1b": partial(experts, "1f1b", 2),
    "experts, zb_h1": partial(experts, "zb_h1", 1),
    "experts, zbv": partial(experts, "zbv", 1),
    "experts, gpipe, no overlap": partial(experts, "gpipe", 2, overlap=False),
    "experts, zb_h1, no overlap": partial(experts, "zb_h1", 1, overlap=False),
    "experts, every": partial(experts, "1f1b", 1, grad_sync="every"),
    "experts, clipped": partial(experts, "1f1b", 1, grad_norm=True),
    "experts, evaluations": partial(experts, "1f1b", 1, 2, evaluations),
    "experts, accumulated": partial(experts, "1f1b", 1, 2, accumulated),
    "offload, gpipe": partial(offload, "gpipe", 3),
    "offload, 1f1b": partial(offload, "1f1b", 3),
    "offload, 1f1b, saved outputs": partial(offload, "1f1b", 3, saves_output=True),
    "offload, zb_h1": partial(offload, "zb_h1", 2),
    "offload, zbv": partial(offload, "zbv", 2),
    "offload, recompute": partial(offload, "gpipe", 3, recompute="always"),
    "offload, half": partial(offload, "gpipe", 2, share=0.5),
    "offload, no overlap": partial(offload, "gpipe", 3, overlap=False),
    "offload, no overlap, saved outputs": partial(
        offload, "gpipe", 3, saves_output=True, overlap=False
    ),
    "offload, clipped": partial(offload, "1f1b", 2, grad_norm=True),
    "offload, replicas": partial(offload, "1f1b", 2, n_replicas=2, grad_sync="every"),
    "offload, evaluations": partial(offload, "gpipe", 2, evaluations),
    "offload, scaled, clipped": lambda: scaled(lowered(grad_norm=True, offload="all")),
    "offload, tied, clipped": partial(tied, "gpipe", grad_norm=True, offload="all"),
    "offload, slices": partial(slices, offload="all"),
    "offload, peer": partial(offload, "1f1b", 2, offload_to="peer", m=6, prefetch=0),
    "offload, peer, gpus": partial(
        offload, "1f1b", 2, offload_to="peer", m=6, prefetch=0, gpus=True
    ),
    "offload, peer, gpus, no overlap": partial(
        offload, "gpipe", 3, offload_to="peer", gpus=True, overlap=False
    ),
    "offload, peer, gpus, saved outputs": partial(
        offload, "1f1b", 4, offload_to="peer", gpus=True, saves_output=True, prefetch=0
    ),
    "slices": slices,
    "slices, slimpipe": partial(slices, "slimpipe"),
    "slices, recompute": partial(slices, recompute="always"),
    "slices, no overlap": partial(slices, overlap=False),
    "slices, evaluations": partial(slices, use=evaluations),
    "slices, clipped, replicas": partial(slices, grad_norm=True, n_replicas=2),
    "norm": lambda: run(lowered(grad_norm=True), max_grad_norm=None),
    "clipped, not checked": lambda: run(lowered(grad_norm=True), error_if_nonfinite=False),
    "clipped": lambda: run(lowered(grad_norm=True)),
    "clipped, zbv": lambda: run(lowered("zbv", grad_norm=True)),
    "clipped, no overlap": lambda: run(lowered(grad_norm=True, overlap=False)),
    "clipped, replicas, every": lambda: run(
        lowered("gpipe", 1, n_replicas=2, grad_sync="every", grad_norm=True)
    ),
    "clipped, replicas, bucketed": lambda: run(
        lowered(n_replicas=2, grad_sync="bucketed", n_buckets=2, grad_norm=True)
    ),
    "clipped, evaluations": lambda: run(lowered(grad_norm=True), evaluations),
    "clipped, accumulated": lambda: run(lowered(grad_norm=True), accumulated),
    "scaled": lambda: scaled(lowered(grad_norm=True), max_grad_norm=None),
    "scaled, clipped, replicas": lambda: scaled(lowered(grad_norm=True, n_replicas=2)),
    "tied": tied,
    "tied, 3 devices": partial(tied, "gpipe", 3),
    "tied, zb_h1, no overlap": partial(tied, "zb_h1", overlap=False),
    "tied, zbv": partial(tied, "zbv"),
    "tied, clipped": partial(tied, n_devices=3, grad_norm=True),
    "tied, replicas": partial(tied, n_replicas=2, grad_sync="every"),
    "tied, clipped, replicas": partial(tied, grad_norm=True, n_replicas=2),
    "tied, evaluations": partial(tied, use=evaluations),
    "tied, accumulated": partial(tied, use=accumulated),
    "evaluations": lambda: run(lowered(), evaluations),
    "evaluations, zbv": lambda: run(lowered("zbv"), evaluations),
    "evaluations, replicas": lambda: run(lowered(n_replicas=2), evaluations),
    "evaluations, pipedream": lambda: run(lowered("pipedream"), evaluations),
    "accumulated": lambda: run(lowered(), accumulated),
    "accumulated, replicas": lambda: run(lowered(n_replicas=2, grad_sync="every"), accumulated),
    "counted": lambda: counted(lowered()),
    "counted, clipped": lambda: counted(lowered(grad_norm=True)),
    "counted, replicas, accumulated": lambda: counted(lowered(n_replicas=2), accumulated),
    "split": partial(split, is_tied=False),
    "split, tied": partial(split, is_tied=True),
    "training": lambda: run(lowered(), training),
    "training, clipped, replicas": lambda: run(lowered(grad_norm=True, n_replicas=2), training),
}


def _parts(name: str) -> list[str]:
    """Return the parts of a case, and each feature with split backwards as a part of its own."""
    feature, *others = name.split(", ")
    return [feature, *others, *(f"{feature}, {part}" for part in others if part == "zb_h1")]


@pytest.mark.parametrize("case", covering(CASES, parts=_parts))
def test_a_feature(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    with sanitized(monkeypatch) as watch:
        CASES[case]()
    check(watch)


# The checks see mistakes in each feature

Mistake = Callable[[pytest.MonkeyPatch], None]


def _kinds_of_streams(patch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Return a function that returns a stream's name without its peer, by its number."""
    names: dict[int, str] = {}
    inner = CudaDevice._make_stream

    def make_stream(device: CudaDevice, name: str, blocks: bool) -> CudaStream:
        stream = inner(device, name, blocks)
        assert isinstance(stream, CudaStream)
        assert isinstance(stream.stream, FakeStream)
        names[stream.stream.number] = name.partition(":")[0]
        return stream

    patch.setattr(CudaDevice, "_make_stream", make_stream)
    return lambda number: names.get(number, "caller")


def no_wait(waiting: str, awaited: str) -> Mistake:
    """Drop all waits of one kind of stream for another one."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        kind, inner = _kinds_of_streams(patch), FakeStream.wait_event

        def wait_event(stream: FakeStream, event: FakeEvent) -> None:
            if (kind(stream.number), kind(event.stream_number)) != (waiting, awaited):
                inner(stream, event)

        patch.setattr(FakeStream, "wait_event", wait_event)

    return mistake


def not_kept(name: str) -> Mistake:
    """Keep no memory for one kind of stream."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        kind, inner = _kinds_of_streams(patch), CudaDevice.adopt

        def adopt(device: CudaDevice, tensor: Tensor, stream: Any) -> None:
            if kind(stream.stream.number) != name:
                inner(device, tensor, stream)

        patch.setattr(CudaDevice, "adopt", adopt)

    return mistake


def freed_by_offload(patch: pytest.MonkeyPatch) -> None:
    """Free what OFFLOAD copies when the host has issued it."""
    patch.setattr("pipeexec.executor.offload.outlasts_issue", lambda task: False)


#: Mistake, case, kind of finding, and an operator in it, which is one of the feature.
MISTAKES: dict[str, tuple[Mistake, str, str, str]] = {
    "segment of experts before exchange": (
        no_wait("compute", "exchange"), "experts, zb_h1", "races", "index_select"),
    "exchange before segment of experts": (
        no_wait("exchange", "compute"), "experts, zb_h1", "races", "cat"),
    "other members before exchange": (
        no_wait("exchange", "exchange"), "experts, zb_h1", "races", "index_select"),
    "no waits within an exchange on compute streams": (
        no_wait("compute", "compute"), "experts, zb_h1, no overlap", "races", "cat"),
    "rows that are not kept": (
        not_kept("compute"), "experts, zb_h1, no overlap", "freed", "index_add"),
    "gradients of experts that are not kept": (
        not_kept("collective"), "experts, every", "freed", "copy_"),
    "OFFLOAD before F": (no_wait("offload", "compute"), "offload, gpipe", "races", "copy_"),
    "RELOAD before OFFLOAD": (no_wait("reload", "offload"), "offload, gpipe", "races", "copy_"),
    "B before RELOAD": (no_wait("compute", "reload"), "offload, gpipe", "races", "copy_"),
    "RELOAD into memory in use": (
        no_wait("reload", "compute"), "offload, gpipe", "races", "empty"),
    "memory is taken before OFFLOAD": (
        no_wait("compute", "offload"), "offload, gpipe", "freed", "copy_"),
    "OFFLOAD frees at once": (freed_by_offload, "offload, gpipe", "freed", "copy_"),
    "OFFLOAD of a message frees at once": (
        freed_by_offload, "offload, 1f1b, saved outputs", "freed", "tanh"),
    "OFFLOAD into memory of a peer that is in use": (
        no_wait("offload", "held copies"), "offload, peer", "races", "empty"),
    "a peer's memory is taken before RELOAD": (
        no_wait("held copies", "reload"), "offload, peer", "freed", "empty"),
    "memory of another GPU is taken before RELOAD": (
        no_wait("held copies", "reload"), "offload, peer, gpus", "freed", "empty"),
    "RELOAD from another GPU before OFFLOAD": (
        no_wait("reload", "offload"), "offload, peer, gpus", "races", "copy_"),
    "GRAD_NORM without the others": (no_wait("compute", "compute"), "clipped", "races", "clamp"),
    "GRAD_NORM before a reduction": (
        no_wait("compute", "collective"), "clipped, replicas, every", "races",
        "linalg_vector_norm"),
    "STEP before REDUCE_TIED": (no_wait("compute", "collective"), "tied", "races", "copy_"),
    "REDUCE_TIED before B": (no_wait("collective", "compute"), "tied", "races", "add_"),
    "tied gradients that are not kept": (
        not_kept("collective"), "tied, replicas", "freed", "copy_"),
    "F of a slice before its message": (
        no_wait("compute", "recv"), "slices", "races", "native_layer_norm"),
    "messages of slices that are not kept": (not_kept("compute"), "slices", "freed", "add on"),
    "messages of evaluations that are not kept": (
        not_kept("compute"), "evaluations", "freed", "tanh on 1, used by aten::clone"),
    "a step after the caller's use of a prediction": (
        no_wait("compute", "caller"), "evaluations", "freed", "cat"),
}  # fmt: skip


def _feature(name: str) -> list[str]:
    """Return the feature in which a mistake is, with the kind of finding."""
    _, case, kind, _ = MISTAKES[name]
    return [f"{case.partition(', ')[0]}, {kind}"]


@pytest.mark.parametrize("name", covering(MISTAKES, parts=_feature))
def test_the_checks_see(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mistake, case, kind, operator = MISTAKES[name]
    with sanitized(monkeypatch) as watch:
        mistake(monkeypatch)
        CASES[case]()
    findings = getattr(watch, kind)
    assert any(f"aten::{operator}" in text for text in findings), findings
