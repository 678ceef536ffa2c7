"""`train_config`: train as a TOML file says: make pipeline, data and options from it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

import pipesim
from pipeexec.demo_models.data import replicas_of
from pipeexec.demo_models.registry import MODELS, cross_entropy
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.executor.lr_schedulers import LRSchedulers
from pipeexec.executor.pipeline import Pipeline
from pipeexec.splitting.split import split
from pipeexec.stages.loss_function import Loss
from pipeexec.training.batch_source import (
    Batches,
    BatchSource,
    TextBatches,
    preserved_random_states,
    read_texts,
    text_files,
)
from pipeexec.training.options import EvaluationHook
from pipeexec.training.read_config import Config
from pipeexec.training.train import train
from pipeexec.training.training_run import TrainingRun
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, check_name, suggestion
from pipesim.graph.graph import TaskGraph
from pipesim.scheduling.schedule import Schedule
from pipesim.sweeps.settings import source_info


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

    ``n_steps`` takes the place of ``steps`` in the configuration, if it is not None. A step in
    which no task ends for ``timeout`` seconds is given up. The others are as for `pipeexec.train`.
    """
    training = config.training
    with guard_processes(processes):
        # Torch takes 64 bits; a longer seed wraps, as the seed of the demo models does.
        torch.manual_seed(training.seed % (1 << 63))
        rank, n_ranks = (0, 1) if processes is None else (processes.rank, processes.n_ranks)
        replicas = replicas_of(rank, n_ranks, config.pipeline.replicas)
        model, loss = make_model(config), make_loss(config)
        batches, evaluation = make_data(config, replicas)
        sample = _sample(config, batches)
    autocast = training.autocast
    scaler: GradScaler | None = None
    if autocast == "float16":
        scaler = GradScaler(torch.device((config.pipeline.devices or ["cpu"])[0]).type)
    with (
        make_pipeline(config, model, loss, sample, scaler, processes, timeout) as pipeline,
        nullcontext()
        if autocast is None
        else torch.autocast(pipeline.devices[0].torch_device.type, dtype=getattr(torch, autocast)),
    ):
        return train(
            pipeline,
            batches,
            n_steps=training.steps if n_steps is None else n_steps,
            epochs=training.epochs,
            scheduler=make_scheduler(config, pipeline),
            evaluation=evaluation,
            evaluate_every=None if evaluation is None else training.evaluate_every,
            directory=training.directory,
            checkpoint_every=training.checkpoint_every,
            keep=training.keep,
            resume=resume,
            record=config.record(),
            costs="measure" if training.predict else None,
            timelines=training.timelines or (),
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


# Model, loss and data.


def make_model(config: Config) -> nn.Module:
    """Return the model that a configuration names."""
    with config.errors("model"):
        section, seed = config.model, config.training.seed
        if (name := section.factory) is not None:
            factory = imported(name, config.path.parent)
            model = call(config, "model", name, factory, config.arguments["model"])
            if not isinstance(model, nn.Module):
                raise ArgumentTypeError(
                    f"factory {name!r} returned {model!r:.60}; it must return a torch.nn.Module"
                )
            return model
        name = check_name("model", section.name, MODELS)
        spec = MODELS[name]
        make = partial(spec.make, seed)
        result = call(config, "model", name, make, config.arguments["model"])
        layers: nn.Module = result[0]
        return layers


def make_loss(config: Config) -> Loss:
    """Return the loss function: by default the cross entropy over all positions."""
    with config.errors("model"):
        name = config.model.loss
        return cross_entropy if name is None else imported(name, config.path.parent)


def make_data(config: Config, replicas: Sequence[int]) -> tuple[Batches, Batches | None]:
    """Return the batches of this process's replicas: to train on, and to evaluate on or None."""
    with config.errors("data"):
        if config.data.factory is None:
            return _text_data(config, replicas)
        return _factory_data(config, config.data.factory, replicas)


def _text_data(config: Config, replicas: Sequence[int]) -> tuple[Batches, Batches | None]:
    """Return batches of texts; their last part is for evaluations."""
    section, n_replicas = config.data, config.pipeline.replicas
    size = section.batch_size or 16
    if size % n_replicas:
        raise ArgumentError(
            f"batch_size={size} is that of all {n_replicas} replicas; give a multiple of them"
        )
    assert section.text is not None  # without a factory
    text = read_texts(text_files(section.text, config.path.parent))
    n_held_out = int(len(text) * section.held_out)
    share = (replicas[0] * size // n_replicas, (replicas[-1] + 1) * size // n_replicas)
    make = partial(TextBatches, context=_context(config), batch_size=size, share=share)
    training = make(text[: len(text) - n_held_out], seed=config.training.seed)
    if not n_held_out:
        return training, None
    limit = section.evaluation_batches
    return training, make(text[len(text) - n_held_out :], seed=None, limit=limit)


def _context(config: Config) -> int:
    """Return the bytes of a sample: by default those that a demo model takes."""
    context, name = config.data.context, config.model.name
    if context is None and name is not None and name in MODELS:
        options = {**MODELS[name].options, **config.arguments["model"]}
        if isinstance(value := options.get("sequence"), int):
            context = value
    if context is None:
        raise ArgumentError("lacks context, the bytes of a sample; add it, as the model takes it")
    return context


def _factory_data(
    config: Config, name: str, replicas: Sequence[int]
) -> tuple[Batches, Batches | None]:
    """Return the batches that a function of the user makes."""
    n_replicas = config.pipeline.replicas
    factory: Callable[..., Any] = imported(name, config.path.parent)
    own = {"batch_size": config.data.batch_size, "context": config.data.context}
    arguments = {k: v for k, v in own.items() if v is not None} | config.arguments["data"]
    if len(replicas) < n_replicas:
        names, takes_any = keyword_parameters(factory)
        if "replicas" not in names and not takes_any:
            raise ArgumentError(
                f"each process has {len(replicas)} of {n_replicas} replicas, whose samples it "
                f"takes; give {name!r} the parameters replicas and n_replicas"
            )
        arguments |= {"replicas": list(replicas), "n_replicas": n_replicas}
    result = call(config, "data", name, factory, arguments)
    return result if isinstance(result, tuple) and len(result) == 2 else (result, None)


# Pipeline, optimizers and scheduler.


def n_devices(config: Config, processes: Processes | None) -> tuple[int, int]:
    """Return the numbers of devices of a replica, and of this process."""
    section, n_ranks = config.pipeline, 1 if processes is None else processes.n_ranks
    n_replicas, names = section.replicas, section.devices
    n_all = None if names is None else len(names) * n_ranks
    n_stages = section.stages
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
        section = config.pipeline
        n_stages, n_local = n_devices(config, processes)
        schedule = source_info(section.schedule).make(n_stages, section.microbatches)
        homes = _graph(config, schedule, processes, ()).homes
        first = 0 if processes is None else processes.rank * n_local
        local = range(first, first + n_local)
        own = sorted({k for row in homes.tolist() for k, d in enumerate(row) if d in local})
        cuts = homes.shape[1] if section.split is None else section.split
        stages = split(model, cuts, sample=sample, balance=section.balance, only=own)
        graph = _graph(config, schedule, processes, stages.tied_stages)
    with config.errors("optimizer"):
        optimizer = make_optimizer(config)
    with config.errors("pipeline"):
        return Pipeline(
            stages,
            graph,
            section.devices or ["cpu"] * n_local,
            loss,
            optimizer,
            timeout=timeout,
            processes=processes,
            max_grad_norm=config.optimizer.max_grad_norm,
            grad_scaler=grad_scaler,
        )


def _graph(
    config: Config,
    schedule: Schedule,
    processes: Processes | None,
    tied: Sequence[tuple[int, ...]],
) -> TaskGraph:
    """Return the graph of a step, with the collectives over stages that it needs."""
    section = config.pipeline
    return pipesim.lower(
        schedule,
        recompute=section.recompute,
        n_replicas=section.replicas,
        hosts="one" if processes is None else "per_device",
        tied=tied,
        grad_norm=config.optimizer.max_grad_norm is not None
        or config.training.autocast == "float16",
    )


def make_optimizer(config: Config) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function that makes the optimizer of a stage."""
    section, arguments = config.optimizer, dict(config.arguments["optimizer"])
    optimizer = named_class(section.name, torch.optim, torch.optim.Optimizer)
    least = section.decay_dimensions

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups: Any = list(parameters)
        if least is not None:
            decayed = [p for p in groups if p.dim() >= least]
            others = [p for p in groups if p.dim() < least]
            groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        result = call(config, "optimizer", section.name, optimizer, arguments, groups)
        assert isinstance(result, torch.optim.Optimizer)
        return result

    make([nn.Parameter(torch.zeros(1, 1))])  # a wrong argument fails here
    return make


def make_scheduler(config: Config, pipeline: Pipeline) -> LRSchedulers | None:
    """Return the learning-rate schedulers of a pipeline; None without one.

    ``warm_up`` steps before it raise the rate from zero in equal steps.
    """
    section, arguments = config.scheduler, config.arguments["scheduler"]
    name, warm_up = section.name, section.warm_up
    if name is None and warm_up is None:
        return None
    module = torch.optim.lr_scheduler

    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if kind is None:
            after: Any = module.ConstantLR(optimizer, factor=1.0)
        if warm_up is not None:
            rise = module.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
        if kind is not None:
            after = call(config, "scheduler", kind.__name__, kind, arguments, optimizer)
        if warm_up is not None:
            after = module.SequentialLR(optimizer, [rise, after], [warm_up])
        scheduler: torch.optim.lr_scheduler.LRScheduler = after
        return scheduler

    with config.errors("scheduler"):
        kind = None if name is None else named_class(name, module, module.LRScheduler)
        return LRSchedulers(pipeline, make)


# Functions that a configuration names: import them, check their arguments, and call them.


def imported(name: str, folder: Path) -> Callable[..., Any]:
    """Import a function by ``"package.module:function"``, also from modules in a folder.

    Importing a module runs its code: it is the user's own, named in the user's own file.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(x.isidentifier() for x in [*module_name.split("."), function_name]):
        raise ArgumentError(
            f"a function is named 'package.module:function', got {name!r}; the module is imported, "
            "from the folder of the configuration too"
        )
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"cannot import {module_name!r} of {name!r}: {error}; put it beside the configuration, "
            "or install its package"
        ) from error
    except Exception as error:  # of the user's code
        raise ExecutionError(
            f"importing {module_name!r} raised {type(error).__name__}: {error!s:.300}"
        ) from error
    finally:
        sys.path.remove(str(folder))
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [x for x in vars(module) if not x.startswith("_") and callable(vars(module)[x])]
        raise ArgumentError(
            f"{module_name!r} has no function {function_name!r}{suggestion(function_name, names)}"
        )
    result: Callable[..., Any] = function
    return result


def named_class(name: str, module: Any, base: type) -> type:
    """Return a class of a module by its name."""
    value = vars(module).get(name)
    if isinstance(value, type) and issubclass(value, base) and value is not base:
        return value
    classes = (x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base))
    names = sorted(x.__name__ for x in classes if x is not base and not x.__name__.startswith("_"))
    raise ArgumentError(
        f"{module.__name__} has no {name!r}{suggestion(name, names)} (known: {', '.join(names)})"
    )


def keyword_parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's keyword parameters, and whether it takes any other."""
    values = inspect.signature(function).parameters.values()
    names = [x.name for x in values if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    return names, any(x.kind is x.VAR_KEYWORD for x in values)


def call(
    config: Config,
    section: str,
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *positional: Any,
) -> Any:
    """Call a function with the arguments of a section."""
    names, takes_any = keyword_parameters(function)
    names = names[len(positional) :]
    unknown = [x for x in arguments if x not in names]
    if unknown and not takes_any:
        raise config.argument_error(section, unknown[0], names, name)
    try:
        return function(*positional, **arguments)
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code, or of torch
        raise ExecutionError(
            f"{config.path}: [{section}] {name} raised {type(error).__name__}: {error!s:.300}"
        ) from error
