"""Slices of a GPU: how multiprocessors are split, through which driver, and what is refused."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeexec as px
import pipesim as ps
from pipeexec.devices import gpu_slices as slices_module
from pipeexec.devices import green_contexts
from pipeexec.devices.green_contexts import (
    GreenContextsMissingError,
    LibCuda,
    part_size,
    split_gpu,
    split_with_any_driver,
)
from pipesim.errors import ArgumentError, SharedSlicesWarning

N_SMS = 132


class FakeDriver:
    """Splits SMs as a Hopper driver does, in the form of `cuda.bindings.driver`."""

    class CUdevResourceType:
        """Kinds of resources."""

        CU_DEV_RESOURCE_TYPE_SM = 1

    def __init__(
        self,
        n_sms: int = N_SMS,
        failing: str = "",
        most: int = 99,
        clusters: tuple[int, ...] = (),
    ) -> None:
        self.n_sms, self.failing, self.most = n_sms, failing, most
        self.clusters = clusters  # SMs of each, if a group of 8 must lie within one
        self.sizes: list[int] = []
        self.contexts: list[tuple[int, int]] = []
        self.n_streams = 0

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (801 if name == self.failing else 0, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._answer("cuInit")

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", index)

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetDevResource", _resource(0, self.n_sms))

    def cuDevSmResourceSplitByCount(self, n: int, whole: Any, flags: int, size: int) -> Any:
        self.sizes.append(size)
        n = min(n, self.most)
        if self.clusters:
            n = min(n, sum(sms // 8 for sms in self.clusters) // (size // 8))
        groups = [_resource(k * size, size) for k in range(n)]
        rest = _resource(n * size, whole.sm.smCount - n * size)
        return self._answer("cuDevSmResourceSplitByCount", groups, n, rest)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[Any, ...]:
        return self._answer("cuDevResourceGenerateDesc", resources[0])

    def cuGreenCtxCreate(self, description: Any, device: int, flags: int) -> tuple[Any, ...]:
        assert flags == 1
        self.contexts.append((description.first, description.sm.smCount))
        return self._answer("cuGreenCtxCreate", len(self.contexts) - 1)

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[Any, ...]:
        assert (flags, priority) == (1, 0)
        self.n_streams += 1
        return self._answer("cuGreenCtxStreamCreate", 1000 * context + self.n_streams)


def _resource(first: int, n_sms: int) -> Any:
    return SimpleNamespace(first=first, sm=SimpleNamespace(smCount=n_sms))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Pretend that there is a Hopper GPU, as far as making slices of it goes."""
    fake = FakeDriver()
    properties = SimpleNamespace(major=9, multi_processor_count=N_SMS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        slices_module,
        "_split_once",
        lambda index, n, major: split_gpu(fake, index, n, major),
    )
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(handle=handle)
    )
    return fake


