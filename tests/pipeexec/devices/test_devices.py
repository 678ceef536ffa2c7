"""Devices: names, pinning, and what is refused."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest
import torch
from small_pipelines import call_within

from pipeexec.devices import make_devices as devices_module
from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.make_devices import CpuDevice, available_cores, make_devices
from pipeexec.devices.streams import CpuStream, InlineStream
from pipesim.errors import ArgumentError, OversubscriptionWarning


@pytest.fixture
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are four cores, all of them the first real one."""
    real = available_cores()
    monkeypatch.setattr(devices_module, "available_cores", lambda: (real * 4)[:4])


@pytest.mark.usefixtures("_many_cores")
def test_each_cpu_is_a_new_worker() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices = make_devices(["cpu", torch.device("cpu"), "cpu:0"])
    assert [device.name for device in devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert all(device.torch_device == torch.device("cpu") for device in devices)


def test_more_workers_than_cores_are_warned_of() -> None:
    """And none is pinned: two on one core would be slower than the machine is."""
    n = len(available_cores()) + 1
    with pytest.warns(OversubscriptionWarning, match=rf"{n} CPU devices share {n - 1} cores"):
        devices = make_devices(["cpu"] * n)
    assert {device.core for device in devices if isinstance(device, CpuDevice)} == {None}
    with warnings.catch_warnings(action="error"):  # other processes of the machine say nothing
        make_devices(["cpu"], local_rank=1, n_local=n)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux' affinity")
def test_a_worker_is_pinned_and_has_one_thread() -> None:
    """Its caller is left as it was."""
    before = os.sched_getaffinity(0), torch.get_num_threads()
    (device,) = make_devices(["cpu"])
    settings: list[Any] = []
    stream = device.stream("compute")
    stream.submit(lambda: settings.extend([os.sched_getaffinity(0), torch.get_num_threads()]))
    call_within(10, device.synchronize)
    device.close()
    assert settings == [{available_cores()[0]}, 1]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux' affinity")
def test_pinning_can_be_left_out() -> None:
    (device,) = make_devices(["cpu"], pin_threads=False)
    cores: list[Any] = []
    device.stream("compute").submit(lambda: cores.append(os.sched_getaffinity(0)))
    call_within(10, device.synchronize)
    device.close()
    assert cores == [set(available_cores())]


def test_streams_are_made_on_first_use() -> None:
    device = CpuDevice(0)
    compute = device.stream("compute")
    assert isinstance(compute, CpuStream)
    assert device.stream("compute") is compute
    assert isinstance(device.stream("send:1"), InlineStream)
    assert device.stream("send:1") is not device.stream("recv:1")
    device.close()


def test_a_device_waits_for_all_of_its_streams() -> None:
    device, ran = CpuDevice(0), []
    gate = threading.Event()
    compute, send = device.stream("compute"), device.stream("send:1")
    compute.submit(gate.wait)
    send.wait_event(compute.record())
    send.submit(lambda: ran.append("sent"))
    threading.Timer(0.05, gate.set).start()
    call_within(10, device.synchronize)
    assert ran == ["sent"]
    device.close()


def test_marks_share_one_clock() -> None:
    first, second = CpuDevice(0), CpuDevice(1)
    a, b = first.mark(), second.mark()
    assert 0 <= b.seconds_since(a) < 60


def test_devices_can_be_given_ready_made() -> None:
    device = CpuDevice(7)
    assert make_devices([device]) == [device]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu", "'tpu' is no device; write 'cpu' or 'cuda:0'"),
        ("", "'' is no device"),
        ("cpu:x", "'cpu:x' is no device"),
        (None, "None is no device"),
        (3.5, "3.5 is no device"),
        ("meta", "'meta' cannot run stages yet"),
    ],
)
def test_a_name_that_is_no_device_is_refused(name: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_devices([name])


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:99"])
def test_hardware_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ArgumentError, match=f"'{name}' is not there: torch sees 0 CUDA devices"):
        make_devices([name])


def test_cpu_and_gpu_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker cannot wait for an event of CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match=r"several kinds \(cpu, cuda\)"):
        make_devices(["cpu", "cuda:0"])


def test_a_gpu_may_be_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a device with separate streams on the same GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, second = make_devices(["cuda", "cuda:0"])
    assert isinstance(first, CudaDevice)
    assert first is not second
    assert first.name == second.name == "cuda:0"


def test_a_closed_device_is_refused() -> None:
    device = CpuDevice(0)
    device.close()
    with pytest.raises(ArgumentError, match="cpu:0 was closed"):
        make_devices([device])
