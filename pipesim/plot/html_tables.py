"""HTML tables for notebooks: costs, layers, models, GPUs, placements, networks, layouts."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs, n_stages_of_costs
from pipesim.costs.rows import ROWS, STAGE_ROWS, CostFields, given_rows
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.model_sizes import SIZES_OF_SOME, end_flops
from pipesim.models.precision import FORMATS
from pipesim.models.transformer import Transformer
from pipesim.network.links import Link, Nodes
from pipesim.network.network import Network
from pipesim.network.parallel_layout import Layout
from pipesim.plot.palette import text_colours
from pipesim.plot.paper_figure import ignore_small_boxes
from pipesim.scheduling.placement import Placement
from pipesim.utils.texts import format_bytes, format_decimal, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Parts of HTML: figures, tables, coloured cells and notes

#: CSS of tables, of their coloured cells, and of the first cell of a row.
TABLE = "border-collapse:separate;border-spacing:1px;font-size:11px;line-height:1.5"
CELL = "text-align:center;min-width:1.7em;padding:0 2px"
HEAD = "text-align:left;padding:0 8px 0 0;font-weight:normal"


def figure_png(figure: Figure) -> bytes:
    """Return a figure as a PNG of 128 colours, which has a third of the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    whole, small = io.BytesIO(), io.BytesIO()
    with ignore_small_boxes():
        FigureCanvasAgg(figure).print_figure(whole, format="png", dpi=200)
    with Image.open(whole) as image:
        image.convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def figure_html(figure: Figure, text: str) -> str:
    """Return a figure as an inline PNG, with ``text`` as its alternative text."""
    image = base64.b64encode(figure_png(figure)).decode("ascii")
    width = round(figure.get_figwidth() * 110)
    return (
        f'<img alt="{escape(text)}" src="data:image/png;base64,{image}" '
        f'style="width:{width}px;max-width:100%;background:white"/>'
    )


def note_html(text: str) -> str:
    """Return a line of text."""
    return f'<div style="margin:2px 0 4px;font-size:12px">{escape(text)}</div>'


def omitted_text(count: int, shown: int, noun: str) -> list[str]:
    """Return a text for omitted items, such as ``devices 32 to 63``; [] if all are shown."""
    return [f"{noun} {shown} to {count - 1}"] if count > shown else []


def omitted_html(omitted: list[str]) -> str:
    """Return a line that names omitted items; "" if there are none."""
    return note_html(f"Not shown: {', '.join(omitted)}.") if omitted else ""


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """Return a table with its first column aligned left, the others right."""

    def line(cells: list[str], tag: str) -> str:
        first = f'<th style="{HEAD}">{escape(cells[0])}</th>'
        style = "text-align:right;padding:0 8px;font-weight:normal"
        rest = (f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells[1:])
        return f"<tr>{first}{''.join(rest)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<table style="{TABLE}">{line(head, "th")}{body}</table>'


def cell_html(text: str, colour: NDArray[np.float64], title: str, tag: str = "td") -> str:
    """Return a cell with a background colour: red, green, blue (0..1)."""
    red, green, blue = (colour * 255).round().astype(int)
    ink = text_colours(colour[None])[0]
    return (
        f'<{tag} title="{title}" style="{CELL};background:rgb({red},{green},{blue});'
        f'color:{ink}">{text}</{tag}>'
    )


# Costs, layers, models, GPUs and placements

#: Most stages, layers and devices that are shown, a row each, and most stages of a device.
MAX_STAGES, MAX_LAYERS, MAX_DEVICES, MAX_CHUNKS = 64, 32, 32, 16

Form = Callable[[Any], str]


def costs_html(costs: Costs) -> str:
    """Return costs as a table: a row a stage, and a column for each field that is given.

    Values that differ between micro-batches are averages. Fields without values of stages are
    named below it.
    """
    title, costs, usual = repr(costs), costs.averaged(), CostFields()
    n_stages = n_stages_of_costs(costs)
    shown = min(n_stages or 1, MAX_STAGES)
    names = ["each stage" if n_stages is None else f"stage {stage}" for stage in range(shown)]
    values = {
        name: [value] * shown if isinstance(value := getattr(costs, name), float) else value
        for name in given_rows(costs)
    }
    others = [
        name
        for name in ROWS.keys() - STAGE_ROWS.keys()
        if getattr(costs, name) != getattr(usual, name)
    ]
    return (
        note_html(title)
        + _values_html("costs", names, values)
        + (note_html(f"Given as well: {', '.join(sorted(others))}.") if others else "")
        + omitted_html(omitted_text(n_stages or 1, shown, "stages"))
    )


