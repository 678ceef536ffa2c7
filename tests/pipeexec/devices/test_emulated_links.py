"""Imposed links: what is copied, and how long the GPU is told to wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_pipelines import assert_same, call_within, cut, data, dense, mse, unsplit
from torch import Tensor

import pipeexec as px
import pipesim as ps
from pipeexec.devices import transfer
from pipeexec.devices.device import Values
from pipeexec.devices.emulated_links import CycleTimer, EmulatedLinks, TimedMessage, make_timer
from pipeexec.devices.gpu_kernels import load_kernels
from pipeexec.devices.make_devices import CpuDevice
from pipeexec.devices.streams import InlineStream
from pipesim.errors import AccuracyWarning, ArgumentError


class Listed:
    """Waits for nothing, and lists what it was asked for."""

    description = "listed"

    def __init__(self) -> None:
        self.noted: list[Tensor] = []
        self.requests: list[tuple[Tensor | None, float]] = []

    def timestamp(self) -> Tensor:
        self.noted.append(torch.tensor([len(self.noted)]))
        return self.noted[-1]

    def wait_until(self, noted: Tensor | None, seconds: float) -> None:
        self.requests.append((noted, seconds))


class Linked(CpuDevice):
    """A CPU worker whose messages take an imposed link, as those of a slice."""

    def __init__(self, index: int, links: EmulatedLinks) -> None:
        super().__init__(index)
        self.index, self.links = index, links

    def await_link(self, values: Values) -> None:
        assert isinstance(values, TimedMessage)
        self.links.await_arrival(values)


NETWORK = ps.Network(latency=3e-6, bandwidth=2e9)


def test_a_message_is_copied_and_waits() -> None:
    """16 KB at 2 GB/s from its start, then the latency from its end."""
    waits = Listed()
    links = EmulatedLinks(NETWORK, 2, waits)
    values = torch.arange(4096.0), None
    message = links.carry(values, 0, 1)
    assert torch.equal(message[0], values[0])
    assert message[0].data_ptr() != values[0].data_ptr()
    assert message[1] is None
    began, ended = waits.noted
    assert waits.requests == [(began, 4 * 4096 / 2e9)]
    assert message.sent is ended
    links.await_arrival(message)
    assert waits.requests[1:] == [(ended, 3e-6)]


def test_pure_latency_holds_nothing() -> None:
    """Endless bandwidth: the copy is made, no SEND waits; nor does a RECV without latency."""
    waits = Listed()
    links = EmulatedLinks(ps.Network(latency=1e-5, bandwidth=math.inf), 2, waits)
    message = links.carry((torch.ones(1000),), 1, 0)
    assert waits.requests == []
    links.await_arrival(message)
    assert [seconds for _, seconds in waits.requests] == [1e-5]
    EmulatedLinks(ps.Network(bandwidth=1e9), 2, waits).await_arrival(TimedMessage((), None, 0.0))
    assert len(waits.requests) == 1


def test_copies_to_a_peer_hold_stream_and_link() -> None:
    """For latency and bytes / bandwidth of all tensors together, in both directions."""
    slow = ps.Network(3e-6, 2e9, links=[ps.Link(5e-6, 1e9, ((1, 0),))])
    waits = Listed()
    first, second = (Linked(k, EmulatedLinks(slow, 2, waits)) for k in range(2))
    second.links = first.links
    values = [torch.arange(100.0), torch.ones(25)]
    copies = first.to_peer(values, second)
    again = first.from_peer(copies, second)
    for value, copy, back in zip(values, copies, again, strict=True):
        assert torch.equal(value, back)
        assert len({x.data_ptr() for x in (value, copy, back)}) == 3
    start, later = waits.noted
    assert waits.requests == [(start, 3e-6 + 500 / 2e9), (later, 5e-6 + 500 / 1e9)]


def test_each_pair_has_its_own_link() -> None:
    slow = ps.Network(1e-6, 1e9, links=[ps.Link(5e-6, 1e8, ((0, 1),))])
    waits = Listed()
    links = EmulatedLinks(slow, 3, waits)
    for source, target in ((0, 1), (1, 0), (2, 1)):
        links.await_arrival(links.carry((torch.ones(25, dtype=torch.float32),), source, target))
    assert [seconds for _, seconds in waits.requests] == [1e-6, 5e-6, 1e-7, 1e-6, 1e-7, 1e-6]


def test_messages_on_one_link_go_in_the_order_in_which_they_ask() -> None:
    """Rule 8: threads that ask while another one has the link, with 1 to 4 values each."""
    gate, carried = threading.Event(), list[float]()

    class Gated(Listed):
        def wait_until(self, noted: Tensor | None, seconds: float) -> None:
            carried.append(seconds)
            gate.wait(10)

    links = EmulatedLinks(NETWORK, 2, Gated(), has_threads=True)
    queue = links._locks[0, 1]._queue

    def send(n: int) -> None:
        links.carry((torch.ones(n),), 0, 1)

    threads = [threading.Thread(target=send, args=(n,), daemon=True) for n in range(1, 5)]
    for n_asked, thread in enumerate(threads, 1):
        thread.start()
        while len(queue) < n_asked:
            time.sleep(1e-3)
    gate.set()
    call_within(10, lambda: [thread.join() for thread in threads])
    assert carried == [n * 4 / 2e9 for n in range(1, 5)]


@pytest.mark.parametrize(
    "network",
    [
        ps.Network(links=[ps.Link(0.0, 1e9, ((0, 1), (0, 2)))]),
        ps.Network.preset("dgx_h100"),
    ],
)
def test_shared_links_are_refused(network: ps.Network) -> None:
    with pytest.raises(ArgumentError, match="each pair of devices a link of its own"):
        EmulatedLinks(network, 3, Listed())


def test_a_pipeline_over_imposed_links_computes_the_same() -> None:
    """Each message waits once on each end; gradients are to the last bit the unsplit model's."""
    stages, whole = cut(dense(3), [1, 1, 1]), cut(dense(3), [1, 1, 1])
    graph = ps.lower(ps.schedule("1f1b", n_devices=3, n_microbatches=4))
    waits = Listed()
    links = EmulatedLinks(NETWORK, 3, waits)
    inputs, targets = data(8)
    loss = unsplit(whole, graph, inputs, targets)
    with px.Pipeline(stages, graph, [Linked(i, links) for i in range(3)], mse) as subject:
        result = subject.step(inputs, targets)
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)
    n_messages = 2 * 2 * 4
    assert len(waits.noted) == 2 * n_messages
    seconds = [s for _, s in waits.requests]
    assert sorted(seconds) == sorted([3e-6] * n_messages + [2 * 16 * 4 / 2e9] * n_messages)


