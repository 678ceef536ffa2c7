"""`LayerCosts`: operations, bytes and activations of each layer, counted without computing.

With the data sheet of a GPU they give the seconds of each layer and of stages, and so the
prediction of a pipeline before the hardware is available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipeexec.gpipe.balance import DetachingShelf, backward_roots, isolated_layers
from pipeexec.gpipe.skip import Key, Skippable
from pipeexec.splitting.operations import storage_of
from pipeexec.stages.batches import Batch
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import checked_split
from pipesim.errors import ArgumentError, number
from pipesim.models.gpu import GPU, Kernel, as_gpu
from pipesim.models.layers import Layers
from pipesim.network.network import Network

_META = torch.device("meta")


class LayerCost(NamedTuple):
    """Work and bytes of one layer, for one micro-batch.

    B includes the sums of the parameters' gradients. ``output_bytes`` are without skips.
    ``activation_bytes`` are those that autograd saves for B, without parameters and without tensors
    that an earlier layer has saved.
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
    """Layers of a sequential module, for one micro-batch; see `layer_costs`."""

    layers: tuple[LayerCost, ...]
    skips: tuple[LayerSkip, ...] = ()

    def to_layers(self, gpu: GPU | Mapping[str, Any] | str) -> Layers:
        """Return seconds and bytes of the layers on a GPU, each layer by itself."""
        device = as_gpu(gpu)
        columns: dict[str, list[float]] = {
            name: [device.seconds(getattr(layer, name)) for layer in self.layers]
            for name in ("forward", "backward")
        }
        for name in ("output_bytes", "activation_bytes", "parameter_bytes"):
            columns[name] = [getattr(layer, name) for layer in self.layers]
        return Layers(columns, "layer costs")

    def skip_bytes(self, balance: Sequence[int]) -> dict[tuple[int, int], float]:
        """Return the bytes of skips between stages, for each pair of stages with skips."""
        sizes = checked_split(balance, len(self.layers), "balance")
        stage = np.repeat(np.arange(len(sizes)), sizes).tolist()
        nbytes: dict[tuple[int, int], float] = {}
        for skip in self.skips:
            pair = stage[skip.source], stage[skip.target]
            if pair[0] != pair[1]:
                nbytes[pair] = nbytes.get(pair, 0.0) + skip.nbytes
        return nbytes

    def costs(
        self,
        balance: Sequence[int],
        gpu: GPU | Mapping[str, Any] | str,
        *,
        network: Network | None = None,
    ) -> Costs:
        """Return the costs of the stages of a balance.

        F and B of a stage take as long as its kernels, or as the host's launches if these are
        longer (`pipesim.GPU.seconds`). The host launches kernels of short layers while the GPU runs
        long ones. So a stage may take less time than its layers one by one.

        Parameters
        ----------
        balance
            Number of layers of each stage, in order.
        gpu
            The GPU of each device, the name of a preset, or a mapping of a GPU's fields. Its
            ``flops`` are those for the data type of the layers.
        network
            As in `Costs`.
        """
        device = as_gpu(gpu)
        sizes = checked_split(balance, len(self.layers), "balance")
        stages = [self.layers[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]
        return replace(
            self.to_layers(device).costs(sizes, network=network),
            forward=tuple(
                device.seconds(chain.from_iterable(layer.forward for layer in stage))
                for stage in stages
            ),
            backward=tuple(
                device.seconds(chain.from_iterable(layer.backward for layer in stage))
                for stage in stages
            ),
        )


def layer_costs(module: nn.Sequential, sample: Batch, *, winograd: float = 1.0) -> LayerCosts:
    """Count what each layer does for one micro-batch.

    Copies of the layers run one by one on the meta device, forward and backward, in training mode.
    Nothing is computed, and the copies need no memory.

    Parameters
    ----------
    module
        Module whose layers take and return one tensor or one tuple of tensors; skips are allowed.
    sample
        A micro-batch, on any device.
    winograd
        Counted operations over executed ones of 3 x 3 convolutions with stride 1, as in
        `KernelRecorder`; 1 (the default) if convolutions are computed directly.

    Examples
    --------
    >>> import torch
    >>> linear = torch.nn.Linear(10, 20, bias=False, device="meta")
    >>> [layer] = layer_costs(torch.nn.Sequential(linear), torch.empty(4, 10)).layers
    >>> [product] = layer.forward
    >>> product.flops, product.nbytes  # 2 * 4 * 10 * 20; 4 for a number of input, weight, output
    (1600.0, 1280.0)
    """
    shelf, saved = DetachingShelf(), _SavedStorages()
    source: dict[Key, tuple[int, float]] = {}
    layers: list[LayerCost] = []
    skips: list[LayerSkip] = []
    for i, (run, layer_input) in enumerate(isolated_layers(module, sample, _META, shelf)):
        layers.append(_layer_cost(run, layer_input, saved, winograd))
        if isinstance(run, Skippable):
            for key in run.poppable():
                skips.append(LayerSkip(source[key][0], i, source[key][1]))
            for key in run.stashable():
                skip = shelf.skips[key]
                source[key] = i, 0.0 if skip is None else float(skip.nbytes)
    return LayerCosts(tuple(layers), tuple(skips))


def _layer_cost(
    layer: nn.Module, layer_input: Batch, saved: _SavedStorages, winograd: float
) -> LayerCost:
    """Run a layer forward and backward, and return its cost."""
    parameters = list(layer.parameters())
    for parameter in parameters:  # B then adds to a gradient, as in a pipeline
        parameter.grad = torch.zeros_like(parameter)
    forward, backward = KernelRecorder(winograd), KernelRecorder(winograd)
    before = saved.nbytes
    with saved.counting(layer), forward:
        output = layer(layer_input)
    outputs, gradients = backward_roots(output)
    if outputs:
        with backward:
            torch.autograd.backward(outputs, gradients)
    return LayerCost(
        tuple(forward.kernels),
        tuple(backward.kernels),
        float(sum(x.nbytes for x in (output if isinstance(output, tuple) else (output,)))),
        saved.nbytes - before,
        float(sum(x.nbytes for x in parameters)),
    )


class _SavedStorages:
    """Storages that autograd has saved, each counted once.

    References are kept, so that no later storage gets the identity of a freed one. Storages on the
    meta device have no memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._held: dict[int, torch.UntypedStorage] = {}

    def counting(self, layer: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts saved tensors, except parameters and buffers of a layer."""
        own = {storage_of(x) for x in (*layer.parameters(), *layer.buffers())}

        def pack(tensor: Tensor) -> Tensor:
            if storage_of(tensor) not in own | self._held.keys():
                self._held[storage_of(tensor)] = tensor.untyped_storage()
                self.nbytes += tensor.untyped_storage().nbytes()
            return tensor

        unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# Record the kernels of PyTorch operations: floating-point operations and bytes of each.
#
# On the meta device nothing is computed: its tensors have only shapes.

#: Operations that allocate memory without reading or writing it.
_ALLOCATIONS = frozenset({
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
})  # fmt: skip
#: Position of the left operand of matrix products; they sum over its last dimension.
_LEFT_OPERANDS = {
    torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1, torch.ops.aten.baddbmm: 1,
}  # fmt: skip


class KernelRecorder(TorchDispatchMode):
    """Context that records each operation that runs a kernel.

    FLOPs are those of `torch.utils.flop_counter`. A kernel reads each operand once and writes each
    result once, which is a lower bound. Views move nothing. Matrix products have a depth;
    convolutions have none, since it depends on their algorithm.

    Parameters
    ----------
    winograd
        Counted operations over executed ones, for a 3 x 3 convolution with stride 1 and for its
        backward: 2.25 for Winograd's algorithm F(2 x 2, 3 x 3), 4 for F(4 x 4, 3 x 3) (Lavin and
        Gray, arXiv 1509.09308). By default, 1, convolutions are computed directly.

    Attributes
    ----------
    kernels
        Recorded kernels, in order, with the names of PyTorch's operations.
    """

    def __init__(self, winograd: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        factor = number(winograd)
        if factor is None or not 1 <= factor < inf:
            raise ArgumentError(f"winograd must be finite and at least 1, got {winograd!r}")
        self._winograd = factor
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record its kernel."""
        keywords = dict(kwargs or {})
        out = func(*args, **keywords)
        packet = func._overloadpacket
        if not func.is_view and packet not in _ALLOCATIONS:
            count = flop_registry.get(packet)
            flops = 0.0 if count is None else float(count(*args, **keywords, out_val=out))
            if _is_3x3(packet, args):
                flops /= self._winograd
            nbytes, left = _nbytes((args, keywords)) + _nbytes(out), _LEFT_OPERANDS.get(packet)
            depth = 0.0 if left is None else float(args[left].shape[-1])
            self.kernels.append(Kernel(packet.__name__, flops, nbytes, depth))
        return out


def _is_3x3(operation: torch._ops.OpOverloadPacket, args: Sequence[Any]) -> bool:
    """Return whether an operation is a 3 x 3 convolution with stride 1, or its backward."""
    if operation is torch.ops.aten.convolution:
        _, weight, _, stride = args[:4]
    elif operation is torch.ops.aten.convolution_backward:
        _, _, weight, _, stride = args[:5]
    else:
        return False
    return tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}


def _nbytes(values: object) -> float:
    """Return the bytes of the tensors in values: each once, and without expanded elements."""
    tensors = {id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}
    return float(sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors.values()))
