"""Which stream is the current one while work is submitted to a CUDA stream, and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from pipeexec.devices.cuda import CudaStream


def _contexts(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the streams that torch's context was made for."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda s: streams.append(s) or cuda.stream(s))
    return streams


@pytest.mark.parametrize("index", [0, 1])
def test_work_runs_under_its_stream(
    index: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU than the current one needs torch's context, which knows both streams."""
    entered = _contexts(cuda, monkeypatch)
    stream = CudaStream(torch.cuda.Stream())
    stream.stream.device_index = index  # type: ignore[misc]
    currents: list[Any] = []
    stream.submit(lambda: currents.append(cuda.current))
    assert currents == [stream.stream]
    assert cuda.current is cuda.caller
    assert entered == ([stream.stream] if index else [])


@pytest.mark.parametrize("index", [0, 1])
def test_work_that_raises_gives_the_stream_back(index: int, cuda: FakeCuda) -> None:
    stream = CudaStream(torch.cuda.Stream())
    stream.stream.device_index = index  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        stream.submit(lambda: 1 // 0)
    assert cuda.current is cuda.caller


def test_work_within_work(cuda: FakeCuda) -> None:
    """Each goes back to the stream around it."""
    outer, inner = CudaStream(torch.cuda.Stream()), CudaStream(torch.cuda.Stream())
    currents: list[Any] = []

    def work() -> None:
        inner.submit(lambda: currents.append(cuda.current))
        currents.append(cuda.current)

    outer.submit(work)
    assert currents == [inner.stream, outer.stream]
    assert cuda.current is cuda.caller
