"""One GPU as several devices: slices of its multiprocessors (SMs).

Stages on slices run at the same time, each on its own SMs, so schedules of many stages can be run,
measured and compared on one card. Slices share level-2 cache, memory bandwidth and power, which the
simulator does not model. Measure costs with all slices busy, as `pipeexec.profile` does.

         GPU of 132 SMs, slices("cuda:0", 4)
    0        32        64        96        128  132
    |  0of4  |  1of4   |  2of4   |  3of4   |copy|

SMs are allotted in multiples of 8 on Hopper. If the driver makes too few parts of the largest size,
all slices are smaller, and their notes say so. The remaining SMs serve the copies of all slices, as
the copy engines of several GPUs would, so a copy waits for no stage's kernels. If no SMs remain, or
the driver keeps them, a slice's copies run on its own SMs.
"""

from __future__ import annotations

from functools import cache

import torch

from pipeexec.devices.cuda import CudaDevice, CudaStream
from pipeexec.devices.device import Values
from pipeexec.devices.emulated_links import EmulatedLinks, TimedMessage, check_links, make_timer
from pipeexec.devices.green_contexts import (
    GreenContext,
    GreenContextsMissingError,
    find_driver,
    part_size,
    split_with_any_driver,
)
from pipeexec.devices.make_devices import parse_device
from pipeexec.devices.streams import Stream
from pipesim.errors import ArgumentError, SharedSlicesWarning, check_count
from pipesim.network.network import Network
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names


class Slice(CudaDevice):
    """A part of a GPU; `slices` makes them.

    Parameters
    ----------
    device
        The GPU.
    index, n_slices
        Number of the slice, and of slices.
    part, copies
        Green contexts for computing and for copying; None for the SMs of the whole GPU.
    n_sms
        Number of SMs on which the slice computes.
    links
        Imposed links between slices with the same object.
    whole_n_sms
        Number of SMs of a slice if the GPU's could be divided freely; None for ``n_sms``.

    Attributes
    ----------
    name
        Name such as ``"cuda:0/2of4"``.

    Examples
    --------
    >>> import pipeexec as px
    >>> part, _ = px.slices("cuda:0", 2)  # doctest: +SKIP
    >>> part.name  # doctest: +SKIP
    'cuda:0/0of2'
    """

    def __init__(
        self,
        device: torch.device,
        index: int,
        n_slices: int,
        part: GreenContext | None,
        copies: GreenContext | None,
        n_sms: int,
        links: EmulatedLinks | None = None,
        whole_n_sms: int | None = None,
    ) -> None:
        super().__init__(device)
        self.name = f"{self.torch_device}/{index}of{n_slices}"
        self.index, self.n_sms, self.links = index, n_sms, links
        self._part, self._copies = part, copies
        notes = [] if part is not None else ["slices share SMs"]
        if whole_n_sms is not None and n_sms < whole_n_sms:
            notes.append(
                f"slices have {n_sms} SMs each, not {whole_n_sms}: the driver made too few of those"
            )
        if links is not None:
            notes.append(f"link times are imposed: {links.timer.description}")
        self.note = "; ".join(notes)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        context = self._part if name in ("compute", "collective") else self._copies
        if context is None:
            return super()._make_stream(name, blocks)
        handle = context.stream((self.index, name))
        return CudaStream(torch.cuda.ExternalStream(handle, device=self.torch_device))

    def await_link(self, values: Values) -> None:
        """Make the current stream wait for the imposed latency of a message.

        Parameters
        ----------
        values
            Message from `carry`. Others pass at once.
        """
        if not isinstance(values, TimedMessage) or self.links is None:
            return
        if values.sent is not None:
            values.sent.record_stream(torch.cuda.current_stream(self.torch_device))
        self.links.await_arrival(values)


@checked_names
def slices(device: str | torch.device, n: int, *, link: Network | None = None) -> list[Slice]:
    """Return a GPU as ``n`` devices with equal numbers of multiprocessors, none shared.

    The number is the largest of which the driver makes ``n`` groups; it is ``n_sms`` of a slice.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    n
        Number of slices.
    link
        Messages between slices take the time that they would take on this network, where each pair
        has separate links; see `pipeexec.devices.emulated_links`. With None they pass by
        reference within the GPU's memory, which takes next to no time.

    Returns
    -------
    list of Slice
        ``n`` devices; ``n_sms`` of each is its number of multiprocessors.

    Warns
    -----
    SharedSlicesWarning
        If driver or GPU have no green contexts. Then every slice runs on all SMs, and stages slow
        each other down.

    See Also
    --------
    pipeexec.workers : CPU workers as devices.
    pipeexec.Pipeline : Its ``devices`` takes them.
    pipesim.Network : Latency and bandwidth of links.

    Examples
    --------
    >>> import pipeexec as px, pipesim as ps
    >>> link = ps.Network(latency=20e-6, bandwidth=25e9)
    >>> devices = px.slices("cuda:0", 4, link=link)  # doctest: +SKIP
    >>> [device.name for device in devices]  # doctest: +SKIP
    ['cuda:0/0of4', 'cuda:0/1of4', 'cuda:0/2of4', 'cuda:0/3of4']
    """
    check_count("n", n)
    if link is not None:
        check_links(link)
    gpu = parse_device(device)
    if gpu.type != "cuda":
        raise ArgumentError(
            f"slices are parts of a GPU, got {str(gpu)!r}; name one ('cuda:0'), or use "
            f"devices=['cpu'] * {n}"
        )
    gpu = torch.device(gpu.type, gpu.index or 0)
    properties = torch.cuda.get_device_properties(gpu)
    try:
        parts, rest = _split_once(gpu.index, n, properties.major)
    except GreenContextsMissingError as error:
        warn_caller(
            f"{gpu} cannot be split ({error}): its {n} slices are plain streams, whose stages "
            "share all SMs and slow each other down; use a driver of CUDA 12.4 or later",
            SharedSlicesWarning,
        )
        parts, rest = [], None
    links = None if link is None else EmulatedLinks(link, n, make_timer(gpu))
    count = properties.multi_processor_count
    size = part_size(count, n, properties.major) if parts else None
    return [
        Slice(gpu, i, n, parts[i], rest or parts[i], parts[i].n_sms, links, size)
        if parts
        else Slice(gpu, i, n, None, None, count, links)
        for i in range(n)
    ]


@cache
def _split_once(index: int, n: int, major: int) -> tuple[list[GreenContext], GreenContext | None]:
    """Split a GPU, once for each number of slices: contexts are never destroyed."""
    torch.empty(1, device=torch.device("cuda", index))  # makes the primary context
    return split_with_any_driver(find_driver(), index, n, major)
