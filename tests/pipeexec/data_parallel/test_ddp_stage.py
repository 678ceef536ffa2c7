"""Stages that DistributedDataParallel replicates: two pipelines, each in a separate process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from small_pipelines import Faulty, cut, data, dense, mse, pipeline, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentError, StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

_GROUPS: list[dist.ProcessGroup] = []


def groups() -> list[dist.ProcessGroup]:
    """Return a process group a stage, which are made once."""
    while len(_GROUPS) < 2:
        _GROUPS.append(dist.new_group())
    return _GROUPS


Batch = tuple[Tensor, Tensor]


class Replicated:
    """Two stages in DDP, of which each counts the buckets that its reducer sends."""

    def __init__(self, modules: list[nn.Module], **options: Any) -> None:
        self.counts: Counter[int] = Counter()
        self.stages = [
            DistributedDataParallel(module, process_group=group, **options)
            for module, group in zip(modules, groups(), strict=True)
        ]
        for index, stage in enumerate(self.stages):
            # A function, whose annotations torch would check, is not what takes the bucket.
            stage.register_comm_hook(index, lambda index, bucket: self._count(index, bucket))

    def _count(self, index: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.counts[index] += 1
        group = self.stages[index].process_group
        flat = bucket.buffer().div_(dist.get_world_size(group))
        work = dist.all_reduce(flat, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


class Sometimes(nn.Module):
    """Three layers: one that only some samples take, one that others take, one that none take."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below, self.nobody = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        is_above = x[:, 0] > 0
        output = torch.zeros_like(x)
        for layer, chosen in ((self.above, is_above), (self.below, ~is_above)):
            if chosen.any():
                output[chosen] = layer(x[chosen])
        return output


def _stages(model: str) -> list[nn.Module]:
    torch.manual_seed(2)
    first, second = cut(dense(4), [2, 2])
    if model == "batch_norm":
        first = nn.Sequential(first, nn.BatchNorm1d(16))
    return [Sometimes() if model == "sometimes" else first, second]


def _batches(rank: int, m: int, step: int) -> tuple[Batch, Batch]:
    """Return a replica's batch, and that of both, whose micro-batches are those of both."""
    both = [data(3 * m, seed=2 * step + replica) for replica in range(2)]
    whole = [
        torch.cat(
            [part for pair in zip(*(x.split(3) for x in of_both), strict=True) for part in pair]
        )
        for of_both in zip(*both, strict=True)
    ]
    return both[rank], (whole[0], whole[1])


def _steps_case(
    processes: Processes,
    model: str,
    schedule: str,
    lowered: dict[str, Any],
    ddp: dict[str, Any],
) -> None:
    """Train two replicas for three steps, and a pipeline without with the batches of both."""
    m = 4
    graph = ps.lower(ps.schedule(schedule, n_devices=2, n_microbatches=m), **lowered)
    stages, alone = _stages(model), _stages(model)
    replicated = Replicated(stages, **ddp)
    with (
        pipeline(replicated.stages, graph, mse, sgd) as subject,
        pipeline(alone, graph, mse, sgd) as reference,
    ):
        for step in range(3):
            own, whole = _batches(processes.rank, m, step)
            replicated.counts.clear()
            subject.step(*own)
            assert replicated.counts == {0: graph.n_batches, 1: graph.n_batches}
            reference.step(*whole)
            _assert_close(stages, alone)


def _assert_close(stages: list[nn.Module], others: list[nn.Module]) -> None:
    for stage, other in zip(stages, others, strict=True):
        for (name, p), its in zip(stage.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (its.grad is None), name
            torch.testing.assert_close(p.grad, its.grad)
            torch.testing.assert_close(p, its)


@pytest.mark.parametrize(
    ("model", "schedule", "lowered", "ddp"),
    [
        ("dense", "gpipe", {}, {}),
        ("dense", "1f1b", {}, {}),
        ("dense", "1f1b", {"recompute": "always"}, {"gradient_as_bucket_view": True}),
        ("dense", "zb_h1", {}, {}),
        ("dense", "zb_h1", {"recompute": "always"}, {"gradient_as_bucket_view": True}),
        ("sometimes", "1f1b", {}, {"find_unused_parameters": True}),
        ("sometimes", "zb_h1", {"recompute": "except_last"}, {"find_unused_parameters": True}),
        ("dense", "pipedream", {}, {}),  # a mini-batch a micro-batch
        ("dense", "pipedream_2bw", {}, {}),  # two mini-batches
    ],
)
def test_two_replicas_are_one_model_with_both_batches(
    two_ranks: Ranks, model: str, schedule: str, lowered: Any, ddp: Any
) -> None:
    """Gradients are those of the whole batch, after one all-reduce a mini-batch in each stage."""
    two_ranks.run(_steps_case, model=model, schedule=schedule, lowered=lowered, ddp=ddp)


def _no_sync_case(processes: Processes, schedule: str, skipped: int) -> None:
    """Accumulate gradients over two steps, the first of which reduces one stage's or none."""
    graph = ps.lower(ps.schedule(schedule, n_devices=2, n_microbatches=4))
    stages, alone = _stages("dense"), _stages("dense")
    replicated = Replicated(stages)
    with pipeline(replicated.stages, graph) as subject, pipeline(alone, graph) as reference:
        for step in range(2):
            own, whole = _batches(processes.rank, 4, step)
            reference.step(*whole)
            with ExitStack() as context:
                for stage in replicated.stages[: skipped if step == 0 else 0]:
                    context.enter_context(stage.no_sync())
                subject.step(*own)
        assert replicated.counts == {k: 1 if k < skipped else 2 for k in range(2)}
        _assert_close(stages, alone)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("skipped", [1, 2])
def test_no_sync_leaves_gradients_for_a_later_step(
    two_ranks: Ranks, schedule: str, skipped: int
) -> None:
    two_ranks.run(_no_sync_case, schedule=schedule, skipped=skipped)


def _buffers_case(processes: Processes, recompute: str) -> None:
    """Change a buffer of one replica, which takes those of the other in its next forward."""
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4), recompute=recompute)
    stages = _stages("batch_norm")
    mean = stages[0].get_buffer("1.running_mean")
    own, _ = _batches(processes.rank, 4, 0)
    ddp = Replicated(stages).stages
    with pipeline(ddp, graph, mse, sgd) as subject:
        for is_broadcast, synchronizes in ((True, True), (True, False), (False, True)):
            mean.fill_(1e4 * processes.rank)
            with nullcontext() if synchronizes else ddp[0].no_sync():
                subject.step(*own)
            assert bool((mean < 1e2).all()) == (is_broadcast or processes.rank == 0)


