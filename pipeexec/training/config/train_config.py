"""`train_config`: train as a TOML file says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pipeexec.demo_models.data import replicas_of
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.training.batch_source import Batches, BatchSource
from pipeexec.training.config.build_model import make_data, make_loss, make_model
from pipeexec.training.config.build_pipeline import (
    make_grad_scaler,
    make_pipeline,
    make_scheduler,
)
from pipeexec.training.config.read_config import Config
from pipeexec.training.options import MEASURE, EvaluationHook
from pipeexec.training.random_states import preserved_random_states
from pipeexec.training.train import train
from pipeexec.training.training_run import TrainingRun
from pipesim.errors import ArgumentError


def train_config(
    config: Config,
    processes: Processes | None = None,
    *,
    n_steps: int | None = None,
    resume: bool = True,
    progress: bool | None = None,
    on_evaluation: EvaluationHook | None = None,
    timeout: float = 60.0,
) -> TrainingRun:
    """Train as a configuration says; in several processes, all of them call this.

    Parameters
    ----------
    n_steps
        In place of ``steps`` in the configuration, if it is not None.
    resume, progress, on_evaluation
        See `pipeexec.train`.
    timeout
        Seconds after which a step is given up in which no task ends.

    Raises
    ------
    PipeError
        For values that do not fit together, and all that `pipeexec.train` raises.
    """
    training = config["training"]
    with guard_processes(processes):
        # Torch takes 64 bits; a longer seed wraps, as the seed of the demo models does.
        torch.manual_seed(training["seed"] % (1 << 63))
        rank, n_ranks = (0, 1) if processes is None else (processes.rank, processes.n_ranks)
        replicas = replicas_of(rank, n_ranks, config["pipeline"]["replicas"])
        model, loss = make_model(config), make_loss(config)
        data = make_data(config, replicas)
        sample = _sample(config, data.training)
    scaler = make_grad_scaler(config)
    with (
        make_pipeline(config, model, loss, sample, scaler, processes, timeout) as pipeline,
        _autocast(config, pipeline),
    ):
        return train(
            pipeline,
            data.training,
            n_steps=training["steps"] if n_steps is None else n_steps,
            epochs=training["epochs"],
            scheduler=make_scheduler(config, pipeline),
            evaluation=data.evaluation,
            evaluate_every=None if data.evaluation is None else training["evaluate_every"],
            directory=training["directory"],
            checkpoint_every=training["checkpoint_every"],
            keep=training["keep"],
            resume=resume,
            record=config.record(),
            costs=MEASURE if training["predict"] else None,
            timelines=training["timelines"] or (),
            on_evaluation=on_evaluation,
            progress=progress,
        )


def _sample(config: Config, batches: Batches) -> Any:
    """Return the inputs of the first batch; random states stay as they are."""
    if isinstance(batches, Iterator):
        raise ArgumentError(
            f"{config.path}: [data] factory returned an iterator ({type(batches).__name__}); it "
            "must return a DataLoader, a list, or a function from the number of an epoch to an "
            "iterable"
        )
    with config.errors("data"):
        source = BatchSource(batches, 1)
        with preserved_random_states(source.loader):
            batch = source.next()
            assert batch is not None  # an epoch without batches is refused
            return batch[0]


def _autocast(config: Config, pipeline: Pipeline) -> AbstractContextManager[Any]:
    """Return autocast for the steps of a training."""
    name = config["training"]["autocast"]
    if name is None:
        return nullcontext()
    return torch.autocast(pipeline.devices[0].torch_device.type, dtype=getattr(torch, name))
