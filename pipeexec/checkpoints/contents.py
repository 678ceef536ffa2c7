"""Contents of a checkpoint in one process: its tensors, by folder, and facts for the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeexec.checkpoints.encoding import encode
from pipeexec.checkpoints.manifest import FOLDERS
from pipeexec.checkpoints.random_state import random_state
from pipeexec.checkpoints.rows import row_tensors
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.state.optimizer_state import merged_groups, optimizer_state
from pipesim.errors import ArgumentError


@dataclass
class Contents:
    """Tensors of one process, and facts that all processes share.

    Attributes
    ----------
    tensors
        By folder and key.
    numbers
        Number of the file of each key, from 1 on, by folder and key.
    facts
        What JSON can hold: see `local_contents`.
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
    _check_whole(pipeline)
    optimizer = optimizer_state(names, pipeline._model.whole_optimizers())
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


def _check_whole(pipeline: Pipeline) -> None:
    """Raise `ArgumentError` if a stage has a share of its experts alone."""
    for stage in sorted(pipeline._model.expert_groups):
        raise ArgumentError(
            f"stage {stage} has a share of its experts in this process, and the files of a stage "
            "are written by one process; give pipeexec.Experts without share, so that each process "
            "holds all experts, or save pipeline.state_dict() of each process yourself"
        )


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
    """Which process writes which tensor, and the manifest's content without files.

    Attributes
    ----------
    owners
        Rank that writes each key, by folder and key.
    numbers
        Number of the file of each key, by folder and key.
    n_files
        Files of each folder.
    manifest
        Content of the manifest, but ``files``.
    """

    owners: dict[str, dict[str, int]]
    numbers: dict[str, dict[str, int]]
    n_files: dict[str, int]
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
