"""Which stream is the current one while work is submitted to a CUDA stream, and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from pipeexec.devices.cuda_streams import CudaStream


def _contexts(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the streams that torch's context was made for."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda s: made.append(s) or cuda.stream(s))
    return made


@pytest.mark.parametrize("index", [0, 1])
def test_work_runs_under_its_stream(
    index: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU than the current one needs torch's context, which knows both streams."""
    made = _contexts(cuda, monkeypatch)
    stream = CudaStream(torch.cuda.Stream())
    stream.stream.device_index = index  # type: ignore[misc]
    seen: list[Any] = []
    stream.submit(lambda: seen.append(cuda.current))
    assert seen == [stream.stream]
    assert cuda.current is cuda.caller
    assert made == ([stream.stream] if index else [])


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
    seen: list[Any] = []

    def work() -> None:
        inner.submit(lambda: seen.append(cuda.current))
        seen.append(cuda.current)

    outer.submit(work)
    assert seen == [inner.stream, outer.stream]
    assert cuda.current is cuda.caller
