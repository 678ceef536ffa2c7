"""A sharded embedding as a stage: the step of one process that has all rows and the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from sharded_stage import (
    DIM,
    REPLICAS,
    ROWS,
    SIZES,
    K,
    Rest,
    batch,
    build_pipeline,
    lowered,
    model,
    share,
)
from small_pipelines import mse
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.embedding.stage import check_embedding
from pipesim.errors import ArgumentError, StageError
from pipesim.ops import EXCHANGES, Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

RATE = 0.5


def unsplit(n_steps: int, bag: int, combiner: str | None) -> dict[str, Any]:
    """Return losses, weights and gradients of steps of one process."""
    weights, bottom, top = model()
    tables = [w.requires_grad_() for w in weights]
    parameters = [*tables, *bottom.parameters(), *top.parameters()]
    optimizer = torch.optim.SGD(parameters, RATE)
    dense, keys, y = batch(sum(SIZES), bag)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        rows = [
            nn.functional.embedding(k, w) if combiner is None
            else nn.functional.embedding_bag(k, w, mode=combiner, padding_idx=0)
            for w, k in zip(tables, keys.unbind(1), strict=True)
        ]  # fmt: skip
        loss = mse(top(bottom(dense, keys)[0], torch.stack(rows, 1)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "tables": [w.detach() for w in tables],
        "grads": [w.grad for w in tables],
        "bottom": [p.detach() for p in bottom.parameters()],
        "top": [p.detach() for p in top.parameters()],
    }


def steps(
    processes: Processes,
    schedule: str,
    n_devices: int,
    n_stages: int,
    lowering: dict[str, Any],
    n_steps: int,
    bag: int = 0,
    optimizer: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Run steps in a rank; return what it then has, and what it knows of all."""
    graph = lowered(schedule, n_devices, n_stages, **lowering)
    sgd = (lambda parameters: torch.optim.SGD(parameters, RATE)) if optimizer else None
    pipeline, modules = build_pipeline(processes, graph, sgd, **options)
    inputs, targets = share(processes, graph, bag)
    with pipeline:
        results = [pipeline.gather(pipeline.step(inputs, targets)) for _ in range(n_steps)]
    timeline = results[-1].timeline
    values: dict[str, Any] = {
        "losses": [result.loss.item() for result in results],
        "complete": bool(timeline.complete),
        "nbytes": {
            (name, replica): _of_exchanges(timeline, part, replica)
            for part, name in enumerate(EXCHANGES)
            for replica in range(REPLICAS)
        },
    }
    for name in ("bottom", "top"):
        if name in modules:
            values[name] = [p.detach() for p in modules[name].parameters()]
    if "embedding" in modules:
        embedding: Any = modules["embedding"]
        values["tables"] = embedding.full_weight()
        if embedding.weight.grad is not None:
            with torch.no_grad():
                embedding.weight.copy_(embedding.weight.grad.to_dense())
            values["grads"] = embedding.full_weight()
    return values


def _of_exchanges(timeline: ps.Timeline, part: int, replica: int) -> list[float]:
    """Return the bytes of a replica's exchanges, micro-batch by micro-batch."""
    graph = timeline.graph
    exchanges = (graph.op == Op.ALL_TO_ALL) & (graph.part == part) & (graph.replica == replica)
    nbytes: list[float] = timeline.nbytes[exchanges][
        np.argsort(graph.microbatch[exchanges])
    ].tolist()
    return nbytes


