"""`GPU`: the rates that kernels reach on a GPU, and its memory; `Kernel`: the work of kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from pipesim.errors import (
    ArgumentError,
    check_list,
    check_name,
    check_text,
    check_type,
    find_name,
    number,
)
from pipesim.framework.framework import AttentionKernel
from pipesim.models.attention_rates import attention_flops, slower
from pipesim.models.data_sheets import DATA_SHEETS
from pipesim.models.model_sizes import check_size, checked_value
from pipesim.models.precision import FORMATS, Precision
from pipesim.network.network import Network
from pipesim.network.sources import EFFICIENCY
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path, read_json
from pipesim.utils.texts import in_bytes, parse_rate

if TYPE_CHECKING:
    from pathlib import Path

    from pipesim.calibration.fit_gpu import fit_gpu


class Kernel(NamedTuple):
    """Work of one kernel on one GPU, or of ``n_kernels`` together.

    Attributes
    ----------
    name
        Name of the kernel.
    flops
        Floating-point operations of matrix products, two per multiply-add. Other operations are
        bound by memory, and count as none.
    nbytes
        Bytes read and written, each tensor once.
    depth
        Size that the matrix products sum over; 0 for other kernels.
    n_kernels
        Number of kernels.
    is_attention
        Whether it is a fused attention core.
    share
        Share of the GPU's FLOP/s and bandwidth that kernels of this kind reach.
    tiles
        Number of tiles of queries of a causal attention core; 0 for many, or for other kernels.
    is_grouped
        Whether it is a group of small products, such as one for each expert of a GPU.
    attention_kernel, sequence, is_backward
        Of a fused attention core: its version, such as ``"fa2"``, tokens of a sequence, and whether
        it is a backward. A version without measured speeds has ``attention_ratio`` of the GPU.
    is_misaligned
        Whether it is a product whose rows do not begin at multiples of 16 bytes, which tensor cores
        need. It takes 16 times as long, as on A100 without them (19.5 of 312 TFLOP/s).
    precision
        Number format of its operands; other than 16 bits for linear products of layers only.
    splits_depth
        Whether multiprocessors share the depth of a product, as libraries do where its result has
        fewer rows than a tile: decode steps of a few tokens. It then has no waves.
    """

    name: str
    flops: float = 0.0
    nbytes: float = 0.0
    depth: float = 0.0
    n_kernels: float = 1
    is_attention: bool = False
    share: float = 1.0
    tiles: float = 0.0
    is_grouped: bool = False
    attention_kernel: AttentionKernel = ""
    sequence: float = 0.0
    is_backward: bool = False
    is_misaligned: bool = False
    precision: Precision = "bf16"
    splits_depth: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it has matrix products and is no fused attention core."""
        return self.flops > 0 and not self.is_attention


#: Units of the fields that must be above 0, and of those that may be 0.
_RATES = {
    "flops": "FLOP/s",
    "bandwidth": "bytes/s",
    "memory": "bytes",
    "peak_flops": "FLOP/s",
    "attention_ratio": "times flops",
}
_UNITS = {
    "launch": "seconds",
    "overhead": "seconds",
    "half_depth": "elements",
    "synchronization": "seconds",
    "attention_half_depth": "elements",
    **{f"{name}_ratio": "times flops" for name in FORMATS},
}
#: Assumptions of `GPU.preset`: seconds of the host's launch of a kernel, and of its own overhead;
#: depth at half the rate.
_LAUNCH, _OVERHEAD, _HALF_DEPTH = 10e-6, 2e-6, 64.0
#: Elements of the tiles of a matrix product's result, and the share of ``flops`` that they reach:
#: tiles of 128 by 256, and of 128 by 128 with an assumed loss.
_TILES = ((128 * 256, 1.0), (128 * 128, 0.93))
#: See `Kernel.is_misaligned`; inferred from BLOOM's steps with heads of 108 elements.
_MISALIGNED = 16.0
#: Words between the name of a GPU and the number of steps that its constants were fitted to.
FITTED = " fitted to "


