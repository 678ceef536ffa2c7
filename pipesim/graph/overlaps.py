"""Overlapped actions: an F and a B that run as one (``OVERLAP_F_B``), and their dependencies.

They are two consecutive tasks on a stream. Both start when both can start, and the results of both
are ready when both have ended.
"""

from __future__ import annotations

import numpy as np

from pipesim.graph.tasks import Kinds
from pipesim.ops import Op
from pipesim.utils.csr import CSR, Ints


def overlapped_pairs(kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> tuple[Ints, Ints]:
    """Return the F and the B halves of overlapped actions; incomplete if they do not pair up.

    The B of an overlapped F is the task after it on its stream.
    """
    halves = np.flatnonzero((kinds.overlapped > 0)[kind])
    halves = halves[np.argsort(stream_of_kind[kind[halves]], kind="stable")]
    first, second = halves[:-1], halves[1:]
    is_pair = (
        (stream_of_kind[kind[first]] == stream_of_kind[kind[second]])
        & (kinds.op[kind[first]] == Op.F)
        & (kinds.op[kind[second]] == Op.B)
    )
    return first[is_pair], second[is_pair]


def with_starts(needs: CSR, kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> CSR:
    """Add to each overlapped F the dependencies of its B, so that it starts when both can."""
    if not kinds.overlapped.any():
        return needs
    forward, backward = overlapped_pairs(kinds, kind, stream_of_kind)
    rows = np.repeat(forward, np.diff(needs.ptr)[backward])
    return _joined(needs, rows, needs.gather(backward))


def with_ends(needs: CSR, kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> CSR:
    """Add to each task that needs an overlapped F its B, as results come at the action's end."""
    if not kinds.overlapped.any():
        return needs
    forward, backward = overlapped_pairs(kinds, kind, stream_of_kind)
    end_of = np.full(len(kind), -1, dtype=np.int64)
    end_of[forward] = backward
    ends = end_of[needs.values]
    later = (ends >= 0) & (ends != needs.rows)
    return _joined(needs, needs.rows[later], ends[later])


def _joined(needs: CSR, rows: Ints, values: Ints) -> CSR:
    """Append values to rows of a CSR, without duplicates."""
    all_rows = np.concatenate([needs.rows, rows])
    all_values = np.concatenate([needs.values, values])
    _, first = np.unique(all_rows * np.int64(len(needs)) + all_values, return_index=True)
    first = np.sort(first)
    return CSR.from_pairs(all_rows[first], all_values[first], len(needs))