@pytest.mark.parametrize(
    ("n_sms", "n", "major", "size"),
    [
        (132, 1, 9, 128),
        (132, 3, 9, 40),
        (132, 4, 9, 32),
        (132, 16, 9, 8),
        (108, 4, 8, 26),  # an A100
        (108, 27, 8, 4),
        (148, 4, 10, 32),  # later ones are taken for Hopper's like
        (80, 80 // 2, 7, 2),
    ],
)
def test_parts_are_multiples(n_sms: int, n: int, major: int, size: int) -> None:
    assert part_size(n_sms, n, major) == size


def test_parts_do_not_overlap() -> None:
    """One after the other, and what is left over last."""
    fake = FakeDriver()
    parts, rest = split_gpu(fake, 0, 4, major=9)
    assert [part.n_sms for part in parts] == [32] * 4
    assert rest is not None
    assert rest.n_sms == 4
    assert fake.contexts == [(0, 32), (32, 32), (64, 32), (96, 32), (128, 4)]


def test_nothing_may_be_left_over() -> None:
    _, rest = split_gpu(FakeDriver(n_sms=128), 0, 4, major=9)
    assert rest is None


def test_streams_of_a_part_are_kept() -> None:
    """The same key is the same stream: none can be destroyed."""
    (part,), _ = split_gpu(FakeDriver(), 0, 1, major=9)
    assert part.stream("compute") == part.stream("compute")
    assert part.stream("compute") != part.stream("send:1")


@pytest.mark.parametrize(
    "name",
    ["cuInit", "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount",
     "cuDevResourceGenerateDesc", "cuGreenCtxCreate"],
)  # fmt: skip
def test_a_driver_that_refuses_is_named(name: str) -> None:
    with pytest.raises(GreenContextsMissingError, match=rf"{name} answered with CUDA error 801"):
        split_gpu(FakeDriver(failing=name), 0, 2, major=9)


def test_a_driver_without_the_function() -> None:
    with pytest.raises(GreenContextsMissingError, match="the driver has no cuInit"):
        split_gpu(SimpleNamespace(), 0, 2, major=9)


def test_a_driver_that_makes_fewer_parts() -> None:
    with pytest.raises(GreenContextsMissingError, match="made 3 parts of 32 SMs, not 4"):
        split_gpu(FakeDriver(most=3), 0, 4, major=9)


#: A die of 132 SMs: of clusters with 18 and with 14, of which one group of 8 is left.
CLUSTERS = (18, 18, 18, 18, 16, 16, 14, 14)


@pytest.mark.parametrize(
    ("n", "sizes", "rest"), [(1, [128, 120, 112], 20), (2, [64, 56], 20), (4, [32, 24], 36),
                             (8, [16, 8], 68), (14, [8], 20)]
)  # fmt: skip
def test_parts_are_smaller_where_too_few_are_made(n: int, sizes: list[int], rest: int) -> None:
    """The largest size of which the driver makes so many; what is left over is more."""
    fake = FakeDriver(clusters=CLUSTERS)
    parts, left = split_gpu(fake, 0, n, major=9)
    assert fake.sizes == sizes
    assert [part.n_sms for part in parts] == [sizes[-1]] * n
    assert left is not None
    assert left.n_sms == rest
    assert len(fake.contexts) == n + 1


def test_too_many_parts_for_the_clusters() -> None:
    """The error message names the largest size."""
    with pytest.raises(GreenContextsMissingError, match="made 14 parts of 8 SMs, not 15"):
        split_gpu(FakeDriver(clusters=CLUSTERS), 0, 15, major=9)


# Through ctypes


class FakeLibrary:
    """libcuda as ctypes sees it: writes through pointers."""

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = 40 + index.value
        return 0

    def cuDeviceGetDevResource(self, device: Any, resource: Any, kind: Any) -> int:
        assert (device.value, kind.value) == (42, 1)
        resource._obj.type, resource._obj.sm.smCount = 1, N_SMS
        return 0

    def cuDevSmResourceSplitByCount(
        self, groups: Any, count: Any, whole: Any, rest: Any, flags: Any, size: Any
    ) -> int:
        for group in groups:
            group._internal_padding[5] = 77  # what only the driver understands
            group.sm.smCount = size.value
        rest._obj.sm.smCount = whole._obj.sm.smCount - len(groups) * size.value
        return 0

    def cuDevResourceGenerateDesc(self, description: Any, resources: Any, count: Any) -> int:
        assert count.value == 1
        kept = resources[0]._internal_padding[5]
        assert kept == (0 if resources[0].sm.smCount == 4 else 77)
        description._obj.value = resources[0].sm.smCount
        return 0

    def cuGreenCtxCreate(self, context: Any, description: Any, device: Any, flags: Any) -> int:
        context._obj.value = 100 + description.value
        return 0

    def cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: Any, priority: Any) -> int:
        stream._obj.value = 1000 + context.value
        return 0


def test_the_driver_through_ctypes() -> None:
    """As through its bindings; resources go whole from call to call."""
    parts, rest = split_gpu(LibCuda(FakeLibrary()), 2, 4, major=9)
    assert [part.n_sms for part in parts] == [32] * 4
    assert rest is not None
    assert (rest.n_sms, rest.stream("send:1"), parts[0].stream("compute")) == (4, 1104, 1132)


