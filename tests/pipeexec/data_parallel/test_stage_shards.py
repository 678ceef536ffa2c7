"""Sharded optimizers (ZeRO-1) and parameters (FSDP) in processes, against one process.

Loss and weights after several steps are those of the unsplit model with the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from small_pipelines import cut, data, dense, mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.data_parallel.stage_shards import StageShards, check_shardable, flatten
from pipeexec.distributed import Processes
from pipeexec.executor import sharding
from pipesim.errors import ArgumentError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning"),
]

N_STEPS, MAX_NORM = 2, 0.5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}
ZERO_1 = {"shard_optimizer": True}


def decayed(named_parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that lets matrices decay, which shares must not change."""
    rows: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, parameter in named_parameters:
        rows[parameter.dim() > 1].append(parameter)
    groups = [{"params": row, "weight_decay": 0.5 * decays} for decays, row in rows.items()]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS["decayed"] = decayed


def model() -> nn.Sequential:
    """Return four stages of layers; the norm's parameters are not deferred to W.

    The first has no norm, so that the halves of a stage end within parameters.
    """
    torch.manual_seed(1)
    first, *rest = dense(4)
    return nn.Sequential(first, *(nn.Sequential(layer, nn.LayerNorm(16)) for layer in rest))


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    named = name == "decayed"
    optimizer: torch.optim.Optimizer = OPTIMIZERS[name](
        module.named_parameters() if named else module.parameters()
    )
    return optimizer


def unsplit(
    name: str, x: Tensor, y: Tensor, *, max_norm: float | None = None, n_steps: int = N_STEPS
) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of steps of one process with the whole batch."""
    module = model()
    optimizer, losses = optimizer_of(name, module), []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = mse(module(x), y)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in module.parameters()]


def lowered(
    schedule: str, n_devices: int, chunks: int, n_replicas: int, m: int = 4, **options: Any
) -> ps.TaskGraph:
    kwargs = {"n_chunks": chunks} if chunks > 1 else {}
    return ps.lower(
        ps.schedule(schedule, n_devices, m, **kwargs),
        n_replicas=n_replicas,
        hosts="per_device",
        **options,
    )


def pipeline_of(
    processes: Processes, graph: ps.TaskGraph, name: str, **options: Any
) -> tuple[px.Pipeline, int]:
    """Return the pipeline of this rank, with one device, and the number of its replica."""
    n = graph.n_stages
    stages = cut(model(), [4 // n] * n)
    replica, _ = divmod(processes.rank, graph.n_devices // graph.n_replicas)
    own = graph.homes[replica] == processes.rank
    modules = [stage if own[s] else None for s, stage in enumerate(stages)]
    return (
        px.Pipeline(modules, graph, ["cpu"], mse, OPTIMIZERS[name], processes=processes, **options),
        replica,
    )


def train(
    processes: Processes,
    name: str,
    layout: list[Any],
    options: dict[str, Any],
    max_norm: float | None = None,
    n_steps: int = N_STEPS,
) -> dict[str, Any]:
    """Run steps on this rank's share of the batch; return losses and weights of its stages."""
    graph = lowered(*layout, **options)
    pipeline, replica = pipeline_of(processes, graph, name, max_grad_norm=max_norm)
    x, y = (batch.chunk(graph.n_replicas)[replica] for batch in data(16))
    with pipeline:
        losses = [float(pipeline.gather(pipeline.step(x, y)).loss) for _ in range(n_steps)]
        weights = pipeline.state_dict()
        evaluated = float(pipeline.gather(pipeline.evaluate(x, y)).loss)
        state = pipeline.optimizer_state_dict()["state"]
    return {
        "losses": losses,
        "weights": weights,
        "evaluated": evaluated,
        "state": {key: sorted(values) for key, values in state.items()},
    }


