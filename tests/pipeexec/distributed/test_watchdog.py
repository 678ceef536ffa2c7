"""Parts of the watchdog, over a store in one process: statuses, the first failure, the election."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pipeexec.distributed.store import StoreConnection
from pipeexec.distributed.watchdog import (
    Failure,
    Head,
    ReporterElection,
    SharedFailure,
    Status,
    StatusBoard,
    StepReporter,
    Watchdog,
)
from pipesim.errors import PeerError

HEAD = Head(1, "1F0", "stage 1, micro-batch 0", False, "0F0 of device 0")
STATUS = Status(1, 3, True, 7, [HEAD])


class LostStore:
    """Store whose process has ended."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Connection reset by peer\nin a line that no message repeats")


def boards(store: dist.Store) -> list[tuple[StatusBoard, StepReporter]]:
    """Return the boards and reporters of two processes."""
    reporters = [StepReporter(rank) for rank in range(2)]
    return [
        (StatusBoard(StoreConnection(store), rank, 2, reporter), reporter)
        for rank, reporter in enumerate(reporters)
    ]


def election(store: object, rank: int, holder: int | None, exited: list[int]) -> ReporterElection:
    connection = StoreConnection(store)  # type: ignore[arg-type]
    return ReporterElection(connection, rank, 3, holder, lambda: exited)


def test_statuses_reach_the_other_process() -> None:
    (first, _), (second, reporter) = boards(HashStore())
    first.publish()
    assert not first.read_all(), "rank 1 has published nothing yet"
    assert first.describe_last_status(1) == "last seen rank 1 at its start"
    reporter.start_step(lambda: STATUS, lambda rank: f"task of rank {rank}")
    second.publish()
    assert first.read_all()
    assert first.statuses == {0: Status(0, 0, False, 0, []), 1: STATUS}
    assert first.others_in_step()
    assert first.describe_others(0) == str(STATUS)
    assert first.describe_last_status(1) == f"last seen {STATUS}"
    assert first.describe_last_task(1) == f"last seen {STATUS}", "no step has begun in rank 0"
    assert second.describe_last_task(0) == "task of rank 0"
    ended = STATUS._replace(in_step=False)
    reporter.end_step(ended)
    assert reporter.read_status() == ended


def test_a_process_that_publishes_again_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), (second, _) = boards(HashStore())
    clock = [100.0]
    monkeypatch.setattr("pipeexec.devices.running_clock.time.monotonic", lambda: clock[0])
    for _ in range(16):
        clock[0] += 0.5
        first.publish()
        if clock[0] == 100.5:
            second.publish()
        assert first.read_all()
    clock[0] += 60.0  # a freeze, which counts as half a second
    assert first.silent_rank(8.0) == -1
    assert first.silent_rank(7.9) == 1, "rank 0 has published the same status again and again"


def test_final_statuses() -> None:
    (first, _), (second, reporter) = boards(HashStore())
    reporter.end_step(STATUS)
    second.publish_final_status(b"timeline")
    assert first.collect_final_statuses([0, 1], 0.05) == {1: b"timeline"}
    assert first.statuses == {1: STATUS}


def test_the_first_failure_counts_for_all() -> None:
    store = HashStore()
    first, second = (SharedFailure(StoreConnection(store)) for _ in range(2))
    failure = Failure("raised", 0, "rank 0 stopped")
    assert not second.read()
    assert first.post(failure) == failure
    assert second.post(Failure("late", 1, "rank 1 waited")) == second.first == failure
    third = SharedFailure(StoreConnection(store))
    assert third.read()
    assert third.first == failure


def test_without_a_store_each_process_has_its_own_failure() -> None:
    store = HashStore()
    connection = StoreConnection(store)
    SharedFailure(StoreConnection(store)).post(Failure("raised", 0, "rank 0 stopped"))
    connection.abandon()
    alone = SharedFailure(connection)
    failure = Failure("lost", -1, "the launcher was lost")
    assert alone.post(failure) == failure
    with pytest.raises(RuntimeError, match="the store does not answer"):
        connection.store.get("failure")


def test_an_abandoned_store_keeps_its_lock() -> None:
    """A thread may hold it for ever, in a call that does not return."""
    connection = StoreConnection(HashStore())
    with connection.lock:
        connection.abandon()
        assert connection.lock.acquire(blocking=False)


def test_one_process_is_elected_and_the_others_know_it() -> None:
    store = HashStore()
    elections = [election(store, rank, 0, []) for rank in range(3)]
    assert [elections[rank].elect() for rank in (2, 0, 1, 2)] == [True, False, False, True]
    elections[1].follow_election(threading.Event())
    assert not store.check(["confirmed/2"])
    assert store.check(["confirmed/1"])
    elections[2].release_others()
    assert store.check(["error_printed"])
    elections[0].wait_for_release(60.0)


