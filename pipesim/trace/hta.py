"""Timelines as the traces of ranks that HolisticTraceAnalysis (HTA) reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipesim.errors import ArgumentError
from pipesim.ops import COLLECTIVES, TRANSFERS, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_export import NEVER, Event, lanes, names, nanoseconds, slice_event, write
from pipesim.utils.files import check_no_others, check_path

__all__ = ["save"]

#: Prefix of kernel names. HTA recognizes communication by ``nccl...Kernel`` alone.
_KERNEL = dict.fromkeys(TRANSFERS, "ncclDevKernel_SendRecv ") | dict.fromkeys(
    COLLECTIVES, "ncclDevKernel_AllReduce "
)


def save(directory: Path | str, timeline: Timeline) -> list[Path]:
    """Write one trace a device in the form that HTA reads; return the files.

    A device is a rank, and its tasks are kernels. Communication has an ``nccl`` name. Streams are
    numbered from 1, ``compute`` first. Each kernel is linked to a launch at time 0. Times are whole
    microseconds, since HTA rounds fractions, and short kernels would end before they start. Read
    the traces with ``TraceAnalysis(trace_dir=directory)``.

    Parameters
    ----------
    directory
        Made if it does not exist; files are ``rank0.json``, ``rank1.json``, ...
    timeline
        Timeline, simulated or measured.

    Returns
    -------
    list of pathlib.Path
        The file of each device.
    """
    if not isinstance(timeline, Timeline):
        raise ArgumentError(f"a trace is of a Timeline, got {type(timeline).__name__}")
    directory = check_path("directory", directory, "write")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"cannot make the directory {directory}: {error.strerror}; name one that can be written"
        ) from error
    own = {f"rank{device}.json" for device in range(timeline.n_devices)}
    check_no_others(directory, r"rank[0-9]+\.json", own, "HTA")
    paths = []
    for device in range(timeline.n_devices):
        ranks = {"backend": "nccl", "rank": device, "world_size": timeline.n_devices}
        trace = {"distributedInfo": ranks, "traceEvents": list(_kernels(timeline, device))}
        paths.append(directory / f"rank{device}.json")
        write(paths[-1], trace)
    return paths


def _kernels(timeline: Timeline, device: int) -> Iterator[Event]:
    """Yield a device's tasks as kernels, each with its launch."""
    graph, shown = timeline.graph, names(timeline)
    start, end = (
        np.where(time > NEVER, np.round(time / 1e3), NEVER).astype(np.int64)
        for time in nanoseconds(timeline)
    )
    number = 0
    for stream, _, tasks in lanes(graph.queues, start, end):
        if graph.streams[stream][0] != device:
            continue
        number += 1
        for task in tasks.tolist():
            args = {"correlation": task + 1}
            launch, host = "cudaLaunchKernel", {"pid": 1000 + device, "tid": 1000 + device}
            yield slice_event(launch, "cuda_runtime", 0, 0, host, args)
            name = _KERNEL.get(Op(graph.op[task]), "") + shown[task]
            place = {"pid": device, "tid": number}
            args = {"device": device, "stream": number, **args}
            yield slice_event(name, "kernel", int(start[task]), int(end[task]), place, args)
