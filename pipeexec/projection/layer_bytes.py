"""Count the bytes that each layer holds for a micro-batch, and those that several layers share.

A layer holds the tensors that autograd saves, and its inputs. As part of a stage it shares tensors
with other layers: a ReLU at its end saves the tensor that the next layer saves as its input. And a
value from the same stage is held only if it is saved. So the bytes of a stage are not the sum of
those of its layers. `LayerBytes` follows each tensor that layers pass on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.devices.transfer import nbytes as message_bytes
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage, attach_meters


@dataclass
class _Passed:
    """A tensor that layers pass on: its bytes, and the layers that save or receive it."""

    nbytes: int
    saved: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


class _Meter(ActivationMeter):
    """Keeps the bytes of each storage, and how many tensors hold it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([*module.parameters(), *module.buffers()])
        self.sizes: dict[int, int] = {}

    def acquire(self, tensor: Tensor) -> tuple[int, int]:
        """Count a tensor as held."""
        key, nbytes = super().acquire(tensor)
        if nbytes:
            self.sizes[key] = nbytes
        return key, nbytes

    def holders(self) -> dict[int, int]:
        """Return the number of tensors that hold each storage now."""
        return dict(self._holders)


class LayerBytes:
    """Runs layers one after the other for one micro-batch, and counts what they hold.

    ``values`` are the tensors that the layers so far pass on: at first those of the sample, on its
    device. Of each layer by itself there are ``activation_bytes``, from F to B, its input included;
    ``left_bytes``, between I and W; ``workspace_bytes``, beyond its activations while B runs, as of
    a recompute inside it; and ``output_bytes``, of the values that it passes on.
    """

    def __init__(self, sample: Sequence[Tensor]) -> None:
        self.values = tuple(sample)
        self.activation_bytes: list[float] = []
        self.left_bytes: list[float] = []
        self.workspace_bytes: list[float] = []
        self.output_bytes: list[float] = []
        self._own: list[int] = []
        self._passed: list[_Passed] = []
        # Those of `values`, by the address of their storage.
        self._by_address: dict[int, _Passed] = {}

    def run(self, layer: nn.Module, *, split: bool, is_last: bool) -> None:
        """Run the next layer, forward and backward; its parameters have no gradients after.

        The last layer returns the loss. With ``split``, the bytes between I and W are counted.
        """
        loss = (lambda output, _: output) if is_last else None
        index, device = len(self._own), self.values[0].device
        stage = Stage(layer, index, device, ActivationCounter(), loss)
        stage.forward(0, self.values, None, recomputed=False)  # learns if it changes its input
        stage.forget(0)
        meter = _Meter(layer)
        with attach_meters([stage], [meter]):
            outputs = stage.forward(0, self.values, None, recomputed=False)
            held, holders = meter.current, meter.holders()
            gradients = tuple(None if x is None else torch.ones_like(x) for x in outputs)
            stage.backward(0, gradients)
        self.activation_bytes.append(float(held))
        self.workspace_bytes.append(float(meter.peak - held))
        self.left_bytes.append(float(self._left(stage, layer, gradients)) if split else 0.0)
        self.output_bytes.append(0.0 if is_last else float(message_bytes(outputs)))
        layer.zero_grad(set_to_none=True)
        received = self.values
        self.values = () if is_last else tuple(x for x in outputs if x is not None)
        self._follow(index, holders, meter.sizes, received)

    def _left(self, stage: Stage, layer: nn.Module, gradients: Sequence[Tensor | None]) -> int:
        """Return the bytes between I and W."""
        meter = _Meter(layer)
        with attach_meters([stage], [meter]):
            stage.forward(0, self.values, None, recomputed=False, split=True)
            stage.input_grad(0, tuple(gradients))
            stage.weight_grad(0)
        return meter.deferred_peak

    def _follow(
        self, index: int, holders: dict[int, int], sizes: dict[int, int], received: Sequence[Tensor]
    ) -> None:
        """Note the tensors that a layer saves and receives, and those that it passes on."""
        inputs = {key: x for x in received if (key := _address(x))}
        by_address = {key: self._by_address.get(key) or self._new(x) for key, x in inputs.items()}
        for key, passed in by_address.items():
            passed.received.append(index)
            n_inputs = sum(_address(x) == key for x in received)
            if holders.get(key, 0) > n_inputs:
                passed.saved.append(index)
        outputs = {key: x for x in self.values if (key := _address(x))}
        self._by_address = {key: by_address.get(key) or self._new(x) for key, x in outputs.items()}
        for key in outputs.keys() & holders.keys() - inputs.keys():
            self._by_address[key].saved.append(index)
        own = holders.keys() - inputs.keys() - outputs.keys()
        self._own.append(sum(sizes[key] for key in own))

    def _new(self, tensor: Tensor) -> _Passed:
        self._passed.append(_Passed(tensor.untyped_storage().nbytes()))
        return self._passed[-1]

    def joint(self) -> NDArray[np.float64]:
        """Return the activation bytes of stages by first and last layer; see `pipesim.Layers`."""
        n = len(self._own)
        total = np.triu(np.cumsum(np.tile(np.array(self._own, float), (n, 1)), axis=1))
        total -= np.triu(np.tile(np.cumsum([0, *self._own[:-1]])[:, None], (1, n)))
        for passed in self._passed:
            for first in range(n):
                later = [layer for layer in passed.saved if layer >= first]
                begins = first if first in passed.received else min(later, default=n)
                total[first, begins:] += passed.nbytes
        return total


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has no bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0