def check(ranks: Ranks, *where: Any, n_steps: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Run steps in ranks and in this process: losses, every row and other weights are equal."""
    schedule, n_devices, n_stages, lowering = where
    results: list[dict[str, Any]] = ranks.run(
        steps, schedule=schedule, n_devices=n_devices, n_stages=n_stages, lowering=lowering,
        n_steps=n_steps, **options,
    )  # fmt: skip
    wanted = unsplit(n_steps, options.get("bag", 0), options.get("combiner"))
    for rank in results:
        assert rank["complete"]
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for name in ("tables", "bottom", "top", "grads"):
            if name in rank:
                torch.testing.assert_close(rank[name], wanted[name])
    for name in ("tables", "bottom", "top"):
        assert any(name in rank for rank in results)
    return results


MODES: list[dict[str, Any]] = [
    {},
    {"grad_sync": "every"},
    {"grad_sync": "bucketed", "n_buckets": 2},
    {"recompute": "always"},
    {"overlap": False, "rendezvous": True},
    {"exchange_work": "compute"},
    {"sparse_grad_sync": "last", "grad_sync": "every"},
    {"exchange_work": "compute", "sparse_grad_sync": "last", "prefetch_keys": True},
    {"exchange_work": "compute", "sparse_grad_sync": "last", "overlap": False},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_both_stages_in_one_process_each(mode: dict[str, Any], two_ranks: Ranks) -> None:
    """Before the dense pipeline, and in its midst, where what passes by has gradients too."""
    check(two_ranks, "looped_bfs", 1, 2, mode)
    mode = {name: value for name, value in mode.items() if name != "prefetch_keys"}
    check(two_ranks, "gpipe", 3, 3, mode, n_steps=1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_two_replicas_of_two_processes(schedule: str, four_ranks: Ranks) -> None:
    """Embeddings on ranks 0 and 2; backwards whole and split."""
    check(four_ranks, schedule, 2, 2, {})


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("work", ["collective", "compute"])
def test_in_the_midst_of_a_pipeline(schedule: str, work: str, two_ranks: Ranks) -> None:
    once = {} if work == "collective" else {"sparse_grad_sync": "last"}
    check(two_ranks, schedule, 3, 3, {"exchange_work": work, **once})


def test_split_backwards_without_tasks_of_their_own(two_ranks: Ranks) -> None:
    check(two_ranks, "zb_h1", 3, 3, {"sparse_grad_sync": "last"}, placement="hash", unique=False)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_bags_with_padding(combiner: str, two_ranks: Ranks) -> None:
    check(two_ranks, "looped_bfs", 1, 2, {}, bag=3, combiner=combiner, padding_key=0)


def test_sparse_gradients_of_rows(two_ranks: Ranks) -> None:
    check(two_ranks, "looped_bfs", 1, 2, {}, sparse=True)
    check(two_ranks, "looped_bfs", 1, 2, {"sparse_grad_sync": "last"}, sparse=True)


def test_bytes_of_exchanges(two_ranks: Ranks) -> None:
    """Of each key once: what one replica asks the other for, and gets."""
    results = check(two_ranks, "looped_bfs", 1, 2, {})
    _, all_keys, _ = batch(sum(SIZES), 0)
    requests: list[list[int]] = []  # keys that each replica asks the other for, by micro-batch
    for replica, keys in enumerate(all_keys.split(SIZES)):
        parts = [{(t, k) for row in part.tolist() for t, k in enumerate(row)}
                 for part in keys.tensor_split(K)]  # fmt: skip
        requests.append([sum(k % REPLICAS != replica for _, k in part) for part in parts])
    for nbytes in (rank["nbytes"] for rank in results):
        for replica in range(REPLICAS):
            of_keys, of_rows = requests[replica], requests[1 - replica]
            assert nbytes["counts", replica] == [8] * K
            assert nbytes["keys", replica] == [4 * n for n in of_keys]
            assert nbytes["vectors", replica] == [4 * DIM * n for n in of_rows]
            assert nbytes["gradients", replica] == [4 * DIM * n for n in of_keys]


def test_bytes_of_accumulated_gradients(two_ranks: Ranks) -> None:
    """Each row of a replica's micro-batches once, whatever placement, and duplicates of keys."""
    lowering = {"sparse_grad_sync": "last"}
    results = check(two_ranks, "looped_bfs", 1, 2, lowering, unique=False)
    _, all_keys, _ = batch(sum(SIZES), 0)
    for nbytes in (rank["nbytes"] for rank in results):
        for replica, keys in enumerate(all_keys.split(SIZES)):
            rows = {(t, k) for row in keys.tolist() for t, k in enumerate(row)}
            n_requests = sum(k % REPLICAS != replica for _, k in rows)
            assert nbytes["gradients", replica] == []
            assert nbytes["accumulated", replica] == [4 * DIM * n_requests]
            duplicates = [(part % REPLICAS != replica).sum() for part in keys.tensor_split(K)]
            assert nbytes["keys", replica] == [4 * int(n) for n in duplicates]


@pytest.mark.parametrize(("n_steps", "once"), [(1, "every"), (2, "every"), (2, "last")])
def test_gradients_add_up_without_an_optimizer(n_steps: int, once: str, two_ranks: Ranks) -> None:
    """Of every process's rows alike."""
    lowering = {"step": "none", "sparse_grad_sync": once}
    options = {"n_devices": 1, "n_stages": 2, "lowering": lowering, "optimizer": False}
    results = two_ranks.run(steps, schedule="looped_bfs", n_steps=n_steps, **options)
    wanted = unsplit(1, 0, None)
    for rank in results:
        for own, its in zip(rank["grads"], wanted["grads"], strict=True):
            torch.testing.assert_close(own, n_steps * its)


def validated(processes: Processes, lowering: dict[str, Any]) -> dict[str, Any]:
    """Predict and measure a step."""
    weights, bottom, top = model()
    graph = lowered("looped_bfs", 1, 2, **lowering)
    embedding = px.ShardedEmbedding.from_full(weights, processes)
    stages = [px.EmbeddingStage(embedding), Rest(bottom, top)]
    validation = px.validate(
        stages, {"step": graph}, ["cpu"], mse, iter([share(processes, graph)] * 3),
        n_steps=2, warm_up=1, processes=processes,
    )  # fmt: skip
    row, costs = validation.rows["step"], validation.costs
    return {
        "complete": bool(row.measured.complete and row.predicted.complete),
        "exchanges": [getattr(costs, f"exchange_{name}") for name in EXCHANGES],
        "work": [costs.dispatch, costs.reorder, costs.reorder_gradients],
        "parameters": costs.parameter_bytes,
        "rows": embedding.weight.nbytes,
    }


@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
@pytest.mark.parametrize("once", [False, True])
def test_a_step_is_predicted_from_measured_exchanges(once: bool, two_ranks: Ranks) -> None:
    """Parameters are those that a process holds; tasks of their own have seconds too."""
    lowering = {"exchange_work": "compute", "sparse_grad_sync": "last"} if once else {}
    for rank in two_ranks.run(validated, lowering=lowering):
        assert rank["complete"]
        *of_each, gradients, accumulated = rank["exchanges"]
        for seconds in (*of_each, accumulated if once else gradients):
            assert seconds[0] > 0
            assert seconds[1] == 0
        assert (gradients if once else accumulated) is None
        for seconds in rank["work"]:
            assert (seconds[0] > 0, seconds[1]) == (True, 0) if once else not seconds
        assert rank["parameters"][0] == rank["rows"]


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize(
    ("placement", "lowering"),
    [
        ("modulo", {}),
        ("hash", {"sparse_grad_sync": "last"}),
        ("frequency", {"exchange_work": "compute", "prefetch_keys": True}),
    ],
)
def test_one_process_alone_has_all_rows(
    placement: str, lowering: dict[str, Any], unique: bool
) -> None:
    """The graph's exchanges then have one member; every way to exchange gives the same."""
    weights, bottom, top = model()
    graph = ps.lower(ps.schedule("1f1b", 2, K), sharded=[0], **lowering)
    counts = ps.Keys.zipf(ROWS, 9) if placement == "frequency" else None
    embedding = px.ShardedEmbedding.from_full(
        weights, placement=placement, unique=unique, counts=counts
    )
    stages = [px.EmbeddingStage(embedding), Rest(bottom, top)]
    dense, keys, y = batch(sum(SIZES), 0)
    sgd = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd) as pipeline:
        losses = [pipeline.step((dense, keys), y).loss.item() for _ in range(2)]
    wanted = unsplit(2, 0, None)
    assert losses == pytest.approx(wanted["losses"], rel=1e-5)
    torch.testing.assert_close(embedding.full_weight(), wanted["tables"])
    for stage in (bottom, top):
        name = "bottom" if stage is bottom else "top"
        torch.testing.assert_close([p.detach() for p in stage.parameters()], wanted[name])


