"""Arguments and settings of the command ``pipesim plan``."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesim.cli.argument_values import (
    FIGURES,
    figure_path,
    parse_option,
    parse_value,
    writable_path,
)
from pipesim.cli.help_texts import PLAN_EPILOG
from pipesim.errors import ArgumentError, check_name
from pipesim.utils.files import read_text

#: Parameters of a configuration, each one value or a list: metavar and help.
CHOICES: Mapping[str, tuple[str, str]] = {
    "tensor_parallel": ("N", "GPUs that share each layer"),
    "pipeline_parallel": ("N", "devices of the pipeline"),
    "data_parallel": ("N", "replicas of the pipeline"),
    "microbatch_size": ("N", "sequences of a micro-batch"),
    "schedules": ("NAME", "schedules to try; pipesim schedules lists them"),
    "n_chunks": ("N", "stages of each device"),
    "recompute": ("MODE", "recompute of layers: none, selective, full"),
    "shard_optimizer": ("BOOL", "true, false or true,false: a distributed optimizer, as in ZeRO-1"),
    "sequence_parallel": ("BOOL", "likewise: split the sequence where tensor parallelism does not"),
    "context_parallel": ("N", "GPUs that share each sequence; 1 by default"),
    "expert_parallel": ("N", "GPUs among which the experts of a layer are divided"),
    "shard_parameters": ("MODE", "replicas share parameters, and gather them: none (the default), "
                         "every, step, or the number of stages that a device keeps"),
    "offload": ("SHARE", "activations in host memory: none (the default), all, a share (0.5), "
                "or longest:0.5"),
    "n_slices": ("N", "slices of each sequence, for seq1f1b and slimpipe; 1 by default"),
}  # fmt: skip
#: Settings of the model that are true or false, and their help.
SWITCHES: Mapping[str, str] = {
    "flash_attention": "the attention core is one fused kernel",
    "scatter_gather": "each GPU of a group sends a part of a stage's output",
    "fused_loss": "the loss is fused, and keeps no logits in 32 bits",
}
_SETTINGS: Mapping[str, tuple[str, str]] = {
    "global_batch": ("N", "sequences of a step, of all replicas"),
    "memory_limit": ("BYTES", "bytes that a device may hold, such as 75e9 or 75GiB; by default the "
                     "memory of its GPU"),
    "memory_reserve": ("SHARE", "of the allocated bytes, held besides by the allocator"),
    "split": ("MODE", "layers of stages: refined (the best few moved further), balanced or even"),
    "layout": ("ORDER", "stage_major or replica_major: whose devices are numbered in a row"),
    "noise": ("SHARE", "standard deviation of the seconds of each task, relative to their mean"),
    "percentile": ("N", "of noisy steps, by which the best are ranked; 90 by default"),
}  # fmt: skip
_CLUSTER: Mapping[str, tuple[str, str, str]] = {
    "machine": ("--cluster", "NAME", "machine of the nodes, such as dgx_h100"),
    "n_gpus": ("--gpus", "N", "GPUs of the cluster"),
    "gpu": ("--gpu", "NAME", "GPU of the nodes, or a file that pipesim calibrate --json wrote; by "
            "default that of the machine"),
    "usable_memory": ("--usable-memory", "SHARE", "of each GPU's memory that tensors may take"),
    "network_efficiency": ("--network-efficiency", "SHARE", "of nominal bandwidths that messages "
                           "reach"),
}  # fmt: skip


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of plan; settings are stored as ``plan.`` or ``cluster.`` and their key."""
    command.epilog = PLAN_EPILOG
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL",
        help="a published model, such as llama3_70b, or measured layers, .csv")  # fmt: skip
    add("--config", type=Path, metavar="FILE.toml", help="settings; see below")
    add("--size", dest="sizes", action="append", type=parse_option, metavar="KEY=VALUE", default=[],
        help="of the model, such as sequence_length=4096")  # fmt: skip
    for key, (flag, metavar, text) in _CLUSTER.items():
        add(flag, dest=f"cluster.{key}", type=parse_value, metavar=metavar, help=text)
    for key, (metavar, text) in _SETTINGS.items():
        add(_flag(key), dest=f"plan.{key}", type=parse_value, metavar=metavar, help=text)
    choices = command.add_argument_group("choices", "one value, or several between commas")
    for key, (metavar, text) in CHOICES.items():
        choices.add_argument(
            _flag(key), dest=f"plan.{key}", type=parse_value, metavar=metavar, help=text
        )
    for key, text in SWITCHES.items():
        action = argparse.BooleanOptionalAction
        add(_flag(key), dest=f"plan.{key}", action=action, help=text)
    add("--jobs", dest="plan.n_jobs", type=parse_value, metavar="N", default=1,
        help="processes; -1: one a core; by default 1")  # fmt: skip
    add(
        "--best",
        type=parse_value,
        metavar="N",
        default=10,
        help="configurations to find for certain, and to print",
    )
    add("--explain", type=parse_value, metavar="RANK", default=None,
        help="print why the best takes less time than the one of this rank")  # fmt: skip
    add("--plot", type=figure_path, metavar="FILE", default=None,
        help=f"memory over time of all configurations; {', '.join(FIGURES)}")  # fmt: skip
    add("--csv", type=writable_path, metavar="FILE", default=None,
        help="write all configurations, in s and bytes")  # fmt: skip
    add("--megatron", action="store_true", default=False,
        help="print the flags of Megatron-LM for the best")  # fmt: skip
    add("--order", type=writable_path, metavar="FILE.csv", default=None,
        help="write the order of the best as torch's CSV; --torchtitan names it")  # fmt: skip
    add("--torchtitan", action="store_true", default=False,
        help="print the settings of torchtitan for the best")  # fmt: skip


def _flag(key: str) -> str:
    """Return the flag of a setting."""
    return "--" + key.replace("_", "-")


def plan_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the file, overridden by those of the arguments.

    ``model`` and ``cluster`` are tables: of sizes, with the ``model`` that they change, and of the
    parameters of `pipesim.Cluster`. A model that is a file of layers is a text.
    """
    settings = {} if "config" not in args else _read(args.config)
    model = dict(settings.pop("model", {}))
    if "model" in args:
        model = {"model": args.model}
    model |= dict(args.sizes)
    cluster = dict(settings.pop("cluster", {}))
    for path, value in vars(args).items():
        table, _, key = path.partition(".")
        if key:
            (cluster if table == "cluster" else settings)[key] = value
    return {**settings, "model": model, "cluster": cluster}


def _read(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file, with tables of the model and the cluster."""
    try:
        settings = tomllib.loads(read_text(path, "settings from", ArgumentError))
    except (RecursionError, ValueError) as error:
        raise ArgumentError(f"cannot read settings from {path}: {error}") from error
    for key in settings:
        check_name(f"{path}: key", key, ("model", "cluster", *_SETTINGS, *CHOICES, *SWITCHES))
    for key, name in (("model", "model"), ("cluster", "machine")):
        value = settings.get(key, {})
        if isinstance(value, str):
            settings[key] = {name: value}
        elif not isinstance(value, dict):
            raise ArgumentError(f"{path}: {key} must be a name or a table, got {value!r:.60}")
    gpu = settings.get("cluster", {}).get("gpu")
    if str(gpu).endswith(".json"):  # relative to this file, as are files of costs
        settings["cluster"] = {**settings["cluster"], "gpu": str(path.parent / str(gpu))}
    return settings
