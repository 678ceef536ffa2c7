"""Checkpoints of one process: resuming, other numbers of stages, plain torch, and objects."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_pipelines import cut, data, mse, pipeline
from split_models import WIDTH, WORDS, Language, Tied
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, CheckpointError, ExecutionError
from pipesim.utils.texts import CHECKSUM, checksum

X, Y = data(16)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def network(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    """Return a model of four layers, with a group norm."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Sequential(nn.GroupNorm(2, 16), nn.Linear(16, 16)))


def on_workers(
    model: nn.Sequential,
    counts: Sequence[int],
    optimizer: Any = adam,
    schedule: str = "1f1b",
    **options: Any,
) -> px.Pipeline:
    """Return a pipeline of a model with so many layers a stage."""
    graph = ps.lower(ps.schedule(schedule, len(counts), 4), **options)
    return pipeline(cut(model, counts), graph, mse, optimizer)


def losses(p: px.Pipeline, n: int = 3) -> list[float]:
    return [float(p.step(X, Y).loss) for _ in range(n)]


# Resuming.


@pytest.mark.parametrize("optimizer", [adam, momentum])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_resumed_run_has_the_same_losses(optimizer: Any, schedule: str, tmp_path: Path) -> None:
    """To the last bit, dropout included, in a process whose seed was another."""
    with on_workers(network(0, 0.5), [2, 2], optimizer, schedule) as p:
        losses(p)
        px.save_checkpoint(p, tmp_path / "x")
        order, expected = torch.randperm(9), losses(p)
    with on_workers(network(1, 0.5), [2, 2], optimizer, schedule) as p:
        losses(p, 1)
        px.load_checkpoint(p, tmp_path / "x")
        assert p.n_steps == 3
        assert torch.equal(torch.randperm(9), order)
        assert losses(p) == expected


def test_a_run_resumed_in_three_stages(tmp_path: Path) -> None:
    """Without dropout, losses are the same to the last bit; dropout depends on the stage."""
    with on_workers(network(), [2, 2]) as p:
        losses(p)
        px.save_checkpoint(p, tmp_path / "x")
        expected = losses(p)
    with on_workers(network(1), [1, 1, 2]) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert losses(p) == expected


def test_a_run_resumed_with_replicas(tmp_path: Path) -> None:
    """Up to rounding: gradients are summed in another order."""
    with on_workers(network(), [2, 2]) as p:
        losses(p)
        px.save_checkpoint(p, tmp_path / "x")
        expected = losses(p)
    with on_workers(network(1), [2, 2], n_replicas=2) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert losses(p) == pytest.approx(expected, rel=1e-5)
        px.save_checkpoint(p, tmp_path / "y")
    with on_workers(network(1), [4]) as p:
        px.load_checkpoint(p, tmp_path / "y")
        assert p.n_steps == 6


def test_gradients_that_wait_for_optimizers(tmp_path: Path) -> None:
    """A checkpoint has none: it is not saved while there are some, and loading drops them."""
    with on_workers(network(), [2, 2]) as p:
        px.save_checkpoint(p, tmp_path / "x")
        expected = losses(p)
        p.step(X, Y, accumulate=True)
        with pytest.raises(ExecutionError, match="1 step with accumulate=True left gradients"):
            px.save_checkpoint(p, tmp_path / "y")
        px.load_checkpoint(p, tmp_path / "x")
        assert losses(p) == expected
        px.save_checkpoint(p, tmp_path / "y")


def test_a_pipeline_without_optimizers(tmp_path: Path) -> None:
    """It loads the model alone; the other way round, the state of optimizers is missing."""
    with on_workers(network(), [2, 2]) as p:
        losses(p, 1)
        px.save_checkpoint(p, tmp_path / "x")
        state = copy.deepcopy(p.state_dict())
    with on_workers(network(1), [3, 1], None) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert all(torch.equal(value, state[key]) for key, value in p.state_dict().items())
        px.save_checkpoint(p, tmp_path / "y")
    with on_workers(network(1), [2, 2]) as p:
        with pytest.raises(CheckpointError, match="has no state of optimizers; load the model alo"):
            px.load_checkpoint(p, tmp_path / "y")
        p.load_state_dict(px.read_checkpoint(tmp_path / "y")["model"])


# Plain torch.