@pytest.mark.parametrize("once", ["every", "last"])
def test_a_failed_step_leaves_no_gradients_of_rows(once: str) -> None:
    """Of micro-batches that were through already; the next step is as if there had been none."""
    weights, bottom, top = model()
    graph = ps.lower(ps.schedule("1f1b", 2, K), sharded=[0], sparse_grad_sync=once)
    embedding = px.ShardedEmbedding.from_full(weights)
    dense, keys, y = batch(sum(SIZES), 0)
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == K:
            raise ValueError("on purpose")
        return mse(output, target)

    sgd = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
    stages = [px.EmbeddingStage(embedding), Rest(bottom, top)]
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss, sgd) as pipeline:
        with pytest.raises(StageError, match="on purpose"):
            pipeline.step((dense, keys), y)
        losses = [pipeline.step((dense, keys), y).loss.item() for _ in range(2)]
    wanted = unsplit(2, 0, None)
    assert losses == pytest.approx(wanted["losses"], rel=1e-5)
    torch.testing.assert_close(embedding.full_weight(), wanted["tables"])


def test_graphs_that_exchange_in_other_ways_are_not_measured_together() -> None:
    """Exchanges that group keys take longer than those that do not."""
    weights, bottom, top = model()
    schedule = ps.schedule("1f1b", 2, K)
    graph, *others = (
        ps.lower(schedule, sharded=[0], **options)
        for options in ({}, {"exchange_work": "compute"}, {"sparse_grad_sync": "last"})
    )
    stages = [px.EmbeddingStage(px.ShardedEmbedding.from_full(weights)), Rest(bottom, top)]
    dense, keys, y = batch(sum(SIZES), 0)
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse) as pipeline:
        texts = ["exchange_work='compute'", "sparse_grad_sync='last'"]
        for other, text in zip(others, texts, strict=True):
            with pytest.raises(ArgumentError, match=f"lowered with {text}, that of the pipeline"):
                px.measure(pipeline, (dense, keys), y, graphs=[graph, other])


