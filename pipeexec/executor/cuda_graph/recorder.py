"""`Recorder`: capture the work of a step on a GPU, and launch it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from pipeexec.devices.cuda_streams import CapturedEvent, CudaEvent, CudaStream
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step


class Recorder:
    """Captures steps on a GPU as CUDA graphs, and launches these."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, step: Step, tasks: Sequence[PlannedTask]) -> torch.cuda.CUDAGraph:
        """Capture a step: all streams fork from the first one, and join it again."""
        graph = torch.cuda.CUDAGraph()
        every = [stream for t in tasks for stream in (t.stream, t.device.stream("compute"))]
        streams = [s for s in {id(s): s for s in every}.values() if isinstance(s, CudaStream)]
        for stream in streams:
            stream.make_event = CapturedEvent
        try:
            # The outer context restores the current stream even if the inner one fails to end.
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
                first = torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=first):
                    for stream in streams:
                        stream.stream.wait_stream(first)
                    step.issue(tasks)
                    for stream in streams:
                        first.wait_stream(stream.stream)
        finally:
            for stream in streams:
                stream.make_event = CudaEvent
        return graph

    def launch(self, graph: torch.cuda.CUDAGraph) -> float:
        """Run a graph after the work of the caller's stream; return the seconds of the call."""
        with torch.cuda.device(self.device):
            start = perf_counter()
            graph.replay()
            seconds = perf_counter() - start
            torch.cuda.current_stream().synchronize()
        return seconds
