"""`Admission`: how many more bytes a device may take, so that no micro-batch gets stuck."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Admission"]

#: Share of a limit by which sums of bytes may exceed it, since sums of floats are rounded.
_ROUNDING = 1e-9


@dataclass
class _StartedMicrobatch:
    """A micro-batch on a device: bytes held for I or B, bytes to come, backwards to come."""

    held: float
    to_come: float
    backwards: int


class Admission:
    """Bytes that one device holds for each micro-batch, and whether it may take more.

    Devices that wait for each other's room could wait forever. So a device takes bytes only if it
    could then still finish its micro-batches one after the other, in their order, each with all
    bytes that it needs here (the banker's algorithm: Dijkstra, EWD 108). Thus the oldest
    micro-batch that has not passed the whole pipeline finds room on every device.

    Parameters
    ----------
    limit
        Bytes that the device may hold.
    needed
        Bytes that a micro-batch needs on this device at the same time, path by path.
    n_chunks
        Number of stages on this device, path by path.
    path_of
        Path of each micro-batch; the micro-batches of a path have consecutive numbers.
    """

    def __init__(
        self, limit: float, needed: list[float], n_chunks: list[int], path_of: list[int]
    ) -> None:
        self.limit = limit * (1 + _ROUNDING)
        self.needed, self.n_chunks, self.path_of = needed, n_chunks, path_of
        self.most_needed = max(needed)
        self.held = 0.0  # until I or B
        self.held_for_w = 0.0  # W can run whenever its room is needed
        self.in_progress: dict[int, _StartedMicrobatch] = {}
        self.started = bytearray(len(path_of))
        used = sorted(set(path_of))
        self.next_to_start = [path_of.index(path) for path in used]  # the first on each path
        self.end = [*self.next_to_start[1:], len(path_of)]

    def has_room(self, nbytes: float) -> bool:
        """Return whether there is room now."""
        return self.held + self.held_for_w + nbytes <= self.limit

    def could_have_room(self, nbytes: float) -> bool:
        """Return whether there is room once every W that can run has run."""
        return self.held + nbytes <= self.limit

    def is_safe(self, microbatch: int, nbytes: float) -> bool:
        """Return whether all micro-batches can still finish after this one takes ``nbytes``."""
        if self.held + nbytes + self.most_needed <= self.limit:
            return True
        rows = {number: (row.held, row.to_come) for number, row in self.in_progress.items()}
        held, to_come = rows.get(microbatch, (0.0, self.needed[self.path_of[microbatch]]))
        rows[microbatch] = held + nbytes, to_come - nbytes
        for first, end in zip(self.next_to_start, self.end, strict=True):
            while first < end and (self.started[first] or first == microbatch):
                first += 1
            if first < end:
                rows[first] = 0.0, self.needed[self.path_of[first]]
        held_by_later = 0.0
        for number in sorted(rows, reverse=True):
            held, to_come = rows[number]
            held_by_later += held
            if held_by_later + to_come > self.limit:
                return False
        return True

    def count_forward(self, microbatch: int, nbytes: float) -> None:
        """Count an F, which takes ``nbytes``."""
        path = self.path_of[microbatch]
        self.held += nbytes
        if not self.started[microbatch]:
            self.started[microbatch] = True
            self.in_progress[microbatch] = _StartedMicrobatch(
                0.0, self.needed[path], self.n_chunks[path]
            )
            for k, end in enumerate(self.end):
                while self.next_to_start[k] < end and self.started[self.next_to_start[k]]:
                    self.next_to_start[k] += 1
        row = self.in_progress[microbatch]
        row.held += nbytes
        row.to_come -= nbytes

    def count_backward(self, microbatch: int, nbytes: float, w_bytes: float) -> None:
        """Count an I or a B, which releases ``nbytes``, except ``w_bytes`` that W needs."""
        self.held -= nbytes
        self.held_for_w += w_bytes
        row = self.in_progress[microbatch]
        row.held -= nbytes
        row.backwards -= 1
        if not row.backwards:
            del self.in_progress[microbatch]

    def count_weight(self, w_bytes: float) -> None:
        """Count a W, which releases ``w_bytes``."""
        self.held_for_w -= w_bytes
