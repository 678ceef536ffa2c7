"""`load_checkpoint`: load the state of a training run, whole or not at all; `read_checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pipeexec.checkpoints.contents import (
    all_rows,
    check_rows,
    decode,
    load_random_state,
    load_rows,
    random_tensors,
    tensor_keys,
)
from pipeexec.checkpoints.directory import check_files, present, read_manifest, read_tensors
from pipeexec.executor.accumulation import AccumulatedSteps, Accumulation
from pipeexec.executor.named_state import (
    StateNames,
    apply_optimizer_states,
    check_model_state,
    load_model_state,
    prepared_states,
)
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.sharding import Sharding, whole_optimizers
from pipeexec.executor.state_methods import raise_together
from pipeexec.executor.tied_parameters import TiedParameters
from pipesim.errors import CheckpointError, check_type
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path
from pipesim.utils.texts import CHECKSUM


@checked_names
def load_checkpoint(pipeline: Pipeline, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load model, optimizers, random state and number of steps; all processes must call this.

    The pipeline may have another number of stages, replicas or processes than the saved one.
    Each process reads the tensors that it needs. Nothing that is read is executed. torch is seeded
    as it was. Gradients of steps with ``accumulate=True`` are dropped. After another number of
    stages, random numbers of steps (dropout) are others, since they depend on the stage; everything
    else is the same.

    Parameters
    ----------
    pipeline
        The pipeline, between two steps. Without optimizers, their state is left out.
    path
        Folder that `save_checkpoint` has written.

    Returns
    -------
    dict
        State of each object that was saved, by name: the result of its ``state_dict``, or the
        value.

    Raises
    ------
    CheckpointError
        Names the first file that is missing, cut or edited, or the first key whose shape differs
        from the model's. Also for copies of a tied parameter that would get different values.
        Nothing has been changed then.
    PeerError
        If another process has such an error.

    See Also
    --------
    pipeexec.latest_checkpoint : Find the newest checkpoint of a folder.
    pipeexec.read_checkpoint : Read a checkpoint without a pipeline.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...         path = px.save_checkpoint(pipeline, f"{folder}/step-0", note="first")
    ...         px.load_checkpoint(pipeline, path)
    {'note': 'first'}
    """
    check_type("pipeline", pipeline, Pipeline)
    folder = check_path("path", path)
    processes = pipeline.processes
    rank, n_ranks = (0, 1) if processes is None else (processes.rank, processes.n_ranks)
    with pipeline._model.locked("load_checkpoint"):
        with raise_together(processes), _plain_errors(folder):
            folder = present(folder)
            manifest = read_manifest(folder)
        if processes is not None:
            processes.agree("the checkpoint (its checksum)", manifest[CHECKSUM])
        with raise_together(processes), _plain_errors(folder):
            check_files(folder, manifest, rank, n_ranks)
        optimizers = whole_optimizers(pipeline._model)
        with raise_together(processes), _plain_errors(folder):
            names, rows = pipeline.names, {}
            _check_model(names, manifest)
            for prefix, embedding in names.embeddings().items():
                rows[prefix] = load_rows(folder, prefix, embedding, manifest)
            state = _model_state(folder, names, manifest, rows)
            prepared = []
            if pipeline.zero_grad:
                keys = {
                    key for slot, _ in names.local_slots()
                    for key in names.parameter_keys(slot).values()
                }  # fmt: skip
                optimizer = _optimizer_state(folder, manifest, keys, rows)
                prepared = prepared_states(names, optimizers, optimizer, error=CheckpointError)
            states = manifest["random"]
            random = random_tensors(states[rank] if rank < len(states) else states[0])
            objects = _decoded(folder, "objects", manifest, manifest["objects"])
            tied = pipeline._model.part(TiedParameters)
            values = tied.loaded_values(names, state)
        tied.check_loaded_values(values, processes, error=CheckpointError, label="the checkpoint")
        with pipeline._model.part(Sharding).whole_parameters(changes=True):
            load_model_state(names, state)
        apply_optimizer_states(prepared)
        pipeline.n_steps = manifest["n_steps"]
        pipeline._model.part(Accumulation).steps = AccumulatedSteps()
        load_random_state(manifest["seed"], random)
    return objects


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Turn errors about values of a manifest into a `CheckpointError` that names the folder."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the manifest of {folder} is not valid ({type(error).__name__}: {error!s:.100}); give "
            "another checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read {folder}: {error.strerror or error}; give another checkpoint"
        ) from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {folder}: {error}; give another checkpoint") from error


