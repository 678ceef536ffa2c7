"""Make the pipeline, its optimizers and its scheduler from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

import pipesim
from pipeexec.distributed.processes import Processes
from pipeexec.executor.optimizer_steps.lr_schedulers import LRSchedulers
from pipeexec.executor.pipeline import Pipeline
from pipeexec.splitting.split import split
from pipeexec.stages.loss.loss_function import Loss
from pipeexec.training.config.factories import call, named_class
from pipeexec.training.config.read_config import Config
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.scheduling.schedule import Schedule
from pipesim.sweeps.schedule_sources import source_info


def n_devices(config: Config, processes: Processes | None) -> tuple[int, int]:
    """Return the numbers of devices of a replica, and of this process."""
    section, n_ranks = config["pipeline"], 1 if processes is None else processes.n_ranks
    n_replicas, names = section["replicas"], section["devices"]
    n_all = None if names is None else len(names) * n_ranks
    n_stages = section["stages"]
    if n_stages is None:
        n_stages = 2 if n_all is None else max(1, n_all // n_replicas)
    if n_all is None and n_stages * n_replicas % n_ranks:
        raise ArgumentError(
            f"stages={n_stages} of replicas={n_replicas} need {n_stages * n_replicas} devices, "
            f"which {n_ranks} processes cannot share evenly; start another number of them"
        )
    n_all = n_stages * n_replicas if n_all is None else n_all
    if n_all != n_stages * n_replicas:
        raise ArgumentError(
            f"stages={n_stages} of replicas={n_replicas} need {n_stages * n_replicas} devices, but "
            f"{n_all // n_ranks} in each of {n_ranks} processes are {n_all}; change devices, or "
            "start another number of processes"
        )
    return n_stages, n_all // n_ranks


def make_pipeline(
    config: Config,
    model: nn.Module,
    loss: Loss,
    sample: Any,
    grad_scaler: GradScaler | None,
    processes: Processes | None,
    timeout: float,
) -> Pipeline:
    """Return the pipeline of a model; ``sample`` has the inputs of one batch."""
    with config.errors("pipeline"):
        section = config["pipeline"]
        n_stages, n_local = n_devices(config, processes)
        schedule = source_info(section["schedule"]).make(n_stages, section["microbatches"])
        homes = _graph(config, schedule, processes, ()).homes
        first = 0 if processes is None else processes.rank * n_local
        local = range(first, first + n_local)
        own = sorted({k for row in homes.tolist() for k, d in enumerate(row) if d in local})
        options = {} if section["balance"] is None else {"balance": section["balance"]}
        cuts = section["split"] or homes.shape[1]
        stages = split(model, cuts, sample=sample, only=own, **options)
        graph = _graph(config, schedule, processes, stages.tied_stages)
    with config.errors("optimizer"):
        optimizer = make_optimizer(config)
    with config.errors("pipeline"):
        return Pipeline(
            stages,
            graph,
            section["devices"] or ["cpu"] * n_local,
            loss,
            optimizer,
            timeout=timeout,
            processes=processes,
            max_grad_norm=config["optimizer"]["max_grad_norm"],
            grad_scaler=grad_scaler,
        )


def make_grad_scaler(config: Config) -> GradScaler | None:
    """Return the gradient scaler of a training with autocast to float16; otherwise None."""
    if config["training"]["autocast"] != "float16":
        return None
    names = config["pipeline"]["devices"] or ["cpu"]
    return GradScaler(torch.device(names[0]).type)


def _graph(
    config: Config,
    schedule: Schedule,
    processes: Processes | None,
    tied: Sequence[tuple[int, ...]],
) -> TaskGraph:
    """Return the graph of a step, with the collectives over stages that it needs."""
    section = config["pipeline"]
    return pipesim.lower(
        schedule,
        recompute=section["recompute"],
        n_replicas=section["replicas"],
        hosts="one" if processes is None else "per_device",
        tied=tied,
        grad_norm=config["optimizer"]["max_grad_norm"] is not None
        or config["training"]["autocast"] == "float16",
    )


def make_optimizer(config: Config) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function that makes the optimizer of a stage."""
    section, arguments = config["optimizer"], dict(config.arguments["optimizer"])
    optimizer = named_class(section["name"], torch.optim, torch.optim.Optimizer)
    least = section["decay_dimensions"]

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups: Any = list(parameters)
        if least is not None:
            groups = decay_groups(groups, least)
        result = call(config, "optimizer", section["name"], optimizer, arguments, groups)
        assert isinstance(result, torch.optim.Optimizer)
        return result

    make([nn.Parameter(torch.zeros(1, 1))])  # a wrong argument fails here
    return make


def decay_groups(parameters: list[nn.Parameter], least: int) -> list[dict[str, Any]]:
    """Return parameter groups: those of fewer dimensions have no weight decay."""
    decayed = [p for p in parameters if p.dim() >= least]
    others = [p for p in parameters if p.dim() < least]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def make_scheduler(config: Config, pipeline: Pipeline) -> LRSchedulers | None:
    """Return the learning-rate schedulers of a pipeline; None without one.

    ``warm_up`` steps before it raise the rate from zero in equal steps.
    """
    section, arguments = config["scheduler"], config.arguments["scheduler"]
    name, warm_up = section["name"], section["warm_up"]
    if name is None and warm_up is None:
        return None
    with config.errors("scheduler"):
        if name is not None:
            named_class(name, torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return LRSchedulers(pipeline, partial(_scheduler, config, name, warm_up, arguments))


def _scheduler(
    config: Config,
    name: str | None,
    warm_up: int | None,
    arguments: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the scheduler of one optimizer."""
    module = torch.optim.lr_scheduler
    if name is None:
        after: Any = module.ConstantLR(optimizer, factor=1.0)
    if warm_up is not None:
        rise = module.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    if name is not None:
        kind = named_class(name, module, module.LRScheduler)
        after = call(config, "scheduler", name, kind, arguments, optimizer)
    return after if warm_up is None else module.SequentialLR(optimizer, [rise, after], [warm_up])
