"""Layers of each stage, and stages of each device, as flags of Megatron-LM share them."""

from __future__ import annotations

from collections.abc import Sequence

from pipesim.costs.megatron_layout import read_layout
from pipesim.errors import ArgumentError
from pipesim.planning.trainer_settings.flags import Flags
from pipesim.planning.trainer_settings.settings import whole_number

_LAYOUT = "--pipeline-model-parallel-layout"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_LOSS = "--account-for-loss-in-pipeline-split"


def layers_of_stages(read: Flags, p: int, n_layers: int | None) -> tuple[int, ...]:
    """Return the layers of each stage; none if their number is unknown."""
    names = [name for name in (_LAYOUT, _LAYERS, _STAGES) if name in read]
    if len(names) > 1:
        raise ArgumentError(f"flags: {' and '.join(names)} contradict each other; give one of them")
    layers = read.count("--num-layers")
    if None not in (layers, n_layers) and layers != n_layers:
        raise ArgumentError(f"flags: --num-layers is {layers}, but n_layers={n_layers}")
    layers = layers or n_layers
    if _LAYOUT in read:
        sizes = read_layout(read.text(_LAYOUT))
        why = f"the stages of {_LAYOUT} must be a multiple of --pipeline-model-parallel-size"
        whole_number("flags", len(sizes), p, why)
        if layers is not None and sum(sizes) != layers:
            raise ArgumentError(
                f"flags: {_LAYOUT} has {sum(sizes)} layers, but the model has n_layers={layers}"
            )
        return sizes
    if layers is None:
        for name in (_LAYERS, _FIRST, _LAST, _EMBEDDING, _LOSS):
            if name in read:
                raise ArgumentError(
                    f"flags: --num-layers is missing, which {name} needs; give it, or n_layers="
                )
        return ()
    return _split(read, p, layers)


def _split(read: Flags, p: int, layers: int) -> tuple[int, ...]:
    """Return the layers of each stage, chunk by chunk, as Megatron-LM shares them."""
    ends = [read.switch(name) for name in (_EMBEDDING, _LOSS)]
    first, last = (read.count(name) for name in (_FIRST, _LAST))
    uneven = first is not None or last is not None
    if uneven and any(ends):
        raise ArgumentError(
            f"flags: {_FIRST} or {_LAST} contradict {_EMBEDDING} or {_LOSS}; give one pair"
        )
    per_device = [0] * p
    middle = [d for d in range(p) if not (d == 0 and first) and not (d == p - 1 and last)]
    if first is not None:
        per_device[0] = first
    if last is not None:
        per_device[-1] = last
    rest = layers + sum(ends) - sum(per_device)
    if middle:
        why = f"{layers} layers must be shared evenly by {len(middle)} devices"
        even = whole_number("flags", rest, len(middle), why)
        for device in middle:
            per_device[device] = even
    elif rest:
        raise ArgumentError(
            f"flags: {_FIRST} and {_LAST} have {sum(per_device)} layers, but --num-layers is "
            f"{layers}"
        )
    n_chunks = chunks_of_devices(read, p, per_device)
    why = f"the layers of a device must be a multiple of its {n_chunks} stages"
    sizes = [whole_number("flags", size, n_chunks, why) for size in per_device] * n_chunks
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return tuple(sizes)


def chunks_of_devices(read: Flags, p: int, per_device: Sequence[int] = ()) -> int:
    """Return the stages of each device."""
    layers, stages = read.count(_LAYERS), read.count(_STAGES)
    if layers is not None and per_device:
        if len(set(per_device)) > 1:
            raise ArgumentError(f"flags: {_LAYERS} needs even devices; give {_STAGES}")
        why = f"the layers of a device must be a multiple of {_LAYERS}"
        stages = whole_number("flags", per_device[0], layers, why)
    if (stages or 1) > 1 and p == 1:
        raise ArgumentError(
            "flags: several stages a device need --pipeline-model-parallel-size of at least 2"
        )
    return stages or 1
