"""Seconds of a transformer's stages: from a rate alone, or from kernels on a GPU and its network.

Letters are those of `pipesim.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipesim.errors import ArgumentError, CostsWarning, NetworkError, check_type
from pipesim.models.gpu import GPU
from pipesim.models.kernels.group_collectives import Collective, PartCollectives, group_collectives
from pipesim.models.kernels.layer_kernels import (
    OperationKernels,
    embedding_kernels,
    head_kernels,
    layer_kernels,
)
from pipesim.models.size_checks import checked_value
from pipesim.network.network import Network
from pipesim.utils.caller_warnings import warn_caller

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard

__all__ = ["GpuSeconds", "RateSeconds", "StageSeconds", "per_stage", "stage_seconds"]


def stage_seconds(
    shard: Shard, gpu: GPU | None, flops_per_second: float | None, network: Network | None
) -> StageSeconds:
    """Return the seconds of stages from a GPU, or from one rate; see `Shard.stages` for errors.

    Warns
    -----
    CostsWarning
        If GPUs share layers, but the network has no rate between them.
    """
    if (gpu is None) == (flops_per_second is None):
        choice = 'gpu=..., such as pipesim.GPU.preset("h100_sxm"), or flops_per_second=...'
        text = f"give {choice}, not both" if gpu is not None else f"give one of {choice}"
        raise ArgumentError(text)
    t = shard.tensor_parallel
    if gpu is None:
        if isinstance(network, Network) and network.nodes and network.nodes.gpus_per_device > 1:
            _check_gpus(network.nodes.gpus_per_device, t)
        rate = checked_value("flops_per_second", flops_per_second, "FLOP/s", above_zero=True)
        return RateSeconds(shard, rate)
    check_type("gpu", gpu, GPU, 'give such as pipesim.GPU.preset("h100_sxm")')
    network = Network() if network is None else check_type("network", network, Network)
    if network.nodes is not None:
        _check_gpus(network.nodes.gpus_per_device, t)
    elif t > 1:
        warn_caller(
            f"tensor_parallel={t}, but the network has no nodes: collectives between the {t} GPUs "
            "of a device take no time; give such as "
            f'network=pipesim.Network.preset("dgx_h100", gpus_per_device={t})',
            CostsWarning,
        )
    return _gpu_seconds(shard, gpu, network)


@lru_cache(maxsize=256)
def _gpu_seconds(shard: Shard, gpu: GPU, network: Network) -> GpuSeconds:
    """Return the seconds of stages on a GPU; all splits of a model share those of its layers."""
    return GpuSeconds(shard, gpu, network)


def _check_gpus(gpus_per_device: int, tensor_parallel: int) -> None:
    """Raise `NetworkError` unless the GPUs of a device are those that share a layer."""
    if gpus_per_device != tensor_parallel:
        gpus = "1 GPU" if gpus_per_device == 1 else f"{gpus_per_device} GPUs"
        raise NetworkError(
            f"tensor_parallel={tensor_parallel}, but a device of the network has {gpus}; give "
            f"gpus_per_device={tensor_parallel} to the network"
        )


class StageSeconds(Protocol):
    """Seconds of stages, of which the first has the embedding and the last the head."""

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of F and B of a layer, of the embedding, and of head and loss."""

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in seconds, one value a stage, for its number of layers."""

    @property
    def without_launches(self) -> StageSeconds:
        """The same without the host's launches: a lower bound, and sums over layers."""


def per_stage(
    sizes: Sequence[int], layer: float, first: float = 0.0, last: float = 0.0
) -> tuple[float, ...]:
    """Return the value of each stage: ``layer`` times its layers, plus ``first`` or ``last``."""
    end = len(sizes) - 1
    return tuple(
        _of_stage(n, stage == 0, stage == end, layer, first, last) for stage, n in enumerate(sizes)
    )


def _of_stage(
    n: int, is_first: bool, is_last: bool, layer: float, first: float, last: float
) -> float:
    """Return the value of a stage of n layers; see `per_stage`."""
    return n * layer + first * is_first + last * is_last


@dataclass(frozen=True)
class RateSeconds:
    """Seconds as FLOPs over one rate, ``flops_per_second`` of each GPU; see `Shard.stages`."""

    shard: Shard
    flops_per_second: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of F and B of a layer, of the embedding (0), and of the head."""
        model, b = self.shard.model, self.shard.microbatch_size
        layer = 3 * model.layer_flops(b) + model.recomputed_flops(b, self.shard.recompute)
        return layer / self._rate, 0.0, 3 * model.head_flops(b) / self._rate

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in seconds; see `StageSeconds`."""
        model, b, rate = self.shard.model, self.shard.microbatch_size, self._rate
        linear, core, head = model.linear_flops(b), model.core_flops(b), model.head_flops(b)
        recomputed = model.recomputed_flops(b, self.shard.recompute)
        forward = per_stage(sizes, (linear + core) / rate, last=head / rate)
        backward = (2 * (linear + core) + recomputed) / rate
        input_grad = (linear + 2 * core + recomputed) / rate
        return {
            "forward": forward,
            "backward": per_stage(sizes, backward, last=2 * head / rate),
            "input_grad": per_stage(sizes, input_grad, last=head / rate),
            "weight_grad": per_stage(sizes, linear / rate, last=head / rate),
            "recompute": forward,
        }

    @property
    def without_launches(self) -> RateSeconds:
        """The same: a rate has no launches."""
        return self

    @property
    def _rate(self) -> float:
        """FLOP/s of all GPUs of the group."""
        return self.shard.tensor_parallel * self.flops_per_second


