"""`GPipe(streams=...)` and `GPipe(hosts=...)`: streams and hosts as torchgpipe has them."""

from __future__ import annotations

import copy
import random
import threading
import time
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from gpipe_models import CPUS, batch, check_same, dense, plain_step, sequential, step
from small_pipelines import Faulty, Nap, assert_order_respected
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.streams import CpuStream, Work
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.ops import Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
BOTH: dict[str, Any] = {"streams": "per_microbatch", "hosts": "per_device"}


@pytest.mark.parametrize(
    "options",
    [BOTH, {"streams": "single"}, {"hosts": "per_device", "dependencies": False},
     {"hosts": "per_device", "copy_streams": False, "portals": False}],
)  # fmt: skip
def test_they_change_nothing_but_time(options: dict[str, Any]) -> None:
    """Outputs and gradients are the module's, and the order is the graph's; skips included."""
    plain = sequential("skips")
    model = px.GPipe(copy.deepcopy(plain), [1, 4, 2, 1], devices=CPUS, chunks=4, **options)
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    assert torch.equal(step(model, x), plain_step(plain, y, 4))
    check_same(model, plain)
    torch.testing.assert_close(x.grad, y.grad)
    timeline = model.timeline()
    assert timeline.complete
    assert_order_respected(timeline)


def test_a_microbatch_has_its_own_streams_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of two micro-batches are on two streams of each GPU; a thread a GPU issues."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    names: set[str] = set()

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            names.add(threading.current_thread().name)
            return super().forward(x)

    plain = nn.Sequential(Noted(6, 6), Noted(6, 6))
    devices = [FakeGpu(0, 0), FakeGpu(1, 1)]
    model = px.GPipe(copy.deepcopy(plain), [1, 1], devices=devices, chunks=2, **BOTH)
    assert torch.equal(step(model, batch()), plain_step(plain, batch(), 2))
    check_same(model, plain)
    assert {name for name in names if name.endswith("host")} == {"cuda:0 host", "cuda:1 host"}
    expected = {f"{end}:1/{i}" for end in ("send", "recv") for i in range(2)}
    assert expected <= {name for name, _ in model._runtime.devices[0]._streams}  # type: ignore[union-attr, attr-defined]
    assert not cuda.calls("synchronize")


@pytest.mark.measures_time
@pytest.mark.slow
def test_launches_take_the_hosts_time() -> None:
    """A launch takes a third of F: one host for three devices is the bottleneck of forwards."""
    n, m, seconds = 3, 6, 0.01
    measured, predicted = {}, {}
    for hosts in ("one", "per_device"):
        model = px.GPipe(
            nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), Nap(seconds, 0.0)) for _ in range(n))),
            [1] * n, devices=px.workers(n, launch=seconds / 3), chunks=m, checkpoint="never",
            hosts=hosts,
        )  # fmt: skip
        ends = []
        for _ in range(3):
            model(torch.zeros(m, 1)).sum().backward()
            ends.append(last_forward(model.timeline()))
        measured[hosts] = min(ends)
        costs = ps.Costs(forward=seconds, backward=0.0, launch=seconds / 3)
        predicted[hosts] = last_forward(ps.simulate(model.graph(m), costs))
    assert 1.5 * predicted["per_device"] < predicted["one"] <= measured["one"] * 1.01
    assert predicted["per_device"] <= measured["per_device"] * 1.01 < predicted["one"]


def last_forward(timeline: ps.Timeline) -> float:
    """Return when the last F ends (s)."""
    return float(timeline.end[timeline.graph.op == Op.F].max())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_ends_all_hosts(where: str) -> None:
    """The error is the layer's; the next step is that of the module."""
    faulty = Faulty(ValueError("no"), **{where: 1})
    model = px.GPipe(nn.Sequential(*dense(2), faulty, *dense(1)), [1, 1, 2], devices=CPUS[:3],
                     chunks=4, checkpoint="never", **BOTH)  # fmt: skip
    with pytest.raises(ValueError, match="no"):
        step(model, batch())
    faulty.repair()
    model.zero_grad()
    plain = copy.deepcopy(nn.Sequential(*model))
    assert torch.equal(step(model, batch()), plain_step(plain, batch(), 4))
    check_same(model, plain)


def test_forwards_of_two_threads_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread is in a backward while the other is in a forward; a slow host is between both."""
    submit = CpuStream.submit

    def slow_submit(self: CpuStream, work: Work) -> None:
        time.sleep(random.random() * 1e-3)
        submit(self, work)

    monkeypatch.setattr(CpuStream, "submit", slow_submit)
    model = px.GPipe(nn.Sequential(*dense(3)), [1, 1, 1], devices=CPUS[:3], chunks=4, **BOTH)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(5):
                step(model, batch())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


def test_what_is_refused() -> None:
    layers, devices = nn.Sequential(*dense(2)), CPUS[:2]
    for options, kind, text in (
        ({"hosts": "two"}, UnknownNameError, "unknown hosts 'two'"),
        ({"streams": "many"}, UnknownNameError, "unknown streams 'many'"),
        ({"streams": "single", "copy_streams": False}, ArgumentError, "have no copy streams"),
        ({"hosts": "per_device", "threads": False}, ArgumentError, "leave out one of them"),
    ):
        with pytest.raises(kind, match=text):
            px.GPipe(layers, [1, 1], devices=devices, **options)
