"""Find the ancestors of each task along given edges: one bit for each pair of tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel

Bits = NDArray[np.uint64]


class Edges(NamedTuple):
    """Edges between nodes that are numbered in topological order: ``before`` is the smaller.

    An edge from a node to itself is ignored and counts as implied.
    """

    before: Ints
    after: Ints

    @classmethod
    def joined(cls, *others: Edges) -> Edges:
        """Return the concatenated edges of all groups."""
        return cls(*(np.concatenate(column) for column in zip(*others, strict=True)))

    def kept(self, mask: NDArray[np.bool_]) -> Edges:
        """Return the edges where ``mask`` is True."""
        return Edges(self.before[mask], self.after[mask])


def ancestors(edges: Edges, n: int) -> tuple[Bits, NDArray[np.bool_]]:
    """Return one row of bits for each node: the nodes from which a path leads to it.

    Returns
    -------
    bits
        Shape ``(n, ceil(n / 64))``.
    is_implied
        Whether another path leads from the first node of each edge to its second; an equal edge
        earlier in ``edges`` is such a path. Shape ``(len(edges.before),)``.
    """
    order = CSR.group(edges.after, n)
    bits = np.zeros((n, -(-n // 64)), dtype=np.uint64)
    implied = np.zeros(len(order.values), dtype=np.bool_)
    _close(order.ptr, edges.before[order.values], bits, implied)
    is_implied = np.empty_like(implied)
    is_implied[order.values] = implied
    return bits, is_implied


@kernel()
def _close(ptr: Ints, values: Ints, bits: Bits, implied: NDArray[np.bool_]) -> None:
    """Fill ``bits`` and ``implied``, which are zeros at first; see `ancestors`."""
    for node in range(len(ptr) - 1):
        for k in range(ptr[node], ptr[node + 1]):
            words = (values[k] >> 6) + 1
            if values[k] != node:
                bits[node, :words] |= bits[values[k], :words]
        for k in range(ptr[node], ptr[node + 1]):
            if values[k] == node:
                implied[k] = True
                continue
            word, place = values[k] >> 6, np.uint64(values[k] & 63)
            implied[k] = (bits[node, word] >> place) & np.uint64(1) != np.uint64(0)
            bits[node, word] |= np.uint64(1) << place


def before(bits: Bits, first: Ints, second: Ints) -> NDArray[np.bool_]:
    """Return whether a path leads from each ``first`` node to the ``second``."""
    place = (first & 63).astype(np.uint64)
    is_before: NDArray[np.bool_] = (bits[second, first >> 6] >> place) & np.uint64(1) != 0
    return is_before
