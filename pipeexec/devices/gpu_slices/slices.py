"""One GPU as several devices: slices of its multiprocessors (SMs).

Stages on slices run at the same time, each on SMs of its own, so that schedules of many stages are
run, measured and compared on one card. What slices share is not the simulator's to know: level-2
cache, memory bandwidth, power. Measure costs with all of them busy, as `pipeexec.profile` does.

         GPU of 132 SMs, slices("cuda:0", 4)
    0        32        64        96        128  132
    |  0of4  |  1of4   |  2of4   |  3of4   |copy|

SMs are given out in multiples of 8 on Hopper. Where the driver makes too few parts of the largest
size, all slices are smaller, and their notes say so. What is left over serves the copies of all
slices, as the copy engines of several GPUs would, so that a copy waits for no stage's kernels.
Where nothing is left over, or the driver keeps it, a slice's copies run on its own SMs.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.cuda_streams import CudaStream
from pipeexec.devices.device import Device, Values
from pipeexec.devices.emulated_links.links import Links, Message, check_links
from pipeexec.devices.emulated_links.timers import make_waits
from pipeexec.devices.gpu_slices.cuda_driver import GreenContextsMissingError, find_driver
from pipeexec.devices.gpu_slices.green_contexts import Part, part_size, split_by_any
from pipeexec.devices.make_devices import parse
from pipeexec.devices.streams import Stream
from pipesim.errors import ArgumentError, SharedSlicesWarning, check_count
from pipesim.network.network import Network

__all__ = ["Slice", "slices"]

#: Streams on which a slice computes; all others copy.
_COMPUTING = frozenset({"compute", "collective"})


class Slice(CudaDevice):
    """A part of a GPU; `slices` makes them.

    Parameters
    ----------
    device
        The GPU.
    index, n_slices
        Which of how many.
    part, copies
        The SMs on which it computes, and on which it copies; None for those of the whole GPU.
    n_sms
        How many SMs it computes on.
    links
        Imposed ones, between slices that have the same.
    whole_n_sms
        How many SMs a slice would have if the GPU's could be divided at will; ``n_sms`` where None.

    Attributes
    ----------
    name
        Such as ``"cuda:0/2of4"``.
    """

    def __init__(
        self,
        device: torch.device,
        index: int,
        n_slices: int,
        part: Part | None,
        copies: Part | None,
        n_sms: int,
        links: Links | None = None,
        whole_n_sms: int | None = None,
    ) -> None:
        super().__init__(device)
        self.name = f"{self.torch_device}/{index}of{n_slices}"
        self.index, self.n_sms, self.links = index, n_sms, links
        self._part, self._copies = part, copies
        shared = [] if part is not None else ["slices share SMs"]
        if whole_n_sms is not None and n_sms < whole_n_sms:
            shared.append(
                f"slices have {n_sms} SMs each, not {whole_n_sms}: the driver made too few of those"
            )
        imposed = [] if links is None else [f"link times are imposed: {links.waits.says}"]
        self.note = "; ".join(shared + imposed)

    def _make(self, name: str, blocks: bool) -> Stream:
        part = self._part if name in _COMPUTING else self._copies
        if part is None:
            return super()._make(name, blocks)
        handle = part.stream((self.index, name))
        return CudaStream(torch.cuda.ExternalStream(handle, device=self.torch_device))

    def carry(self, values: Values, target: Device) -> Values:
        """Return a message on the memory of ``target``; a copy where links are imposed."""
        if self.links is not None and isinstance(target, Slice) and target.links is self.links:
            return self.links.carry(values, self.index, target.index)
        return super().carry(values, target)

    def await_link(self, values: Values) -> None:
        """Let the current stream wait for the imposed latency of a message."""
        if not isinstance(values, Message) or self.links is None:
            return
        if values.sent is not None:
            values.sent.record_stream(torch.cuda.current_stream(self.torch_device))
        self.links.arrive(values)


def slices(device: str | torch.device, n: int, *, link: Network | None = None) -> list[Slice]:
    """Return a GPU as ``n`` devices of equally many multiprocessors each, none shared.

    As many as the driver makes ``n`` groups of; ``n_sms`` of a slice says how many these are.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    n
        How many slices.
    link
        Messages between slices take the time that they would take on this network, each pair
        having links of its own; see `pipeexec.devices.emulated_links`. With None they are handed
        over within the GPU's memory, which takes next to no time.

    Raises
    ------
    ArgumentError
        For a device that is no GPU or not there, ``n`` below 1 or more than there are groups of
        SMs, or a network of shared links.

    Warns
    -----
    SharedSlicesWarning
        If driver or GPU have no green contexts: then every slice runs on all SMs, and stages slow
        each other down.

    Examples
    --------
    >>> devices = px.slices("cuda:0", 4, link=ps.Network(20e-6, 25e9))  # doctest: +SKIP
    >>> pipeline = px.Pipeline(stages, graph, devices, loss_fn)  # doctest: +SKIP
    """
    check_count("n", n)
    if link is not None:
        check_links(link)
    gpu = parse(device)
    if gpu.type != "cuda":
        raise ArgumentError(
            f"slices are parts of a GPU, got {str(gpu)!r}; name one ('cuda:0'), or use "
            f"devices=['cpu'] * {n}"
        )
    gpu = torch.device(gpu.type, gpu.index or 0)
    properties = torch.cuda.get_device_properties(gpu)
    try:
        parts, rest = _parts(gpu.index, n, properties.major)
    except GreenContextsMissingError as error:
        warnings.warn(
            f"{gpu} cannot be split ({error}): its {n} slices are plain streams, whose stages "
            "share all SMs and slow each other down; use a driver of CUDA 12.4 or later",
            SharedSlicesWarning,
            stacklevel=2,
        )
        parts, rest = [], None
    links = None if link is None else Links(link, n, make_waits(gpu))
    count = properties.multi_processor_count
    size = part_size(count, n, properties.major) if parts else None
    return [
        Slice(gpu, i, n, parts[i], rest or parts[i], parts[i].n_sms, links, size)
        if parts
        else Slice(gpu, i, n, None, None, count, links)
        for i in range(n)
    ]


@cache
def _parts(index: int, n: int, major: int) -> tuple[list[Part], Part | None]:
    """Split a GPU, once a number of slices: contexts cannot be given back (see `Part`)."""
    torch.empty(1, device=torch.device("cuda", index))  # the primary context must be there
    return split_by_any(find_driver(), index, n, major)
