"""Replicas of a pipeline against one process with the whole batch: loss, gradients, weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from executing import cut, data, dense, mse
from ranks import Ranks
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

MODES: list[dict[str, Any]] = [
    {"grad_sync": "last"},
    {"grad_sync": "every"},
    {"grad_sync": "bucketed", "n_buckets": 2},
]
RATE = 0.5
K = 3


def layers(n: int) -> list[nn.Module]:
    """Return a model of four layers in ``n`` stages, always with the same weights."""
    return list(cut(dense(4), [4 // n] * n))


def unsplit(x: Tensor, y: Tensor, n_steps: int) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of steps with the whole batch."""
    model = nn.Sequential(*layers(1))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def lowered(schedule: str, n_stages: int, n_replicas: int, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, n_stages, K), n_replicas=n_replicas, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, RATE)


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
        found = [float(pipeline.step(x, y).loss) for _ in range(2)]
        assert found == pytest.approx(losses, rel=1e-5)
        for replica in range(n_replicas):
            copies = pipeline.modules[replica * n_stages : (replica + 1) * n_stages]
            own = [p.detach() for module in copies for p in module.parameters()]
            torch.testing.assert_close(own, weights)
    torch.testing.assert_close([p.detach() for s in stages for p in s.parameters()], weights)


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


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["grad_sync"])
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_mini_batches_of_replicas(name: str, mode: dict[str, Any]) -> None:
    """Delayed and stashed weights: as one replica whose micro-batches are twice as large."""
    schedule = ps.schedule(name, 2, 4)
    x, y = data(16)
    # Micro-batch m of the one replica has those of both.
    joined = [torch.stack(batch.chunk(2)).unflatten(1, (4, 2)).transpose(0, 1).flatten(0, 2)
              for batch in (x, y)]  # fmt: skip
    found = []
    for n_replicas, batch in ((1, joined), (2, [x, y])):
        stages = layers(2)
        graph = ps.lower(schedule, n_replicas=n_replicas, **mode)
        with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, mse, sgd) as pipeline:
            loss = pipeline.step(*batch).loss
        found.append([loss, *(p.detach() for stage in stages for p in stage.parameters())])
    torch.testing.assert_close(*found)


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


def _steps(
    processes: px.Processes,
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
    given = [stage if s in own else None for s, stage in enumerate(stages)]
    pipeline = px.Pipeline(given, graph, ["cpu"] * n_own, mse, sgd, processes=processes)
    losses = [float(pipeline.gather(pipeline.step(x, y)).loss)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        result = pipeline.step(x, y)
    of_gradients = [call for call in calls.call_args_list if call.args[0].is_floating_point()]
    losses.append(float(pipeline.gather(result).loss))
    weights = {s: [p.detach().clone() for p in stages[s].parameters()] for s in own}
    pipeline.close()
    return {"losses": losses, "weights": weights, "calls": len(of_gradients), "own": own}


def _check(found: list[dict[str, Any]], sizes: list[int], n_calls: int, n_stages: int) -> None:
    losses, weights = unsplit(*data(sum(sizes)), 2)
    per_stage = len(weights) // n_stages
    for rank in found:
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


@pytest.mark.parametrize(("mode", "n_calls"), list(zip(MODES, [1, K, 2], strict=True)))
def test_four_processes(four_ranks: Ranks, mode: dict[str, Any], n_calls: int) -> None:
    """2 replicas x 2 stages, a process each; replicas of unlike batches."""
    options = {"n_stages": 2, "n_replicas": 2, "sizes": [5, 8], "options": mode}
    found = four_ranks.run(_steps, schedule="zb_h1", **options)
    _check(found, [5, 8], n_calls, 2)
