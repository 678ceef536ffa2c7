"""The partitions of a `pipeexec.GPipe`: layers as stages.

A partition takes and returns flat tensors, those of skips that cross its border included.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device
from pipeexec.gpipe.arguments import Switches
from pipeexec.gpipe.checkpoint import recomputing
from pipeexec.gpipe.skip import Key, Shelf, Skippable, use_shelf
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.module_call import default_state, set_default_state
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentTypeError

if TYPE_CHECKING:
    from pipeexec.gpipe.call_plan import CallPlan


class Form(NamedTuple):
    """Structure of flat tensors: one tensor (atomic) or a tuple of ``n``, then skips, not None."""

    is_atomic: bool
    n: int
    skips: tuple[Key, ...] = ()

    @property
    def slots(self) -> Sequence[int | Key]:
        """The name of each flat tensor: its number, or its skip."""
        return (*range(self.n), *self.skips) if self.skips else range(self.n)


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

    def input_form(self, is_atomic: bool, slots: Collection[int | Key]) -> Form:
        """Return the form of inputs, given the slots of all tensors that come to this partition."""
        n = sum(isinstance(slot, int) for slot in slots)
        return Form(is_atomic, n, tuple(key for key in self.popped_skips if key in slots))

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
        if [x for x in outputs if not isinstance(x, Tensor)]:
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


class Runtime(NamedTuple):
    """Stages, devices and plans that all forwards of one module share.

    ``skips`` has the source and target partition of each skip that crosses a border. There is a
    lock for each partition, as two forwards may run it in different threads. ``plans`` are by the
    form of a call: which micro-batches are recomputed, which partitions are tracked, the stream.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    skips: Mapping[Key, tuple[int, int]]
    locks: Sequence[AbstractContextManager[Any]]
    call_numbers: Iterator[int]
    switches: Switches
    plans: dict[tuple[tuple[bool, ...], tuple[int, ...], str], CallPlan]

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
    """Return the stages of the parts of a module, one device each.

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
    locks = [threading.RLock() for _ in parts]
    return Runtime(stages, partitions, devices, skips, locks, itertools.count(), switches, {})
