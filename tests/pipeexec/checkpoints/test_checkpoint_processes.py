"""Checkpoints of several processes: resumed in two, in one, and of one in two."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, run_to_end
from sharded_stage import REPLICAS, SIZES, Rest, batch, build_pipeline, lowered, model, share
from small_pipelines import cut, data, mse, pipeline
from split_models import WORDS, Tied
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.checkpoints import save
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, CheckpointError

pytestmark = pytest.mark.slow

X, Y = data(16)
WORDS_OF_BATCH = torch.arange(20).reshape(4, 5) % WORDS


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(16, 16))


def in_process(processes: Processes, seed: int, n_replicas: int = 1) -> px.Pipeline:
    """Return the pipeline of a rank: a stage each, or a replica each."""
    stages: list[nn.Module | None] = list(cut(network(seed), [2, 2]))
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=n_replicas)
    if n_replicas == 1:
        stages[1 - processes.rank] = None
    devices = ["cpu"] * (graph.n_devices // processes.n_ranks)
    return px.Pipeline(
        stages, graph, devices, mse, adam, processes=processes, pin_threads=False
    )  # fmt: skip


def losses(p: px.Pipeline, n: int = 2) -> list[float]:
    return [float(p.gather(p.step(X, Y)).loss) for _ in range(n)]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def saved_and_resumed(processes: Processes, folder: str) -> list[Any]:
    """Save after two steps; resume in a new pipeline, and load a checkpoint of one process."""
    path = Path(folder)

    def trained(p: px.Pipeline, scheduler: px.LRSchedulers) -> list[float]:
        values = []
        for _ in range(2):
            values += losses(p, 1)
            scheduler.step()
        return values

    with in_process(processes, 0) as p:
        scheduler = px.LRSchedulers(p, halving)
        trained(p, scheduler)
        px.save_checkpoint(p, path / "two", note=[1, torch.ones(2)], scheduler=scheduler)
        expected = trained(p, scheduler)
    with in_process(processes, 1) as p:
        scheduler = px.LRSchedulers(p, halving)
        loaded = px.load_checkpoint(p, path / "two")
        scheduler.load_state_dict(loaded["scheduler"])
        resumed = trained(p, scheduler)
        px.load_checkpoint(p, path / "one")
        scheduler.load_state_dict(loaded["scheduler"])
        return [expected, resumed, trained(p, scheduler), loaded["note"][0], p.n_steps]


def test_two_processes_and_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """Losses are equal to the last bit, dropout included: stages have the same numbers."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with pipeline(cut(network(0), [2, 2]), graph, mse, adam) as p:
        scheduler = px.LRSchedulers(p, halving)
        for _ in range(2):
            losses(p, 1)
            scheduler.step()
        px.save_checkpoint(p, tmp_path / "one")
        before = copy.deepcopy(scheduler.state_dict())
        expected = losses(p, 1)
        scheduler.step()
        expected += losses(p, 1)
    answers = two_ranks.run(saved_and_resumed, folder=str(tmp_path))
    assert answers == [[expected, expected, expected, 1, 4]] * 2
    with pipeline(cut(network(1), [2, 2]), graph, mse, adam) as p:
        scheduler = px.LRSchedulers(p, halving)
        scheduler.load_state_dict(px.load_checkpoint(p, tmp_path / "two")["scheduler"])
        assert scheduler.state_dict() == before
        resumed = losses(p, 1)
        scheduler.step()
        assert resumed + losses(p, 1) == expected
    manifest = json.loads((tmp_path / "two" / "checkpoint.json").read_text())
    assert len(manifest["random"]) == 2
    assert px.latest_checkpoint(tmp_path) == tmp_path / "two"
    one, two = (px.read_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert str(one["model"]) == str(two["model"])
    assert str(one["optimizer"]) == str(two["optimizer"])


def tied_pipeline(n: int, processes: Processes | None = None) -> px.Pipeline:
    """Return the pipeline of a model whose head is its embedding."""
    torch.manual_seed(processes is None)
    only = None if processes is None else [processes.rank]
    stages = px.split(Tied(), n, sample=WORDS_OF_BATCH, only=only)
    graph = ps.lower(ps.schedule("1f1b", n, 4), tied=stages.tied_stages, grad_norm=True)
    return px.Pipeline(
        stages, graph, ["cpu"] * (n if processes is None else 1), word_loss, adam,
        processes=processes, pin_threads=False, max_grad_norm=0.5,
    )  # fmt: skip


def word_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tied_saved(processes: Processes, folder: str) -> list[Any]:
    """Save a tied model after two steps; return later losses, and the error of an untied state."""

    def train(n: int) -> list[float]:
        rows = [p.gather(p.step(WORDS_OF_BATCH, WORDS_OF_BATCH)) for _ in range(n)]
        return [float(row.loss) for row in rows]

    with tied_pipeline(2, processes) as p:
        train(2)
        px.save_checkpoint(p, Path(folder) / "tied")
        expected, own = train(2), p.state_dict()
        try:
            p.load_state_dict({key: x + processes.rank for key, x in own.items()})
        except ArgumentError as error:
            return [expected, str(error)]
    return [expected, ""]


def test_tied_copies_of_two_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    """Resumed in one process and three stages; values that differ between processes are refused."""
    expected, message = two_ranks.run(tied_saved, folder=str(tmp_path))[0]
    assert "are tied, but the state has different values for them" in message
    with tied_pipeline(3) as p:
        px.load_checkpoint(p, tmp_path / "tied")
        resumed = [float(p.step(WORDS_OF_BATCH, WORDS_OF_BATCH).loss) for _ in range(2)]
        state = p.state_dict()
    assert resumed == pytest.approx(expected, rel=1e-6)
    assert torch.equal(state["words.weight"], state["head.weight"])


def replicas(processes: Processes, folder: str) -> list[Any]:
    """Save a pipeline with a replica in each process; return states, and the files written here."""
    written: list[str] = []

    def write_own(*args: Any) -> dict[str, Any]:
        facts = original(*args)
        written.extend(facts)
        return facts

    original, save._write_own = save._write_own, write_own
    own = slice(8 * processes.rank, 8 * (processes.rank + 1))
    with in_process(processes, 0, n_replicas=2) as p:
        for module in p.modules:
            module.eval()
        p.step(X[own], Y[own])
        px.save_checkpoint(p, Path(folder) / "x")
        save._write_own = original
        state = str(p.state_dict())
        p.step(X[own], Y[own])
        px.load_checkpoint(p, Path(folder) / "x")
        return [state, str(p.state_dict()), written]


def test_replicas_write_each_tensor_once(two_ranks: Ranks, tmp_path: Path) -> None:
    """They share the work: each writes one stage."""
    answers = two_ranks.run(replicas, folder=str(tmp_path))
    assert len({text for answer in answers for text in answer[:2]}) == 1
    assert [written for _, _, written in answers] == [
        [f"{part}/model-0000{k}-of-00002.safetensors" for part in ("model", "optimizer")]
        for k in (1, 2)
    ]
    with pipeline(cut(network(1), [2, 2]), ps.lower(ps.schedule("1f1b", 2, 4)), mse, adam) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert str(p.state_dict()) == answers[0][0]
    assert len(list((tmp_path / "x" / "model").glob("*.safetensors"))) == 2


def refused(processes: Processes, folder: str) -> list[str]:
    """Return the errors of calls that fail in one process, or in all."""
    texts, path = [], Path(folder)
    with in_process(processes, 0) as p:
        before = str(p.state_dict())
        px.save_checkpoint(p, path / "x")
        calls: list[Any] = [
            lambda: px.save_checkpoint(p, path / "x", rank=processes.rank),
            lambda: px.save_checkpoint(p, path / "x", f=print if processes.rank else None),
            lambda: px.save_checkpoint(p, path),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        file = path / "x" / "model" / "model-00002-of-00002.safetensors"
        processes.barrier()
        if processes.rank == 0:
            file.write_bytes(b"x" * file.stat().st_size)
        processes.barrier()
        try:
            px.load_checkpoint(p, path / "x")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        assert str(p.state_dict()) == before
        losses(p, 1)
    return texts


def test_errors_stop_all_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    """The process that has an error names it, others say whose it is; then a step runs."""
    first, second = two_ranks.run(refused, folder=str(tmp_path))
    assert first[0] == second[0]
    assert "object 'rank' of rank 1 is another than that of rank 0" in first[0]
    assert first[1].startswith("PeerError: rank 1 stopped the call, and nothing was changed: 'f' ")
    assert second[1].startswith("ArgumentError: 'f' is a builtin_function")
    assert first[2].startswith("CheckpointError: ")
    assert second[2].startswith("PeerError: rank 0 stopped the call")
    texts = sorted([first[3], second[3]])
    assert texts[0].startswith("CheckpointError: ")
    assert "model-00002-of-00002.safetensors does not match its checksum" in texts[0]
    assert texts[1].startswith("PeerError: rank ")


def embedding_of_ranks(processes: Processes, folder: str) -> list[Any]:
    """Train an embedding whose rows are spread over two processes, save and resume."""
    graph, path = lowered("looped_bfs", 1, 2), Path(folder) / "x"
    p, _ = build_pipeline(processes, graph, adam)
    p.step(*share(processes, graph))
    px.save_checkpoint(p, path)
    expected = float(p.gather(p.step(*share(processes, graph))).loss)
    p.close()
    p, _ = build_pipeline(processes, graph, adam, placement="hash")
    px.load_checkpoint(p, path)
    loss = float(p.gather(p.step(*share(processes, graph))).loss)
    p.close()
    return [expected, loss]


def test_rows_of_two_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    """Loaded into another placement, and into one process; each process wrote its rows."""
    answers = two_ranks.run(embedding_of_ranks, folder=str(tmp_path))
    assert answers[0] == answers[1]
    expected = answers[0][0]
    assert answers[0][1] == pytest.approx(expected, rel=1e-6)
    assert len(list((tmp_path / "x" / "rows").iterdir())) == REPLICAS
    weights, bottom, top = model()
    embedding = px.ShardedEmbedding.from_full([torch.zeros_like(x) for x in weights])
    stages = [px.EmbeddingStage(embedding), Rest(bottom, top)]
    graph = ps.lower(ps.schedule("1f1b", 2, 2), sharded=[0])
    dense, keys, y = batch(sum(SIZES), 0)
    with pipeline(stages, graph, mse, adam) as p:
        px.load_checkpoint(p, tmp_path / "x")
        assert float(p.step((dense, keys), y).loss) == pytest.approx(expected, rel=1e-5)
    few = px.ShardedEmbedding([30, 8], 4)
    with pipeline([px.EmbeddingStage(few), stages[1]], graph, mse, adam) as p, pytest.raises(
        CheckpointError, match=r"has tables of \[30, 7\] rows"
    ):  # fmt: skip
        px.load_checkpoint(p, tmp_path / "x")


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """The older checkpoint stays, and nothing of the new one; the other process says who it was."""
    script = str(Path(__file__).with_name("save_in_two.py"))
    folder = tmp_path / "run"
    run_to_end([[script, str(folder)]] * 2, tmp_path)
    text = (tmp_path / "error").read_text()
    assert text.startswith("PeerError: rank 1 ")
    assert [file.name for file in folder.iterdir()] == ["x"]
    assert px.read_checkpoint(folder / "x")["objects"] == {"n": 1}
