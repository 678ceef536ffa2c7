"""Streams and events: CUDA's meaning, kept by worker threads and by streams without a thread."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from small_pipelines import call_within

from pipeexec.devices.streams import CallerStream, CpuEvent, CpuStream, Event, InlineStream, Stream

#: Long compared with a hand-over, so that a consumer that does not wait is detected.
NAP = 0.05


@pytest.fixture
def make() -> Iterator[Callable[[str], Stream]]:
    """Make streams, and end them after the test."""
    streams: list[Stream] = []

    def stream(kind: str) -> Stream:
        streams.append(CpuStream(f"worker {len(streams)}") if kind == "worker" else InlineStream())
        return streams[-1]

    yield stream
    for item in streams:
        call_within(5, item.close)


KINDS = ("worker", "inline")
PAIRS = [(a, b) for a in KINDS for b in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_runs_its_work_in_order(kind: str, make: Callable[[str], Stream]) -> None:
    """Though an earlier piece sleeps."""
    stream, ran = make(kind), []

    def work(number: int) -> None:
        time.sleep(NAP if number == 0 else 0)
        ran.append(number)

    for number in range(20):
        stream.submit(lambda number=number: work(number))
    call_within(10, stream.synchronize)
    assert ran == list(range(20))


def test_a_worker_runs_beside_its_caller(make: Callable[[str], Stream]) -> None:
    """``submit`` returns at once: work that waits for the caller would block for ever otherwise."""
    stream, gate, threads = make("worker"), threading.Event(), []
    stream.submit(gate.wait)
    stream.submit(lambda: threads.append(threading.current_thread().name))
    assert threads == []
    gate.set()
    call_within(10, stream.synchronize)
    assert threads == ["worker 0"]


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_a_consumer_sees_what_a_sleeping_producer_made(
    producer: str, consumer: str, make: Callable[[str], Stream]
) -> None:
    """An inline producer is blocked by a sleeping worker: it has no thread to sleep in."""
    source, target, value, copies = make(producer), make(consumer), [], []
    if producer == "inline":
        blocker = make("worker")
        blocker.submit(lambda: time.sleep(NAP))
        source.wait_event(blocker.record())
    else:
        source.submit(lambda: time.sleep(NAP))
    source.submit(lambda: value.append("made"))
    target.wait_event(source.record())
    target.submit(lambda: copies.extend(value or ["too early"]))
    call_within(10, target.synchronize)
    assert copies == ["made"]


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_only_what_comes_after_a_wait_waits(
    producer: str, consumer: str, make: Callable[[str], Stream]
) -> None:
    source, target, gate, order = make(producer), make(consumer), make("worker"), []
    opened = threading.Event()
    gate.submit(opened.wait)
    source.wait_event(gate.record())
    event = source.record()
    target.submit(lambda: order.append("before"))
    reached = target.record()
    target.wait_event(event)
    target.submit(lambda: order.append("after"))
    probe = make("worker")
    probe.wait_event(reached)
    call_within(10, probe.synchronize)
    assert order == ["before"]
    opened.set()
    call_within(10, target.synchronize)
    assert order == ["before", "after"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_that_has_passed_stops_nobody(kind: str, make: Callable[[str], Stream]) -> None:
    stream, event, results = make(kind), CpuEvent(), []
    event.set()
    stream.wait_event(event)
    stream.submit(lambda: results.append(1))
    call_within(10, stream.synchronize)
    assert results == [1]


def test_events_tell_the_seconds_between_them(make: Callable[[str], Stream]) -> None:
    stream = make("worker")
    base = stream.record()
    stream.submit(lambda: time.sleep(NAP))
    end = stream.record()
    call_within(10, stream.synchronize)
    assert end.seconds_since(base) >= NAP
    assert base.seconds_since(end) == -end.seconds_since(base)
    assert base.seconds_since(base) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_surfaces_when_the_caller_synchronizes(
    kind: str, make: Callable[[str], Stream]
) -> None:
    """The first error is raised; later work ran, and the stream stays usable."""
    stream, ran = make(kind), []
    first, second = ValueError("first"), ValueError("second")

    def fail(error: Exception) -> None:
        raise error

    stream.submit(lambda: fail(first))
    stream.submit(lambda: fail(second))
    stream.submit(lambda: ran.append(1))
    with pytest.raises(ValueError, match="first") as caught:
        call_within(10, stream.synchronize)
    assert caught.value is first
    assert ran == [1]
    call_within(10, stream.synchronize)
    stream.submit(lambda: ran.append(2))
    call_within(10, stream.synchronize)
    assert ran == [1, 2]


def test_an_inline_stream_runs_in_the_thread_that_makes_it_ready(
    make: Callable[[str], Stream],
) -> None:
    worker, inline, ran = make("worker"), make("inline"), []

    def note() -> None:
        ran.append(threading.current_thread().name)

    inline.submit(note)
    assert ran == [threading.current_thread().name]
    gate = threading.Event()
    worker.submit(gate.wait)
    inline.wait_event(worker.record())
    inline.submit(note)
    assert len(ran) == 1
    gate.set()
    call_within(10, inline.synchronize)
    assert ran[1] == "worker 0"


def test_an_inline_stream_asks_once_for_what_blocks_it(make: Callable[[str], Stream]) -> None:
    """Else each further piece of work adds a call, carried on from one blocker to the next."""
    inline, blockers, ran = make("inline"), [CpuEvent() for _ in range(3)], []
    for blocker in blockers:
        inline.wait_event(blocker)
        for _ in range(50):
            inline.submit(lambda: ran.append(1))
    for blocker in blockers:
        assert len(blocker._callbacks) <= 1
        blocker.set()
    assert len(ran) == 150


def test_work_given_by_work_runs_after_it(make: Callable[[str], Stream]) -> None:
    """An inline stream that is being run takes more without running it inside of itself."""
    inline, ran = make("inline"), []

    def outer() -> None:
        inline.submit(lambda: ran.append("inner"))
        ran.append("outer")

    inline.submit(outer)
    assert ran == ["outer", "inner"]


@pytest.fixture
def _switching() -> Iterator[None]:
    """Let threads take turns as often as they can, so that races happen."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("seed", range(6))
