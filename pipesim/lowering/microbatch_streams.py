"""Split the copy stream of each peer and direction into one stream for each micro-batch.

torchgpipe copies each micro-batch on its own stream (arXiv 2004.09910, section 3.2.2), so that a
message waits for no message of another micro-batch:

    per_peer             per_microbatch
    send:1   |a0|a1|a2|  send:1/0  |a0|
                         send:1/1  |a1|
                         send:1/2  |a2|
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.ops import TRANSFERS
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.utils.host_memory import check_memory

#: A kind and its costs, and a stream with its queue, by measurement.
_BYTES_PER_STREAM = 1000


def with_streams_of_microbatches(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> tuple[Kinds, NDArray[np.int32]]:
    """Return kinds and tasks with separate kinds for messages of each micro-batch.

    Each such kind is on the stream of its peer, direction and micro-batch.

    Parameters
    ----------
    kinds
        Messages on streams of their peer and direction.
    kind, microbatch
        One entry a task.

    Raises
    ------
    CapacityError
        If so many streams would not fit in memory.
    """
    is_message = kinds.is_op(TRANSFERS)
    others = np.flatnonzero(~is_message)
    number = np.full(len(kinds), -1, dtype=np.int32)
    number[others] = np.arange(len(others))
    messages = np.flatnonzero(is_message[kind])
    check_memory(
        f'streams="per_microbatch" with {len(messages):,} messages',
        _BYTES_PER_STREAM * len(messages),
        FEWER_TASKS,
    )
    width = int(microbatch.max(initial=0)) + 1
    cells, position = np.unique(
        kind[messages].astype(np.int64) * width + microbatch[messages], return_inverse=True
    )
    kind_of_cell, own = np.divmod(cells, width)
    columns = {column.name: getattr(kinds, column.name) for column in fields(kinds)}
    added = {name: column[kind_of_cell] for name, column in columns.items()}
    added["stream"] = StreamKind.of_microbatch(added["stream"], own)
    new = number[kind]
    new[messages] = len(others) + position
    return Kinds(**{name: np.r_[columns[name][others], added[name]] for name in columns}), new