def test_resources_are_laid_out_as_in_the_header() -> None:
    """cuda.h, RESOURCE_ABI_VERSION 1: 4 + 92 + 48 bytes."""
    assert ctypes.sizeof(green_contexts.Resource) == 144
    assert green_contexts.Resource.sm.offset == 96


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setattr(green_contexts.ctypes, "CDLL", missing)
    green_contexts.find_driver.cache_clear()
    with pytest.raises(GreenContextsMissingError, match=r"no CUDA driver \(libcuda.so.1"):
        green_contexts.find_driver()
    green_contexts.find_driver.cache_clear()


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError, AttributeError])
def test_bindings_that_cannot_be_imported(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or are not there: the driver itself serves."""

    def broken(name: str) -> None:
        raise error(f"{name} is broken")

    monkeypatch.setattr(green_contexts.importlib, "import_module", broken)
    monkeypatch.setattr(green_contexts, "load_driver", FakeDriver)
    green_contexts.find_driver.cache_clear()
    assert isinstance(green_contexts.find_driver(), FakeDriver)
    green_contexts.find_driver.cache_clear()


def test_bindings_that_do_not_suit_the_driver_are_passed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver itself is called; if it refuses too, the error is that of the bindings."""
    monkeypatch.setattr(green_contexts, "load_driver", FakeDriver)
    parts, _ = split_with_any_driver(FakeDriver(failing="cuGreenCtxCreate"), 0, 4, major=9)
    assert [part.n_sms for part in parts] == [32] * 4
    monkeypatch.setattr(green_contexts, "load_driver", lambda: FakeDriver(failing="cuInit"))
    with pytest.raises(GreenContextsMissingError, match="cuGreenCtxCreate answered"):
        split_with_any_driver(FakeDriver(failing="cuGreenCtxCreate"), 0, 4, major=9)


def test_parts_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the bindings took resources for larger than the driver's, and read between them."""
    driver = FakeDriver()
    split = driver.cuDevSmResourceSplitByCount

    def torn(*arguments: Any) -> Any:
        error, groups, *rest = split(*arguments)
        return (error, [groups[0], *(_resource(0, 0) for _ in groups[1:])], *rest)

    monkeypatch.setattr(driver, "cuDevSmResourceSplitByCount", torn)
    with pytest.raises(GreenContextsMissingError, match=r"parts of \[32, 0, 0, 0\] SMs, not of 32"):
        split_gpu(driver, 0, 4, major=9)


# `slices`


@pytest.mark.usefixtures("driver")
def test_slices_have_names_and_sms() -> None:
    parts = px.slices("cuda:0", 4)
    assert [part.name for part in parts] == [f"cuda:0/{i}of4" for i in range(4)]
    assert [part.n_sms for part in parts] == [32] * 4
    assert {part.torch_device for part in parts} == {torch.device("cuda:0")}
    assert [part.note for part in parts] == [""] * 4


@pytest.mark.usefixtures("driver")
def test_a_slice_computes_on_its_own_sms_and_copies_on_the_rest() -> None:
    """Handles are a thousand a context; the fifth context is that of the SMs left over."""
    parts = px.slices("cuda", 4)
    handles = {
        (i, name): part.stream(name).stream.handle // 1000  # type: ignore[attr-defined]
        for i, part in enumerate(parts)
        for name in ("compute", "collective", "send:1", "recv:0")
    }
    for (i, name), context in handles.items():
        assert context == (4 if ":" in name else i)
    streams = [part.stream("send:1").stream.handle for part in parts]  # type: ignore[attr-defined]
    assert len(set(streams)) == 4


def test_where_nothing_is_left_over_copies_are_on_the_slice(driver: FakeDriver) -> None:
    driver.n_sms = 128
    second = px.slices("cuda:0", 2)[1]
    assert second.stream("send:0").stream.handle // 1000 == 1  # type: ignore[attr-defined]


def test_without_green_contexts_slices_share_sms(driver: FakeDriver) -> None:
    driver.failing = "cuGreenCtxCreate"
    with pytest.warns(SharedSlicesWarning, match=r"cuda:0 cannot be split .*share all SMs") as w:
        parts = px.slices("cuda:0", 2)
    assert w[0].filename == __file__
    assert [part.n_sms for part in parts] == [N_SMS] * 2
    assert parts[0].note == "slices share SMs"


def test_smaller_slices_say_so(driver: FakeDriver) -> None:
    """In a note, which a pipeline shows; without a warning, as they are slices all the same."""
    driver.clusters = CLUSTERS
    parts = px.slices("cuda:0", 4)
    assert [part.n_sms for part in parts] == [24] * 4
    note = "slices have 24 SMs each, not 32: the driver made too few of those"
    assert [part.note for part in parts] == [note] * 4


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
@pytest.mark.usefixtures("driver")
def test_a_count_that_is_none(n: Any) -> None:
    with pytest.raises(ArgumentError, match="n must be"):
        px.slices("cuda:0", n)


@pytest.mark.usefixtures("driver")
def test_more_slices_than_groups_of_sms() -> None:
    with pytest.raises(ArgumentError, match=r"17 slices are too many for 132 SMs.*at most 16"):
        px.slices("cuda:0", 17)


def test_a_cpu_has_no_slices() -> None:
    with pytest.raises(ArgumentError, match=r"parts of a GPU, got 'cpu'.*\['cpu'\] \* 2"):
        px.slices("cpu", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="'cuda:0' is not there: torch sees 0 CUDA devices"):
        px.slices("cuda:0", 2)


@pytest.mark.usefixtures("driver")
def test_links_must_be_a_network() -> None:
    with pytest.raises(ArgumentError, match=r"link must be a pipesim\.Network, got 3"):
        px.slices("cuda:0", 2, link=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("driver")
def test_links_are_between_the_slices_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The representation calls them imposed; messages to other devices pass without a delay."""
    module = slices_module
    delays: list[float] = []
    waits = SimpleNamespace(
        description="at once",
        timestamp=lambda: torch.zeros(1),
        wait_until=lambda timestamp, seconds: delays.append(seconds),
    )
    kept: list[object] = []
    monkeypatch.setattr(module, "make_timer", lambda gpu: waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: "current")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: kept.append(stream))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x)
    first, second = px.slices("cuda:0", 2, link=ps.Network(latency=1e-5, bandwidth=4e6))
    other = px.slices("cuda:0", 2)[1]
    assert first.note == "link times are imposed: at once"
    value = torch.ones(10)
    message = first.carry((value,), second)
    assert message[0] is not value
    second.await_link(message)
    assert delays == [1e-5, 1e-5]
    assert kept == ["current"]  # the time of sending, read on the stream that receives
    copies = first.carry((value,), other)
    assert copies[0] is value
    other.await_link(copies)
    assert len(delays) == 2


@pytest.mark.usefixtures("driver")
def test_slices_are_devices_of_a_pipeline_as_they_are() -> None:
    """As those that a user made."""
    from pipeexec.devices.make_devices import make_devices

    parts = px.slices("cuda:0", 2)
    assert make_devices(parts) == parts