def test_no_wake_up_is_lost(seed: int, make: Callable[[str], Stream]) -> None:
    """Streams of both kinds that wait for each other all the time come to an end, in order."""
    draw, lazy = random.Random(seed), random.Random(seed)
    streams = [make(draw.choice(KINDS)) for _ in range(6)]
    done: set[int] = set()
    wrong: list[tuple[int, int]] = []
    queues: list[list[int]] = [[] for _ in streams]
    events = []

    def work(item: int, needed: list[int], own: list[int]) -> None:
        wrong.extend((item, other) for other in needed if other not in done)
        if lazy.random() < 0.01:
            time.sleep(1e-4)
        own.append(item)
        done.add(item)

    for item in range(1500):
        number = draw.randrange(len(streams))
        recent = range(max(0, item - 12), item)
        needed = draw.sample(recent, min(len(recent), draw.randrange(4)))
        for other in needed:
            streams[number].wait_event(events[other])
        streams[number].submit(
            lambda item=item, needed=needed, own=queues[number]: work(item, needed, own)
        )
        events.append(streams[number].record())
    for stream in streams:
        call_within(30, stream.synchronize)
    assert wrong == []
    assert done == set(range(1500))
    assert all(queue == sorted(queue) for queue in queues)


@pytest.mark.usefixtures("_switching")
def test_an_event_that_passes_while_it_is_waited_for(make: Callable[[str], Stream]) -> None:
    """The waiter asks, and the event passes, at the same moment, over and over."""
    first, second, inline = make("worker"), make("worker"), make("inline")
    count = []
    for _ in range(2000):
        event = first.record()
        second.wait_event(event)
        inline.wait_event(event)
        inline.submit(lambda: count.append(1))
        first.wait_event(second.record())
    for stream in (first, second, inline):
        call_within(30, stream.synchronize)
    assert len(count) == 2000