@checked_names
@dataclass(frozen=True, kw_only=True)
class GPU:
    """Rates that kernels reach on a GPU, seconds to launch them, and bytes of memory.

    A kernel takes ``max(flops * (1 + half_depth / depth) * waves / gpu.flops, nbytes /
    gpu.bandwidth) + overhead`` seconds, where the depth is the size that a matrix product sums
    over. An operation takes as long as all its kernels, and at least ``launch`` for each of them:
    the host launches kernels one after another while the GPU runs earlier ones.

    Each multiprocessor computes one tile of a product's result at a time. ``waves`` is the number
    of tiles a multiprocessor, rounded up, over that number: 2 if 109 tiles run on 108
    multiprocessors. Tiles have 128 by 256 elements, or 128 by 128 at 93 % of ``flops`` where that
    is faster.

    Kernels whose `Kernel` says so differ from this formula:

    - One with a ``share`` reaches that share of both rates.
    - Products with a ``precision`` below 16 bits have its ratio, such as ``fp8_ratio``, times
      ``flops``.
    - Products in a group (``is_grouped``), one for each expert, have no waves, since those of
      several experts run at the same time. Their memory takes its seconds in addition to their
      FLOPs: each tile is a large part of its product, so that few others hide its loads and stores.
      The mean error of 60 measured kernels of B200 is 17 % by this, and 31 % by the formula above
      (SimuMax, see `pipesim.models.data_sheets`).
    - Fused attention has ``gpu.flops * attention_ratio``, its own ``attention_half_depth``, and
      takes ``1 + multiprocessors / tiles`` times as long: its last tile has all keys under the
      causal mask, twice as many as the mean, so that a kernel ends with one mean tile on few
      multiprocessors.

    Sources: Williams et al., "Roofline", Communications of the ACM 52(4), 2009. NVIDIA, "Matrix
    Multiplication Background User's Guide" (tiles and waves),
    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.

    Attributes
    ----------
    flops
        FLOP/s of large and deep matrix products in 16 bits.
    bandwidth
        Bytes a second that element-wise kernels read and write in the GPU's memory.
    launch
        Seconds of the host to launch a kernel, which includes the Python code around it.
    memory
        Bytes of memory that tensors may take; None (the default) if unknown. Presets have 0.95 of
        the GPU's: CUDA, NCCL and the allocator take the rest (`pipesim.gpus`).
    overhead
        Seconds of a kernel beside its work: the gap before it, and its start and end.
    half_depth
        Depth at which a matrix product reaches half of ``flops``. Each tile of its result begins
        with loads and ends with a store, during which it computes nothing.
    synchronization
        Seconds that every message between stages holds its stream and links, in addition to its
        bytes: in frameworks that wait for the GPU before and after a message, such as early
        Megatron-LM. Messages that block (``lower(overlap=False)``) delay their stage by it; others
        arrive later by it.
    multiprocessors
        Number of multiprocessors that compute tiles; 0 (the default) for no waves.
    peak_flops
        FLOP/s of the data sheet without sparsity, the base of the model FLOPs utilization; None
        (the default) for ``flops``.
    attention_half_depth
        ``half_depth`` of fused attention, whose depth is the size of a head; None (the default) for
        the same. Half of its products sum over a head, and half over the sequence: half of
        ``half_depth`` leaves the loss to the first half alone, as for kernels that load the next
        tiles while they compute (FlashAttention-3, arXiv 2407.08608, section 3). Published speeds
        on H100 with heads of 64 and of 128 elements give 17 for FlashAttention-2, 35 for
        FlashAttention-3 and 44 for cuDNN (figures 5 and 6).
    attention_ratio
        FLOP/s of fused attention with deep heads, forward and backward together, over ``flops``;
        1 by default.
    fp8_ratio, mxfp8_ratio, nvfp4_ratio
        FLOP/s of linear products in a format over ``flops``; 0 (the default) if the GPU lacks it.
    name
        Name for tables; empty for none.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim.models import Kernel
    >>> gpu = ps.GPU(flops=200e12, bandwidth=1.5e12, launch=10e-6, memory=80e9)
    >>> gpu.seconds([Kernel("matrix product", flops=2e12, nbytes=1e9, depth=4096)])
    0.01
    >>> gpu.seconds([Kernel("dropout", nbytes=3e6)])  # 2 us, but its launch takes 10 us
    1e-05
    """

    flops: float
    bandwidth: float
    launch: float = 0.0
    memory: float | None = None
    overhead: float = 0.0
    half_depth: float = 0.0
    synchronization: float = 0.0
    multiprocessors: int = 0
    peak_flops: float | None = None
    name: str = ""
    attention_half_depth: float | None = None
    attention_ratio: float = 1.0
    fp8_ratio: float = 0.0
    mxfp8_ratio: float = 0.0
    nvfp4_ratio: float = 0.0

    def __post_init__(self) -> None:
        for field, unit in {**_RATES, **_UNITS}.items():
            value = getattr(self, field)
            if field == "memory":
                value = in_bytes("memory", value)
            if field == "bandwidth" and isinstance(value, str):
                value = parse_rate(value) or value
            if value is not None or field not in ("memory", "peak_flops", "attention_half_depth"):
                checked = checked_value(field, value, unit, above_zero=field in _RATES)
                object.__setattr__(self, field, checked)
        count = check_size("multiprocessors", self.multiprocessors, 0)
        object.__setattr__(self, "multiprocessors", count)
        if self.peak < self.flops:
            raise ArgumentError(
                f"peak_flops={self.peak:g} must be at least flops={self.flops:g}: flops are those "
                "that kernels reach, and peak_flops those of the data sheet"
            )
        check_text("name", self.name)

    @property
    def peak(self) -> float:
        """``peak_flops``, or ``flops`` if it was not given (FLOP/s)."""
        return self.flops if self.peak_flops is None else self.peak_flops

    if TYPE_CHECKING:  # registered by the rooms that have them
        fit = staticmethod(fit_gpu)

    @classmethod
    @checked_names
    def preset(cls, name: str, *, launch: float = _LAUNCH) -> GPU:
        """Return a common GPU from its data sheet; `pipesim.gpus` lists them.

        ``flops`` and ``bandwidth`` are nominal rates times the efficiencies in that list, which
        rest on training steps for some GPUs, on large products or on assumptions for others. The
        rest is assumed: an ``overhead`` of 2 us, a ``half_depth`` of 64, an
        ``attention_half_depth`` of 32, no ``synchronization``, and ``launch``. A framework that
        runs layers from Python needs 5 to 50 us a kernel: give yours if operations are short, or
        measure some steps and call `fit`.

        Parameters
        ----------
        name
            Such as ``"h100_sxm"``.
        launch
            Seconds of the host to launch a kernel; 10 us by default.

        Returns
        -------
        GPU
            With the rates that kernels reach, and the memory that tensors may take.
        """
        name = find_name("GPU", name, DATA_SHEETS)
        sheet = DATA_SHEETS[name]
        return cls(
            flops=sheet.flops * sheet.flops_efficiency,
            bandwidth=sheet.bandwidth * sheet.bandwidth_efficiency,
            launch=launch,
            memory=sheet.memory * sheet.memory_efficiency,
            overhead=_OVERHEAD,
            half_depth=_HALF_DEPTH,
            attention_half_depth=_HALF_DEPTH / 2,
            attention_ratio=sheet.attention_ratio,
            multiprocessors=sheet.multiprocessors,
            peak_flops=sheet.flops,
            name=name,
            **{f"{precision}_ratio": x for precision, x in sheet.product_ratios.items()},
        )

    def scaled(self, part: float) -> GPU:
        """Return this GPU with ``flops`` and ``bandwidth`` times a factor; the rest stays.

        The result reaches ``part`` of the rates, or is a slice of the GPU. Launches and overheads
        take as long as before, and ``peak_flops`` is that of the same data sheet.

        Parameters
        ----------
        part
            Factor of both rates, above 0; usually at most 1.

        Returns
        -------
        GPU
            With other ``flops`` and ``bandwidth``.
        """
        factor = checked_value("part", part, "share of the rates", above_zero=True)
        return replace(self, flops=self.flops * factor, bandwidth=self.bandwidth * factor)

    def kernel_shares(self, kernel: Kernel) -> dict[str, float]:
        """Return the seconds of a kernel's matrix products, of its memory, and its overhead.

        Parameters
        ----------
        kernel
            Work of the kernel.

        Returns
        -------
        dict
            Seconds by ``"compute"``, ``"memory"`` and ``"overhead"``. The first two overlap, unless
            the kernel is of a group.
        """
        check_type("kernel", kernel, Kernel)
        half_depth, flops = self.half_depth, self.flops * kernel.share
        if kernel.is_attention:
            flops *= self.attention_ratio / slower(kernel.attention_kernel)
            if self.attention_half_depth is not None:
                half_depth = self.attention_half_depth
        shallow = 1 + half_depth / kernel.depth if kernel.depth else 1.0
        compute = kernel.flops * shallow * self._waves(kernel) / flops
        if kernel.is_misaligned:
            compute *= _MISALIGNED
        if kernel.precision in FORMATS:
            compute /= product_ratio(self, kernel.precision)
        if (measured := self._measured_attention(kernel)) is not None:
            compute = kernel.flops / (measured * kernel.share)
        return {
            "compute": compute,
            "memory": kernel.nbytes / (self.bandwidth * kernel.share),
            "overhead": kernel.n_kernels * self.overhead,
        }

    def _measured_attention(self, kernel: Kernel) -> float | None:
        """Return the measured FLOP/s of a fused core, as large as constants say; None without."""
        sheet = DATA_SHEETS.get(self.name.partition(FITTED)[0])
        if not kernel.attention_kernel or sheet is None:
            return None
        speed = attention_flops(
            kernel.attention_kernel, sheet.architecture, kernel.depth, kernel.sequence,
            is_backward=kernel.is_backward,
        )  # fmt: skip
        if speed is None:
            return None
        usual = sheet.flops * sheet.flops_efficiency * sheet.attention_ratio
        return speed * self.flops * self.attention_ratio / usual

    def _waves(self, kernel: Kernel) -> float:
        """Return how much longer a kernel takes since its tiles run in whole waves."""
        if kernel.is_attention:
            return 1 + self.multiprocessors / kernel.tiles if kernel.tiles else 1.0
        in_waves = not (kernel.is_grouped or kernel.splits_depth)
        if not (in_waves and kernel.depth and kernel.n_kernels and self.multiprocessors):
            return 1.0
        elements = kernel.flops / (2 * kernel.depth * kernel.n_kernels)
        least = math.inf
        for tile, rate in _TILES:
            tiles = elements / tile / self.multiprocessors
            least = min(least, math.ceil(tiles) / (tiles * rate) if tiles else 1.0)
        return least

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Return the seconds that the GPU is busy with a kernel, without its launch.

        Parameters
        ----------
        kernel
            Work of the kernel.

        Returns
        -------
        float
            Seconds.
        """
        shares = self.kernel_shares(kernel)
        work = (shares["compute"], shares["memory"])
        return (sum(work) if kernel.is_grouped else max(work)) + shares["overhead"]

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of an operation: of its kernels, or of their launches if longer.

        Parameters
        ----------
        kernels
            Kernels of the operation, which run one after another.

        Returns
        -------
        float
            Seconds.
        """
        operation: list[Kernel] = check_list("kernels", kernels, "kernels")
        busy = sum(map(self.kernel_seconds, operation))
        return max(busy, self.launch * sum(kernel.n_kernels for kernel in operation))