def test_gradients_of_the_mean_over_processes_are_refused() -> None:
    """Losses of a pipeline are weighted over the whole batch, so that its gradients are sums."""
    weights, bottom, top = model()
    graph = ps.lower(ps.schedule("1f1b", 2, K), sharded=[0])
    stages = [
        px.EmbeddingStage(px.ShardedEmbedding.from_full(weights, gradients="mean")),
        Rest(bottom, top),
    ]
    with pytest.raises(ArgumentError, match=r"stage 0.*gradients='mean'.*leave gradients out"):
        px.Pipeline(stages, graph, ["cpu"] * 2, mse)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([0, 2], None),
        ([2, 0], None),
        ([0, 1], r"over processes \[0, 2\], but the replicas of the stage are in .* \[0, 1\]"),
        ([0], r"over processes \[0, 2\], but the replicas of the stage are in processes \[0\]"),
        ([0, 1, 2], r"over processes \[0, 2\], but .* \[0, 1, 2\]; give the embedding a group of"),
        ([0, 0], r"over 2 replicas, which are in processes \[0, 0\]; give each replica its own"),
    ],
)
def test_owners_are_the_processes_of_the_replicas(
    replicas: list[int], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = px.ShardedEmbedding.from_full(model()[0])
    monkeypatch.setattr(px.ShardedEmbedding, "ranks", (0, 2))
    monkeypatch.setattr(px.ShardedEmbedding, "n_ranks", 2)
    module = px.EmbeddingStage(embedding)
    if message is None:
        check_embedding(module, 0, replicas)
    else:
        with pytest.raises(ArgumentError, match=message):
            check_embedding(module, 0, replicas)
