"""`Watch`: a thread that notices when a step gets nowhere, and says who waits for whom.

Every process tells the shared store, several times a second, what its devices are in, and reads
what the others say. The first failure, whoever posts it, is everyone's: an exception in a stage, a
lost connection, no progress anywhere for as long as the timeout, a process without a sign of life.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.errors import PeerError
from pipesim.ops import COLLECTIVES, TRANSFERS, Action

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Failure", "Head", "Status", "Watch"]

#: Seconds between two looks; more where there are many processes, which all read each other.
_TICK = 0.2
#: Seconds that a process waits for the others' last words, or that they know of a failure.
_LAST_WORDS = 2.0


class Head(NamedTuple):
    """What a device is at.

    Attributes
    ----------
    device
        Its number.
    task
        The first task of its compute stream that has not ended, or of its messages.
    place
        Stage and micro-batch of the task, as text.
    running
        Whether the task has begun.
    waits_for
        Where it has not: what it waits for, as text.
    """

    device: int
    task: str
    place: str
    running: bool
    waits_for: str

    def __str__(self) -> str:
        if self.running:
            return f"device {self.device} in {self.task} ({self.place})"
        waiting = f", waiting for {self.waits_for}" if self.waits_for else ""
        return f"device {self.device} before {self.task} ({self.place}){waiting}"


class Status(NamedTuple):
    """What a process says of itself: its step, how many tasks have ended, its devices' heads."""

    rank: int
    step: int
    in_step: bool
    n_ended: int
    heads: list[Head]

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        """Return the status that was written."""
        rank, step, in_step, n_ended, heads = json.loads(text)
        return cls(rank, step, in_step, n_ended, [Head(*head) for head in heads])

    def __str__(self) -> str:
        if not self.in_step:
            return f"rank {self.rank} between steps ({self.step} ended)"
        heads = "; ".join(map(str, self.heads)) or "no task to do"
        return f"rank {self.rank} in step {self.step}: {heads}"


class Failure(NamedTuple):
    """What stopped everything: what happened, and the rank where (-1: nowhere).

    ``kind`` is ``"raised"``, ``"lost"``, ``"stalled"``, ``"silent"``, ``"late"`` or
    ``"ended"``.
    """

    kind: str
    rank: int
    message: str


