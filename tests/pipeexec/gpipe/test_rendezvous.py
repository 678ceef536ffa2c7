"""`GPipe(copy_streams=False)`: both ends of a message wait for each other (rule 6)."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from gpipe_models import CPUS, batch, sequential
from small_pipelines import Nap, assert_order_respected, dense
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.device import Device, NamedStreams, Values
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.gpipe.rendezvous import Rendezvous

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


@pytest.mark.measures_time
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"dependencies": False, "recompute_waits": True},
     {"dependencies": False, "backward_seed": 3, "checkpoint": "never"}],
)  # fmt: skip
def test_a_step_takes_as_long_as_predicted(options: dict[str, Any]) -> None:
    """A message takes 4 ms. With the same seconds and one-way waits, the step would be shorter."""
    model = px.GPipe(
        nn.Sequential(*(Nap(x, 2 * x) for x in (0.005, 0.015, 0.01))), [1, 1, 1],
        devices=px.workers(3, link=ps.Network(bandwidth=1e6)), chunks=4, copy_streams=False,
        **options,
    )  # fmt: skip
    x = torch.zeros(4, 1000, requires_grad=True)
    timelines = []
    for _ in range(3):
        model(x).sum().backward()
        timelines.append(model.timeline())
        assert_order_respected(timelines[-1])
    timeline = min(timelines, key=lambda timeline: timeline.makespan)
    graph, costs = timeline.graph, ps.Costs.from_timeline(timeline)
    one_way = replace(graph, options=replace(graph.options, rendezvous=False))
    error, error_one_way = (
        abs(ps.simulate(x, costs).makespan / timeline.makespan - 1) for x in (graph, one_way)
    )
    assert error < min(0.08, error_one_way)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("dependencies", [True, False])
def test_a_send_begins_when_its_target_is_ready(dependencies: bool, threads: bool) -> None:
    """Every task runs behind those that the graph has before it; messages of skips included."""
    model = px.GPipe(
        sequential("skips"), [1, 4, 2, 1], devices=CPUS, chunks=4, threads=threads,
        dependencies=dependencies, copy_streams=False, portals=False, checkpoint="always",
    )  # fmt: skip
    model(batch(requires_grad=True)).sum().backward()
    timeline = model.timeline()
    assert timeline.complete
    assert timeline.graph.rendezvous
    assert_order_respected(timeline)


def test_skips_with_portals_wait_one_way() -> None:
    """Both ends could wait for ever: messages of other partitions come between."""
    options: dict[str, Any] = {"devices": CPUS, "chunks": 4, "copy_streams": False}
    for balance, portals in (([2, 3, 3], True), ([2, 3, 3], False), ([8], True)):
        graph = px.GPipe(sequential("skips"), balance, portals=portals, **options).graph(8)
        assert graph.rendezvous == (not portals or len(balance) == 1)


def test_compute_streams_of_two_gpus_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is between the compute streams, which are current on both GPUs meanwhile."""
    cuda, currents = FakeCuda(), []
    cuda.install(monkeypatch)
    carry = NamedStreams.carry

    def noted_carry(self: NamedStreams, values: Values, target: Device) -> Values:
        gpus = None, self.torch_device, target.torch_device
        currents.append(tuple(cuda.current_stream(gpu).number for gpu in gpus))
        return carry(self, values, target)

    monkeypatch.setattr(NamedStreams, "carry", noted_carry)
    devices = [FakeGpu(0, 0), FakeGpu(1, 1)]
    model = px.GPipe(
        nn.Sequential(*dense(2)), [1, 1], devices=devices, chunks=3, copy_streams=False
    )
    x = torch.rand(6, 16)
    cuda.log.clear()
    model(x).sum().backward()
    assert model._runtime is not None
    first, second = (d.stream("compute").stream.number for d in model._runtime.devices)  # type: ignore[attr-defined]
    assert currents == [(first, first, second)] * 3 + [(second, second, first)] * 3
    waits = [
        (who, target) for _, who, target in cuda.calls("wait") if {who, target} == {first, second}
    ]
    forward = [(second, first), *[(first, second), (second, first)] * 2]
    backward = [(second, first), (first, second)] * 3  # a SEND waits, then its RECV
    assert waits[-11:] == forward + backward


@pytest.mark.parametrize("seed", range(20))
def test_threads_submit_tasks_in_the_order_of_their_streams(seed: int) -> None:
    """A thread a partition puts tasks, as the engine's threads of GPUs; so does a running task."""
    n, m, draws = 3, 5, random.Random(seed)
    recvs: dict[int, PlannedTask] = {}
    queues: list[list[list[PlannedTask]]] = [[] for _ in range(n)]  # a list a partition and task
    for i, j in itertools.product(range(m), range(n)):

        def task(place: int, i: int = i, j: int = j) -> PlannedTask:
            stage: Any = SimpleNamespace(index=j)
            no: Any = None
            number = 3 * (i * n + j) + place
            return PlannedTask(number, stage, i, -1, j, i, False, False, no, no, (), -1, no)

        compute, send, recv = task(1), task(2), task(0)
        queues[j].append([compute])
        if j > 0:
            queues[j][-1].insert(0, recv)
            recvs[recv.id - 1] = recv  # the SEND of the partition before
        if j < n - 1:
            queues[j][-1].append(send)
    submitted: list[PlannedTask] = []

    def submit(tasks: Sequence[PlannedTask]) -> None:
        submitted.extend(tasks)
        if draws.random() < 0.3:
            put_next(tasks[0].stage.index)  # a node that runs within a task
        time.sleep(draws.choice([0, 1e-4]))

    rendezvous = Rendezvous(recvs, {}, n)
    left = [deque(queue) for queue in queues]
    locks = [threading.RLock() for _ in range(n)]

    def put_next(j: int) -> None:
        with locks[j]:
            if left[j]:
                rendezvous.put(j, left[j].popleft(), submit)

    threads = [
        threading.Thread(target=lambda j=j: [put_next(j) for _ in range(m)]) for j in range(n)
    ]
    for thread in draws.sample(threads, n):
        thread.start()
    for thread in threads:
        thread.join()
    ids = [task.id for task in submitted]
    for j, queue in enumerate(queues):
        expected = [task.id for tasks in queue for task in tasks]
        assert [task.id for task in submitted if task.stage.index == j] == expected
    for send, recv in recvs.items():
        place = ids.index(send)
        assert ids[place + 1] == recv.id
        earlier = [x.id for x in submitted[:place] if x.stage.index == recv.stage.index]
        assert submitted[place].waits == tuple(earlier[-1:])
