"""Micro-batches of different shapes over processes: steps equal those of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import pipeline
from torch import nn
from unequal import (
    SHAPES,
    assert_like_whole,
    language_stages,
    mean_loss,
    token_loss,
    tokens,
    whole_step,
)

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import LossWarning

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

#: Shapes of three steps; the last has those of the first again.
STEPS = [SHAPES, [(1, 2), (2, 3), (1, 1), (5, 4)], SHAPES]


def lowered(name: str, p: int, m: int, options: dict[str, Any]) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, p, m), **options)


def batches(m: int, n_shares: int = 1) -> list[tuple[Any, Any]]:
    rows = [shapes * (m * n_shares // len(shapes)) for shapes in STEPS]
    return [tokens(row, seed) for seed, row in enumerate(rows)]


def run_steps(
    processes: Processes | None, stages: list[Any], graph: ps.TaskGraph, steps: list[Any]
) -> dict[str, Any]:
    n_ranks = 1 if processes is None else processes.n_ranks
    devices = ["cpu"] * (graph.n_devices // n_ranks)
    with px.Pipeline(
        stages, graph, devices, token_loss, pin_threads=False, processes=processes
    ) as subject:
        losses = [subject.gather(subject.step(*batch)).loss for batch in steps]
        losses.append(subject.gather(subject.evaluate(*steps[1])).loss)
        outputs = subject.predict(steps[0][0])
        memory = subject.memory(*steps[0])
        names = {
            f"{k}.{name}": x.grad
            for k, module in enumerate(subject.modules)
            for name, x in module.named_parameters()
        }
    return {
        "losses": losses,
        "outputs": outputs,
        "gradients": names,
        "nbytes": memory.peak.tolist(),
    }


def train(processes: Processes, name: str, p: int, m: int, options: Any) -> dict[str, Any]:
    graph = lowered(name, p, m, options)
    stages: list[nn.Module | None] = list(language_stages(graph.n_stages))
    steps = batches(m)
    if 0 < processes.rank < processes.n_ranks - 1:  # has neither the first stage nor the last
        steps = [(None, None)] * len(steps) if graph.n_stages == p else steps
    elif graph.n_stages == p:
        steps = [(x, None) if processes.rank == 0 else (None, y) for x, y in steps]
    return run_steps(processes, stages, graph, steps)


def check(ranks: Ranks, name: str, p: int, m: int, **options: Any) -> None:
    graph = lowered(name, p, m, options)
    expected = run_steps(None, language_stages(graph.n_stages), graph, batches(m))
    results = ranks.run(train, name=name, p=p, m=m, options=options)
    for result in results:
        assert torch.equal(torch.stack(result["losses"]), torch.stack(expected["losses"]))
        for one, other in zip(result["outputs"] or [], expected["outputs"], strict=False):
            assert torch.equal(one, other)
    assert any(result["outputs"] for result in results)
    n_found = 0
    for key, gradient in expected["gradients"].items():
        same = [x["gradients"][key] for x in results if key in x["gradients"]]
        n_found += len(same)
        assert all(torch.equal(x, gradient) for x in same if x is not None), key
    assert n_found


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipev"])
def test_two_processes_are_one(name: str, two_ranks: Ranks) -> None:
    check(two_ranks, name, 2, 4)


@pytest.mark.parametrize(
    "options", [{"recompute": "always"}, {"overlap": False}, {"rendezvous": True},
                {"streams": "single"}]
)  # fmt: skip
def test_however_messages_are_sent(options: dict[str, Any], two_ranks: Ranks) -> None:
    check(two_ranks, "gpipe", 2, 4, **options)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_four_processes_are_one(name: str, four_ranks: Ranks) -> None:
    """The second and third give neither inputs nor targets, and learn shapes of each step."""
    check(four_ranks, name, 4, 8)


# Replicas


def replicas(processes: Processes, weigh: bool) -> Any:
    """Train replicas of two stages: ranks 0 and 1 have replica 0, or each has its own."""
    n_stages = processes.n_ranks // 2
    graph = ps.lower(ps.schedule("1f1b", n_stages, 2), n_replicas=2, layout="replica_major")
    share = processes.rank // n_stages
    inputs, targets = (px.Microbatches(list(x)[2 * share : 2 * share + 2]) for x in tokens(SHAPES))
    if weigh:
        targets = px.Microbatches(list(targets), weights=[x.numel() for x in targets])
    stages = language_stages(n_stages)
    with px.Pipeline(
        stages, graph, ["cpu"], mean_loss if weigh else token_loss, processes=processes
    ) as subject:
        loss = subject.gather(subject.step(inputs, targets)).loss
        own = {
            k % n_stages: [x.grad for x in module.parameters()]
            for k, module in enumerate(subject.modules)
            if any(True for _ in module.parameters())
        }
    return loss, own


@pytest.mark.parametrize("weigh", [False, True])
def test_replicas_have_their_own_shapes(weigh: bool, four_ranks: Ranks) -> None:
    stages = language_stages(2)
    loss, whole = whole_step(stages, *tokens(SHAPES))
    gradients = iter([x.grad for x in whole.parameters()])
    expected = [[next(gradients) for _ in stage.parameters()] for stage in stages]
    for result, own in four_ranks.run(replicas, weigh=weigh):
        torch.testing.assert_close(result, loss)
        for stage, row in own.items():
            for one, other in zip(row, expected[stage], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_replicas_in_one_process() -> None:
    """The graph's micro-batches of replica 0 come first."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=2)
    stages, batch = language_stages(2), tokens(SHAPES)
    with pipeline(stages, graph, token_loss) as subject:
        assert_like_whole(subject.step(*batch).loss, stages, *batch)