def layers_html(layers: Layers) -> str:
    """Return layers as a table: a row a layer, and a column for each that is not 0."""
    shown = min(len(layers), MAX_LAYERS)
    columns = layers.columns
    values = {name: columns[name] for name in STAGE_ROWS if max(columns.get(name, [0])) > 0}
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
    """Return a table of fields of `Costs`, a row for each name.

    A column with more values than names is cut; one with fewer ends in empty cells.
    """
    columns, forms = {}, {"seconds": format_time, "bytes": format_bytes}
    for name, column in values.items():
        row = STAGE_ROWS[name]
        head = name.replace("_", " ")
        if row.computes and row.op is not None:
            head = f"{row.op} {row.part}".strip()
        columns[head] = list(map(forms.get(row.unit, "{:g}".format), column))
    rows = [
        [name, *(column[row] if row < len(column) else "" for column in columns.values())]
        for row, name in enumerate(names)
    ]
    return table_html([title, *columns], rows)


def _count(value: float) -> str:
    return f"{value:,}"


def _flag(value: bool) -> str:
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
    "bidirectional": _flag,
}


def transformer_html(model: Transformer) -> str:
    """Return a transformer as two tables: parameters and FLOPs of its parts, and its sizes."""
    n_experts = model.n_expert_layers
    layer = model.expert_layer_flops() if n_experts else model.layer_flops()
    mtp_flops = layer + (end_flops(model, 1) - model.head_flops()) // max(1, model.mtp_layers)
    parts = {
        "layer": (model.n_layers - n_experts, model.layer_parameters, model.layer_flops()),
        "layer with experts": (
            n_experts,
            model.expert_layer_parameters,
            model.expert_layer_flops(),
        ),
        "embedding": (1, model.embedding_parameters, 0),
        "norm and LM head": (1, model.head_parameters, model.head_flops()),
        "multi-token prediction": (model.mtp_layers, model.mtp_parameters, mtp_flops),
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
    **{f"{precision}_ratio": lambda value: f"{value:.3g}" for precision in FORMATS},
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
    **{
        f"{precision}_ratio": f"FLOP/s of products in {precision} over flops"
        for precision in FORMATS
    },
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
        own = "stages of its own or shared" if placement.shares_stages else "a copy of the stages"
        title += f", {n_paths} paths; each has {own}, and equally many micro-batches"
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


# Networks: links, and the routes of pairs of devices

#: Most links and kinds of links that are shown, a row each; most pairs of a link; most devices of
#: the table of routes.
MAX_LINKS, MAX_PAIRS, MAX_ROUTED = 16, 4, 8


def network_html(network: Network) -> str:
    """Return a network as a table of its links, and one of routes between devices that links name.

    Many links are counted by kind: latency, bandwidth, and number of pairs. Routes are those of the
    first devices.
    """
    links, routes = network.links, ""
    rows, omitted = _kind_rows(links) if len(links) > MAX_LINKS else _link_rows(links)
    rows += [*_other_rows(network), *_host_rows(network)]
    if links:
        devices = sorted({device for link in links for pair in link.pairs for device in pair})
        routes = _routes_html(network, devices)
        if len(devices) > MAX_ROUTED:
            omitted.append(f"routes of {len(devices) - MAX_ROUTED:,} more devices (see resolve)")
    head = ["messages", "links", "latency", "bandwidth"]
    return note_html(_title(network)) + table_html(head, rows) + routes + omitted_html(omitted)


def _title(network: Network) -> str:
    n, nodes = len(network.links), network.nodes
    parts = [f"{n:,} link{'s' * (n > 1)} of particular pairs"] if n else []
    if nodes is not None:
        parts.append(_nodes_text(nodes))
    share, of_nics = network.nominal_share, network.nominal_nic_share
    text = f"Network of {', and '.join(parts) or 'one link for each pair of devices'}"
    text += "" if share is None else f", {share:.3g} of nominal bandwidths"
    text += "" if of_nics is None else f", NICs {of_nics:.3g}"
    return text + ", which interleave messages and collectives" * network.interleaves


def _nodes_text(nodes: Nodes) -> str:
    size, nics = nodes.devices_per_node, nodes.nics_per_node
    text = f"nodes of {size} device{'s' * (size > 1)}"
    if nodes.gpus_per_device > 1:
        text += f" ({nodes.gpus_per_device} GPUs each"
        text += f" on {nodes.nodes_per_device} nodes" if nodes.nodes_per_device > 1 else ""
        text += "; rates are those of one GPU)"
    return (
        f"{text}: a port of {_bandwidth(nodes.port_bandwidth)} each, and {nics} "
        f"NIC{'s' * (nics > 1)} of {_bandwidth(nodes.nic_bandwidth)}"
    )


def _link_rows(links: tuple[Link, ...]) -> tuple[list[list[str]], list[str]]:
    """Return a row for each link, and no text for others."""
    rows = []
    for link in links:
        pairs = [f"{source} to {target}" for source, target in link.pairs[:MAX_PAIRS]]
        more = len(link.pairs) - MAX_PAIRS
        text = ", ".join(pairs) + (f" and {more:,} more" if more > 0 else "")
        shared = f", shared by {len(link.pairs):,} pairs" if len(link.pairs) > 1 else ""
        rows.append([text, f"1{shared}", format_time(link.latency), _bandwidth(link.bandwidth)])
    return rows, []


def _kind_rows(links: tuple[Link, ...]) -> tuple[list[list[str]], list[str]]:
    """Return a row for each of the most frequent kinds of links, and a text for the others."""
    kinds = Counter((len(link.pairs), link.latency, link.bandwidth) for link in links)
    rows = []
    for (n_pairs, latency, bandwidth), count in kinds.most_common(MAX_LINKS):
        shared = f", each shared by {n_pairs:,} pairs" if n_pairs > 1 else ""
        text = [f"{count * n_pairs:,} named pairs", f"{count:,}{shared}"]
        rows.append([*text, format_time(latency), _bandwidth(bandwidth)])
    omitted = [f"pairs of all {len(links):,} links"]
    if len(kinds) > MAX_LINKS:
        omitted.append(f"{len(kinds) - MAX_LINKS:,} more kinds of links")
    return rows, omitted


def _other_rows(network: Network) -> list[list[str]]:
    """Return the rows of messages between pairs that no link names."""
    nodes = network.nodes
    if nodes is None:
        pairs = "all other pairs" if network.links else "all pairs"
        rate = _bandwidth(network.bandwidth)
        return [[pairs, "1 a pair", format_time(network.latency), rate]]
    port, nic = nodes.port_bandwidth, nodes.nic_bandwidth
    has_port, has_nic = math.isfinite(port), math.isfinite(nic)
    inside = ["port out", "port in"] * has_port
    between = [*inside[:1], *["NIC out", "NIC in"] * has_nic, *inside[1:]]
    return [
        ["inside a node", _held(inside), format_time(nodes.port_latency), _bandwidth(port)],
        ["between nodes", _held(between), format_time(nodes.nic_latency),
         _bandwidth(min(port, nic))],
        *_collective_rows(nodes),
    ]  # fmt: skip


def _collective_rows(nodes: Nodes) -> list[list[str]]:
    """Return a row of measured all-reduces inside a node."""
    own, n = nodes.collectives, nodes.gpus_per_node
    if own is None or n == 1:
        return []
    latency = own.latency + own.latency_per_gpu * (n - 1)
    rate = _bandwidth(own.rate(n, nodes.port_bandwidth))
    return [[f"all-reduce of {n} GPUs of a node", "ports", format_time(latency), rate]]


def _host_rows(network: Network) -> list[list[str]]:
    host = network.host
    if host is None:
        return []
    shared = f", each of {host.devices_per_link} devices" if host.devices_per_link > 1 else ""
    held = f"host out, host in{shared}"
    return [["copies to hosts", held, format_time(host.latency), _bandwidth(host.bandwidth)]]


def _held(links: list[str]) -> str:
    return ", ".join(links) or "none"


def _routes_html(network: Network, devices: list[int]) -> str:
    """Return a table of latencies and bandwidths from the row's device to the column's."""
    shown = devices[:MAX_ROUTED]
    ends = np.array(shown)
    source, target = np.repeat(ends, len(ends)), np.tile(ends, len(ends))
    routes = network.resolve(source, target, devices[-1] + 1)
    cells = [
        "" if a == b else f"{format_time(latency)}, {_bandwidth(bandwidth)}"
        for a, b, latency, bandwidth in zip(
            source.tolist(), target.tolist(), routes.latency.tolist(), routes.bandwidth.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    n = len(shown)
    rows = [[f"from {device}", *cells[k * n : k * n + n]] for k, device in enumerate(shown)]
    return table_html(["routes", *(f"to {device}" for device in shown)], rows)


def _bandwidth(value: float) -> str:
    return "unlimited" if math.isinf(value) else format_decimal(value, "B/s")


# Layouts of parallelism: a row a GPU

#: Most GPUs that are shown.
MAX_GPUS = 64


def layout_html(layout: Layout) -> str:
    """Return a layout as a table of its GPUs, with their nodes, coordinates and devices."""
    table = layout.table
    shown = table.head(MAX_GPUS)
    rows = [[str(gpu), *map(str, values)] for gpu, *values in shown.itertuples()]
    title = (
        f"{layout.n_gpus} GPUs on {layout.n_nodes} node{'s' * (layout.n_nodes > 1)}, order "
        f"{layout.order}; etp, ep and edp are coordinates of experts"
    )
    return (
        note_html(title)
        + table_html(["GPU", *table.columns], rows)
        + omitted_html(omitted_text(len(table), len(shown), "GPUs"))
    )
