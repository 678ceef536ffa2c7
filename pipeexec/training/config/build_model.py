"""Make the model, its loss and its data from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pipeexec.demo_models.registry import MODELS, cross_entropy
from pipeexec.stages.loss.loss_function import Loss
from pipeexec.training.batch_source import Batches
from pipeexec.training.config.factories import call, imported, parameters
from pipeexec.training.config.read_config import Config
from pipeexec.training.config.text_data import TextBatches, read_texts, text_files
from pipesim.errors import ArgumentError, ArgumentTypeError, check_name

#: Samples of a step of all replicas, by default.
_BATCH_SIZE = 16


@dataclass(frozen=True)
class Data:
    """Batches to train on, and to evaluate on; None for none."""

    training: Batches
    evaluation: Batches | None


def _one_of(config: Config, section: str, *keys: str) -> str:
    """Return which one of some keys a section has."""
    names = [key for key in keys if config[section][key] is not None]
    if len(names) != 1:
        raise ArgumentError(
            f"needs either {' or '.join(keys)}, got {' and '.join(names) or 'neither'}"
        )
    return names[0]


def make_model(config: Config) -> nn.Module:
    """Return the model that a configuration names."""
    with config.errors("model"):
        section, seed = config["model"], config["training"]["seed"]
        if _one_of(config, "model", "name", "factory") == "factory":
            name = section["factory"]
            factory = imported(name, config.path.parent)
            model = call(config, "model", name, factory, config.arguments["model"])
            if not isinstance(model, nn.Module):
                raise ArgumentTypeError(
                    f"factory {name!r} returned {model!r:.60}; it must return a torch.nn.Module"
                )
            return model
        name = section["name"]
        spec = MODELS[check_name("model", name, MODELS)]
        make = partial(spec.make, seed)
        result = call(config, "model", name, make, config.arguments["model"])
        layers: nn.Module = result[0]
        return layers


def make_loss(config: Config) -> Loss:
    """Return the loss function: by default the cross entropy over all positions."""
    with config.errors("model"):
        name = config["model"]["loss"]
        return cross_entropy if name is None else imported(name, config.path.parent)


def make_data(config: Config, replicas: Sequence[int]) -> Data:
    """Return the batches of some data-parallel replicas, which this process runs."""
    with config.errors("data"):
        if _one_of(config, "data", "text", "factory") == "text":
            return _text_data(config, replicas)
        return _factory_data(config, replicas)


def _text_data(config: Config, replicas: Sequence[int]) -> Data:
    """Return batches of texts; their last part is for evaluations."""
    section, n_replicas = config["data"], config["pipeline"]["replicas"]
    size = section["batch_size"] or _BATCH_SIZE
    if size % n_replicas:
        raise ArgumentError(
            f"batch_size={size} is that of all {n_replicas} replicas; give a multiple of them"
        )
    text = read_texts(text_files(section["text"], config.path.parent))
    n_held_out = int(len(text) * section["held_out"])
    share = (replicas[0] * size // n_replicas, (replicas[-1] + 1) * size // n_replicas)
    make = partial(TextBatches, context=_context(config), batch_size=size, share=share)
    training = make(text[: len(text) - n_held_out], seed=config["training"]["seed"])
    if not n_held_out:
        return Data(training, None)
    limit = section["evaluation_batches"]
    return Data(training, make(text[len(text) - n_held_out :], seed=None, limit=limit))


def _context(config: Config) -> int:
    """Return the bytes of a sample: by default those that a demo model takes."""
    context: int | None = config["data"]["context"]
    if context is None and config["model"]["name"] in MODELS:
        options = {**MODELS[config["model"]["name"]].options, **config.arguments["model"]}
        if isinstance(value := options.get("sequence"), int):
            context = value
    if context is None:
        raise ArgumentError("lacks context, the bytes of a sample; add it, as the model takes it")
    return context


def _factory_data(config: Config, replicas: Sequence[int]) -> Data:
    """Return the batches that a function of the user makes."""
    name, n_replicas = config["data"]["factory"], config["pipeline"]["replicas"]
    factory: Callable[..., Any] = imported(name, config.path.parent)
    keys = ("batch_size", "context")
    arguments = {k: v for k in keys if (v := config["data"][k]) is not None}
    arguments |= config.arguments["data"]
    if len(replicas) < n_replicas:
        names, takes_any = parameters(factory)
        if "replicas" not in names and not takes_any:
            raise ArgumentError(
                f"each process has {len(replicas)} of {n_replicas} replicas, whose samples it "
                f"takes; give {name!r} the parameters replicas and n_replicas"
            )
        arguments |= {"replicas": list(replicas), "n_replicas": n_replicas}
    result = call(config, "data", name, factory, arguments)
    if isinstance(result, tuple) and len(result) == 2:
        return Data(*result)
    return Data(result, None)