def test_without_links_messages_are_handed_over() -> None:
    """By reference, on one memory."""
    device, stream = CpuDevice(0), InlineStream()
    value = torch.ones(3)
    sent = transfer.send((value, None), device, stream, CpuDevice(1))
    assert sent[0] is value
    assert transfer.receive(sent, device, stream) is sent


@pytest.fixture
def _loads_anew() -> Iterator[None]:
    """Forget the kernels of every GPU, before and after."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.usefixtures("_loads_anew")
def test_waits_by_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel notes the time; another one spins until so many micro- and nanoseconds after it."""
    launched: list[tuple[str, list[Any]]] = []
    loaded: list[str] = []

    def load(ptx: str, names: list[str]) -> dict[str, Any]:
        loaded.append(ptx)
        return {name: lambda args, name=name: launched.append((name, args)) for name in names}

    monkeypatch.setattr(torch.cuda, "device", lambda _: Listening())
    monkeypatch.setattr("torch.cuda._utils._cuda_load_module", load)
    waits = make_timer(torch.device("cpu"))
    noted = waits.timestamp()
    waits.wait_until(noted, 2.5000015)
    waits.wait_until(noted, 7e-9)
    assert launched == [
        ("pipeexec_note", [noted]),
        ("pipeexec_wait", [noted, 2_500_001, 500]),
        ("pipeexec_wait", [noted, 0, 7]),
    ]
    assert noted is not None
    assert noted.dtype is torch.int64
    make_timer(torch.device("cpu"))
    assert len(loaded) == 1  # once a GPU


@pytest.mark.usefixtures("_loads_anew")
def test_without_the_kernels_waits_count_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of three runs calibrates them; a warning says that they are added to copies."""
    slept: list[int] = []
    times = iter([80.0, 50.0, 60.0])  # ms

    def missing(*_: object, **__: object) -> None:
        raise OSError("no libcuda.so")

    class Timer(SimpleNamespace):
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, other: Any) -> float:
            return next(times)

    monkeypatch.setattr(torch.cuda, "device", lambda _: Listening())
    monkeypatch.setattr("pipeexec.devices.gpu_kernels.torch.empty", missing)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Timer())
    with pytest.warns(AccuracyWarning, match=r"no libcuda.so.*added to those of the copies"):
        waits = make_timer(torch.device("cuda:0"))
    waits.wait_until(waits.timestamp(), 1e-3)
    assert slept == [CycleTimer.CYCLES] * 3 + [CycleTimer.CYCLES // 50]


class Listening:
    """A context that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
