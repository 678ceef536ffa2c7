"""Which bytes a device may still take, so that every micro-batch can get through."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Admission"]

#: Share of a limit by which sums of bytes may pass it, since sums of floats are rounded.
_ROUNDING = 1e-9


@dataclass
class _Open:
    """A micro-batch on a device: bytes held for I or B, bytes to come, backwards to come."""

    held: float
    to_come: float
    backwards: int


class Admission:
    """What one device holds, micro-batch by micro-batch, and whether it may take more.

    Devices that wait for room on each other could wait for ever. So a device takes bytes only if
    it could then still finish its micro-batches one after the other, in their order, each with
    all that it needs here (the banker's algorithm: Dijkstra, EWD 108). The oldest micro-batch that
    is not through the pipeline then finds room wherever it goes.

    Parameters
    ----------
    limit
        Bytes that the device may hold.
    needed
        Bytes that a micro-batch needs here at once, path by path.
    n_chunks
        How many of its stages are here, path by path.
    path_of
        Path of each micro-batch; a path has micro-batches that follow each other.
    """

    def __init__(
        self, limit: float, needed: list[float], n_chunks: list[int], path_of: list[int]
    ) -> None:
        self.limit = limit * (1 + _ROUNDING)
        self.needed, self.n_chunks, self.path_of = needed, n_chunks, path_of
        self.most = max(needed)
        self.held = 0.0  # for I or B
        self.kept = 0.0  # for W, which can run whenever room is wanted
        self.open: dict[int, _Open] = {}
        self.seen = bytearray(len(path_of))
        used = sorted(set(path_of))
        self.unseen = [path_of.index(path) for path in used]  # the first on each path
        self.end = [*self.unseen[1:], len(path_of)]

    def has_room(self, nbytes: float) -> bool:
        """Whether there is room now."""
        return self.held + self.kept + nbytes <= self.limit

    def could_have_room(self, nbytes: float) -> bool:
        """Whether there is room once every W that can run has run."""
        return self.held + nbytes <= self.limit

    def is_safe(self, microbatch: int, nbytes: float) -> bool:
        """Whether all micro-batches can still get through after this one takes ``nbytes``."""
        if self.held + nbytes + self.most <= self.limit:
            return True
        rows = {number: (row.held, row.to_come) for number, row in self.open.items()}
        held, to_come = rows.get(microbatch, (0.0, self.needed[self.path_of[microbatch]]))
        rows[microbatch] = held + nbytes, to_come - nbytes
        for first, end in zip(self.unseen, self.end, strict=True):
            while first < end and (self.seen[first] or first == microbatch):
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

    def take(self, microbatch: int, nbytes: float) -> None:
        """Count an F."""
        path = self.path_of[microbatch]
        self.held += nbytes
        if not self.seen[microbatch]:
            self.seen[microbatch] = True
            self.open[microbatch] = _Open(0.0, self.needed[path], self.n_chunks[path])
            for k, end in enumerate(self.end):
                while self.unseen[k] < end and self.seen[self.unseen[k]]:
                    self.unseen[k] += 1
        row = self.open[microbatch]
        row.held += nbytes
        row.to_come -= nbytes

    def give(self, microbatch: int, nbytes: float, kept: float) -> None:
        """Count an I or a B, which gives back ``nbytes``, but for those ``kept`` for W."""
        self.held -= nbytes
        self.kept += kept
        row = self.open[microbatch]
        row.held -= nbytes
        row.backwards -= 1
        if not row.backwards:
            del self.open[microbatch]

    def release(self, kept: float) -> None:
        """Count a W."""
        self.kept -= kept