class _Work(NamedTuple):
    """Work of an operation on a layer, on the embedding, on the head, or on a stage.

    Attributes
    ----------
    busy
        Seconds of kernels and collectives.
    launches
        Number of launches of the host.
    """

    busy: float
    launches: float


#: Fields of `Costs`, and the fields of `OperationKernels` whose kernels each runs.
_FIELDS = {
    "forward": ("forward",),
    "backward": ("recompute", "input_grad", "weight_grad"),
    "input_grad": ("recompute", "input_grad"),
    "weight_grad": ("weight_grad",),
    "recompute": ("forward",),
}


@dataclass(frozen=True)
class GpuSeconds:
    """Seconds of kernels on a GPU, and of collectives between the GPUs that share a layer.

    An operation of a stage takes the sum of its kernels and collectives, or the time of the host to
    launch them, if that is longer. Collectives do not overlap with kernels.
    """

    shard: Shard
    gpu: GPU
    network: Network

    @cached_property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of F and B of a layer, of the embedding, and of head and loss."""
        layer, embedding, head = (
            sum(self._seconds(work[name]) for name in ("forward", "backward"))
            for work in (self._layer, self._embedding, self._head)
        )
        return layer, embedding, head

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in seconds; see `StageSeconds`."""
        end, kept = len(sizes) - 1, self._kept
        rows = []
        for stage, n in enumerate(sizes):
            key = (n, stage == 0, stage == end)
            if key not in kept:
                kept[key] = tuple(self._seconds(self._of_stage(name, *key)) for name in _FIELDS)
            rows.append(kept[key])
        return {
            **dict(zip(_FIELDS, zip(*rows, strict=True), strict=True)),
            "optimizer_step": self._optimizer_steps(sizes),
            "output_seconds": (self._message_seconds,) * len(sizes),
        }

    @cached_property
    def without_launches(self) -> GpuSeconds:
        """The same on a GPU that never waits for its host."""
        return replace(self, gpu=replace(self.gpu, launch=0.0))

    def _optimizer_steps(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of STEP of each stage, by the bytes that it reads and writes.

        Gradients are read for their norm and by the update, and set to zero; the optimizer's state
        is read and written, and parameters are written. With Adam in mixed precision and gradients
        in 32 bits that is 38 bytes a parameter.
        """
        model = self.shard.model
        nbytes = 3 * model.bytes_per_gradient + 2 * model.optimizer_bytes_per_parameter
        nbytes += model.bytes_per_parameter
        steps = [n * nbytes / self.gpu.bandwidth for n in self.shard.stage_parameters(sizes)]
        return tuple(steps)

    @cached_property
    def _message_seconds(self) -> float:
        """Seconds of a message besides its bytes: synchronization, and gathering its parts."""
        shard = self.shard
        gathered = Collective(shard.output_bytes * shard.tensor_parallel, is_half=True)
        gather = self._collective_seconds(gathered) if shard.scattered_messages else 0.0
        return self.gpu.synchronization + gather

    @cached_property
    def _kept(self) -> dict[tuple[int, bool, bool], tuple[float, ...]]:
        """Seconds in each of `_FIELDS` of stages by layers, and whether first and last."""
        return {}

    def _of_stage(self, name: str, n: int, is_first: bool, is_last: bool) -> _Work:
        """Return the work of a stage of n layers in one field of `Costs`."""
        works = (self._layer[name], self._embedding[name], self._head[name])
        return _Work(*(_of_stage(n, is_first, is_last, *x) for x in zip(*works, strict=True)))

    def _seconds(self, work: _Work) -> float:
        """Return the seconds of an operation: of its work, or of its launches if longer."""
        return max(work.busy, work.launches * self.gpu.launch)

    @cached_property
    def _layer(self) -> dict[str, _Work]:
        return self._works(layer_kernels(self.shard), group_collectives(self.shard).layer)

    @cached_property
    def _embedding(self) -> dict[str, _Work]:
        return self._works(embedding_kernels(self.shard), group_collectives(self.shard).embedding)

    @cached_property
    def _head(self) -> dict[str, _Work]:
        return self._works(head_kernels(self.shard), group_collectives(self.shard).head)

    def _works(self, kernels: OperationKernels, collectives: PartCollectives) -> dict[str, _Work]:
        """Return the work of each field of `Costs`."""
        works = {}
        for name, parts in _FIELDS.items():
            busy = launches = 0.0
            for part in parts:
                for kernel in getattr(kernels, part):
                    busy += self.gpu.kernel_seconds(kernel)
                    launches += kernel.n_kernels
                for collective in getattr(collectives, part):
                    busy += self._collective_seconds(collective)
                    launches += collective.n_collectives
            works[name] = _Work(busy, launches)
        return works

    def _collective_seconds(self, collective: Collective) -> float:
        """Return the seconds of collectives; 0 if the network has no rate inside a device."""
        if self.network.nodes is None:
            return 0.0
        return collective.seconds(self.network, self.shard.tensor_parallel)