class _Spec(NamedTuple):
    """Shape and type of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str


def _check_model(names: StateNames, manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a checkpoint is that of the model."""
    shapes: dict[str, Any] = {
        key: _Spec(tuple(shape), dtype)
        for key, (shape, dtype) in manifest["tensors"]["model"].items()
    }
    shapes |= dict.fromkeys(manifest["others"])
    for prefix in manifest["rows"]:
        shapes |= {f"{prefix}weight": None, f"{prefix}_extra_state": None}
    for prefix, embedding in names.embeddings().items():
        check_rows(prefix, embedding, manifest)
        shapes[f"{prefix}weight"] = embedding.weight
        shapes[f"{prefix}_extra_state"] = embedding.get_extra_state()
    check_model_state(names, shapes, error=CheckpointError, label="the checkpoint")
    for key, value in names.local_state().items():
        saved = shapes.get(names.find(shapes, key) or "")
        if isinstance(saved, _Spec) and saved.dtype != str(value.dtype):
            raise CheckpointError(
                f"{key!r} is {saved.dtype} in the checkpoint, and {value.dtype} in the model; to "
                "convert it, use pipeline.load_state_dict(read_checkpoint(path)['model'])"
            )


def _model_state(
    folder: Path,
    names: StateNames,
    manifest: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return the entries of the local stages."""
    specs = manifest["tensors"]["model"]
    own = names.local_state()
    keys = {names.find(specs, key) for key in own} - {None}
    chosen = [key for key in specs if key in keys]
    state: dict[str, Any] = dict(read_tensors(folder, "model", manifest, chosen))
    others = {key: x for key, x in manifest["others"].items() if key in own}
    state |= _decoded(folder, "objects", manifest, others)
    return state | {f"{prefix}weight": columns["weight"] for prefix, columns in rows.items()}


def _optimizer_state(
    folder: Path,
    manifest: Mapping[str, Any],
    keys: set[str] | None,
    rows: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return the groups of all parameters, and the state of those with some keys."""
    saved = manifest["optimizer"]
    if saved is None:
        raise CheckpointError(
            f"the checkpoint {folder} has no state of optimizers; load the model alone, by "
            "pipeline.load_state_dict(pipeexec.read_checkpoint(path)['model'])"
        )
    chosen = {name: x for name, x in saved["state"].items() if keys is None or name in keys}
    state = _decoded(folder, "optimizer", manifest, chosen)
    for prefix, columns in rows.items():
        values = {name.removeprefix("state."): x for name, x in columns.items() if name != "weight"}
        if values or f"{prefix}weight" in state:
            state[f"{prefix}weight"] = {**state.get(f"{prefix}weight", {}), **values}
    return {"state": state, "param_groups": decode(saved["param_groups"], {})}


def _decoded(
    folder: Path, part: str, manifest: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return decoded values, with their tensors from a folder of the checkpoint."""
    tensors = read_tensors(folder, part, manifest, tensor_keys(dict(values)))
    return {name: decode(value, tensors) for name, value in values.items()}


@checked_names
def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint without a pipeline, such as for the unsplit model.

    Parameters
    ----------
    path
        Folder that `save_checkpoint` has written.

    Returns
    -------
    dict
        - ``"model"``: for ``model.load_state_dict``. The tables of a sharded embedding are one
          tensor of all rows.
        - ``"optimizer"``: for `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`;
          None if the pipeline had none.
        - ``"objects"``: the state of each object.
        - ``"n_steps"`` and ``"seed"``.

    Raises
    ------
    CheckpointError
        Names the first file that is missing, cut or edited.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with px.Pipeline(list(model), graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...         path = px.save_checkpoint(pipeline, f"{folder}/step-0")
    ...     model.load_state_dict(px.read_checkpoint(path)["model"])
    <All keys matched successfully>
    """
    folder = check_path("path", path)
    with _plain_errors(folder):
        folder = present(folder)
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        rows = {prefix: all_rows(folder, prefix, manifest) for prefix in manifest["rows"]}
        keys = manifest["tensors"]["model"]
        model: dict[str, Any] = dict(read_tensors(folder, "model", manifest, keys))
        model |= _decoded(folder, "objects", manifest, manifest["others"])
        model |= {f"{prefix}weight": columns["weight"] for prefix, columns in rows.items()}
        has_optimizer = manifest["optimizer"] is not None
        return {
            "model": model,
            "optimizer": _optimizer_state(folder, manifest, None, rows) if has_optimizer else None,
            "objects": _decoded(folder, "objects", manifest, manifest["objects"]),
            "n_steps": manifest["n_steps"],
            "seed": manifest["seed"],
        }