class Watch:
    """Tells the other processes how this one fares, and learns how they do.

    Parameters
    ----------
    store
        A connection of its own to the shared store.
    rank, n_ranks
        Of this process.
    timeout
        Seconds without progress after which a step has failed.
    holder
        The rank whose process holds the store; None if it is the launcher.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        n_ranks: int,
        timeout: float,
        *,
        holder: int | None = None,
    ) -> None:
        self.store: Any = store
        self.rank, self.n_ranks, self.timeout = rank, n_ranks, timeout
        self.holder = holder
        self.status: Callable[[], Status] = lambda: Status(rank, 0, False, 0, [])
        self.failure: Failure | None = None
        self.statuses: dict[int, Status] = {}
        #: Which processes have surely ended; what else is known of one that does not answer.
        self.gone: Callable[[], list[int]] = list
        self.last_of: Callable[[int], str] = self.last_seen
        self.leaving = False  # whether the others may end
        self._looked = time.monotonic()
        self._speaker = -1
        self._seen: dict[int, tuple[bytes, float]] = {}  # last words of each rank, and when
        self._progress: tuple[Any, float] = None, time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._tick = max(_TICK, 0.01 * n_ranks)
        self._n_beats = 0
        self._thread = threading.Thread(target=self._run, name="pipeexec watch", daemon=True)
        self._beat()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_LAST_WORDS)  # a store that does not answer has the thread

    def _run(self) -> None:
        while not self._closed.wait(self._tick):
            try:
                self._look()
            except RuntimeError as error:  # the store is gone, and its process with it
                self._learn(self._without_store(error))
            except Exception as error:  # a watch that ends without a word would seem a lost process
                text = f"the watch of rank {self.rank} failed: {type(error).__name__}: {error}"
                self.post(Failure("raised", self.rank, text))
            if self.failure is not None:
                self._learn_speaker()
                return

    def _learn_speaker(self) -> None:
        """Note who tells the user, whose process may take the store with it."""
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(0.05):
                with self._lock:
                    if self.store.check(["speaker"]):
                        self._speaker = int(self.store.get("speaker"))
                        self.store.set(f"heard/{self.rank}", "")
                        return

    def wait_until_heard(self) -> None:
        """Block, where this process holds the store, until all others know what failed."""
        end = time.monotonic() + (_LAST_WORDS if self.holder == self.rank else 0.0)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                others = set(range(self.n_ranks)) - {self.rank, *self.gone()}
                with self._lock:
                    if not others or self.store.check([f"heard/{rank}" for rank in others]):
                        return
                time.sleep(0.02)

    def _without_store(self, error: RuntimeError) -> Failure:
        """Return the failure of whoever held the store."""
        if self.holder is None:
            first = str(error).splitlines()[0]
            return Failure("lost", -1, f"the launcher, which held the store, was lost: {first}")
        text = f"rank {self.holder}, which held the store, was lost; {self.last_of(self.holder)}"
        return Failure("lost", self.holder, text)

    def last_seen(self, rank: int) -> str:
        """Return what a process last said."""
        return f"last seen {self.statuses.get(rank) or f'rank {rank} at its start'}"

    def lose_store(self, error: RuntimeError) -> None:
        """Note that the store is gone, unless something has failed before."""
        self._learn(self._without_store(error))

    def look_after_store(self) -> None:
        """Do without the store if it has not answered for too long: its process may be stopped."""
        if self.failure is None and time.monotonic() - self._looked > self.timeout + 2.0:
            # A call that waits for it has the lock, and will not give it back.
            self.store, self._lock = _Silent(), threading.Lock()
            self.lose_store(RuntimeError(f"it has not answered for {self.timeout:g} s"))

    def _beat(self) -> None:
        """Say what this process is at."""
        status = self.status()
        self.statuses[self.rank] = status
        self._n_beats += 1
        self.store.set(f"beat/{self.rank}", json.dumps([self._n_beats, status]))

    def lost(self) -> int:
        """Return a process that has surely ended, too early; -1 where there is none."""
        return -1 if self.leaving else next(iter(self.gone()), -1)

    def _look(self) -> None:
        lost = self.lost()  # before the failure is read that it may have posted
        with self._lock:
            self._beat()
            failed = self.store.check(["failure"])
            self._looked = time.monotonic()
            if failed:
                self._learn(Failure(*json.loads(self.store.get("failure"))))
                return
            names = [f"beat/{rank}" for rank in range(self.n_ranks)]
            if not self.store.check(names):
                return  # some are still to come
            now = time.monotonic()
            for rank, text in enumerate(self.store.multi_get(names)):
                if self._seen.get(rank, (b"", now))[0] != text:
                    self._seen[rank] = text, now
                    self.statuses[rank] = Status.from_json(json.dumps(json.loads(text)[1]).encode())
        if lost >= 0:
            self.post(self._lost(lost))
        else:
            self._judge(now)

    def others_in_step(self) -> bool:
        """Return whether another process was in a step when it last said something."""
        return any(s.in_step for rank, s in list(self.statuses.items()) if rank != self.rank)

    def lost_text(self, rank: int) -> str:
        """Return that a process was lost, and what is known of it."""
        return f"rank {rank} was lost; {self.last_of(rank)}"

    def _lost(self, rank: int) -> Failure:
        return Failure("lost", rank, self.lost_text(rank))

    def _judge(self, now: float) -> None:
        """Post a failure if a process is silent, or nothing has moved anywhere."""
        silent = [r for r, (_, seen) in self._seen.items() if now - seen > self.timeout]
        if silent:
            rank = silent[0]
            text = f"rank {rank} has given no sign of life for {self.timeout:g} s"
            self.post(Failure("silent", rank, f"{text}; {self.last_of(rank)}"))
            return
        everyone = [self.statuses[rank] for rank in range(self.n_ranks)]
        progress = [(s.step, s.in_step, s.n_ended) for s in everyone]
        if progress != self._progress[0] or not any(s.in_step for s in everyone):
            self._progress = progress, now
        elif now - self._progress[1] > self.timeout:
            self.post(stalled(everyone, self.timeout))

    def post(self, failure: Failure) -> Failure:
        """Make a failure everyone's, unless there is one; return the one that counts."""
        with self._lock:
            try:
                text = json.dumps(failure)
                failure = Failure(*json.loads(self.store.compare_set("failure", "", text)))
            except RuntimeError:  # without a store everyone is alone with what they know
                pass
        self._learn(failure)
        assert self.failure is not None
        return self.failure

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure

    def wait_for_failure(self) -> None:
        """Block until something has failed anywhere, for a little while."""
        end = time.monotonic() + _LAST_WORDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)

    def check(self) -> None:
        """Raise `PeerError` if something has failed anywhere."""
        if self.failure is not None:
            raise PeerError(self.explain())

    def say_last(self, timeline: bytes = b"") -> None:
        """Leave this process's last status, and what it measured, for the others."""
        with self._lock:
            status = self.status()
            self.statuses[self.rank] = status
            try:
                self.store.set(f"part/{self.rank}", timeline)
                self.store.set(f"last/{self.rank}", json.dumps(status))
            except RuntimeError:
                return

    def collect(self) -> dict[int, bytes]:
        """Return what each process that still answers has measured; wait a little for them."""
        parts: dict[int, bytes] = {}
        end = time.monotonic() + _LAST_WORDS
        lost = self.failure.rank if self.failure and self.failure.kind in ("lost", "silent") else -1
        missing = set(range(self.n_ranks)) - {lost}
        with self._lock:
            try:
                while missing and time.monotonic() < end:
                    for rank in sorted(missing):
                        if self.store.check([f"last/{rank}"]):
                            self.statuses[rank] = Status.from_json(self.store.get(f"last/{rank}"))
                            parts[rank] = bytes(self.store.get(f"part/{rank}"))
                            missing.discard(rank)
                    time.sleep(0.01)
            except RuntimeError:
                return parts
        return parts

    def told_to_end(self) -> None:
        """Note that this process was told to end, as a launcher does when another has failed."""
        if self.failure is None and (lost := self.lost()) >= 0:
            self.post(self._lost(lost))
        if self.failure is None:
            message = f"rank {self.rank} was told to end (SIGTERM): {self.status()}"
            self.post(Failure("ended", self.rank, message))

    def speaks(self) -> bool:
        """Return whether this process is the one that tells the user what failed."""
        try:
            with self._lock:
                chosen = self.store.compare_set("speaker", "", str(self.rank))
            return int(chosen) == self.rank
        except RuntimeError:
            if self._speaker >= 0:
                return self._speaker == self.rank
            # Nobody can be asked: the first that may be there.
            return self.rank == (0 if self.holder is None else min({0, 1} - {self.holder}))

    def has_spoken(self) -> None:
        """Let the other processes leave."""
        with contextlib.suppress(RuntimeError), self._lock:
            self.store.set("spoken", "")

    def wait_until_spoken(self, seconds: float) -> None:
        """Block until the user was told what failed, for so long at most."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                with self._lock:
                    if self.store.check(["spoken"]):
                        return
                time.sleep(0.02)

    def explain(self) -> str:
        """Return what failed, and what everyone else was at."""
        assert self.failure is not None
        others = [str(s) for r, s in sorted(self.statuses.items()) if r != self.failure.rank]
        return self.failure.message + (f"; meanwhile {'; '.join(others)}" if others else "")


class _Silent:
    """Stands for a store that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store does not answer")


