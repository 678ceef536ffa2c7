"""A good call of every public callable of pipeexec; `attack_table` has those of pipesim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from attack_table import Good, graph, schedule
from small_pipelines import mse, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import pipeexec as px
import pipesim as ps
from pipeexec.executor import StepResult
from pipeexec.profiling import Profile
from pipeexec.projection import Projection
from pipeexec.training import TrainingRun
from pipeexec.validation import Validation

ORDER = {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}


def stages() -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(2)]


def new_pipeline() -> px.Pipeline:
    return px.Pipeline(stages(), graph(), ["cpu"] * 2, mse, pin_threads=False)


_PIPELINES: list[px.Pipeline] = []


def pipeline() -> px.Pipeline:
    """Return a pipeline that serves many calls: a new one after a call has closed it."""
    if not _PIPELINES or any(device.closed for device in _PIPELINES[-1].devices):
        _PIPELINES.append(new_pipeline())
    return _PIPELINES[-1]


@cache
def decoder() -> px.Pipeline:
    """Return a pipeline of a prompt and a decode step."""
    steps = ps.lower(ps.schedule("gpipe", 1, 2).with_slices(2), forward_only=True, prompt_slices=1)
    return px.Pipeline([nn.Embedding(2, 2)], steps, ["cpu"], pin_threads=False)


def batch() -> dict[str, Tensor]:
    return {"inputs": torch.ones(4, 2), "targets": torch.zeros(4, 2)}


def microbatches() -> px.Microbatches:
    return px.Microbatches([torch.ones(1), torch.ones(2)])


@cache
def result() -> StepResult:
    return pipeline().step(**batch())


@cache
def measured() -> Profile:
    return px.measure(pipeline(), **batch(), n_steps=1, warm_up=0)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    return repeat((torch.ones(4, 2), torch.zeros(4, 2)))


def short() -> dict[str, Any]:
    """Return arguments of the shortest validation."""
    return {
        "stages": stages(), "graphs": {"x": graph()}, "devices": ["cpu"] * 2, "loss_fn": mse,
        "batches": batches(), "n_steps": 1, "warm_up": 0, "costs": measured().costs,
    }  # fmt: skip


@cache
def validation() -> Validation:
    return px.validate(**short())


def training(to: Path) -> TrainingRun:
    """Return the training of one step in a directory."""
    folder = to / "training"
    if not folder.exists():
        px.train(pipeline(), [tuple(batch().values())], n_steps=1, directory=folder, progress=False)
    return TrainingRun.load(folder)


def gpipe() -> px.GPipe:
    return px.GPipe(nn.Sequential(*stages()), [1, 1], devices=["cpu"] * 2, chunks=2, threads=False)


def stepped() -> px.GPipe:
    model = gpipe()
    mse(model(torch.ones(4, 2)), torch.zeros(4, 2)).backward()
    return model


def accumulation() -> px.GradientAccumulation:
    model = nn.Linear(2, 2)
    return px.GradientAccumulation(model, sgd(model.parameters()), 2)


def in_block() -> px.GradientAccumulation:
    block = accumulation()
    block._block = block.microbatch()  # type: ignore[attr-defined]  # or else it ends at once
    block._block.__enter__()  # type: ignore[attr-defined]
    return block


def embedding() -> px.ShardedEmbedding:
    return px.ShardedEmbedding(4, 2)


def experts() -> px.Experts:
    return px.Experts(partial(nn.Linear, 2, 2), 2, 2, 1)


@cache
def with_optimizers() -> px.Pipeline:
    return px.Pipeline(stages(), graph(), ["cpu"] * 2, mse, sgd, pin_threads=False)


def lr_schedulers() -> px.LRSchedulers:
    return px.LRSchedulers(with_optimizers(), LinearLR)


KEYS = torch.tensor([0, 1])

#: By name, what makes the arguments; it gets a folder.
GOOD: dict[str, Callable[[Path], Good]] = {
    "px.EmbeddingStage": lambda _: {"embedding": embedding()},
    "px.EmbeddingStage.forward": lambda _: {
        "self": px.EmbeddingStage(embedding()), "values": (KEYS,)},
    "px.Experts": lambda _: {
        "expert": partial(nn.Linear, 2, 2), "width": 2, "n_experts": 2, "experts_per_token": 1},
    "px.Experts.extra_repr": lambda _: {"self": experts()},
    "px.Experts.forward": lambda _: {"self": experts(), "x": torch.ones(3, 2)},
    "px.GPipe": lambda _: {
        "module": nn.Sequential(*stages()), "balance": [1, 1], "devices": ["cpu"] * 2, "chunks": 2,
        "threads": False},
    "px.GPipe.forward": lambda _: {"self": gpipe(), "input": torch.ones(4, 2)},
    "px.GPipe.graph": lambda _: {"self": gpipe(), "batch_size": 4},
    "px.GPipe.metered": lambda _: {"self": gpipe()},
    "px.GPipe.skip_bytes": lambda _: {"self": stepped()},
    "px.GPipe.timeline": lambda _: {"self": stepped()},
    "px.GradientAccumulation": lambda _: {
        "model": (model := nn.Linear(2, 2)), "optimizer": sgd(model.parameters()), "n_steps": 2},
    "px.GradientAccumulation.backward": lambda _: {
        "self": in_block(), "loss": nn.Linear(2, 1)(torch.ones(2)).sum()},
    "px.GradientAccumulation.flush": lambda _: {"self": accumulation()},
    "px.GradientAccumulation.load_state_dict": lambda _: {
        "self": (source := accumulation()), "state_dict": source.state_dict()},
    "px.GradientAccumulation.state_dict": lambda _: {"self": accumulation()},
    "px.GradientAccumulation.microbatch": lambda _: {"self": accumulation()},
    "px.KeyValueCache": lambda _: {},
    "px.KeyValueCache.append": lambda _: {
        "self": px.KeyValueCache(), "key": torch.ones(1, 2, 3), "value": torch.ones(1, 2, 3)},
    "px.KeyValueCache.attend": lambda _: {
        "self": px.KeyValueCache(), "query": torch.ones(1, 2, 3), "key": torch.ones(1, 2, 3),
        "value": torch.ones(1, 2, 3)},
    "px.KeyValueCache.extra_repr": lambda _: {"self": px.KeyValueCache()},
    "px.KeyValueCache.forward": lambda _: {
        "self": px.KeyValueCache(), "query": torch.ones(1, 2, 3), "key": torch.ones(1, 2, 3),
        "value": torch.ones(1, 2, 3)},
    "px.KeyValueCache.offset": lambda _: {"self": px.KeyValueCache(), "n_positions": 2},
    "px.Pipeline": lambda _: {
        "stages": stages(), "graph": graph(), "devices": ["cpu"] * 2, "loss_fn": mse,
        "pin_threads": False},
    "px.Pipeline.align": lambda _: {"self": pipeline()},
    "px.Pipeline.check_batch": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.clocks": lambda _: {"self": pipeline()},
    "px.Pipeline.close": lambda _: {"self": new_pipeline()},
    "px.Pipeline.device_bytes": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.evaluate": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.gather": lambda _: {"self": pipeline(), "result": result()},
    "px.Pipeline.generate": lambda _: {
        "self": decoder(), "inputs": torch.ones(2, 2, dtype=torch.int64),
        "next_inputs": lambda x: x[:, -1:].argmax(-1), "keep_outputs": False},
    "px.Pipeline.held_bytes": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.left_bytes": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.load_optimizer_state_dict": lambda _: {
        "self": with_optimizers(), "state": with_optimizers().optimizer_state_dict()},
    "px.Pipeline.load_state_dict": lambda _: {
        "self": pipeline(), "state": pipeline().state_dict(), "strict": True},
    "px.Pipeline.memory": lambda _: {"self": pipeline(), **batch()},
    "px.Pipeline.optimizer_state_dict": lambda _: {"self": pipeline()},
    "px.Pipeline.predict": lambda _: {"self": pipeline(), "inputs": batch()["inputs"]},
    "px.Pipeline.preserved": lambda _: {"self": pipeline()},
    "px.Microbatches": lambda _: {"microbatches": [torch.ones(1)], "weights": [1.0]},
    "px.Microbatches.split": lambda _: {"batch": torch.ones(3), "lengths": [1, 2], "dim": 0},
    "px.Microbatches.take": lambda _: {"self": microbatches(), "numbers": [0]},
    "px.LRSchedulers": lambda _: {
        "pipeline": with_optimizers(), "factory": LinearLR},
    "px.LRSchedulers.get_last_lr": lambda _: {"self": lr_schedulers()},
    "px.LRSchedulers.state_dict": lambda _: {"self": lr_schedulers()},
    "px.LRSchedulers.load_state_dict": lambda _: {
        "self": lr_schedulers(), "state_dict": lr_schedulers().state_dict()},
    "px.Pipeline.state_dict": lambda _: {"self": pipeline()},
    "px.Pipeline.step": lambda _: {"self": pipeline(), **batch(), "accumulate": False},
    "px.Pipeline.total": lambda _: {"self": pipeline(), "values": [1.0]},
    "px.Pipeline.with_graph": lambda _: {"self": pipeline(), "graph": graph()},
    "px.projection.Projection.blocks": lambda _: {"self": projection(), "split": 2},
    "px.projection.Projection.compare": lambda _: {
        "self": projection(), "schedules": ["1f1b"], "n_devices": 2, "n_microbatches": 2},
    "px.projection.Projection.costs": lambda _: {"self": projection(), "split": 2},
    "px.projection.Projection.load": lambda to: {"path": _saved(to / "projection", projection())},
    "px.projection.Projection.plan": lambda _: {"self": projection(), "global_batch": 4},
    "px.projection.Projection.predict": lambda _: {
        "self": projection(), "schedule": "1f1b", "n_devices": 2, "n_microbatches": 2},
    "px.projection.Projection.tied_stages": lambda _: {"self": projection(), "split": 2},
    "px.projection.Projection.save": lambda to: {"self": projection(), "path": to / "saved"},
    "px.profiling.Profile.load": lambda to: {"path": _saved(to / "profile", measured())},
    "px.profiling.Profile.plot": lambda _: {"self": measured()},
    "px.profiling.Profile.save": lambda to: {
        "self": replace(measured(), transfers=measured().transfers[:0]), "path": to / "saved"},
    "px.ShardedEmbedding": lambda _: {"n_rows": 4, "dim": 2},
    "px.ShardedEmbedding.accumulated_gradients": lambda _: {"self": embedding()},
    "px.ShardedEmbedding.check": lambda _: {"self": embedding(), "keys": KEYS},
    "px.ShardedEmbedding.dispatch": lambda _: {"self": embedding(), "keys": KEYS},
    "px.ShardedEmbedding.explain": lambda _: {"self": embedding(), "keys": KEYS},
    "px.ShardedEmbedding.extra_repr": lambda _: {"self": embedding()},
    "px.ShardedEmbedding.forward": lambda _: {"self": embedding(), "keys": KEYS},
    "px.ShardedEmbedding.from_full": lambda _: {"weights": torch.ones(4, 2)},
    "px.ShardedEmbedding.full_weight": lambda _: {"self": embedding()},
    "px.ShardedEmbedding.get_extra_state": lambda _: {"self": embedding()},
    "px.ShardedEmbedding.set_extra_state": lambda _: {
        "self": embedding(), "state": embedding().get_extra_state()},
    "px.validation.Validation.figure": lambda _: {"self": validation()},
    "px.validation.Validation.save": lambda to: {
        "self": validation(), "path": to / "saved", "figures": False},
    "px.from_torch": lambda _: {"schedule": ORDER},
    "px.is_checkpointing": lambda _: {},
    "px.is_recomputing": lambda _: {},
    "px.latest_checkpoint": lambda to: {"directory": _saved_checkpoint(to / "checkpoint").parent},
    "px.load_checkpoint": lambda to: {
        "pipeline": with_optimizers(), "path": _saved_checkpoint(to / "checkpoint")},
    "px.read_checkpoint": lambda to: {"path": _saved_checkpoint(to / "checkpoint")},
    "px.save_checkpoint": lambda to: {
        "pipeline": with_optimizers(), "path": to / "checkpoint", "keep": 3},
    "px.load_run": lambda to: {"path": _saved(to / "run", validation())},
    "px.SplitBackward": lambda _: {"compiler": "aot_eager"},
    "px.RunOptions": lambda _: {
        "n_steps": 1, "warm_up": 0, "repeat": 1, "costs": None, "progress": None},
    "px.measure": lambda _: {
        "pipeline": pipeline(), **batch(), "n_steps": 1, "warm_up": 0},
    "px.profile": lambda _: {
        "pipeline": pipeline(), **batch(), "n_steps": 1, "warm_up": 0},
    "px.project": lambda _: {
        "model": nn.Sequential(*stages()), "sample": torch.ones(2, 2), "cluster": cluster(),
        "n_steps": 1, "warm_up": 0},
    "px.check_equivalent": lambda _: {
        "model": nn.Linear(2, 1), "a": {}, "b": {"n_microbatches": 2},
        "batch": (torch.ones(2, 2), torch.ones(2, 1)), "loss_fn": nn.functional.mse_loss,
        "loss_reduction": "mean", "learning_rate": 0.1, "dtype": None, "seed": 0},
    "px.split": lambda _: {
        "model": nn.Sequential(*stages()), "stages": 2, "sample": torch.ones(2, 2),
        "balance": "blocks", "memory_limit": 1e9, "optimizer_bytes": 2.0, "only": [0],
        "chain": True},
    "px.Stages.arguments": lambda _: {"self": split(), "batch": torch.ones(2, 2)},
    "px.Stages.report": lambda _: {
        "self": split(), "batch": torch.ones(2, 2), "schedules": ("gpipe",), "n_microbatches": 2},
    "px.Stages.ordered": lambda _: {"self": split(), "batch": torch.ones(2, 2)},
    "px.Stages.check": lambda _: {
        "self": split(), "batch": torch.ones(2, 2), "loss_fn": lambda output: output.sum()},
    "px.torch_pipelining.torch_schedule_order": lambda _: {
        "name": "1F1B", "n_devices": 2, "n_microbatches": 2},
    "px.training.TrainingRun.load": lambda to: {"directory": training(to).directory},
    "px.training.TrainingRun.plot": lambda to: {"self": training(to)},
    "px.training.TrainingRun.stop": lambda to: {"self": training(to)},
    "px.training.TrainingRun.summary": lambda to: {"self": training(to)},
    "px.train": lambda _: {
        "pipeline": pipeline(), "batches": [tuple(batch().values())], "n_steps": 1, "epochs": 1,
        "scheduler": None, "evaluation": [tuple(batch().values())], "evaluate_every": 1,
        "directory": None, "checkpoint_every": None, "keep": 1, "resume": True, "objects": None,
        "record": None, "costs": None, "timelines": [1], "progress": False},
    "px.validate": lambda _: short(),
    "px.annotate_torch_pipelining": lambda _: {},
    "px.autograd_graph": lambda _: {"output": gpipe()(torch.ones(4, 2))},
    "px.watch_sync": lambda _: {"model": nn.Linear(2, 2), "group": None},
    "px.data_parallel.scaled_learning_rate": lambda _: {
        "learning_rate": 0.1, "batch_size": 512, "reference_batch_size": 256, "rule": "sqrt"},
    "px.data_parallel.sync_report": lambda _: {
        "source": ps.simulate(graph(), ps.Costs(forward=1.0, backward=2.0))},
    "px.workers": lambda _: {
        "n": 2, "link": ps.Network(1e-6, 1e9), "launch": 1e-3},
}  # fmt: skip
#: Whose good call needs what a test lacks: attacked alone, and every call must be refused.
REFUSED: dict[str, Callable[[Path], Good]] = {
    "px.join": lambda _: {"timeout": 0.1},
    "px.slices": lambda _: {"device": "cuda:0", "n": 2},
    "px.to_torch": lambda _: {"schedule": schedule(), "stages": [], "loss_fn": mse},
}


def split() -> px.Stages:
    return px.split(nn.Sequential(*stages()), 2, sample=torch.ones(2, 2))


@cache
def projection() -> Projection:
    sample = torch.ones(2, 2)
    return px.project(nn.Sequential(*stages()), sample, cluster(), n_steps=1, warm_up=0)


def cluster() -> ps.Cluster:
    gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
    return ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())


def _saved_checkpoint(path: Path) -> Path:
    return path if path.exists() else px.save_checkpoint(with_optimizers(), path)


def _saved(path: Path, what: Profile | Projection | Validation) -> Path:
    if not path.exists():
        what.save(path)
    return path


#: Whose calls take long, and are attacked with fewer values.
SLOW = {
    "px.check_equivalent", "px.validate", "px.measure", "px.profile", "px.project", "px.Pipeline",
    "px.validation.Validation.save", "px.profiling.Profile.save", "px.validation.Validation.figure",
    "px.training.TrainingRun.plot", "px.train",
}  # fmt: skip
