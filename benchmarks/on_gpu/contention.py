"""What slices of a GPU share: work on one of them, alone and while all others are busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import pipeexec as px
from on_gpu.bench import Bench
from on_gpu.report import Report
from pipeexec.devices.cuda import CudaStream

#: Cycles for which streams are held back, until all work is queued: about 4 ms.
_CYCLES = 8_000_000
#: Columns of the large tensors.
_WIDTH = 1024


class _Job(NamedTuple):
    """Calls that are queued on a stream one after the other."""

    stream: CudaStream
    call: Callable[[], object]
    n_calls: int


def contention(bench: Bench, report: Report, n: int) -> None:
    """Time work on one slice while the others do nothing, and while they do the same."""
    if bench.dry:
        report.add("no GPU: left out")
        return
    devices = px.slices("cuda:0", n)
    streams = [device.stream("compute") for device in devices]
    rows = bench.pick(1 << 18, 0)  # of 4 KiB
    size = bench.pick(1024, 0)
    x, w = (torch.randn(k, size, device=bench.gpu) for k in (2 * size, size))
    product = partial(torch.mm, x, w)
    sources, targets = (
        [torch.randn(rows, _WIDTH, device=bench.gpu) for _ in devices] for _ in range(2)
    )
    flops, nbytes = 2 * x.numel() * size, 2 * sources[0].nbytes
    copies = [partial(t.copy_, s) for s, t in zip(sources, targets, strict=True)]
    norms = [partial(layer_norm, s, (_WIDTH,)) for s in sources]
    for what, calls, count, amount, unit in (
        ("float32 product", [product] * n, 50, flops / 1e12, "TFLOP/s"),
        ("copy of 1 GiB", copies, 10, nbytes / 1e9, "GB/s"),
        ("LayerNorm of 1 GiB", norms, 10, nbytes / 1e9, "GB/s"),
    ):
        jobs = [_Job(s, call, count) for s, call in zip(streams, calls, strict=True)]
        _note(report, n, what, _seconds(jobs[:1]), _seconds(jobs), amount, unit)
    products = [_Job(stream, product, 50) for stream in streams]
    _host_copies(report, devices[0].stream("offload"), sources[0][: rows // 4], products)
    for device in devices:
        device.close()


def _host_copies(
    report: Report, stream: CudaStream, data: Tensor, products: Sequence[_Job]
) -> None:
    """Time copies between pinned memory and a slice, alone and while all slices multiply."""
    host = torch.empty_like(data, device="cpu", pin_memory=torch.cuda.is_available())
    seconds = _seconds(products)
    for what, call in (
        ("host to device, beside products", partial(data.copy_, host, non_blocking=True)),
        ("device to host, beside products", partial(host.copy_, data, non_blocking=True)),
    ):
        job = _Job(stream, call, 3)
        alone = _seconds([job])
        count = int(1.5 * job.n_calls * alone / seconds) + 1  # they last longer than the copies
        loaded = _seconds([job, *(product._replace(n_calls=count) for product in products)])
        _note(report, len(products), what, alone, loaded, data.nbytes / 1e9, "GB/s")


def _seconds(jobs: Sequence[_Job]) -> float:
    """Return the seconds of a call of the first job, while all run from the same moment on."""
    for _ in range(2):  # the first time, kernels are loaded
        torch.cuda.synchronize()
        gate = torch.cuda.Event()
        torch.cuda._sleep(_CYCLES)
        gate.record()
        around = []
        for stream, call, n_calls in jobs:
            stream.stream.wait_event(gate)
            began = stream.record()
            for _ in range(n_calls):
                stream.submit(call)
            around.append((began, stream.record()))
        torch.cuda.synchronize()
    began, ended = around[0]
    return ended.seconds_since(began) / jobs[0].n_calls


def _note(
    report: Report, n: int, what: str, alone: float, together: float, amount: float, unit: str
) -> None:
    """Report work of which ``amount`` over seconds is in ``unit``."""
    report.record(
        "contention", what=what, slices=n, alone=alone, together=together, ratio=together / alone,
        rate_alone=amount / alone, rate_together=amount / together, unit=unit,
    )  # fmt: skip
    report.add(f"{what}: {amount / alone:.1f} {unit} alone, {amount / together:.1f} with all busy, "
               f"time x{together / alone:.3f}")  # fmt: skip