# Errors


def refused(processes: Processes, mistake: str) -> str:
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    inputs, targets = tokens()
    plain = torch.zeros(4, 5, dtype=torch.int64)
    is_last = processes.rank == 1
    stages = language_stages(2)
    with px.Pipeline(stages, graph, ["cpu"], token_loss, processes=processes) as subject:
        try:
            if mistake == "late":
                subject.step(plain, plain)
                subject.step(inputs, targets)
            elif mistake == "samples":
                shorter = px.Microbatches([x[:1] for x in targets])
                subject.step(*((None, shorter) if is_last else (inputs, None)))
            elif mistake == "weights":
                weights = [1.0, 2.0, 3.0, 4.0 + is_last]
                subject.step(inputs, px.Microbatches(list(targets), weights=weights))
            else:
                fewer = px.Microbatches(list(inputs)[:3])
                subject.step(fewer, targets)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("late", "this step has Microbatches, but the first step split its batches evenly"),
        ("samples", "targets of rank 1 4; give every process of a replica the same batch"),
        ("weights", "processes give Microbatches with different weights; give the same"),
        ("number", "inputs have 3 Microbatches, but a step has 4"),
    ],
)
def test_errors_in_processes(case: str, message: str, two_ranks: Ranks) -> None:
    texts = two_ranks.run(refused, mistake=case)
    assert any(re.search(re.escape(message), text) for text in texts), texts


def means(processes: Processes) -> list[str]:
    """Each replica has one length; they differ between replicas only."""
    import warnings

    graph = ps.lower(ps.schedule("1f1b", 1, 2), n_replicas=2)
    inputs, targets = tokens([(2, 4 + 4 * processes.rank)] * 2)
    with (
        warnings.catch_warnings(record=True) as caught,
        px.Pipeline(language_stages(1), graph, ["cpu"], mean_loss, processes=processes) as subject,
    ):
        warnings.simplefilter("always", LossWarning)
        subject.step(inputs, targets)
    return [str(x.message) for x in caught if x.category is LossWarning]


def test_means_over_unlike_lengths_of_replicas_warn(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(means):
        assert [text[:45] for text in texts] == ["targets of Microbatches have unlike shapes be"]