def stalled(everyone: list[Status], timeout: float) -> Failure:
    """Return the failure of a step in which nothing moves, naming who holds it up.

    A task that has begun and does not end is the culprit; else a process that is not in the step;
    else a collective, of which nobody knows which member holds it up; else nobody in particular:
    what devices wait for is told beside it.
    """
    step = max(s.step for s in everyone)
    begun = [
        (Action.parse(head.task).op, status, head)
        for status in everyone
        for head in status.heads
        if status.in_step and head.running
    ]
    # Those that do not wait for another process, and then, if nobody is away, those that do.
    running = [x for x in begun if x[0] not in TRANSFERS | COLLECTIVES]
    together = [x for x in begun if x[0] in COLLECTIVES]
    if running or (together and all(status.in_step for status in everyone)):
        _, status, head = (running or together)[0]
        return Failure(
            "stalled",
            status.rank,
            f"{head.task} hangs (rank {status.rank}, device {head.device}, {head.place}, "
            f"step {status.step}): no task has ended for {timeout:g} s",
        )
    for status in everyone:
        if not status.in_step:
            return Failure(
                "stalled",
                status.rank,
                f"rank {status.rank} does not come to step {step}: it is still {status}, for "
                f"{timeout:g} s",
            )
    return Failure("stalled", -1, f"nothing has moved for {timeout:g} s in step {step}")
