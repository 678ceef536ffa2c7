"""`LayerCosts`: what each layer of a model computes, moves and keeps, found without running it.

From it come the seconds on a device that one has only the data sheet of, and so a prediction of a
pipeline before there is the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.demo_models.roofline import Kernel, Kernels, Roofline
from pipeexec.gpipe.layer_by_layer import DetachingShelf, backward_roots, isolated_layers
from pipeexec.gpipe.skip import Key, Skippable
from pipeexec.stages.batches import Batch
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import checked_split
from pipesim.models.layers import Layers
from pipesim.network.network import Network

__all__ = ["LayerCost", "LayerCosts", "LayerSkip", "layer_costs"]

_META = torch.device("meta")


class LayerCost(NamedTuple):
    """One layer, for one micro-batch.

    Attributes
    ----------
    forward, backward
        Kernels of F and of B, the sums of the parameters' gradients included.
    output_bytes
        Bytes of its output; without skips.
    activation_bytes
        Bytes of what autograd saves for B, without parameters, and without what an earlier layer
        has saved.
    parameter_bytes
        Bytes of its parameters.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    output_bytes: float
    activation_bytes: float
    parameter_bytes: float


class LayerSkip(NamedTuple):
    """A skip: the layers that stash and pop it, and its bytes for one micro-batch."""

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True)
class LayerCosts:
    """Layers of a sequential module, for one micro-batch; see `layer_costs`.

    Attributes
    ----------
    layers
        In the order of the forward.
    skips
        Between them (`pipeexec.gpipe.skip`).
    """

    layers: tuple[LayerCost, ...]
    skips: tuple[LayerSkip, ...] = ()

    def on(self, device: Roofline) -> Layers:
        """Return seconds and bytes of the layers on such a device."""
        columns: dict[str, list[float]] = {
            name: [device.seconds(getattr(layer, name)) for layer in self.layers]
            for name in ("forward", "backward")
        }
        for name in ("output_bytes", "activation_bytes", "parameter_bytes"):
            columns[name] = [getattr(layer, name) for layer in self.layers]
        return Layers(columns, "layer costs")

    def skip_bytes(self, balance: Sequence[int]) -> dict[tuple[int, int], float]:
        """Return the bytes that skips carry from stage to stage, of those pairs that have any."""
        sizes = checked_split(balance, len(self.layers), "balance")
        stage = np.repeat(np.arange(len(sizes)), sizes).tolist()
        found: dict[tuple[int, int], float] = {}
        for skip in self.skips:
            pair = stage[skip.source], stage[skip.target]
            if pair[0] != pair[1]:
                found[pair] = found.get(pair, 0.0) + skip.nbytes
        return found

    def costs(
        self, balance: Sequence[int], device: Roofline, *, network: Network | None = None
    ) -> Costs:
        """Return the costs of stages of so many layers each.

        Parameters
        ----------
        balance
            Layers of each stage, in order.
        device
            What each of the devices sustains.
        network
            As in `Costs`.

        Raises
        ------
        ArgumentError
            For a balance that does not sum to the number of layers, or has an empty stage.
        """
        return self.on(device).costs(balance, network=network)


def layer_costs(module: nn.Sequential, sample: Batch) -> LayerCosts:
    """Count what each layer does for one micro-batch.

    Layers are run one by one, forward and backward, in training mode, as copies on the meta
    device: nothing is computed, and no memory is needed for a module that is there already.

    Parameters
    ----------
    module
        Its layers take and return one tensor or one tuple of tensors, and may have skips.
    sample
        A micro-batch, on any device.

    Examples
    --------
    >>> import torch
    >>> linear = torch.nn.Linear(10, 20, bias=False, device="meta")
    >>> [layer] = layer_costs(torch.nn.Sequential(linear), torch.empty(4, 10)).layers
    >>> layer.forward  # 2 * 4 * 10 * 20 operations; input, weight and output of 4 bytes a number
    (Kernel(flops=1600.0, nbytes=1280.0, is_3x3=False),)
    """
    shelf, saved = DetachingShelf(), _Saved()
    source: dict[Key, tuple[int, float]] = {}
    layers: list[LayerCost] = []
    skips: list[LayerSkip] = []
    for i, (run, given) in enumerate(isolated_layers(module, sample, _META, shelf)):
        layers.append(_counted(run, given, saved))
        if isinstance(run, Skippable):
            for key in run.poppable():
                skips.append(LayerSkip(source[key][0], i, source[key][1]))
            for key in run.stashable():
                skip = shelf.skips[key]
                source[key] = i, 0.0 if skip is None else float(skip.nbytes)
    return LayerCosts(tuple(layers), tuple(skips))


def _counted(layer: nn.Module, given: Batch, saved: _Saved) -> LayerCost:
    """Run a layer forward and backward, and return what it did."""
    parameters = list(layer.parameters())
    for parameter in parameters:  # so that its gradient is added to one, as in a pipeline
        parameter.grad = torch.zeros_like(parameter)
    forward, backward = Kernels(), Kernels()
    before = saved.nbytes
    with saved.but(layer), forward:
        output = layer(given)
    outputs, gradients = backward_roots(output)
    if outputs:
        with backward:
            torch.autograd.backward(outputs, gradients)
    return LayerCost(
        tuple(forward.listed),
        tuple(backward.listed),
        float(sum(x.nbytes for x in (output if isinstance(output, tuple) else (output,)))),
        saved.nbytes - before,
        float(sum(x.nbytes for x in parameters)),
    )


class _Saved:
    """The storages that autograd has saved, each once.

    They are held: the identity of one that is gone could be that of the next. On the meta device
    they have no memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._held: dict[int, torch.UntypedStorage] = {}

    def but(self, layer: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which what is saved counts, but for a layer's own tensors."""
        own = {_identity(x) for x in (*layer.parameters(), *layer.buffers())}

        def pack(tensor: Tensor) -> Tensor:
            if _identity(tensor) not in own | self._held.keys():
                self._held[_identity(tensor)] = tensor.untyped_storage()
                self.nbytes += tensor.untyped_storage().nbytes()
            return tensor

        unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
