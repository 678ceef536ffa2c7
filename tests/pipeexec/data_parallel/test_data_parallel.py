"""Replicas of a pipeline against one process with the whole batch: loss, gradients, weights."""

from __future__ import annotations

import json
import shlex
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from small_pipelines import Faulty, call_within, cut, data, dense, mse, train_whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeexec as px
import pipesim as ps
from pipeexec.cli import main
from pipeexec.demo_models.data import replica_batches, replicas_of
from pipeexec.demo_models.registry import build_model
from pipeexec.devices.make_devices import CpuDevice
from pipeexec.devices.streams import Stream
from pipeexec.distributed import Processes
from pipeexec.executor import op_handlers
from pipeexec.executor.gradient_sync import reduce_gradients
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipesim.errors import StageError
from pipesim.ops import Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

MODES: list[dict[str, Any]] = [
    {"grad_sync": "last"},
    {"grad_sync": "every"},
    {"grad_sync": "bucketed", "n_buckets": 2},
]
#: Of two stages and four micro-batches: every two of them, and stages that differ.
MIXED: list[dict[str, Any]] = [
    {"grad_sync": 2},
    {"grad_sync": ["every", "last"]},
    {"grad_sync": {0: 2, 1: "bucketed"}, "n_buckets": 2},
]
RATE = 0.5
K = 3