def product_ratio(gpu: GPU, precision: Precision) -> float:
    """Return the FLOP/s of linear products of layers in a format over those in 16 bits."""
    if precision not in FORMATS:
        return 1.0
    ratio: float = getattr(gpu, f"{precision}_ratio")
    if not ratio:
        able = [name for name, sheet in DATA_SHEETS.items() if precision in sheet.product_ratios]
        raise ArgumentError(
            f'precision="{precision}", but {gpu.name or "the GPU"} has no products of this format; '
            f'give precision="bf16", a GPU such as {", ".join(able)}, or {precision}_ratio of your '
            "GPU"
        )
    return ratio


def as_gpu(gpu: GPU | Mapping[str, Any] | Path | str) -> GPU:
    """Return a GPU from any form that `pipesim.Transformer.costs` and `GPU.fit` take.

    Factors of the network in a file do not matter here.
    """
    if has_gpu_table(gpu):
        values = gpu_table(gpu).fields
        names = [field.name for field in fields(GPU)]
        for name in values:
            check_name("field of a GPU", name, names)
        for name in ("flops", "bandwidth"):
            if name not in values:
                raise ArgumentError(f"gpu lacks {name}; give flops and bandwidth, or a name")
        return GPU(**values)
    if isinstance(gpu, str):
        return GPU.preset(gpu)
    return check_type("gpu", gpu, GPU, 'give such as pipesim.GPU.preset("h100_sxm")')