def _evaluation_case(processes: Processes) -> None:
    """Evaluate in one replica alone, with buffers of its own; then train together."""
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    stages = _stages("batch_norm")
    mean = stages[0].get_buffer("1.running_mean")
    own, _ = _batches(processes.rank, 4, 0)
    with pipeline(Replicated(stages).stages, graph, mse, sgd) as subject:
        subject.step(*own)
        mean.fill_(processes.rank)
        if processes.rank:
            with torch.no_grad():
                expected = nn.Sequential(*copy.deepcopy(stages)).eval()(own[0])
            torch.testing.assert_close(subject.predict(own[0]), expected)
            assert torch.isfinite(subject.evaluate(*own).loss)
        assert (mean == processes.rank).all()
        subject.step(*own)


def test_evaluation_of_one_replica(two_ranks: Ranks) -> None:
    """It neither waits for the others, nor takes their buffers."""
    two_ranks.run(_evaluation_case)


def _failure_case(processes: Processes, backward: int, schedule: str) -> None:
    """Fail in a backward of every replica, then train."""
    graph = ps.lower(ps.schedule(schedule, n_devices=2, n_microbatches=4))
    stages, alone = _stages("dense"), _stages("dense")
    faulty = Faulty(OSError("a flaky disk"), backward=backward)
    replicated = Replicated([stages[0], nn.Sequential(stages[1], faulty)])
    own, whole = _batches(processes.rank, 4, 0)
    with (
        pipeline(replicated.stages, graph, mse, sgd) as subject,
        pipeline(alone, graph, mse, sgd) as reference,
    ):
        with pytest.raises(StageError, match="flaky"):
            subject.step(*own)
        faulty.repair()
        assert replicated.counts == {}
        subject.step(*own)
        reference.step(*whole)
        assert replicated.counts == {0: 1, 1: 1}
        _assert_close(stages, alone)


@pytest.mark.parametrize(("backward", "schedule"), [(1, "1f1b"), (3, "1f1b"), (3, "zb_h1")])
def test_a_step_after_one_that_failed(two_ranks: Ranks, backward: int, schedule: str) -> None:
    """In the last backward, too, for which the reducer was ready."""
    two_ranks.run(_failure_case, backward=backward, schedule=schedule)


def _refusals_case(processes: Processes) -> None:
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    one, two = groups()
    layer = nn.Linear(16, 16)

    def refused(match: str, stages: list[nn.Module], graph: ps.TaskGraph = graph) -> None:
        with pytest.raises(ArgumentError, match=match):
            pipeline(stages, graph).close()

    def ddp(group: dist.ProcessGroup, **options: Any) -> nn.Module:
        return DistributedDataParallel(copy.deepcopy(layer), process_group=group, **options)

    refused("0 and 1 are .* over one process group", [ddp(one), ddp(one)])
    refused("stage 1 has .* a part of it \\('0'\\)", [layer, nn.Sequential(ddp(one))])
    refused("static_graph=True", [ddp(one, static_graph=True), layer])
    chimera = ps.lower(ps.schedule("chimera", n_devices=2, n_microbatches=4))
    refused("2 copies of each stage", [ddp(one), ddp(two)], chimera)
    with pytest.raises(ArgumentError, match=r"only pipeexec\.Pipeline can run"):
        Stage(ddp(one), 0, torch.device("cpu"), ActivationCounter())


def test_what_cannot_be_a_stage(two_ranks: Ranks) -> None:
    two_ranks.run(_refusals_case)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_buffers_are_those_of_the_first_replica(two_ranks: Ranks, recompute: str) -> None:
    """In each step after one that has added up gradients, as with DDP alone."""
    two_ranks.run(_buffers_case, recompute=recompute)


def _names_case(processes: Processes) -> None:
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    names: list[list[str]] = []

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        pairs = list(named_parameters)
        names.append([name for name, _ in pairs])
        return torch.optim.SGD([p for _, p in pairs], lr=0.1)

    stages: list[nn.Module] = [nn.Linear(16, 16), nn.Linear(16, 16)]
    with pipeline(Replicated(stages).stages, graph, mse, factory):
        assert names == [["weight", "bias"]] * 2


def test_names_for_optimizers_are_those_inside_ddp(two_ranks: Ranks) -> None:
    two_ranks.run(_names_case)