def test_the_unsplit_model_loads_it(tmp_path: Path) -> None:
    """By torch's own reader, and by `read_checkpoint`; then a step has the same result."""
    model = network()
    with on_workers(model, [1, 3]) as p:
        losses(p)
        px.save_checkpoint(p, tmp_path / "x", name="run")
        whole, again = network(1), network(2)
        state = whole.state_dict()
        load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "x" / "model")),
             no_dist=True)  # fmt: skip
        content = px.read_checkpoint(tmp_path / "x")
        again.load_state_dict(content["model"])
        optimizer = adam(again.parameters())
        set_optimizer_state_dict(again, optimizer, optim_state_dict=content["optimizer"])
        assert content["n_steps"] == 3
        assert content["objects"] == {"name": "run"}
        for key, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[key])
            assert torch.equal(value, again.state_dict()[key])
        saved = get_optimizer_state_dict(again, optimizer)["state"]
        for name, values in p.optimizer_state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(saved[name][key], value)  # type: ignore[index, call-overload]
        loss = float(p.step(X, Y).loss)
    assert float(mse(again(X), Y).detach()) == pytest.approx(loss, rel=1e-6)


def test_files_have_the_names_of_hugging_face(tmp_path: Path) -> None:
    with on_workers(network(), [1, 3]) as p:
        px.save_checkpoint(p, tmp_path / "x")
    assert sorted(file.name for file in (tmp_path / "x" / "model").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


# Objects.


def test_objects(tmp_path: Path) -> None:
    """Objects with a state, and plain values of any nesting."""
    values: dict[str, Any] = {
        "plain": [1, 2.5, None, True, "text", {"a": {"b": []}}],
        "tuple": (1, (2.0, "x")),
        "keys": {1: "one", (2, 3): "two", "$": "three"},
        "counter": Counter({30: 1, 60: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "bytes": b"\x00\xff",
        "special": [float("inf"), -0.0, 10**30],
        "number": np.float64(0.1),
    }
    tensors = {"t": torch.arange(3), "half": [torch.ones(2, dtype=torch.bfloat16)]}
    array = np.arange(6.0).reshape(2, 3)
    with on_workers(network(), [2, 2]) as p:
        optimizer = p.optimizers[0]
        assert optimizer is not None
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        losses(p, 1)
        scheduler.step()
        px.save_checkpoint(p, tmp_path / "x", scheduler=scheduler, scaler=scaler,
                           tensors=tensors, array=array, **values)  # fmt: skip
        loaded = px.load_checkpoint(p, tmp_path / "x")
    assert {key: loaded[key] for key in values} == values
    assert {key: type(loaded[key]) for key in values if key != "number"} == {
        key: type(value) for key, value in values.items() if key != "number"
    }
    assert torch.equal(loaded["tensors"]["t"], tensors["t"])  # type: ignore[arg-type]
    assert torch.equal(loaded["tensors"]["half"][0], tensors["half"][0])
    assert np.array_equal(loaded["array"], array)
    assert loaded["scheduler"] == scheduler.state_dict()
    assert loaded["scaler"] == scaler.state_dict()
    other = torch.optim.lr_scheduler.MultiStepLR(momentum(network().parameters()), [1])
    other.load_state_dict(loaded["scheduler"])
    assert other.last_epoch == 1


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Each is written with its own elements alone: safetensors have no shared memory."""
    base = torch.arange(1000.0)
    views = {"part": base[:10], "other": base[5:15], "same": base[:10]}
    views |= {"whole": base, "again": base.view(10, 100)}
    with on_workers(network(), [2, 2]) as p:
        path = px.save_checkpoint(p, tmp_path / "x", **views)
        few = px.save_checkpoint(p, tmp_path / "few", part=base[:10])
    loaded = px.read_checkpoint(path)["objects"]
    assert all(torch.equal(loaded[key], views[key]) for key in views)
    loaded["part"].zero_()
    assert torch.equal(loaded["same"], views["same"])
    assert sum(file.stat().st_size for file in (few / "objects").iterdir()) < 1000


def test_objects_whose_names_are_alike(tmp_path: Path) -> None:
    """Each of three tensors with one name in dots is kept."""
    zero, one, two = map(torch.tensor, range(3))
    names = {"a.b.c": zero, "a": {"b.c": one, "b": {"c": two}}}
    with on_workers(network(), [2, 2]) as p:
        path = px.save_checkpoint(p, tmp_path / "x", names=names)
    assert px.read_checkpoint(path)["objects"]["names"] == names


def test_objects_that_cannot_be_saved(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with on_workers(network(), [2, 2]) as p:
        with pytest.raises(ArgumentError, match=r"'x\.1\.f' is a function, which a checkpoint ca"):
            px.save_checkpoint(p, tmp_path / "x", x=[0, {"f": losses}])
        with pytest.raises(ArgumentError, match="'x' is nested too deeply, or contains itself"):
            px.save_checkpoint(p, tmp_path / "x", x=loop)
    assert list(tmp_path.iterdir()) == []


# Another model.


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    """The first mismatch is named, and nothing changes."""
    with on_workers(network(), [2, 2]) as p:
        losses(p, 1)
        px.save_checkpoint(p, tmp_path / "x")
    wide = network()
    wide[1][0] = nn.Linear(16, 16, bias=False)
    with on_workers(wide, [2, 2]) as p:
        before = copy.deepcopy([p.state_dict(), p.optimizer_state_dict()])
        with pytest.raises(CheckpointError, match=r"the checkpoint has '1\.0\.bias', which the mo"):
            px.load_checkpoint(p, tmp_path / "x")
        assert str([p.state_dict(), p.optimizer_state_dict()]) == str(before)
    other = network()
    other[2][0] = nn.Linear(16, 8)
    with on_workers(other, [2, 2]) as p, pytest.raises(
        CheckpointError, match=r"'2\.0\.weight' has shape \(16, 16\) in the checkpoint, and has "
        r"shape \(8, 16\) in the model"
    ):  # fmt: skip
        px.load_checkpoint(p, tmp_path / "x")
    longer = network().append(nn.Linear(16, 16))
    with on_workers(longer, [2, 3]) as p, pytest.raises(
        CheckpointError, match=r"the checkpoint lacks '4\.weight' of the model, and 1 other key;"
    ):  # fmt: skip
        px.load_checkpoint(p, tmp_path / "x")
    with on_workers(network(1), [2, 2], momentum) as p:
        before = copy.deepcopy([p.state_dict(), p.optimizer_state_dict()])
        with pytest.raises(CheckpointError, match="the state is that of another optimizer"):
            px.load_checkpoint(p, tmp_path / "x")
        assert p.n_steps == 0
        assert str([p.state_dict(), p.optimizer_state_dict()]) == str(before)


def two_rates(parameters: Any, rate: float = 1e-3) -> torch.optim.Optimizer:
    weights, biases = [[p for p in parameters if (p.dim() > 1) == big] for big in (True, False)]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": rate}], lr=1e-2)


@pytest.mark.parametrize("n_stages", [1, 2])
def test_groups_that_the_checkpoint_does_not_have(n_stages: int, tmp_path: Path) -> None:
    """Two groups of other settings are refused; equal ones, or other groups, are loaded."""
    graph = ps.lower(ps.schedule("1f1b", n_stages, 2))

    def pipeline_with(optimizer: Any) -> px.Pipeline:
        stages = [nn.Linear(4, 4) for _ in range(n_stages)]
        return px.Pipeline(stages, graph, ["cpu"] * n_stages, mse, optimizer, pin_threads=False)

    with pipeline_with(lambda p: torch.optim.AdamW(p, lr=1e-2)) as p:
        path = px.save_checkpoint(p, tmp_path / "one")
    with pipeline_with(lambda p: two_rates(list(p))) as p:
        before = str([p.state_dict(), p.optimizer_state_dict()])
        with pytest.raises(
            CheckpointError,
            match=r"'0\.bias' is in a group of an optimizer with lr=0\.001, another",
        ):
            px.load_checkpoint(p, path)
        assert str([p.state_dict(), p.optimizer_state_dict()]) == before
        px.load_checkpoint(p, px.save_checkpoint(p, tmp_path / "two"))
    with pipeline_with(lambda p: two_rates(list(p), 1e-2)) as p:
        px.load_checkpoint(p, path)
    with pipeline_with(lambda p: two_rates(list(p), 1e-1)) as p:
        px.load_checkpoint(p, tmp_path / "two")  # the settings of a group are those of its own
        assert [group["lr"] for group in p.optimizers[0].param_groups] == [1e-2, 1e-3]


def test_a_checkpoint_of_other_types(tmp_path: Path) -> None:
    """Refused, since a resumed run would have other losses; `load_state_dict` converts."""
    with on_workers(network(), [2, 2]) as p:
        px.save_checkpoint(p, tmp_path / "x")
    with on_workers(network(1).double(), [2, 2]) as p:
        with pytest.raises(CheckpointError, match=r"'0\.0\.weight' is torch.float32 in the check"):
            px.load_checkpoint(p, tmp_path / "x")
        p.load_state_dict(px.read_checkpoint(tmp_path / "x")["model"])


class WithPooler(Language):
    """A model with a module that its forward does not call."""

    def __init__(self) -> None:
        super().__init__(3, dropout=0.5)
        self.pooler = nn.Linear(WIDTH, WIDTH)


@pytest.mark.slow
def test_checkpoints_of_split_models(tmp_path: Path) -> None:
    """Resumed in other stages, also in those of a model that was split without data."""
    words = torch.arange(20).reshape(4, 5) % WORDS

    def resumed(model: Any, n: int, path: Path | None = None) -> px.Pipeline:
        torch.manual_seed(path is None)
        stages = px.split(model, n, sample=words)
        graph = ps.lower(ps.schedule("1f1b", n, 2))
        p = pipeline(stages, graph, lambda out, _: out["logits"].square().mean(), adam)
        if path is not None:
            px.load_checkpoint(p, path)
            for module in p.modules:
                module.eval()
        return p

    torch.manual_seed(5)
    model = WithPooler()
    with resumed(model, 2) as p:
        p.step(words, words)
        px.save_checkpoint(p, tmp_path / "x")
        assert px.read_checkpoint(tmp_path / "x")["model"].keys() == model.state_dict().keys()
    values = []
    for source, n in ((WithPooler(), 2), (WithPooler, 2), (WithPooler(), 3), (WithPooler, 3)):
        with resumed(source, n, tmp_path / "x") as p:
            values.append([float(p.step(words, words).loss) for _ in range(2)])
            px.save_checkpoint(p, tmp_path / "y")
    with resumed(WithPooler(), 1, tmp_path / "y") as p:
        assert p.n_steps == 3
    assert values[0] == values[1]
    assert values[2] == values[3] == pytest.approx(values[0], rel=1e-6)


@pytest.mark.slow
def test_checkpoints_of_tied_models(tmp_path: Path) -> None:
    """Saved in two stages, resumed in three, and by torch with the unsplit model."""
    words = torch.arange(20).reshape(4, 5) % WORDS

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def split(seed: int, n: int) -> px.Pipeline:
        torch.manual_seed(seed)
        stages = px.split(Tied(), n, sample=words)
        graph = ps.lower(ps.schedule("1f1b", n, 2), tied=stages.tied_stages)
        return pipeline(stages, graph, loss_fn, adam)

    with split(0, 2) as p:
        for _ in range(2):
            p.step(words, words)
        px.save_checkpoint(p, tmp_path / "x")
        model, optimizer = copy.deepcopy((p.state_dict(), p.optimizer_state_dict()))
        expected = [float(p.step(words, words).loss) for _ in range(3)]
    with split(1, 3) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert [float(p.step(words, words).loss) for _ in range(3)] == expected
        copies = [p.modules[0].model.words.weight, p.modules[2].model.head.weight]
        assert torch.equal(*copies)
    whole = Tied()
    whole.load_state_dict(model)
    own = adam(whole.parameters())
    set_optimizer_state_dict(whole, own, optimizer)
    for loss in expected:
        own.zero_grad()
        value = loss_fn(whole(words), words)
        value.backward()
        own.step()
        assert float(value) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("placement", ["modulo", "hash", "frequency"])
def test_rows_of_a_sharded_embedding(placement: str, tmp_path: Path) -> None:
    """Saved and loaded by their numbers: into another placement, and as one table."""

    def stages(placement: str, seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        counts = [np.arange(7), np.arange(3)] if placement == "frequency" else None
        embedding = px.ShardedEmbedding([7, 3], 4, placement=placement, counts=counts)
        return [px.EmbeddingStage(embedding), nn.Sequential(nn.Flatten(), nn.Linear(8, 16))]

    graph = ps.lower(ps.schedule("1f1b", 2, 2), sharded=[0])
    keys = torch.tensor([[0, 2], [6, 1], [3, 0], [5, 1]])
    y = data(4)[1]
    with pipeline(stages(placement, 0), graph, mse, adam) as p:
        p.step(keys, y)
        px.save_checkpoint(p, tmp_path / "x")
        embedding: Any = p.modules[0]
        rows = torch.cat(embedding.embedding.full_weight())
        expected = float(p.step(keys, y).loss)
    content = px.read_checkpoint(tmp_path / "x")
    assert torch.equal(content["model"]["0.embedding.weight"], rows)
    assert content["optimizer"]["state"]["0.embedding.weight"]["exp_avg"].shape == rows.shape
    for other in ("modulo", "hash"):
        with pipeline(stages(other, 1), graph, mse, adam) as p:
            px.load_checkpoint(p, tmp_path / "x")
            assert float(p.step(keys, y).loss) == expected
    shutil.copytree(tmp_path / "x", tmp_path / "edited")
    for fact, value in {"n_rows": [10**15], "n_ranks": 0}.items():
        manifest = json.loads((tmp_path / "x" / "checkpoint.json").read_text())
        manifest["rows"]["0.embedding."][fact] = value
        manifest[CHECKSUM] = checksum(manifest)
        (tmp_path / "edited" / "checkpoint.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"edited lacks rows of 0\.embedding\.weight"):
            px.read_checkpoint(tmp_path / "edited")
    few = [px.EmbeddingStage(px.ShardedEmbedding([7, 4], 4)), stages("hash", 0)[1]]
    with pipeline(few, graph, mse, adam) as p, pytest.raises(
        CheckpointError, match=r"has tables of \[7, 3\] rows of 4 in the .* \[7, 4\] rows of 4 in"
    ):  # fmt: skip
        px.load_checkpoint(p, tmp_path / "x")