# Fields of a GPU, and factors of its network, as `Calibration.save` and a JSON file have them

#: Factors of a network in a file, and the default of each.
_FACTORS: dict[str, float | None] = {
    "network_efficiency": 1.0,
    "network_latency": 1.0,
    "nic_efficiency": None,
}


class GpuTable(NamedTuple):
    """Fields of a GPU, and the factors of a network's bandwidths and of its latencies.

    ``nic_efficiency`` is the factor of the bandwidth of NICs; None for ``network_efficiency``.
    """

    fields: Mapping[str, Any]
    network_efficiency: float = 1.0
    network_latency: float = 1.0
    nic_efficiency: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `gpu_table` reads."""
        return {"gpu": dict(self.fields), **{name: getattr(self, name) for name in _FACTORS}}


def has_gpu_table(gpu: object) -> TypeGuard[Mapping[str, Any] | os.PathLike[str] | str]:
    """Tell whether a value is a mapping, or the path of a JSON file and not a preset's name."""
    return isinstance(gpu, Mapping | os.PathLike) or (
        isinstance(gpu, str) and gpu.endswith(".json")
    )


def gpu_table(gpu: Mapping[str, Any] | os.PathLike[str] | str) -> GpuTable:
    """Return the fields of a GPU and the factors of its network, from a file or a mapping.

    ``gpu`` is the path of a JSON file, such as ``pipesim calibrate --json`` and `Calibration.save`
    write; or its content; or fields of a GPU alone, whose network has factors of 1.
    """
    values, place = gpu, "gpu"
    if not isinstance(gpu, Mapping):
        values, place = read_json(check_path("gpu", gpu), "a GPU from", ArgumentError), str(gpu)
    table = values.get("gpu", values) if isinstance(values, Mapping) else values
    if not isinstance(values, Mapping) or not isinstance(table, Mapping):
        raise ArgumentError(
            f"{place} has no table of the fields of a GPU; write it with pipesim calibrate --json"
        )
    if table is values:
        return GpuTable(table)
    for key in values:
        saved = ("gpu", *_FACTORS, "constants", "errors", "checksum")
        check_name("key of a fitted GPU", key, saved)
    factors: dict[str, Any] = {}
    for name, default in _FACTORS.items():
        value = values.get(name, default)
        factors[name] = factor = number(value)
        if value != default and (factor is None or not 0 < factor < float("inf")):
            raise ArgumentError(f"{place}: {name} must be a finite number above 0, got {value!r}")
    return GpuTable(table, **factors)


def fitted_preset(
    name: str,
    gpu: object,
    efficiency: float | None = None,
    gpus_per_device: int = 1,
    nic_efficiency: float | None = None,
) -> Network:
    """Return `Network.preset` of a machine, with the factors of a GPU's file, if ``gpu`` is one.

    ``efficiency`` is used in place of both shares in the file, and ``nic_efficiency`` in place of
    that of NICs; None for that of the file, or of `Network.preset` where there is none: a file has
    1 if none was fitted.
    """
    table = gpu_table(gpu) if has_gpu_table(gpu) else GpuTable({})
    share, of_nics = efficiency, nic_efficiency
    if share is None:
        fitted = table.network_efficiency
        share = EFFICIENCY if fitted == 1 else fitted
        of_nics = table.nic_efficiency if of_nics is None else of_nics
    of_nics = share if of_nics is None else of_nics
    network = Network.preset(
        name, min(share, 1.0), gpus_per_device, nic_efficiency=min(of_nics, 1.0)
    )
    return network.scaled(  # shares that were fitted may exceed 1
        latency=table.network_latency,
        bandwidth=max(share, 1.0),
        nic_bandwidth=max(of_nics, 1.0),
    )
