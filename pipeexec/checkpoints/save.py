"""`save_checkpoint`: write the state of a training run, whole or not at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pipeexec.checkpoints.contents import Contents, Plan, local_contents, plan_files
from pipeexec.checkpoints.directory import (
    check_free,
    file_facts,
    file_name,
    new_folder,
    publish,
    remove_leftovers,
    remove_older,
    restore,
    sync_folder,
    write_index,
    write_manifest,
    write_tensors,
)
from pipeexec.distributed.processes import Processes
from pipeexec.executor.accumulation import Accumulation
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.sharding import Sharding
from pipeexec.executor.state_methods import raise_together
from pipeexec.run_lock import run_lock
from pipesim.errors import (
    CheckpointError,
    ExecutionError,
    RunDirectoryError,
    check_count,
    check_type,
)
from pipesim.utils.files import check_path


def save_checkpoint(
    pipeline: Pipeline, path: str | os.PathLike[str], *, keep: int | None = None, **objects: Any
) -> Path:
    """Save model, optimizers, random state and number of steps; all processes must call this.

    Everything is written to a folder of another name, which is renamed when all processes have
    written and synced their files. So a process that is killed at any moment leaves the last whole
    checkpoint. The next call removes what it has left. Each process writes its own stages: nothing
    is gathered. Files are safetensors, written by `torch.distributed.checkpoint`, and JSON.

    Parameters
    ----------
    pipeline
        The pipeline, between two steps.
    path
        Folder of the checkpoint; its parents are made. An older checkpoint at this path is
        replaced, unless others have put files into its folder. Several processes need a file
        system that they share.
    keep
        Number of checkpoints to keep: of those in the same folder whose names differ from this one
        in the last number alone (``step-100``, ``step-200``), the newest. By default all. A
        checkpoint in whose folder others have put files stays.
    **objects
        Further objects to save, by name: those with ``state_dict`` and ``load_state_dict``, such as
        schedulers of learning rates, gradient scalers and data loaders; or tensors, numbers, texts,
        lists and dicts. They must be equal in all processes.

    Returns
    -------
    Path
        The path.

    Raises
    ------
    ExecutionError
        After a step with ``accumulate=True``: a checkpoint has no gradients.
    CheckpointError
        If a file cannot be written, ``path`` exists and is no checkpoint, has files of others or
        the name of a temporary folder, or another process is writing it. An older checkpoint stays.
    PeerError
        If another process fails.

    See Also
    --------
    pipeexec.load_checkpoint : Load a checkpoint into a pipeline.
    pipeexec.read_checkpoint : Read a checkpoint without a pipeline.
    pipeexec.train : Save checkpoints during a training.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...         path = px.save_checkpoint(pipeline, f"{folder}/step-0", keep=3)
    ...     path.name, px.latest_checkpoint(folder) == path
    ('step-0', True)
    """
    check_type("pipeline", pipeline, Pipeline)
    target = Path(os.path.abspath(check_path("path", path, "write")))
    if keep is not None:
        check_count("keep", keep)
    processes = pipeline.processes
    model = pipeline._model
    with model.locked("save_checkpoint"), model.part(Sharding).whole_parameters():
        with raise_together(processes):
            if n_steps := model.part(Accumulation).steps.n_steps:
                raise ExecutionError(
                    f"{n_steps} step{'s' * (n_steps > 1)} with accumulate=True left gradients, "
                    "which a checkpoint does not hold; save it after the step that runs the "
                    "optimizers"
                )
            contents = local_contents(pipeline, objects)
        shared = contents.shared()
        everyone = [shared] if processes is None else processes.share(shared)
        plan = plan_files(everyone, pipeline.names.n_stages)
        plan.manifest.update(saved=time.time(), n_steps=pipeline.n_steps, seed=torch.initial_seed())
        _write(target, contents, plan, processes, keep)
    return Path(path)


def _write(
    target: Path, contents: Contents, plan: Plan, processes: Processes | None, keep: int | None
) -> None:
    """Write a checkpoint; rank 0 makes the folder and the manifest, and renames it."""
    rank = 0 if processes is None else processes.rank
    lock = _locked_folder(target) if rank == 0 else nullcontext(None)
    with _entered(processes, lock) as own_folder:
        name = None if own_folder is None else str(own_folder)
        folder = Path(name or "") if processes is None else Path(processes.share(name)[0])
        with raise_together(processes), _plain_errors(folder):
            files = _write_own(folder, contents, plan, rank)
        parts = [files] if processes is None else processes.share(files)
        with raise_together(processes), _plain_errors(target):
            if rank == 0:
                plan.manifest["files"] = {name: x for part in parts for name, x in part.items()}
                _finish(folder, plan)
                publish(folder, target)
                if keep is not None:
                    remove_older(target, keep)


@contextmanager
def _entered(processes: Processes | None, context: Any) -> Iterator[Path | None]:
    """Enter a context of this process; raise in all processes if one cannot enter its own."""
    with raise_together(processes):
        value = context.__enter__()
    try:
        yield value
    finally:
        context.__exit__(None, None, None)


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder in which to write ``target``, which no other process writes meanwhile."""
    with _plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = run_lock(target)
        lock.__enter__()
    try:
        with _plain_errors(target):
            check_free(target)
            restore(target)
            remove_leftovers(target.parent)
            folder = new_folder(target)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.__exit__(None, None, None)


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system into a `CheckpointError` that names the path."""
    try:
        yield
    except RunDirectoryError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room, or choose another folder"
        ) from error


def _write_own(folder: Path, contents: Contents, plan: Plan, rank: int) -> dict[str, Any]:
    """Write the tensors that are this process's to write; return facts about the files."""
    names = set()
    for part, owners in plan.owners.items():
        own = {key: x for key, x in contents.tensors[part].items() if owners[key] == rank}
        if own:
            (folder / part).mkdir(exist_ok=True)
            write_tensors(folder / part, own, plan.numbers[part], plan.n_files[part])
            names |= {_file(part, plan, key) for key in own}
    return file_facts(folder, sorted(names))


def _file(part: str, plan: Plan, key: str) -> str:
    return f"{part}/{file_name(plan.numbers[part][key], plan.n_files[part])}"


def _finish(folder: Path, plan: Plan) -> None:
    """Write index and manifest, when the files of all processes are there, and sync folders."""
    written = plan.manifest["files"]
    for name, facts in written.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            raise CheckpointError(
                f"{path} of another process is not there; give a folder of a file system that "
                "all processes share"
            )
    if plan.n_files["model"]:
        files = {key: _file("model", plan, key).partition("/")[2] for key in plan.numbers["model"]}
        total = sum(x["bytes"] for name, x in written.items() if name.startswith("model/"))
        write_index(folder / "model", files, total)
        written |= file_facts(folder, ["model/model.safetensors.index.json"])
    for part in {name.partition("/")[0] for name in written}:
        sync_folder(folder / part)
    write_manifest(folder, plan.manifest)
    sync_folder(folder)
