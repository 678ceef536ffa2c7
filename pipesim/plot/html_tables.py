"""Costs, layers, models, GPUs and placements as notebooks show them: HTML tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipesim.costs.costs import Costs
from pipesim.costs.costs_text import n_stages_of_costs
from pipesim.models.experts.model_sizes import SIZES_OF_SOME
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.plot.html_parts import note_html, omitted_html, omitted_text, table_html
from pipesim.scheduling.placement import Placement
from pipesim.utils.units import format_bytes, format_decimal, format_time

#: Most stages, layers and devices that are shown, a row each, and most stages of a device.
MAX_STAGES, MAX_LAYERS, MAX_DEVICES, MAX_CHUNKS = 64, 32, 32, 16

#: Columns of a table of costs, by the fields of `Costs` that they show.
_COLUMNS = {
    "forward": "F",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
    "recompute": "R",
    "optimizer_step": "STEP",
    "grad_norm": "GRAD_NORM",
    "output_bytes": "message",
    "activation_bytes": "activations",
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}

Form = Callable[[Any], str]


def costs_html(costs: Costs) -> str:
    """Return costs as a table: a row a stage, and a column for each field that is given.

    Values that differ between micro-batches are averages.
    """
    title, costs = repr(costs), costs.averaged()
    n_stages = n_stages_of_costs(costs)
    shown = min(n_stages or 1, MAX_STAGES)
    names = ["each stage" if n_stages is None else f"stage {stage}" for stage in range(shown)]
    values = {
        name: [value] * shown if isinstance(value, float) else value
        for name in _COLUMNS
        if (value := getattr(costs, name)) is not None
    }
    return (
        note_html(title)
        + _values_html("costs", names, values)
        + omitted_html(omitted_text(n_stages or 1, shown, "stages"))
    )


def layers_html(layers: Layers) -> str:
    """Return layers as a table: a row a layer, and a column for each that is not 0."""
    shown = min(len(layers), MAX_LAYERS)
    order = [*(name for name in _COLUMNS if name in layers.columns), *layers.columns]
    values = {name: layers.columns[name] for name in order}
    joint = layers.joint_activation_bytes is not None
    notes = ["Activations of several layers are those of joint_activation_bytes."] * joint
    count = f"{len(layers)} layer{'s' * (len(layers) > 1)}"
    return (
        note_html(f"{layers.source}: {count}, for one micro-batch")
        + _values_html("layers", [f"layer {k}" for k in range(shown)], values)
        + "".join(map(note_html, notes))
        + omitted_html(omitted_text(len(layers), shown, "layers"))
    )


def _values_html(title: str, names: list[str], values: Mapping[str, Sequence[float]]) -> str:
    """Return a table of fields of `Costs`, a row for each name; columns of 0 are left out.

    Parameters
    ----------
    title
        Head of the first column.
    names
        First cell of each row.
    values
        Values of each field, for as many rows or more; or for fewer, whose cells stay empty.
    """
    columns = {}
    for name, column in values.items():
        if max(column, default=0.0) > 0:
            form = format_bytes if name.endswith("bytes") else format_time
            columns[_COLUMNS.get(name, name.replace("_", " "))] = list(map(form, column))
    rows = [
        [name, *(column[row] if row < len(column) else "" for column in columns.values())]
        for row, name in enumerate(names)
    ]
    return table_html([title, *columns], rows)


def _count(value: float) -> str:
    """Return a whole number with separators."""
    return f"{value:,}"


def _flag(value: bool) -> str:
    """Return a switch in a word."""
    return "yes" if value else "no"


def _bytes(value: float) -> str:
    """Return the bytes of one element."""
    return f"{value:g} B"


#: Attributes of a transformer that its table shows, and their form.
SIZES: Mapping[str, Form] = {
    "hidden_size": _count,
    "n_layers": _count,
    "n_heads": _count,
    "n_kv_heads": _count,
    "head_size": _count,
    "ffn_size": _count,
    "sequence_length": _count,
    "vocabulary_size": _count,
    "gated_mlp": _flag,
    "biases": _flag,
    "learned_positions": _flag,
    "dropout": _flag,
    "tied_embeddings": _flag,
    "bytes_per_parameter": _bytes,
    "bytes_per_gradient": _bytes,
    "bytes_per_activation": _bytes,
    "optimizer_bytes_per_parameter": _bytes,
    **dict.fromkeys(SIZES_OF_SOME, _count),
}


def transformer_html(model: Transformer) -> str:
    """Return a transformer as two tables: parameters and FLOPs of its parts, and its sizes."""
    n_experts = model.n_expert_layers
    parts = {
        "layer": (model.n_layers - n_experts, model.layer_parameters, model.layer_flops()),
        "layer with experts": (
            n_experts,
            model.expert_layer_parameters,
            model.expert_layer_flops(),
        ),
        "embedding": (1, model.embedding_parameters, 0),
        "norm and LM head": (1, model.head_parameters, model.head_flops()),
    }
    rows = [
        [name, _count(n), *_part_cells(parameters, flops), *_part_cells(n * parameters, n * flops)]
        for name, (n, parameters, flops) in parts.items()
        if n
    ]
    flops = sum(n * flops for n, _, flops in parts.values())
    rows.append(["all", "", "", "", *_part_cells(model.n_parameters, flops)])
    head = ["part", "number", "parameters each", "forward each", "parameters", "forward"]
    sizes = {x: getattr(model, x) for x in SIZES if x not in SIZES_OF_SOME or getattr(model, x)}
    sizes["head_size"] = model.head_size or model.hidden_size // model.n_heads
    step = format_decimal(model.step_flops(), "FLOP")
    active = f", {_count(model.n_active_parameters)} of them active" if model.n_experts else ""
    tied = " The LM head has the matrix of the embedding." if model.tied_embeddings else ""
    return (
        note_html(
            f"Transformer of {_count(model.n_parameters)} parameters{active}. FLOPs are those of "
            f"one sequence; forward and backward take {step}.{tied}"
        )
        + table_html(head, rows)
        + table_html(["size", "value"], [[k, SIZES[k](value)] for k, value in sizes.items()])
    )


def _part_cells(parameters: int, flops: int) -> list[str]:
    """Return parameters and FLOPs as text."""
    return [_count(parameters), format_decimal(flops, "FLOP") if flops else "0"]


#: Attributes of a GPU that its table shows, and their form; ``name`` is above the table.
RATES: Mapping[str, Form] = {
    "flops": lambda value: format_decimal(value, "FLOP/s"),
    "peak_flops": lambda value: format_decimal(value, "FLOP/s"),
    "bandwidth": lambda value: format_decimal(value, "B/s"),
    "memory": lambda value: format_decimal(value, "B"),
    "launch": format_time,
    "overhead": format_time,
    "half_depth": lambda value: f"{value:g} elements",
    "synchronization": format_time,
    "multiprocessors": _count,
    "attention_half_depth": lambda value: f"{value:g} elements",
    "attention_ratio": lambda value: f"{value:.3g}",
}
#: Meaning of the attributes of a GPU, in a few words.
_MEANINGS = {
    "flops": "large matrix products reach it",
    "peak_flops": "of the data sheet",
    "bandwidth": "element-wise kernels reach it",
    "memory": "of the GPU",
    "launch": "of the host, a kernel",
    "overhead": "of the GPU, a kernel",
    "half_depth": "depth of products at half the rate",
    "synchronization": "of a message",
    "multiprocessors": "0 for no waves of tiles",
    "attention_half_depth": "half_depth of fused attention",
    "attention_ratio": "FLOP/s of fused attention over flops",
}


def gpu_html(gpu: GPU) -> str:
    """Return a GPU as a table: a row an attribute."""
    rows = [
        [name, "not given" if (value := getattr(gpu, name)) is None else form(value), meaning]
        for (name, form), meaning in zip(RATES.items(), _MEANINGS.values(), strict=True)
    ]
    share = f"; products reach {gpu.flops / gpu.peak:.0%} of the data sheet's FLOP/s"
    title = f"GPU {gpu.name}".rstrip() + (share if gpu.peak_flops is not None else "")
    return note_html(title) + table_html(["attribute", "value", "meaning"], rows)


def placement_html(placement: Placement) -> str:
    """Return a placement as a table: a row a device, a column a path, with the stages it holds."""
    shown, n_paths = min(placement.n_devices, MAX_DEVICES), placement.n_paths
    stages: list[list[list[int]]] = [[[] for _ in range(n_paths)] for _ in range(shown)]
    for k, path in enumerate(placement.paths):
        for stage, device in enumerate(path):
            if device < shown:
                stages[device][k].append(stage)
    rows = [[f"device {device}", *map(_stages_text, paths)] for device, paths in enumerate(stages)]
    title = f"Placement of {placement.n_stages} stages on {placement.n_devices} devices"
    if n_paths > 1:
        title += f", {n_paths} paths; each has a copy of the stages, and equally many micro-batches"
    head = [f"stages of path {k}" for k in range(n_paths)] if n_paths > 1 else ["stages"]
    return (
        note_html(title)
        + table_html(["placement", *head], rows)
        + omitted_html(omitted_text(placement.n_devices, shown, "devices"))
    )


def _stages_text(stages: Sequence[int]) -> str:
    """Return the stages of a device; of many the first ones, and how many more there are."""
    text = ", ".join(map(str, stages[:MAX_CHUNKS]))
    more = len(stages) - MAX_CHUNKS
    return f"{text} and {more} more" if more > 0 else text