@pytest.mark.parametrize(("holder", "elected"), [(None, 0), (0, 1), (1, 0)])
def test_an_election_without_a_store(holder: int | None, elected: int) -> None:
    """The lowest rank that does not hold the store, which was lost, is elected."""
    elections = [election(LostStore(), rank, holder, []) for rank in range(3)]
    assert [x.elect() for x in elections] == [rank == elected for rank in range(3)]


def test_an_election_known_before_the_store_was_lost() -> None:
    store = HashStore()
    assert election(store, 2, 0, []).elect()
    connection = StoreConnection(store)
    subject = ReporterElection(connection, 1, 3, 0, list)
    subject.follow_election(threading.Event())
    connection.abandon()
    assert not subject.elect(), "else rank 1 would be the lowest that does not hold the store"


def test_the_holder_of_the_store_waits_for_processes_that_live() -> None:
    """Not for one that has ended; and other processes than the holder do not wait at all."""
    store = HashStore()
    store.set("confirmed/1", "")
    start = time.monotonic()
    election(store, 0, 0, [2]).wait_until_confirmed(30.0)
    election(store, 1, 0, []).wait_until_confirmed(30.0)
    assert time.monotonic() - start < 20.0


@pytest.mark.parametrize(
    ("holder", "failure"),
    [
        (None, (-1, "the launcher, which held the store, was lost: Connection reset by peer")),
        (1, (1, "rank 1, which held the store, was lost; last seen rank 1 at its start")),
    ],
)
def test_a_lost_store(holder: int | None, failure: tuple[int, str]) -> None:
    subject = Watchdog(HashStore(), 0, 2, 60.0, StepReporter(0), list, holder=holder)
    subject.close()
    subject.report_lost_store(RuntimeError("Connection reset by peer\nin a second line"))
    assert subject.failure == Failure("lost", *failure)
    with pytest.raises(PeerError, match="held the store, was lost"):
        subject.check()


def test_sigterm_names_a_process_that_has_ended() -> None:
    """A launcher sends SIGTERM to the others when one has failed."""
    exited: list[int] = []
    subject = Watchdog(HashStore(), 0, 2, 60.0, StepReporter(0), lambda: exited)
    subject.close()
    exited.append(1)
    subject.report_sigterm()
    expected = "rank 1 was lost; last seen rank 1 at its start"
    assert subject.failure == Failure("lost", 1, expected)


def test_sigterm_alone() -> None:
    subject = Watchdog(HashStore(), 0, 2, 60.0, StepReporter(0), list)
    subject.close()
    subject.report_sigterm()
    message = "rank 0 received SIGTERM: rank 0 between steps (0 ended)"
    assert subject.failure == Failure("ended", 0, message)


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a freeze of this process the watchdog may not have asked it yet."""
    monkeypatch.setattr(Watchdog, "_run", lambda watchdog: None)
    clock = [100.0]
    monkeypatch.setattr("pipeexec.devices.running_clock.time.monotonic", lambda: clock[0])
    watchdog = Watchdog(HashStore(), 0, 2, 5.0, StepReporter(0), list, holder=1)
    watchdog.check_store()
    clock[0] += 60.0
    watchdog.check_store()
    assert watchdog.failure is None
    for _ in range(70):
        clock[0] += 0.1
        watchdog.check_store()
    assert watchdog.failure is not None
    assert watchdog.failure.message.startswith("rank 1, which held the store, was lost; ")


def test_a_process_that_never_enters_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named after the timeout, and not rank 0, which waits for it in a reduction."""
    monkeypatch.setattr(Watchdog, "_run", lambda watchdog: None)  # this test sets the time
    clock = [100.0]
    monkeypatch.setattr("pipeexec.devices.running_clock.time.monotonic", lambda: clock[0])
    watchdog = Watchdog(HashStore(), 0, 2, 5.0, StepReporter(0), list)
    waits = Head(0, "0REDUCE_GRAD", "stage 0", True, "")
    watchdog.board.statuses |= {0: Status(0, 1, True, 3, [waits]), 1: Status(1, 1, False, 3, [])}
    for look in range(25):  # 4.8 s
        clock[0] = 100.0 + 0.2 * look
        watchdog._check_progress()
        assert watchdog.failure is None
    clock[0] += 60.0  # a freeze, which counts as half a second
    watchdog._check_progress()
    assert watchdog.failure is not None
    assert watchdog.failure.kind == "stalled"
    assert watchdog.failure.message.startswith("rank 1 does not come to step 1: it is still ")
