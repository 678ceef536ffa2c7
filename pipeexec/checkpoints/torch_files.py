"""Write tensors of one process by `torch.distributed.checkpoint`, as safetensors.

This file is imported when the first checkpoint is saved: torch takes most of a second to load
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from pipesim.errors import CheckpointError


class _Writer(HuggingFaceStorageWriter):
    """Writes files of one process without an index, which has the files of all."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Do nothing."""


def write_files(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, int], n_files: int
) -> None:
    """Write tensors to the files of their numbers, and sync these; see `write_tensors`."""
    # The largest number is part of each file's name. No tensor has an empty name.
    mapping = {key: numbers[key] for key in tensors} | {"": n_files}
    writer = _Writer(str(folder), fqn_to_index_mapping=mapping)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors(f"cannot write {folder}"):
        save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)


@contextmanager
def _plain_errors(text: str) -> Iterator[None]:
    """Turn errors of torch's functions into a `CheckpointError` that begins with ``text``.

    Their warnings about running in one process are left out.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:  # of torch: a BaseException
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{text}: {_reason(cause)}") from error
    except Exception as error:
        raise CheckpointError(f"{text}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or f"{type(error).__name__}: {error!s:.300}"
