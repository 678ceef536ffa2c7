"""`CudaDevice`: a GPU. Not yet measured on hardware."""

from __future__ import annotations

import torch

from pipeexec.devices.cuda_streams import CudaEvent, CudaStream
from pipeexec.devices.device import NamedStreams, Values
from pipeexec.devices.streams import Event, Stream

__all__ = ["CudaDevice"]


class CudaDevice(NamedStreams):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.torch_device = torch.device(device.type, device.index or 0)
        self.name = str(self.torch_device)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def _prepare_host(self) -> None:
        """Make this GPU, and its compute stream, the current ones of the calling thread.

        CUDA keeps both for each thread. A stream makes itself the current one while it runs work,
        which takes less time on the current GPU.
        """
        compute = self.stream("compute")
        assert isinstance(compute, CudaStream)
        torch.cuda.set_stream(compute.stream)

    def mark(self) -> Event:
        """Return an event on the compute stream; `pipeexec.devices.clocks` aligns those of GPUs.

        Work submitted later waits for the caller's own stream, on which batches are copied to the
        GPU and parameters may have been changed.
        """
        compute = self.stream("compute")
        assert isinstance(compute, CudaStream)
        compute.stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        return compute.record()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Make the caller's own stream on this GPU wait for ``event``; the caller does not wait."""
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self.torch_device)
        current.wait_event(event.order)
        for value in values:
            if value is not None:
                value.record_stream(current)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory, to which the current stream copies; nobody waits."""
        copy = torch.empty_like(data, device="cpu", pin_memory=torch.cuda.is_available())
        return copy.copy_(data, non_blocking=True)

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy on this GPU, which the current stream makes; nobody waits."""
        return torch.empty_like(data, device=self.torch_device).copy_(data, non_blocking=True)

    def wait_for_host(self, event: Event) -> None:
        """Return at once: the host launched the kernels when it submitted the work."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the allocator wait for ``stream`` before it uses the memory again.

        The alternative is to hold references until the consumer's event. It needs a host that polls
        events, or a wait on the stream that owns the memory, which is an edge that the graph lacks.
        The allocator polls too, but only when it has to allocate.
        """
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.stream)
