"""The partitions of a `pipeexec.GPipe`: layers as stages, and the routes of messages between them.

A partition takes and returns flat tensors, those of skips that cross its border included. Outputs
go to the next partition, skips across several.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device
from pipeexec.devices.streams import Stream
from pipeexec.gpipe.arguments import Switches
from pipeexec.gpipe.checkpoint import recomputing
from pipeexec.gpipe.skip import Key, Shelf, Skippable, use_shelf
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.module_call import default_state, set_default_state
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentTypeError
from pipesim.graph.skips import border_crossings
from pipesim.ops import Op


class Form(NamedTuple):
    """Structure of flat tensors: one tensor (atomic) or a tuple of ``n``, then skips, not None."""

    is_atomic: bool
    n: int
    skips: tuple[Key, ...] = ()

    @property
    def slots(self) -> tuple[int | Key, ...]:
        """The name of each flat tensor: its number, or its skip."""
        return *range(self.n), *self.skips


class Forms:
    """Forms of a partition's inputs, set before each run, and of its last outputs."""

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs = self.outputs = Form(True, 1)


class Partition(nn.Module):
    """Layers of a sequential module; not registered in the module that they belong to.

    ``popped_skips`` and ``stashed_skips`` are those whose other end is in another partition.
    """

    def __init__(
        self, layers: nn.Sequential, popped_skips: Sequence[Key], stashed_skips: Sequence[Key]
    ) -> None:
        super().__init__()
        self.layers = layers
        self.popped_skips, self.stashed_skips = tuple(popped_skips), tuple(stashed_skips)
        self._has_skips = any(isinstance(layer, Skippable) for layer in layers.modules())
        self.forms = Forms()  # a separate object: attributes of a module are slow to set

    @property
    def training(self) -> bool:
        """Whether the layers train: the module that they belong to sets only their mode."""
        return "layers" not in self._modules or bool(self._modules["layers"].training)  # type: ignore[union-attr]

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the layers; return outputs, then the stashed skips that are not None."""
        form = self.forms.inputs
        layer_input = tensors[0] if form.is_atomic else tensors[: form.n]
        stashed: dict[Key, Tensor] = {}
        if self._has_skips:
            shelf = Shelf(dict.fromkeys(self.popped_skips))
            for key, skip in zip(form.skips, tensors[form.n :], strict=True):
                shelf.put(key, skip)
            with use_shelf(shelf):
                output = self.layers(layer_input)
            skips = {key: shelf.take(key) for key in self.stashed_skips}
            stashed = {key: skip for key, skip in skips.items() if skip is not None}
        else:
            output = self.layers(layer_input)
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(x, Tensor) for x in outputs):
            kinds = ", ".join(type(x).__name__ for x in outputs)
            raise ArgumentTypeError(
                f"a partition must return a tensor or a tuple of tensors: expected Tensor, but got "
                f"{kinds}; its layers are {', '.join(type(x).__name__ for x in self.layers)}"
            )
        self.forms.outputs = Form(not isinstance(output, tuple), len(outputs), tuple(stashed))
        return (*outputs, *stashed.values())


def split_layers(module: nn.Sequential, balance: Sequence[int]) -> Iterator[nn.Sequential]:
    """Yield one sequential module a partition; layers keep their names."""
    layers = iter(module.named_children())
    for n in balance:
        partition = nn.Sequential()
        for _ in range(n):
            partition.add_module(*next(layers))
        yield partition


def skips_across(partitions: Sequence[nn.Sequential]) -> dict[Key, tuple[int, int]]:
    """Return the source and target partition of each skip that crosses a border."""
    source: dict[Key, int] = {}
    crossings: dict[Key, tuple[int, int]] = {}
    for j, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                popped = [key for key in layer.poppable() if source[key] != j]
                crossings |= {key: (source[key], j) for key in popped}
                source |= dict.fromkeys(layer.stashable(), j)
    return crossings


class Route(NamedTuple):
    """Route of one message a micro-batch, from one partition to another.

    ``skips`` is None for outputs of the partition, or their gradients.
    """

    source: int
    target: int
    skips: tuple[Key, ...] | None = None

    @property
    def reverse(self) -> Route:
        """The route of the gradients."""
        return Route(self.target, self.source, self.skips)

    def carries(self, slot: int | Key) -> bool:
        """Return whether a tensor takes this route: the number of an output, or a skip."""
        return isinstance(slot, int) if self.skips is None else slot in self.skips


class RoutesByPartition(NamedTuple):
    """Routes that lead to each partition, and routes that lead from it."""

    incoming: list[list[Route]]
    outgoing: list[list[Route]]


def forward_routes(n: int, skips: Mapping[Key, tuple[int, int]], *, portals: bool) -> list[Route]:
    """Return the routes of a forward through ``n`` partitions, outputs before skips.

    With ``portals`` a skip goes straight to the partition that pops it. Without, it goes through
    each partition between, in a message next to the output.
    """
    keys = list(skips)
    outputs = [Route(j, j + 1) for j in range(n - 1)]
    return outputs + [
        Route(*hop, tuple(keys[k] for k in members))
        for hop, members in border_crossings(skips.values(), portals).items()
    ]


def routes_by_partition(n: int, routes: Sequence[Route]) -> RoutesByPartition:
    """Sort the routes of ``n`` partitions by target and by source.

    Outputs leave before skips. Messages arrive in the order of their sources. Task graphs whose
    messages are all on one stream have the same order.
    """
    by_source = sorted(routes, key=lambda route: (route.source, route.skips is not None))
    by_target = sorted(routes, key=lambda route: (route.skips is not None, route.target))
    return RoutesByPartition(
        [[route for route in by_source if route.target == j] for j in range(n)],
        [[route for route in by_target if route.source == j] for j in range(n)],
    )


class MessageStreams(NamedTuple):
    """A route of the outputs of F, or of the gradients of B, and its streams.

    Attributes
    ----------
    op
        Operation that produces the messages: F or B.
    send_peer, recv_peer
        For skips, the partition at the other end of the SEND and of the RECV; else None.
    send_stream, recv_stream, compute_stream
        Streams of the source that sends, and of the target that receives and computes.
    """

    route: Route
    op: Op
    send_op: Op
    recv_op: Op
    send_peer: int | None
    recv_peer: int | None
    send_stream: Stream
    recv_stream: Stream
    compute_stream: Stream


class MessageStreamsByPartition(NamedTuple):
    """Streams of the messages that each partition receives, and of those that it sends."""

    incoming: list[list[MessageStreams]]
    outgoing: list[list[MessageStreams]]


def message_streams(
    op: Op, routes: RoutesByPartition, devices: Sequence[Device], compute: str, *,
    copy_streams: bool, partitions: Container[int],
) -> MessageStreamsByPartition:  # fmt: skip
    """Return the streams of the messages of F or B between the given partitions.

    With ``copy_streams`` each peer and direction has its own stream. Without, messages are on the
    streams named ``compute``.
    """
    send_op, recv_op = (Op.SEND_F, Op.RECV_F) if op == Op.F else (Op.SEND_B, Op.RECV_B)

    def streams_of_route(route: Route) -> MessageStreams:
        source, target, skips = route
        names = (f"send:{target}", f"recv:{source}") if copy_streams else (compute, compute)
        send_peer, recv_peer = (None, None) if skips is None else (target, source)
        return MessageStreams(
            route, op, send_op, recv_op, send_peer, recv_peer,
            send_stream=devices[source].stream(names[0]),
            recv_stream=devices[target].stream(names[1]),
            compute_stream=devices[target].stream(compute),
        )  # fmt: skip

    def streams_by_partition(rows: Sequence[Sequence[Route]]) -> list[list[MessageStreams]]:
        return [
            [
                streams_of_route(route)
                for route in row
                if route.source in partitions and route.target in partitions
            ]
            for row in rows
        ]

    return MessageStreamsByPartition(
        streams_by_partition(routes.incoming), streams_by_partition(routes.outgoing)
    )


class Runtime(NamedTuple):
    """Stages, devices and routes that all forwards of one module share.

    There is a lock for each partition, as two forwards may run it in different threads.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    forward_routes: RoutesByPartition
    backward_routes: RoutesByPartition
    locks: Sequence[AbstractContextManager[Any]]
    call_numbers: Iterator[int]
    switches: Switches

    def draws_random(self, unknown: bool) -> bool:
        """Return whether a forward draws random numbers; ``unknown`` if it has not run yet."""
        return any(stage.is_random.get(stage.module.training, unknown) for stage in self.stages)

    def random_states(self) -> list[Tensor]:
        """Return the states of the devices' generators."""
        return [default_state(device) for device in dict.fromkeys(s.device for s in self.stages)]

    def restore_random_states(self, states: Sequence[Tensor]) -> bool:
        """Restore ``states`` if a generator has moved; return whether one had.

        All partitions are then asked anew whether they draw.
        """
        devices = dict.fromkeys(stage.device for stage in self.stages)
        if all(map(torch.equal, states, self.random_states())):
            return False
        for device, state in zip(devices, states, strict=True):
            set_default_state(device, state)
        for stage in self.stages:
            stage.is_random.clear()
        return True


def make_runtime(
    parts: Sequence[nn.Sequential],
    torch_devices: Sequence[torch.device],
    devices: Sequence[Device],
    switches: Switches,
) -> Runtime:
    """Return the stages and routes of the parts of a module, one device each.

    Random numbers are drawn on ``torch_devices``; tasks and messages run on ``devices``.
    """
    skips = skips_across(parts)
    partitions = [
        Partition(
            part,
            [key for key, (_, target) in skips.items() if target == j],
            [key for key, (source, _) in skips.items() if source == j],
        )
        for j, part in enumerate(parts)
    ]
    stages = [
        Stage(partition, j, device, ActivationCounter())
        for j, (partition, device) in enumerate(zip(partitions, torch_devices, strict=True))
    ]
    for stage in stages:
        stage.recompute_context, stage.recompute_option = recomputing, "checkpoint='never'"
    routes = forward_routes(len(parts), skips, portals=switches.portals)
    return Runtime(
        stages,
        partitions,
        devices,
        routes_by_partition(len(parts), routes),
        routes_by_partition(len(parts), [route.reverse for route in routes]),
        [threading.RLock() for _ in parts],
        itertools.count(),
        switches,
    )