def layers(n: int) -> list[nn.Module]:
    """Return a model of four layers in ``n`` stages, always with the same weights."""
    return list(cut(dense(4), [4 // n] * n))


def unsplit(x: Tensor, y: Tensor, n_steps: int) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of steps with the whole batch."""
    model = nn.Sequential(*layers(1))
    return train_whole(model, sgd(model.parameters()), mse, x, y, n_steps)


def lowered(schedule: str, n_stages: int, n_replicas: int, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, n_stages, K), n_replicas=n_replicas, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, RATE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["grad_sync"])
@pytest.mark.parametrize(("n_stages", "n_replicas"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_replicas_in_one_process(
    schedule: str, n_stages: int, n_replicas: int, mode: dict[str, Any]
) -> None:
    """The batch is shared by all replicas, evenly or not; every replica ends with the same."""
    x, y = data(14)
    losses, weights = unsplit(x, y, 2)
    graph = lowered(schedule, n_stages, n_replicas, layout="stage_major", **mode)
    stages = layers(n_stages)
    with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, mse, sgd) as pipeline:
        actual = [float(pipeline.step(x, y).loss) for _ in range(2)]
        assert actual == pytest.approx(losses, rel=1e-5)
        for replica in range(n_replicas):
            copies = pipeline.modules[replica * n_stages : (replica + 1) * n_stages]
            own = [p.detach() for module in copies for p in module.parameters()]
            torch.testing.assert_close(own, weights)
    torch.testing.assert_close([p.detach() for s in stages for p in s.parameters()], weights)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MIXED, ids=lambda mode: str(mode["grad_sync"]))
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "mixed"])
def test_stages_that_reduce_after_micro_batches_of_their_own(
    schedule: str, mode: dict[str, Any]
) -> None:
    """Also where the backwards of two groups alternate: each group has separate gradients."""
    x, y = data(18)
    losses, weights = unsplit(x, y, 2)
    if schedule == "mixed":
        order = "F0 F1 F2 F3 B1 B3 B0 B2"
        orders = [[f"{stage}{action}" for action in order.split()] for stage in range(2)]
        plan = ps.Schedule.from_orders(orders)
    else:
        plan = ps.schedule(schedule, 2, 4)
    graph = ps.lower(plan, n_replicas=2, **mode)
    stages = layers(2)
    with px.Pipeline(stages, graph, ["cpu"] * 4, mse, sgd) as pipeline:
        actual = [float(pipeline.step(x, y).loss) for _ in range(2)]
        copies = [p.detach() for module in pipeline.modules[2:] for p in module.parameters()]
    assert actual == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close([p.detach() for s in stages for p in s.parameters()], weights)
    torch.testing.assert_close(copies, weights)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["grad_sync"])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_add_up_from_step_to_step(mode: dict[str, Any], overlap: bool) -> None:
    """Without an optimizer: ``step="none"`` leaves the sum over replicas in ``grad``."""
    x, y = data(12)
    model = nn.Sequential(*layers(1))
    mse(model(x), y).backward()
    graph = lowered("gpipe", 2, 2, step="none", overlap=overlap, **mode)
    stages = layers(2)
    with px.Pipeline(stages, graph, ["cpu"] * 4, mse) as pipeline:
        for n in (1, 2):
            pipeline.step(x, y)
            for p, q in zip(
                (p for s in stages for p in s.parameters()), model.parameters(), strict=True
            ):
                torch.testing.assert_close(p.grad, n * q.grad)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["grad_sync"])
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "zb_h1"])
def test_mini_batches_of_replicas(name: str, mode: dict[str, Any]) -> None:
    """Delayed and stashed weights: as one replica whose micro-batches are twice as large."""
    schedule = ps.schedule(name, 2, 4)
    if schedule.n_batches == 1:
        schedule = schedule.with_updates(2, "stashed")  # with backwards that are split
    x, y = data(16)
    # Micro-batch m of the one replica has those of both.
    joined = [torch.stack(batch.chunk(2)).unflatten(1, (4, 2)).transpose(0, 1).flatten(0, 2)
              for batch in (x, y)]  # fmt: skip
    results = []
    for n_replicas, batch in ((1, joined), (2, [x, y])):
        stages = layers(2)
        graph = ps.lower(schedule, n_replicas=n_replicas, **mode)
        with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, mse, sgd) as pipeline:
            loss = pipeline.step(*batch).loss
        results.append([loss, *(p.detach() for stage in stages for p in stage.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_buckets_are_complete_before_the_backward_is(schedule: str) -> None:
    """Those of the last layers first, whether B makes the gradients or W."""
    x, y = data(12)
    graph = lowered(schedule, 1, 2, grad_sync="bucketed", n_buckets=4)
    with px.Pipeline(layers(1), graph, ["cpu"] * 2, mse) as pipeline:
        result = pipeline.step(x, y)
    shares = [share for _, share in sorted(result.milestones.items())][::2]  # one replica's
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] <= 1
    bucket = result.timeline.frame.query("op == 'REDUCE_GRAD'")
    assert bucket["part"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def reducing_by(handler: Handler) -> Any:
    """Let pipelines that are made in a block reduce gradients by another handler."""
    row = {Op.REDUCE_GRAD: op_handlers.for_all_members(handler)}
    return mock.patch.dict(op_handlers.HANDLERS, row)  # type: ignore[arg-type]


def test_a_bucket_is_reduced_while_the_backward_goes_on() -> None:
    """That of the last layers: the backward waits in the middle until it is being reduced."""
    reducing, waited = threading.Event(), list[bool]()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.register_hook(lambda _: waited.append(reducing.wait(10)))
            return x

    def reduce(run: Step, task: PlannedTask) -> None:
        reducing.set()
        reduce_gradients(run, task)

    first, *others = dense(4)
    model = nn.Sequential(first, Waits(), *others)
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, grad_sync="bucketed", n_buckets=2)
    with (
        reducing_by(reduce),
        px.Pipeline([model], graph, ["cpu"] * 2, mse) as pipeline,
    ):
        pipeline.step(*data(2))
    assert waited == [True, True]


def test_gradients_are_kept_while_they_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the allocator must know that the stream of reductions uses them, too."""
    adopted: list[tuple[Tensor, Stream]] = []
    monkeypatch.setattr(CpuDevice, "adopt", lambda _, *arguments: adopted.append(arguments))
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, step="none")
    with px.Pipeline([dense(2)], graph, ["cpu"] * 2, mse) as pipeline:
        pipeline.step(*data(2))
        gradients = [p.grad for module in pipeline.modules for p in module.parameters()]
    assert len(gradients) == 2 * 4
    assert all(any(x is kept for kept, _ in adopted) for x in gradients)
    assert len({stream for _, stream in adopted}) == 1


def test_replicas_draw_random_numbers_of_their_own() -> None:
    """The same sample everywhere has another dropout in each micro-batch of each replica."""
    x, y = (part[:1].expand(6, -1) for part in data(1))
    graph = ps.lower(ps.schedule("gpipe", 1, 3), n_replicas=2)
    model = nn.Sequential(nn.Dropout(0.5), *dense(4))
    with px.Pipeline([model], graph, ["cpu"] * 2, mse) as pipeline:
        losses = [float(loss) for loss in pipeline.step(x, y).losses]
    assert len(set(losses)) == 6


class Twice(nn.Module):
    """A layer whose gradient a backward makes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer.bias
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_gradient_that_is_made_twice_is_refused_in_buckets() -> None:
    """Nothing marks when it is complete; reduced after the backward, it is right."""
    x, y = data(8)
    for mode in ("last", "bucketed"):
        graph = lowered("gpipe", 1, 2, grad_sync=mode, n_buckets=2, step="none")
        with px.Pipeline([Twice()], graph, ["cpu"] * 2, mse) as pipeline:
            if mode == "last":
                assert pipeline.step(x, y).timeline.complete
                continue
            with pytest.raises(StageError, match=r"more than once, .*use_reentrant=False"):
                pipeline.step(x, y)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_no_bucket_waiting(where: str) -> None:
    """Streams of reductions go on, though no backward will make what they wait for."""
    graph = lowered("gpipe", 1, 2, grad_sync="bucketed", n_buckets=2)
    model = nn.Sequential(*dense(2), Faulty(ValueError("on purpose"), **{where: 0}))
    with (
        px.Pipeline([model], graph, ["cpu"] * 2, mse) as pipeline,
        pytest.raises(StageError, match="on purpose"),
    ):
        call_within(10, lambda: pipeline.step(*data(12)))


class Table(nn.Module):
    """Looks up rows, whose gradient is sparse; for a first sample below 0 all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        output = self.rows(x.abs()[:, 0].long().clamp(max=5))
        return output + self.rows.weight.sum(0) if x[0, 0] < 0 else output


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (1, 1)])
def test_sparse_and_dense_gradients_of_micro_batches_add_up(signs: tuple[int, int]) -> None:
    """Summed one by one, whichever comes first."""
    x, y = data(8)
    x = x.abs() * torch.tensor(signs).repeat_interleave(2).repeat(2)[:, None]
    gradients = []
    for mode in ("last", "every"):
        torch.manual_seed(0)
        table = Table()
        graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync=mode, step="none")
        with px.Pipeline([table], graph, ["cpu"] * 2, mse) as pipeline:
            pipeline.step(x, y)
        gradients.append(table.rows.weight.grad.to_dense())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", ["last", "every"])
