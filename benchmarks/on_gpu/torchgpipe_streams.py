"""torchgpipe 0.0.7 with partitions on one GPU, a stream each.

torchgpipe computes on each device's current stream, with a worker thread for each device. Of
partitions on one GPU all would share one stream and one thread. `on_streams` changes this:

- each partition computes on a stream that is given, and has a worker thread of its own;
- nodes of autograd are made under the stream of their partition, as on a GPU of its own;
- the copy stream of a partition waits for that of the one before. A copy between GPUs does so; a
  copy within a GPU returns the same tensor and waits for nothing;
- the nodes that schedule a recompute are on the copy stream, so that it need not wait for the
  gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torchgpipe import GPipe
from torchgpipe.dependency import fork, join
from torchgpipe.pipeline import Pipeline, wait
from torchgpipe.stream import CPUStream, current_stream, new_stream, use_stream, wait_stream
from torchgpipe.worker import spawn_workers

from on_gpu.streams import GpuStream


@contextmanager
def on_streams(model: GPipe, streams: Sequence[GpuStream], device: torch.device) -> Iterator[None]:
    """Let the partitions of a model, all on ``device``, compute on ``streams``, in a block."""
    computes = [CPUStream if stream is None else stream for stream in streams]
    copies = [new_stream(device) for _ in streams]
    model._copy_streams = [[copy] * model.chunks for copy in copies]
    copy_of = dict(zip(computes, copies, strict=True))
    turn = _Turn(computes)
    changed = {
        "torchgpipe.gpipe.Pipeline": partial(_StreamPipeline, computes, turn),
        "torchgpipe.pipeline.current_stream": turn,
        "torchgpipe.pipeline.spawn_workers": _worker_each,
        "torchgpipe.pipeline.wait": partial(_wait, computes),
        "torchgpipe.checkpoint.fork": partial(_on_copy_stream, fork, copy_of),
        "torchgpipe.checkpoint.join": partial(_on_copy_stream, join, copy_of),
    }
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(patch(name, value))
        yield


class _Turn:
    """Stands for `current_stream`, which is asked for each partition's device in turn."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self.begin()

    def begin(self) -> None:
        self._left = iter(self._streams)

    def __call__(self, device: torch.device) -> Any:
        return next(self._left)


class _StreamPipeline(Pipeline):  # type: ignore[misc]  # torchgpipe may not be installed
    """torchgpipe's, on streams."""

    def __init__(self, computes: Sequence[Any], turn: _Turn, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._computes, self._turn = computes, turn

    def fence(self, schedule: list[tuple[int, int]], skip_trackers: list[Any]) -> None:
        for i, j in schedule:
            with use_stream(self._computes[j]):
                if j:
                    wait_stream(self.copy_streams[j][i], self.copy_streams[j - 1][i])
                super().fence([(i, j)], skip_trackers)

    def compute(self, *arguments: Any) -> None:
        self._turn.begin()
        super().compute(*arguments)


def _wait(computes: Sequence[Any], batch: Any, prev_stream: Any, next_stream: Any) -> None:
    """Do what torchgpipe's `wait` does, under the one of both streams that computes."""
    with use_stream(next_stream if next_stream in computes else prev_stream):
        wait(batch, prev_stream, next_stream)


def _on_copy_stream(call: Callable[..., Any], copy_of: dict[Any, Any], *tensors: Any) -> Any:
    """Call under the copy stream of the partition whose stream is the current one."""
    with use_stream(copy_of[current_stream(tensors[0].device)]):
        return call(*tensors)


@contextmanager
def _worker_each(devices: Sequence[torch.device]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Spawn a worker thread for each partition."""
    with ExitStack() as stack:
        queues = [stack.enter_context(spawn_workers([device])) for device in devices]
        yield [ins[0] for ins, _ in queues], [outs[0] for _, outs in queues]
