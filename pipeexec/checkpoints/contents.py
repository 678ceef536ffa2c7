"""Contents of a checkpoint in one process: its tensors, by folder, and facts for the manifest."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeexec.checkpoints.directory import FOLDERS, read_tensors
from pipeexec.devices.device import Device
from pipeexec.embedding.row_layout import row_numbers
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.executor.expert_layers import ExpertLayers
from pipeexec.executor.named_state import merged_groups, optimizer_state
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.sharding import whole_optimizers
from pipesim.errors import ArgumentError, CheckpointError

# Values of objects as JSON, with tensors kept apart.
#
# A value that JSON has not is an object with the key ``$``, its kind::
#
#     {"$": "tensor", "key": "scheduler.values"}      the tensor is in a file of tensors
#     {"$": "tuple", "items": [1, 2]}
#     {"$": "Counter", "items": [[30, 1], [60, 1]]}   pairs of key and value
#
# Decoding makes values of these kinds alone. Nothing else is constructed, and nothing is called.

_KIND = "$"
#: Classes of mappings that are made again, by name.
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON can hold it; put its tensors into ``tensors``.

    An object with a ``state_dict`` counts as what that returns. Keys of tensors start with the
    name.
    """
    try:
        return _encoded(value, name, tensors)
    except RecursionError as error:
        raise ArgumentError(
            f"{name!r} is nested too deeply, or contains itself; give plain values"
        ) from error


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, str) or type(value) in (bool, int, float):
        return value
    if isinstance(value, Tensor):
        return {_KIND: "tensor", "key": _keep(value.detach(), name, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        array = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        return {_KIND: "array", "key": _keep(array, name, tensors)}
    if isinstance(value, np.generic):
        return _encoded(value.item(), name, tensors)
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, name, tensors)
    if isinstance(value, list | tuple):
        items = [_encoded(x, f"{name}.{k}", tensors) for k, x in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, int | float):  # of a subclass, such as an enumeration
        return _encoded(int(value) if isinstance(value, int) else float(value), name, tensors)
    if callable(state_dict := getattr(value, "state_dict", None)):
        return _encoded(state_dict(), name, tensors)
    raise ArgumentError(
        f"{name!r} is a {type(value).__name__}, which a checkpoint cannot hold; give an object "
        "with state_dict() and load_state_dict(), tensors, or numbers, texts, lists and dicts"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put a tensor into ``tensors`` under a name that is not there yet; return the name."""
    key, number = name, 1
    while key in tensors:
        number += 1
        key = f"{name}#{number}"
    tensors[key] = tensor
    return key


def _encoded_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    is_plain = type(value) is dict and all(isinstance(key, str) for key in value)
    if is_plain and _KIND not in value:
        return {key: _encoded(x, f"{name}.{key}", tensors) for key, x in value.items()}
    kind = type(value).__name__
    items = [
        [_encoded(key, name, tensors), _encoded(x, f"{name}.{key}", tensors)]
        for key, x in value.items()
    ]
    return {_KIND: kind if kind in _MAPPINGS else "dict", "items": items}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` has encoded; raise `ValueError` for any other."""
    if isinstance(value, list):
        return [decode(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(x, tensors) for key, x in value.items()}
    try:
        return _decoded(value, tensors)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(value)[:80]} is no value of a checkpoint") from error


def _decoded(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    kind = value[_KIND]
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        return tensors[value["key"]].numpy()
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    items = [decode(x, tensors) for x in value["items"]]
    return tuple(items) if kind == "tuple" else _MAPPINGS[kind](items)


def tensor_keys(value: Any) -> list[str]:
    """Return the keys of the tensors of an encoded value."""
    if isinstance(value, list):
        return [key for x in value for key in tensor_keys(x)]
    if not isinstance(value, dict):
        return []
    if value.get(_KIND) in ("tensor", "array"):
        return [str(value.get("key"))]
    return [key for x in value.values() for key in tensor_keys(x)]


# Rows of sharded embeddings, and of their optimizers' state, with the number of each row.
#
# A process saves its rows. Another number of processes, or another placement, finds the rows by
# their numbers. A row's number is its key, plus the rows of the tables before its own.


def row_tensors(
    prefix: str, embedding: ShardedEmbedding, state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of this process's rows, and facts about the embedding for the manifest.

    The embedding's keys begin with ``prefix``, as ``"0.embedding."``. Tensors that have a row for
    each row are taken out of ``state``, the state of its parameter.
    """
    layout, rank = embedding.layout, embedding.rank
    numbers = row_numbers(layout, rank)
    used = (numbers >= 0).nonzero()[:, 0]
    columns = {"weight": embedding.weight.detach()}
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and value.dim() and len(value) == layout.rows_per_rank:
            columns[f"state.{name}"] = state.pop(name)
    tensors = {
        f"{prefix}{name}@{rank}": value[used.to(value.device)] for name, value in columns.items()
    }
    tensors[f"{prefix}numbers@{rank}"] = numbers[used]
    facts = {
        "n_rows": list(layout.n_rows), "dim": embedding.dim, "n_ranks": layout.n_ranks,
        "columns": list(columns),
    }  # fmt: skip
    return tensors, facts


def check_rows(prefix: str, embedding: ShardedEmbedding, manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a checkpoint has the tables of an embedding."""
    facts = manifest["rows"].get(prefix)
    if facts is None:
        raise CheckpointError(
            f"the checkpoint lacks the rows of {prefix}weight; give one of this model"
        )
    own = (list(embedding.n_rows), embedding.dim)
    if own != (facts["n_rows"], facts["dim"]):
        raise CheckpointError(
            f"'{prefix}weight' has tables of {facts['n_rows']} rows of {facts['dim']} in the "
            f"checkpoint, and of {own[0]} rows of {own[1]} in the model; give one of this model"
        )


def load_rows(
    folder: Path, prefix: str, embedding: ShardedEmbedding, manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return this process's rows: ``"weight"``, and tensors of state such as ``"state.exp_avg"``.

    The files of one saved process are in memory at a time.
    """
    numbers = row_numbers(embedding.layout, embedding.rank)
    return _selected(folder, prefix, numbers, manifest)


def all_rows(folder: Path, prefix: str, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all rows, table after table; as `load_rows`."""
    total, specs = sum(manifest["rows"][prefix]["n_rows"]), manifest["tensors"]["rows"]
    saved = [spec[0][0] for key, spec in specs.items() if key.startswith(f"{prefix}numbers@")]
    if sum(saved) != total:  # before there is memory for as many rows as the manifest tells
        raise _lacks_rows(folder, prefix)
    numbers = torch.arange(total)
    return _selected(folder, prefix, numbers, manifest)


def _selected(
    folder: Path, prefix: str, numbers: Tensor, manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the rows of some numbers; zeros for -1."""
    facts, specs = manifest["rows"][prefix], manifest["tensors"]["rows"]
    ordered, places = numbers.sort()
    columns: dict[str, Tensor] = {}
    n_rows = 0
    for rank in range(facts["n_ranks"]):
        names = {name: f"{prefix}{name}@{rank}" for name in ("numbers", *facts["columns"])}
        if missing := [name for name in names.values() if name not in specs]:
            raise CheckpointError(
                f"the checkpoint {folder} lacks {missing[0]!r}; give another checkpoint"
            )
        part = read_tensors(folder, "rows", manifest, names.values())
        saved = part[names["numbers"]]
        position = torch.searchsorted(ordered, saved).clamp(max=len(ordered) - 1)
        is_own = ordered[position] == saved
        target = places[position[is_own]]
        n_rows += len(target)
        for name in facts["columns"]:
            rows = part[names[name]]
            if name not in columns:
                columns[name] = rows.new_zeros(len(numbers), *rows.shape[1:])
            columns[name][target] = rows[is_own]
    if n_rows != int((numbers >= 0).sum()):
        raise _lacks_rows(folder, prefix)
    return columns


def _lacks_rows(folder: Path, prefix: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} lacks rows of {prefix}weight; give another checkpoint"
    )


# Random state of a process: torch's generators.
#
# Steps need the seed and the number of steps alone: `pipeexec.stages.module_call`. The state of
# torch's generators is for what runs between steps, such as the order of a data loader. Python and
# numpy have generators of their own; a program that uses these can save their state as an object.


def random_state(devices: Sequence[Device]) -> dict[str, str]:
    """Return the states of torch's generators of the CPU and of this process's GPUs, as text."""
    gpus = {d.torch_device.index or 0 for d in devices if d.torch_device.type == "cuda"}
    states = {"cpu": torch.get_rng_state()}
    states |= {f"cuda:{k}": torch.cuda.get_rng_state(k) for k in sorted(gpus)}
    return {name: base64.b64encode(x.numpy().tobytes()).decode() for name, x in states.items()}


def random_tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of generators, if they are those of this version of torch."""
    try:
        tensors = {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in states.items()
        }
        for name, tensor in tensors.items():
            device = torch.device(name)
            if device.type == "cpu":
                torch.Generator().set_state(tensor)
            elif device.index < torch.cuda.device_count():
                torch.Generator(device).set_state(tensor)
        tensors["cpu"]  # it must be there
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint has no valid random state: {error!s:.100}; give another"
        ) from error
    return tensors


def load_random_state(seed: int, states: Mapping[str, torch.Tensor]) -> None:
    """Seed torch, and set its generators; GPUs that are not there are left out."""
    torch.manual_seed(seed)
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        device = torch.device(name)
        if device.type != "cpu" and device.index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


@dataclass
class Contents:
    """Tensors of one process, and facts that all processes share.

    Tensors, and numbers of their files from 1 on, are by folder and key. Facts are what JSON can
    hold.
    """

    tensors: dict[str, dict[str, Tensor]] = field(
        default_factory=lambda: {folder: {} for folder in FOLDERS}
    )
    numbers: dict[str, dict[str, int]] = field(
        default_factory=lambda: {folder: {} for folder in FOLDERS}
    )
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, folder: str, tensors: Mapping[str, Tensor], number: int) -> None:
        """Add tensors of a file; a key that is there stays."""
        for key, tensor in tensors.items():
            self.tensors[folder].setdefault(key, tensor)
            self.numbers[folder].setdefault(key, number)

    def shared(self) -> dict[str, Any]:
        """Return the facts, with the shape, type and file of each tensor."""
        specs = {
            folder: {key: [list(x.shape), str(x.dtype), self.numbers[folder][key]]
                     for key, x in tensors.items()}
            for folder, tensors in self.tensors.items()
        }  # fmt: skip
        return {**self.facts, "specs": specs}


def local_contents(pipeline: Pipeline, objects: Mapping[str, Any]) -> Contents:
    """Return the contents of this process."""
    names, contents = pipeline.names, Contents()
    if groups := pipeline._model.part(ExpertLayers).groups:
        raise ArgumentError(
            f"stage {min(groups)} has a share of its experts in this process, and the files of a "
            "stage are written by one process; give pipeexec.Experts without share, so that each "
            "process holds all experts, or save pipeline.state_dict() of each process yourself"
        )
    optimizer = optimizer_state(names, whole_optimizers(pipeline._model))
    rows, hidden = {}, set()
    for prefix, embedding in names.embeddings().items():
        state = optimizer["state"].get(f"{prefix}weight", {})
        tensors, rows[prefix] = row_tensors(prefix, embedding, state)
        rank = embedding.rank
        contents.add("rows", tensors, rank + 1)
        hidden |= {f"{prefix}weight", f"{prefix}_extra_state"}
    others: dict[str, Any] = {}
    parts = [(slot % names.n_stages, names.state(slot)) for slot in names.first_slots]
    unused = names.unused()
    for stage, state in [*parts, *((stage, unused) for stage, _ in parts[:1])]:
        for key, value in state.items():
            if key in hidden:
                continue
            if isinstance(value, Tensor):
                contents.add("model", {key: value}, stage + 1)
            else:
                kept: dict[str, Tensor] = {}
                others[key] = encode(value, key, kept)
                contents.add("objects", kept, 1)
    contents.facts = {
        "others": others,
        "optimizer": _encoded_optimizer(contents, pipeline, optimizer)
        if pipeline.zero_grad
        else None,
        "rows": rows,
        "random": random_state(pipeline.devices),
    }
    kept = {}
    encoded = {name: encode(value, name, kept) for name, value in objects.items()}
    contents.add("objects", kept, 1)
    contents.facts["objects"] = encoded
    contents.facts["digests"] = {name: _digest(encoded[name], kept, name) for name in encoded}
    return contents


def _encoded_optimizer(
    contents: Contents, pipeline: Pipeline, optimizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Add the tensors of the optimizers' state; return the rest as JSON can hold it."""
    names = pipeline.names
    stages = {
        key: slot % names.n_stages
        for slot in reversed(names.first_slots)
        for key in names.parameter_keys(slot).values()
    }
    state = {}
    for name, values in optimizer["state"].items():
        kept: dict[str, Tensor] = {}
        state[name] = encode(dict(values), f"state.{name}", kept)
        contents.add("optimizer", kept, stages[name] + 1)
    groups = [
        {key: x.tolist() if isinstance(x, Tensor) else x for key, x in group.items()}
        for group in optimizer["param_groups"]
    ]
    tensors: dict[str, Tensor] = {}
    encoded = encode(groups, "param_groups", tensors)
    if tensors:
        raise ArgumentError(
            f"the option {next(iter(tensors))!r} of an optimizer has tensors inside, which a "
            "checkpoint cannot hold; give numbers, or one tensor"
        )
    return {"state": state, "param_groups": encoded}


def _digest(encoded: Any, tensors: Mapping[str, Tensor], name: str) -> str:
    """Return a checksum of an object, to compare it between processes."""
    checksum = hashlib.sha256(json.dumps(encoded).encode())
    for key in sorted(key for key in tensors if key == name or key.startswith(f"{name}.")):
        flat = tensors[key].detach().cpu().contiguous().reshape(-1)
        checksum.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return checksum.hexdigest()


@dataclass(frozen=True)
class Plan:
    """Which process writes which tensor, and the manifest's content without files."""

    owners: dict[str, dict[str, int]]  # rank that writes a tensor, by folder and key
    numbers: dict[str, dict[str, int]]  # of its file, by folder and key
    n_files: dict[str, int]  # of each folder
    manifest: dict[str, Any]


def plan_files(everyone: Sequence[Mapping[str, Any]], n_stages: int) -> Plan:
    """Return which process writes which tensors, from the facts of all: the same in each process.

    A tensor that several processes have is written by one of them. The files of a stage are written
    by one process.
    """
    for rank, facts in enumerate(everyone):
        for name in {**everyone[0]["digests"], **facts["digests"]}:
            if facts["digests"].get(name) != everyone[0]["digests"].get(name):
                raise ArgumentError(
                    f"object {name!r} of rank {rank} is another than that of rank 0; save objects "
                    "that are equal in all processes"
                )
    owners: dict[str, dict[str, int]] = {}
    numbers: dict[str, dict[str, int]] = {}
    specs: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        ranks: dict[str, list[tuple[int, int]]] = {}  # file and rank
        specs[folder] = {}
        for rank, facts in enumerate(everyone):
            for key, (shape, dtype, number) in facts["specs"][folder].items():
                specs[folder].setdefault(key, [shape, dtype])
                ranks.setdefault(key, []).append((number, rank))
        numbers[folder], owners[folder] = {}, {}
        for key, places in ranks.items():
            number = min(places)[0]
            able = [rank for n, rank in places if n == number]
            numbers[folder][key] = number
            # Replicas share the work, stage by stage.
            owners[folder][key] = able[0 if folder == "objects" else (number - 1) % len(able)]
    n_files = {folder: max(numbers[folder].values(), default=0) for folder in FOLDERS}
    n_files |= {folder: n_stages for folder in ("model", "optimizer") if n_files[folder]}
    manifest = {
        "tensors": specs,
        "others": {key: x for facts in reversed(everyone) for key, x in facts["others"].items()},
        "optimizer": _merged_optimizers([facts["optimizer"] for facts in everyone]),
        "rows": {key: x for facts in everyone for key, x in facts["rows"].items()},
        "random": [facts["random"] for facts in everyone],
        "objects": everyone[0]["objects"],
    }
    return Plan(owners, numbers, n_files, manifest)


def _merged_optimizers(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the optimizer state of all processes."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    state: dict[str, Any] = {}
    for part in present:
        for name, values in part["state"].items():
            state.setdefault(name, values)
    return {"state": state, "param_groups": merged_groups(part["param_groups"] for part in present)}