def run_between(stream: Stream, work: Callable[[], object], *events: Event) -> tuple[Event, Event]:
    """Run work on a stream; return the events before and after it."""
    starts: list[Event] = []
    end = stream.run(work, events, starts.append)
    return starts[0], end


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_work_is_run_between_its_events(
    first: str, second: str, make: Callable[[str], Stream]
) -> None:
    """Work starts after slow dependencies too; work that follows an error runs."""
    one, other, ran = make(first), make(second), []
    slow = run_between(one, lambda: (time.sleep(NAP), ran.append("slow")))
    began, ended = run_between(other, lambda: ran.append("behind"), slow[1])
    call_within(10, other.synchronize)
    assert ran == ["slow", "behind"]
    assert slow[1].seconds_since(slow[0]) >= NAP
    assert began.seconds_since(slow[1]) >= 0 <= ended.seconds_since(began)
    failed = run_between(other, lambda: 1 / 0)
    after = run_between(other, lambda: ran.append("after"), failed[1])
    assert after[1].wait(10)
    with pytest.raises(ZeroDivisionError):
        other.synchronize()
    assert ran[2:] == ["after"]


def test_a_stream_that_is_its_caller_waits_for_what_work_needs(
    make: Callable[[str], Stream],
) -> None:
    """The caller waits, and then does the work; who asks knows that it has starts."""
    _, slow = run_between(make("worker"), lambda: time.sleep(NAP))
    starts: list[Event] = []
    end = CallerStream().run(lambda: starts.append(starts[0]), [slow], starts.append)
    assert 0 <= starts[1].seconds_since(slow) <= end.seconds_since(slow)


def test_work_that_comes_as_a_stream_stops_running_is_run() -> None:
    """The worst moment: the runner has looked for the last time, but has not yet set its flag."""
    inline, ran = InlineStream(), []
    drain = inline._drain
    late = [lambda: ran.append("late")]

    def drain_and_then_some() -> None:
        drain()
        if late:
            inline.submit(late.pop())

    inline._drain = drain_and_then_some
    inline.submit(lambda: ran.append("first"))
    assert ran == ["first", "late"]


def test_an_event_that_passes_as_it_is_asked_says_so() -> None:
    """The worst moment: it has not passed at the first look, and has before the lock is had."""

    class LateLock:
        def __enter__(self) -> None:
            event._lock = threading.Lock()
            event.set()

        def __exit__(self, *_: object) -> None:
            pass

    event, calls = CpuEvent(), []
    event._lock = LateLock()
    assert event.add_callback(lambda: calls.append(1)) is False
    assert calls == []


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_closing_runs_what_was_given_and_ends_the_thread() -> None:
    stream, ran = CpuStream("closing"), []
    stream.submit(lambda: time.sleep(NAP))
    stream.submit(lambda: ran.append(1))
    call_within(10, stream.close)
    assert ran == [1]
    assert threads("closing") == []
    call_within(10, stream.close)


def test_a_forgotten_stream_ends_its_thread() -> None:
    stream = CpuStream("forgotten")
    stream.synchronize()
    (thread,) = threads("forgotten")
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_idle_worker_keeps_nothing_alive() -> None:
    """The last piece of work holds tensors; they go when it is done."""

    class Kept:
        pass

    kept, freed = Kept(), threading.Event()
    weakref.finalize(kept, freed.set)
    stream = CpuStream("idle")
    stream.submit(lambda kept=kept: None)
    del kept
    assert freed.wait(10)
    stream.close()


def test_a_worker_prepares_in_its_own_thread() -> None:
    order = []
    stream = CpuStream("prepared", lambda: order.append(threading.current_thread().name))
    stream.submit(lambda: order.append("work"))
    call_within(10, stream.synchronize)
    stream.close()
    assert order == ["prepared", "work"]