def check(results: list[dict[str, Any]], name: str, **options: Any) -> None:
    """Compare losses and weights of all ranks with one process."""
    x, y = data(16)
    losses, weights = unsplit(name, x, y, **options)
    after = unsplit(name, x, y, n_steps=N_STEPS + 1, **options)[0][-1]
    keys = [key for key, _ in model().named_parameters()]
    wanted = dict(zip(keys, weights, strict=True))
    compared: set[str] = set()
    for rank in results:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["evaluated"] == pytest.approx(after, rel=1e-5)
        for key, value in rank["weights"].items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-6)
            compared.add(key)
    assert compared == set(keys)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, ZERO_1) for name in OPTIMIZERS), ("decayed", {"shard_parameters": "every"})],
)
def test_every_optimizer(two_ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    """Two replicas of one stage; the shares of a stage end within parameters."""
    check(two_ranks.run(train, name=name, layout=["1f1b", 1, 1, 2], options=options), name)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_parameters": "every", "grad_sync": "every"},
        {"shard_parameters": 1, "recompute": "always"},
        {"shard_parameters": 2, "grad_sync": 2, "prefetch": 2},
        {"shard_parameters": "step", "prefetch": 0},
        {"shard_parameters": "every", "overlap": False},
        ZERO_1 | {"grad_sync": "every"},
        ZERO_1 | {"overlap": False},
    ],
    ids=str,
)
def test_two_stages_of_a_process(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """Both stages are on one device, whose parameters come and go."""
    layout = ["interleaved_1f1b", 1, 2, 2]
    check(two_ranks.run(train, name="adam", layout=layout, options=options), "adam")


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"shard_parameters": "every"}),
        ("zb_h1", {"shard_parameters": "every"}),
        ("zb_h1", {"shard_parameters": 1, "grad_sync": ["every", "last"]}),
        ("1f1b", ZERO_1),
    ],
)
def test_four_processes(four_ranks: Ranks, schedule: str, options: dict[str, Any]) -> None:
    """Two replicas of two stages, split backwards too, whose W runs without parameters."""
    layout = [schedule, 2, 1, 2]
    check(four_ranks.run(train, name="sgd", layout=layout, options=options), "sgd")


def test_four_shares(four_ranks: Ranks) -> None:
    """Four replicas of one stage each hold a quarter."""
    layout, options = ["gpipe", 1, 1, 4], {"shard_parameters": "every"}
    check(four_ranks.run(train, name="adam", layout=layout, options=options), "adam")


@pytest.mark.parametrize("options", [ZERO_1, {"shard_parameters": "step"}], ids=str)
def test_clipping_by_the_norm_of_all_shares(two_ranks: Ranks, options: dict[str, Any]) -> None:
    results = two_ranks.run(
        train,
        name="sgd",
        layout=["interleaved_1f1b", 1, 2, 2],
        options=options | {"grad_norm": True},
        max_norm=MAX_NORM,
    )
    check(results, "sgd", max_norm=MAX_NORM)


# State


def state_in_a_rank(
    processes: Processes, options: dict[str, Any], folder: str, name: str
) -> dict[str, Any]:
    """Train, save, train on; then load into pipelines with and without shares, and train on."""
    layout: list[Any] = ["interleaved_1f1b", 1, 2, 2]
    graph = lowered(*layout, **options)
    x, y = (batch.chunk(2)[processes.rank] for batch in data(16))
    pipeline, _ = pipeline_of(processes, graph, name)
    with pipeline:
        for _ in range(2):
            pipeline.step(x, y)
        px.save_checkpoint(pipeline, folder)
        model_state, optimizer_state = pipeline.state_dict(), pipeline.optimizer_state_dict()
        model_state = {key: value.clone() for key, value in model_state.items()}
        pipeline.step(x, y)
        wanted = {key: value.clone() for key, value in pipeline.state_dict().items()}
    resumed = []
    for other in (options, {}, {"shard_parameters": 2}):
        again, _ = pipeline_of(processes, lowered(*layout, **other), name)
        with again:
            px.load_checkpoint(again, folder)
            again.step(x, y)
            resumed.append({k: v.clone() for k, v in again.state_dict().items()})
            again.load_state_dict(model_state)
            again.load_optimizer_state_dict(optimizer_state)
            again.step(x, y)
            resumed.append({k: v.clone() for k, v in again.state_dict().items()})
    shapes = {
        key: {name: tuple(x.shape) for name, x in values.items()}
        for key, values in optimizer_state["state"].items()
    }
    return {"wanted": wanted, "resumed": resumed, "shapes": shapes, "model": model_state}


