"""Steps with a copy stream for each micro-batch, and devices that refuse such streams."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import assert_same, cut, data, dense, mse, pipeline, unsplit

import pipeexec as px
import pipesim as ps
from pipeexec.devices.emulated_links import EmulatedLinks, SleepTimer
from pipeexec.devices.gpu_slices import Slice
from pipeexec.executor.remote_messages import RemoteParts
from pipesim.errors import ArgumentError


def lowered(name: str = "gpipe", n: int = 2, m: int = 2, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, n, m), streams="per_microbatch", **options)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("gpus", [False, True])
def test_a_step_is_that_of_the_unsplit_model(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: bool
) -> None:
    graph = lowered(name, 2, 4, recompute="except_last")
    stages, whole = (cut(dense(graph.n_stages), [1] * graph.n_stages) for _ in range(2))
    inputs, targets = data(16)
    loss = unsplit(whole, graph, inputs, targets)
    if gpus:
        FakeCuda().install(monkeypatch)
        subject = px.Pipeline(stages, graph, [FakeGpu(0), FakeGpu(1)], mse)
    else:
        subject = pipeline(stages, graph)
    with subject:
        result = subject.step(inputs, targets)
        assert torch.equal(result.loss, loss)
        assert_same(stages, whole)
        assert result.timeline.complete
        if gpus:
            names = {name for device, name in graph.streams if device == 0}
            own = {subject.devices[0].stream(name).stream.number for name in names}
            assert len(own) == len(names)


def test_messages_take_turns_on_a_link_of_workers() -> None:
    """Each holds the link for 20 ms: the n-th arrives 20 n ms after the first is issued, or later.

    Forwards are 10 ms apart, more than a thread takes to wake up: the first comes first. With
    nothing held, the last would arrive 40 ms after the first is issued.
    """
    graph = lowered("gpipe", 2, 3, step="none")
    link = ps.Network(bandwidth=4 * 16 * 4 / 0.02)
    stages = cut(dense(2), [1, 1])
    stages[0].register_forward_hook(lambda *_: time.sleep(0.01))
    with px.Pipeline(stages, graph, px.workers(2, link=link), mse) as subject:
        timeline = subject.step(*data(12)).timeline
    sends = timeline.frame[timeline.frame["op"] == "SEND_F"].sort_values("end")
    assert (sends["end"] - sends["start"].min() >= 0.0199 * np.arange(1, 4)).all()
    assert sends["microbatch"].tolist() == [0, 1, 2]


# Refused


def test_slices_with_links_are_refused() -> None:
    links = EmulatedLinks(ps.Network(1e-6), 2, SleepTimer())
    devices = [Slice(torch.device("cuda", 0), i, 2, None, None, 66, links) for i in range(2)]
    for device in devices:
        device.torch_device = torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"stream 'send:1/0' of cuda:0/0of2 .* cannot order"):
        px.Pipeline(cut(dense(2), [1, 1]), lowered(n=2), devices, mse)


def test_messages_between_processes_are_refused() -> None:
    from pipeexec.devices.device import RemoteDevice
    from pipeexec.devices.make_devices import CpuDevice

    class Two:
        rank = 0

    graph = lowered(n=2)
    devices = [CpuDevice(0), RemoteDevice("cpu:1", 1)]
    with pytest.raises(ArgumentError, match=r"0SEND_F0 of device 0 is on stream 'send:1/0'"):
        RemoteParts(graph, [], devices, Two(), ())  # type: ignore[arg-type]