def test_a_failed_step_keeps_the_gradients_of_earlier_ones(mode: Any) -> None:
    """Without an optimizer they add up, and a step that fails adds to them at most."""
    x, y = data(8)
    stage = nn.Sequential(nn.Linear(16, 16))
    graph = lowered("gpipe", 1, 2, grad_sync=mode, step="none")
    with px.Pipeline([stage], graph, ["cpu"] * 2, lambda a, b: mse(a, b)) as pipeline:
        pipeline.step(x, y)
        before = stage[0].weight.grad.clone()
        pipeline.loss_fn = lambda a, b: (a / 0).sum().item()  # no tensor: refused
        with pytest.raises(StageError):
            pipeline.step(x, y)
        torch.testing.assert_close(stage[0].weight.grad, before)


def _steps(
    processes: Processes,
    schedule: str,
    n_stages: int,
    n_replicas: int,
    sizes: list[int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run two steps in a rank, on its share of the batch; count the all-reduces of the second."""
    graph = lowered(schedule, n_stages, n_replicas, hosts="per_device", **options)
    n_own = graph.n_devices // processes.n_ranks
    share = processes.rank * n_own // n_stages
    x, y = (batch.split(sizes)[share] for batch in data(sum(sizes)))
    stages = layers(n_stages)
    own = [s for s in range(n_stages) if processes.rank * n_own <= share * n_stages + s
           < (processes.rank + 1) * n_own]  # fmt: skip
    modules = [stage if s in own else None for s, stage in enumerate(stages)]
    pipeline = px.Pipeline(modules, graph, ["cpu"] * n_own, mse, sgd, processes=processes)
    losses = [float(pipeline.gather(pipeline.step(x, y)).loss)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        result = pipeline.step(x, y)
    of_gradients = [call for call in calls.call_args_list if call.args[0].is_floating_point()]
    assert calls.call_count == 2 * len(of_gradients)  # before each, what there is is agreed on
    losses.append(float(pipeline.gather(result).loss))
    weights = {s: [p.detach().clone() for p in stages[s].parameters()] for s in own}
    pipeline.close()
    return {"losses": losses, "weights": weights, "calls": len(of_gradients), "own": own}


def _check(results: list[dict[str, Any]], sizes: list[int], n_calls: int, n_stages: int) -> None:
    losses, weights = unsplit(*data(sum(sizes)), 2)
    per_stage = len(weights) // n_stages
    for rank in results:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["calls"] == n_calls * len(rank["own"])
        for stage, own in rank["weights"].items():
            torch.testing.assert_close(own, weights[stage * per_stage : (stage + 1) * per_stage])


@pytest.mark.parametrize(("mode", "n_calls"), list(zip(MODES, [1, K, 2], strict=True)))
def test_two_processes(two_ranks: Ranks, mode: dict[str, Any], n_calls: int) -> None:
    """2 replicas x 1 stage, 2 x 2 with two stages a process, 1 x 2: one all-reduce in K or K."""
    for n_stages, schedule in ((1, "gpipe"), (2, "1f1b")):
        sizes = [7, 4]
        options = {"n_stages": n_stages, "n_replicas": 2, "sizes": sizes, "options": mode}
        _check(two_ranks.run(_steps, schedule=schedule, **options), sizes, n_calls, n_stages)
    options = {"n_stages": 2, "n_replicas": 1, "sizes": [11], "options": mode}
    _check(two_ranks.run(_steps, schedule="1f1b", **options), [11], 0, 2)


def test_stages_that_differ_in_two_processes(two_ranks: Ranks) -> None:
    """Stage 0 sums K = 3 times and stage 1 once: 2 x 2 in all."""
    options = {"grad_sync": ("every", "last")}
    results = two_ranks.run(
        _steps, schedule="1f1b", n_stages=2, n_replicas=2, sizes=[7, 4], options=options
    )
    _check(results, [7, 4], 2, 2)


@pytest.mark.parametrize(("mode", "n_calls"), list(zip(MODES, [1, K, 2], strict=True)))
def test_four_processes(four_ranks: Ranks, mode: dict[str, Any], n_calls: int) -> None:
    """2 replicas x 2 stages, a process each; replicas of unlike batches."""
    options = {"n_stages": 2, "n_replicas": 2, "sizes": [5, 8], "options": mode}
    results = four_ranks.run(_steps, schedule="zb_h1", **options)
    _check(results, [5, 8], n_calls, 2)


# What stages hold


def stage_bytes(stage: nn.Module) -> int:
    return sum(p.nbytes for p in stage.parameters())


def gradients_by_rule(timeline: ps.Timeline, stages: list[nn.Module]) -> list[float]:
    """Return the most bytes of gradients of each device, by rule 10 and the times of a step."""
    costs = ps.Costs(1, 2, gradient_bytes=[stage_bytes(stage) for stage in stages])
    return replace(timeline, costs=costs).memory.peak.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad_sync", "overlap", "slow", "n_gradients"),
    [
        ("last", True, False, 1),
        ("bucketed", True, False, 1),
        ("every", True, True, 4),  # all backwards are done before the first is reduced
        (2, True, True, 2),
        ("every", False, False, 2),  # each waits for its own: the sum so far, and one more
        (2, False, False, 2),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_that_wait_are_counted_as_they_are_predicted(
    schedule: str, grad_sync: str | int, overlap: bool, slow: bool, n_gradients: int
) -> None:
    """K = 4: as many of each replica as the simulator says. Sums need no memory of their own."""
    x, y = data(16)
    order = ps.schedule(schedule, 1, 4)
    graph = ps.lower(order, n_replicas=2, grad_sync=grad_sync, n_buckets=2, overlap=overlap)
    stages = layers(1)
    n_groups = 4 if grad_sync == "every" else 2
    last_backwards = np.isin(graph.op, (Op.B, Op.W)) & (graph.microbatch == 3)

    def reduce(run: Step, task: PlannedTask) -> None:
        if task.microbatch == 4 // n_groups - 1:  # the first
            while not run.events.ran[last_backwards].all():
                time.sleep(1e-3)
        reduce_gradients(run, task)

    with (
        reducing_by(reduce if slow else reduce_gradients),
        px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd) as pipeline,
    ):
        memory = pipeline.memory(x, y)
    size = stage_bytes(stages[0])
    costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, gradient_bytes=size)
    predicted = ps.simulate(graph, replace(costs, reduce_grad=100 if slow else 1)).memory.peak
    assert memory.peak_gradients.tolist() == predicted.tolist() == [n_gradients * size] * 2
    assert memory.peak_gradients.tolist() == gradients_by_rule(memory.timeline, stages)
    assert memory.peak_buffers.tolist() == [0, 0]
    assert memory.frame["gradients"].iloc[-1] == size


def _held(pipeline: px.Pipeline, x: Tensor, y: Tensor) -> list[list[int]]:
    return [held(x, y) for held in
            (pipeline.held_bytes, pipeline.device_bytes, pipeline.left_bytes)]  # fmt: skip


def _held_in_a_rank(processes: Processes) -> dict[str, Any]:
    graph = lowered("zb_h1", 2, 2, hosts="per_device")
    x, y = data(6)
    stages = layers(2)
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd, processes=processes) as pipeline:
        values = {"held": _held(pipeline, x, y), "n_steps": pipeline.n_steps}
        every = lowered("1f1b", 2, 2, hosts="per_device", grad_sync=("every", "last"))
        memory = pipeline.with_graph(every).memory(x, y)
    values["by_rule"] = gradients_by_rule(memory.timeline, layers(2))
    values["gradients"], values["buffers"] = (
        peak.tolist() for peak in (memory.peak_gradients, memory.peak_buffers)
    )
    alone = ps.lower(
        ps.schedule("1f1b", 1, 4), n_replicas=2, hosts="per_device", grad_sync=1, overlap=False
    )
    with px.Pipeline(layers(1), alone, ["cpu"], mse, processes=processes) as pipeline:
        values["alone"] = pipeline.memory(x, y).peak_gradients.tolist()
    weights = [p for stage in stages for p in stage.parameters()]
    return {**values, "weights": [p.detach() for p in weights], "grads": [p.grad for p in weights]}


def test_what_replicas_hold(two_ranks: Ranks) -> None:
    """As much as a pipeline alone, each stage of each once; and counting leaves no trace."""
    x, y = data(6)
    alone = lowered("zb_h1", 2, 1)
    with px.Pipeline(layers(2), alone, ["cpu"] * 2, mse, sgd) as pipeline:
        one = _held(pipeline, x, y)
    assert min(one[0]) > 0
    twice = [2 * held for held in one]  # of the first replica, then of the second
    x, y = torch.cat([x, x]), torch.cat([y, y])
    with px.Pipeline(layers(2), lowered("zb_h1", 2, 2), ["cpu"] * 4, mse, sgd) as pipeline:
        assert _held(pipeline, x, y) == twice
    before = [p.detach() for stage in layers(2) for p in stage.parameters()]
    for rank in two_ranks.run(_held_in_a_rank):
        assert rank["held"] == twice
        assert rank["gradients"] == rank["by_rule"]
        size = stage_bytes(layers(2)[0])
        # A message of all gradients of a stage, and the one in which processes agree.
        assert all(size <= nbytes < 1.1 * size for nbytes in rank["buffers"])
        # Without overlap each waits for its own reduction: the sum so far, and one more.
        assert rank["alone"] == [2 * stage_bytes(layers(1)[0])] * 2
        assert rank["n_steps"] == 0
        torch.testing.assert_close(rank["weights"], before, rtol=0, atol=0)
        assert set(rank["grads"]) == {None}


# The command line


def arguments(command: str, name: str, folder: str, more: str = "") -> list[str]:
    sizes = "--layers 2 --width 16 --heads 2 --sequence 16 --batch 8 --microbatches 4 --stages 1"
    rest = f"--replicas 2 --steps 2 --warm-up 1 --results {folder} --name {name} {more}"
    return [command, *shlex.split(f"{sizes} {rest}")]


def command_line(processes: Processes, folder: str) -> list[int]:
    """Profile, train and validate; each command joins and leaves by itself."""
    modes = "--grad-sync every,last,bucketed --n-buckets 2"
    return [
        main(arguments("profile", "costs", folder, modes)),
        main(
            arguments(
                "run", "run", folder, f"--grad-sync bucketed --n-buckets 2 --costs {folder}/costs"
            )
        ),
        main(arguments("validate", "modes", folder, f"{modes} --schedules 1f1b --recompute never")),
    ]


@pytest.mark.parametrize(
    ("n_ranks", "n_replicas", "expected"),
    [(1, 3, [[0, 1, 2]]), (2, 2, [[0], [1]]), (4, 2, [[0], [0], [1], [1]]),
     (2, 4, [[0, 1], [2, 3]]), (3, 2, [[0], [0, 1], [1]]), (2, 1, [[0], [0]])],
)  # fmt: skip
def test_batches_of_replicas(n_ranks: int, n_replicas: int, expected: list[list[int]]) -> None:
    """Each replica has different samples, the same ones in all of its processes."""
    splits = [replicas_of(rank, n_ranks, n_replicas) for rank in range(n_ranks)]
    assert [list(replicas) for replicas in splits] == expected
    make = build_model("gpt", layers=1, width=8, heads=1, sequence=8).make_batch
    own = [next(replica_batches(make, 2, 5, [replica])) for replica in range(n_replicas)]
    for inputs, others in pairwise(own):
        assert not torch.equal(inputs[0], others[0])
    for replicas in splits:
        batch = next(replica_batches(make, 2, 5, replicas))
        for k, part in enumerate(batch):
            assert torch.equal(part, torch.cat([own[replica][k] for replica in replicas]))


def test_every_command_runs_with_replicas(two_ranks: Ranks, tmp_path: Path) -> None:
    """Replicas have batches of their own, the same in one process and in two."""
    assert two_ranks.run(command_line, folder=str(tmp_path)) == [[0, 0, 0]] * 2
    assert main(arguments("run", "alone", str(tmp_path), "--grad-sync 2")) == 0
    together, alone = (
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("run", "alone")
    )
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert together["replicas"] == 2
    modes = px.load_run(tmp_path / "modes")
    names = ["1f1b never every", "1f1b never last", "1f1b never bucketed"]
    assert list(modes.rows) == names
    for row in modes.rows.values():
        assert row.measured.complete
    every, last, bucketed = (
        modes.table.loc[name, ["memory_predicted", "memory_measured"]].tolist() for name in names
    )
    assert last == bucketed == [last[0]] * 2
    # How many gradients wait for their reduction depends on times.
    assert all(last[0] <= nbytes < 4 * last[0] for nbytes in every)
    costs = ps.Costs.load(tmp_path / "costs/costs.json")
    assert costs.reduce_grad[0] > 0
    assert len(costs.buckets[0]) == 2
