"""Compute streams of devices, for runtimes that are not ours; None stands for a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeexec.devices.cuda import CudaDevice, CudaStream
from pipeexec.devices.device import DeviceLike

GpuStream = torch.cuda.Stream | None


def compute_streams(devices: Sequence[DeviceLike]) -> list[GpuStream]:
    """Return the stream on which each device computes."""
    return [_compute_stream(device) for device in devices]


def _compute_stream(device: DeviceLike) -> GpuStream:
    if not isinstance(device, CudaDevice):
        return None
    stream = device.stream("compute")
    assert isinstance(stream, CudaStream)
    return stream.stream


@contextmanager
def on_stream(stream: GpuStream) -> Iterator[None]:
    """Make a stream the current one."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


@contextmanager
def joined(streams: Sequence[GpuStream]) -> Iterator[None]:
    """Let streams wait for the current one at the beginning, and it for them at the end."""
    used = [stream for stream in streams if stream is not None]
    current = torch.cuda.current_stream() if used else None
    for stream in used:
        stream.wait_stream(current)
    yield
    for stream in used:
        current.wait_stream(stream)  # type: ignore[union-attr]  # there is one if there are streams