@pytest.mark.parametrize(
    ("name", "options"), [("adam", ZERO_1), ("sgd", {"shard_parameters": "every"})]
)
def test_state_is_that_of_whole_parameters(
    two_ranks: Ranks, options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """A run that is resumed, with shares or without, ends with the same weights, bit for bit."""
    for rank in two_ranks.run(
        state_in_a_rank, options=options, folder=str(tmp_path / "saved"), name=name
    ):
        for weights in rank["resumed"]:
            assert weights.keys() == rank["wanted"].keys()
            for key, value in weights.items():
                assert torch.equal(value, rank["wanted"][key]), key
        own = dict(model().named_parameters())
        for key, shapes in rank["shapes"].items():
            for name_, shape in shapes.items():
                assert shape == (() if name_ == "step" else tuple(own[key].shape))


def preserved_in_a_rank(processes: Processes, options: dict[str, Any]) -> list[bool]:
    graph = lowered("1f1b", 1, 1, 2, **options)
    x, y = (batch.chunk(2)[processes.rank] for batch in data(16))
    pipeline, _ = pipeline_of(processes, graph, "adam")
    with pipeline:
        pipeline.step(x, y)
        before = {key: value.clone() for key, value in pipeline.state_dict().items()}
        with pipeline.preserved():
            pipeline.step(x, y)
        after = pipeline.state_dict()
        return [torch.equal(before[key], after[key]) for key in before]


@pytest.mark.parametrize("options", [ZERO_1, {"shard_parameters": "every"}], ids=str)
def test_steps_that_leave_no_trace(two_ranks: Ranks, options: dict[str, Any]) -> None:
    assert all(map(all, two_ranks.run(preserved_in_a_rank, options=options)))


# Refusals


@pytest.mark.parametrize(
    ("layer", "factory", "words"),
    [
        (nn.Linear(4, 4), torch.optim.Adagrad, "is Adagrad: .*take one of SGD, Adam"),
        (nn.Linear(4, 4), torch.optim.Adafactor, "optimizer of stage 3 is Adafactor"),
        (nn.Embedding(4, 4, sparse=True), torch.optim.SGD, "layer '' of stage 3 has sparse"),
        (nn.Linear(4, 4, dtype=torch.complex64), torch.optim.SGD, "Parameter of torch.complex64"),
        (nn.Linear(4, 4, device="meta"), torch.optim.SGD, "'weight' of stage 3 is on meta"),
    ],
)
def test_modules_and_optimizers_without_shares(layer: nn.Module, factory: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"shard_optimizer=True, but .*{words}"):
        check_shardable(layer, 3, factory(layer.parameters(), lr=0.1), "shard_optimizer=True")


@pytest.mark.parametrize(
    ("step", "has_optimizer", "words"),
    [("flush", False, "the pipeline has no optimizer"), ("none", True, "the graph has no STEP")],
)
def test_steps_are_needed(
    monkeypatch: pytest.MonkeyPatch, step: str, has_optimizer: bool, words: str
) -> None:
    monkeypatch.setattr(sharding, "device_ranks", lambda *_: [0, 1])
    graph = lowered("1f1b", 1, 1, 2, shard_parameters="every", step=step)
    model: Any = SimpleNamespace(devices=[], processes=None, zero_grad=has_optimizer)
    with pytest.raises(ArgumentError, match=f"shard_parameters, but {words}"):
        sharding.Sharding().check(graph, model)


def test_graphs_of_other_shares() -> None:
    """A pipeline trains graphs with its own sharding."""
    none, zero_1, every, step = (
        lowered("1f1b", 1, 1, 2, **options)
        for options in ({}, ZERO_1, {"shard_parameters": "every"}, {"shard_parameters": "step"})
    )
    sharding.check_sharding(every, sharding.sharding_of(step))
    with pytest.raises(ArgumentError, match="shards nothing of stage 0, the pipeline the param"):
        sharding.check_sharding(none, sharding.sharding_of(every))
    with pytest.raises(ArgumentError, match="shards the optimizer of stage 0, the pipeline nothi"):
        sharding.check_sharding(zero_1, sharding.sharding_of(none))
    buckets = lowered("1f1b", 1, 1, 2, grad_sync="bucketed", **ZERO_1)
    with pytest.raises(ArgumentError, match=r'stage 0 .* in buckets.*take grad_sync="last"'):
        sharding.check_sharding(buckets, sharding.sharding_of(buckets))
    late = lowered("1f1b", 1, 1, 2, gather_parameters="before_forward", **ZERO_1)
    with pytest.raises(ArgumentError, match=r'simulated, not run.*gather_parameters="after_step"'):
        sharding.check_sharding(late, sharding.sharding_of(zero_1))


def accumulated_in_a_rank(processes: Processes) -> None:
    pipeline, _ = pipeline_of(processes, lowered("1f1b", 1, 1, 2, **ZERO_1), "sgd")
    x, y = (batch.chunk(2)[processes.rank] for batch in data(16))
    with pipeline, pytest.raises(ArgumentError, match="accumulate=True, but the replicas share"):
        pipeline.step(x, y, accumulate=True)


def test_accumulation_over_steps(two_ranks: Ranks) -> None:
    two_ranks.run(accumulated_in_a_rank)


@pytest.mark.parametrize(
    ("options", "what"),
    [(ZERO_1, "shard_optimizer=True"), ({"shard_parameters": 1}, "shard_parameters")],
)
def test_replicas_of_one_process(options: dict[str, Any], what: str) -> None:
    graph = lowered("1f1b", 1, 1, 2, **options)
    with pytest.raises(ArgumentError, match=f"{what}, but replicas of stage 0 are in one process"):
        px.Pipeline([nn.Linear(4, 4)], graph, ["cpu"] * 2, mse, OPTIMIZERS["sgd"])


# Memory


def memory_in_a_rank(processes: Processes, options: dict[str, Any]) -> dict[str, Any]:
    """Return bytes of parameters and gradients, counted and by rule 10, and held activations."""
    layout: list[Any] = ["interleaved_1f1b", 1, 2, 2]
    graph = lowered(*layout, **options)
    x, y = (batch.chunk(2)[processes.rank] for batch in data(16))
    pipeline, _ = pipeline_of(processes, graph, "adam")
    with pipeline:
        memory = pipeline.memory(x, y)
        held = pipeline.device_bytes(x, y)
    nbytes = [float(sum(p.nbytes for p in s.parameters())) for s in cut(model(), [2, 2])]
    costs = ps.Costs(0, 0, parameter_bytes=nbytes, gradient_bytes=nbytes)
    timeline = replace(memory.timeline, costs=costs, sizes=None)
    static = sum(nbytes) * (2 if "shard_optimizer" in options else 2 / 2)
    frame = memory.frame
    counted = frame.assign(sum=frame["total"] - frame["activations"]).groupby("device")["sum"].max()
    return {
        "counted": counted.tolist(),
        "rule": (timeline.memory.peak - static).tolist(),
        "parameters": memory.frame.groupby("device")["parameters"].max().tolist(),
        "activations": held,
        "nbytes": nbytes,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"shard_parameters": "every"},
        {"shard_parameters": 1, "prefetch": 0},
        {"shard_parameters": "step", "grad_sync": "every"},
        {"shard_parameters": "every", "overlap": False, "grad_sync": 2},
        ZERO_1,
    ],
    ids=str,
)
def test_bytes_are_those_of_rule_10(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """Gathered parameters and whole gradients, at the times at which the tasks ran, to the byte."""
    wanted = two_ranks.run(memory_in_a_rank, options={})[0]["activations"]
    for rank in two_ranks.run(memory_in_a_rank, options=options):
        assert rank["counted"] == rank["rule"]
        assert rank["activations"] == wanted  # parameters are no activations
        gathers = "shard_parameters" in options
        assert (max(rank["rule"]) > 0) == gathers
        assert max(rank["parameters"]) <= (sum(rank["nbytes"]) if gathers else 0)


def reused_addresses_in_a_rank(processes: Processes) -> int:
    """Return how often tensors get the address of a parameter that had no memory before."""
    module, group = nn.Linear(4, 4), dist.group.WORLD
    assert group is not None
    shards = StageShards(module, None, processes.rank, 2, group, frees=True)
    n_reused = 0
    for _ in range(100):
        before = {p.data_ptr() for p in module.parameters()}
        with shards.whole():
            scalars = [torch.zeros(()) for _ in range(200)]
        n_reused += bool(before & {x.data_ptr() for x in scalars})
    return n_reused


def test_no_tensor_gets_the_address_of_a_parameter(two_ranks: Ranks) -> None:
    """Counted activations exclude parameters by their addresses."""
    assert two_ranks.run(reused_addresses_in_a_rank) == [0, 0]


# Measured costs


def profile_in_a_rank(processes: Processes, options: dict[str, Any]) -> dict[str, Any]:
    layout: list[Any] = ["interleaved_1f1b", 1, 2, 2]
    graph = lowered(*layout, **options)
    x, y = (batch.chunk(2)[processes.rank] for batch in data(16))
    pipeline, _ = pipeline_of(processes, graph, "adam")
    with pipeline:
        before = {key: value.clone() for key, value in pipeline.state_dict().items()}
        costs = px.profile(pipeline, x, y, n_steps=1)
        after = {key: value.clone() for key, value in pipeline.state_dict().items()}
        result = pipeline.gather(pipeline.step(x, y))
    gathers = result.timeline.graph.is_op(frozenset({ps.Op.UNSHARD}))
    return {
        "unshard": costs.unshard,
        "reduce_grad": costs.reduce_grad,
        "bytes": (costs.parameter_bytes, costs.optimizer_bytes),
        "sent": sorted(set(result.timeline.nbytes[gathers].tolist())),
        "same": all(torch.equal(before[key], after[key]) for key in before),
        "makespan": ps.simulate(graph, costs).makespan,
    }


@pytest.mark.parametrize("options", [ZERO_1, {"shard_parameters": "every"}], ids=str)
def test_profiles_measure_gathers(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """Costs have the seconds of gathers, and the bytes of whole parameters and optimizers."""
    nbytes = [float(sum(p.nbytes for p in s.parameters())) for s in cut(model(), [2, 2])]
    for rank in two_ranks.run(profile_in_a_rank, options=options):
        assert min(rank["unshard"]) > 0
        assert min(rank["reduce_grad"]) > 0
        parameters, optimizers = rank["bytes"]
        assert parameters == tuple(nbytes)
        # Beside two values an element, Adam has one number of steps for each piece.
        assert all(0 <= o - 2 * n <= 4 * 20 for o, n in zip(optimizers, nbytes, strict=True))
        assert rank["sent"] == sorted(set(nbytes))
        assert rank["same"]
        assert rank["makespan"] > 0


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_pieces_of_all_processes_are_the_parameters(n_ranks: int) -> None:
    """Each element is in one piece; bounds of a piece that is none are equal."""
    sizes = [3, 4, 1, 2]
    parameters = [nn.Parameter(torch.rand(n), n != 4) for n in sizes]
    values = torch.cat([p.detach().clone() for p in parameters])
    pieces: list[list[Tensor]] = [[] for _ in sizes]
    for rank in range(n_ranks):
        flat = flatten([nn.Parameter(p.clone(), p.requires_grad) for p in parameters], rank,
                       n_ranks, frees=True)  # fmt: skip
        for index, piece in enumerate(flat.pieces):
            low, high = flat.bounds(index, rank)
            assert low <= high
            assert (piece is None) == (low == high)
            if piece is not None:
                assert piece.requires_grad == parameters[index].requires_grad
                pieces[index].append(piece.detach())
    assert [sum(map(len, own)) for own in pieces] == sizes
    assert torch.equal(torch.cat([x for own in pieces for x in own]), values)


def test_preserved_shares_and_gradients() -> None:
    """A block that steps and reduces leaves both as they were, and no gradient where none was."""
    group: Any = None  # nothing is exchanged
    module = nn.ModuleList([nn.Linear(3, 2), nn.Linear(1, 1).double()])
    shards = StageShards(module, None, 0, 1, group, frees=False)
    weight, bias, *_ = shards.pieces
    weight.grad, before = torch.ones(6), weight.detach().clone()
    with shards.preserved(), torch.no_grad():
        weight.add_(1.0)
        weight.grad.add_(1.0)
        bias.grad = torch.ones(2)
    assert torch.equal(weight, before)
    assert weight.grad.tolist() == [1.0] * 6
    assert bias.grad is None
    assert shards.nbytes == 8 * 4 + 2 * 8


def reduced_in_a_rank(processes: Processes) -> list[list[float] | None]:
    """Reduce the gradients of a layer, whose weight rank 1 does not use, and whose bias both do."""
    shards = StageShards(
        nn.Linear(3, 2),
        None,
        processes.rank,
        2,
        dist.group.WORLD,
        frees=False,  # type: ignore[arg-type]
    )
    weight = torch.ones(2, 3) if processes.rank == 0 else None
    shards.reduce([weight, torch.full((2,), 2.0)], shards.group, adds=False)
    return [None if piece.grad is None else piece.grad.tolist() for piece in shards.pieces]


def test_a_parameter_that_one_replica_uses(two_ranks: Ranks) -> None:
    """Both have the gradients of their pieces: part of the weight; its rest, and the bias."""
    assert two_ranks.run(reduced_in_a_rank) == [[[1.0] * 4], [[1.0] * 2, [4.0] * 2]]
