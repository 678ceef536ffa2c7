"""The runtime of torch.distributed.pipelining with all stages in one process, a stream each.

Torch's runtime passes values by reference between stages of one rank, as in its V-shaped schedules,
and orders nothing between streams. The stages here add that order: each computes on a stream of its
own, and waits for the event that its neighbour recorded behind the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import pipesim as ps
from on_gpu.streams import GpuStream, joined, on_stream
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.torch_pipelining.private import make_runtime
from pipesim.ops import SCHEDULED, Action, Op


@contextmanager
def one_process() -> Iterator[None]:
    """Give torch.distributed a group of this process alone; nothing is ever sent."""
    # Without a name of an interface gloo looks this machine up, which can take long offline.
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if interface == "lo":
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def issue_order(graph: ps.TaskGraph) -> list[str]:
    """Return the compute tasks of all devices in the order in which our host issues them."""
    return [
        str(Action(int(graph.stage[task]), Op(graph.op[task]), int(graph.microbatch[task])))
        for task in range(len(graph))
        if Op(graph.op[task]) in SCHEDULED
    ]


class StreamStage(PipelineStage):
    """A stage of torch's that computes on a stream of its own.

    Parameters
    ----------
    module, index, n_stages, device
        As for `PipelineStage`.
    stream
        None on a CPU.
    ran
        Takes the text of each action that this stage runs.
    """

    def __init__(
        self, module: nn.Module, index: int, n_stages: int, device: torch.device, stream: GpuStream,
        ran: list[str],
    ) -> None:  # fmt: skip
        super().__init__(module, index, n_stages, device)
        self.stream, self.ran = stream, ran
        self.previous: StreamStage | None = None
        self.next: StreamStage | None = None
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F behind that of the stage before."""
        self.ran.append(f"{self.stage_index}F{fwd_chunk_id}")
        with self._following(self.previous, "F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _keep_for(self.next, output)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run B or I behind that of the next stage."""
        op = "B" if kwargs.get("full_backward", True) else "I"
        self.ran.append(f"{self.stage_index}{op}{bwd_chunk_id}")
        with self._following(self.next, "B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run W."""
        self.ran.append(f"{self.stage_index}W{bwd_chunk_id}")
        with on_stream(self.stream):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients that the stage before takes."""
        gradients = super().get_local_bwd_output(mb_index)
        for gradient in gradients:
            _keep_for(self.previous, gradient)
        return gradients

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no messages: up to 2.11, torch would send one from this process to itself."""
        return []

    @contextmanager
    def _following(self, source: StreamStage | None, op: str, microbatch: int) -> Iterator[None]:
        """Compute on this stage's stream once a neighbour has made its value; record an event."""
        if self.stream is None:
            yield
            return
        if source is not None:
            self.stream.wait_event(source._events[op, microbatch])
        with torch.cuda.stream(self.stream):
            yield
        event = self._events[op, microbatch] = torch.cuda.Event()
        event.record(self.stream)


def _keep_for(stage: StreamStage | None, value: Tensor | None) -> None:
    """Keep memory of a value until the stream of ``stage`` has used it."""
    if stage is not None and stage.stream is not None and value is not None:
        value.record_stream(stage.stream)


class TorchRuntime:
    """Steps of torch's runtime.

    Parameters
    ----------
    graph
        The runtime runs its compute tasks, in their issue order.
    stages, streams
        One a stage of the graph.
    device
        Where the stages are.
    batch
        On that device.

    Attributes
    ----------
    order
        The actions that were given to the runtime.
    ran
        The actions of the last step, as stages ran them.
    """

    def __init__(
        self, graph: ps.TaskGraph, stages: Sequence[nn.Module], streams: Sequence[GpuStream],
        device: torch.device, batch: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        n, m = len(stages), graph.n_microbatches
        self.order, self.ran = issue_order(graph), list[str]()
        self._streams, self._batch = streams, batch
        pipeline_stages = [
            StreamStage(module, i, n, device, stream, self.ran)
            for i, (module, stream) in enumerate(zip(stages, streams, strict=True))
        ]
        for first, second in pairwise(pipeline_stages):
            first.next, second.previous = second, first

        def loss_of(output: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(output, targets) / m

        self._runtime = make_runtime(
            [self.order], "compute_comms", pipeline_stages, m, loss_fn=loss_of, scale_grads=False
        )

    def step(self) -> None:
        """Run a step, whose gradients add up in the parameters."""
        self.ran.clear()
        inputs, targets = self._batch
        with joined(self._streams), on_stream(self._streams[-1]):  # where the loss is computed
            self._runtime.step(inputs, target=targets, losses=[], return_outputs=False)

    def check_order(self) -> None:
        """Raise unless the last step ran the actions in the order that was given."""
        if self.ran != self.order:
            raise RuntimeError(f"torch's runtime was given {self.order}, and ran {self.ran}")
