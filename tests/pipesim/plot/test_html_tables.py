"""HTML tables of networks, models, GPUs, layers and placements, against the objects' values."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from html_cells import cells_of, tables_of

import pipesim as ps
from pipesim.plot.html_tables import RATES, SIZES
from pipesim.utils.texts import format_decimal, format_time

EVIL = '"><script>alert(1)</script>'


# Networks


def test_links_and_routes_of_a_small_network() -> None:
    """One shared link; routes are those that messages take."""
    slow = ps.Link(10e-6, 12e9, ((0, 2), (1, 2)))
    network = ps.Network(latency=2e-6, bandwidth=200e9, links=(slow,))
    links, routes = tables_of(network._repr_html_())
    assert links == [
        ["messages", "links", "latency", "bandwidth"],
        ["0 to 2, 1 to 2", "1, shared by 2 pairs", "10.0 µs", "12.0 GB/s"],
        ["all other pairs", "1 a pair", "2.00 µs", "200 GB/s"],
    ]
    fast, named = "2.00 µs, 200 GB/s", "10.0 µs, 12.0 GB/s"
    assert routes == [
        ["routes", "to 0", "to 1", "to 2"],
        ["from 0", "", fast, named],
        ["from 1", fast, "", named],
        ["from 2", fast, fast, ""],
    ]


def test_a_network_without_links() -> None:
    assert cells_of(ps.Network()._repr_html_())[1:] == [
        ["all pairs", "1 a pair", "0 s", "unlimited"]
    ]


def test_ports_and_nics_of_nodes() -> None:
    """A message between nodes has the smaller bandwidth; the text has both."""
    network = ps.Network.preset("dgx_h100", 1.0, gpus_per_device=4)
    html = network._repr_html_()
    assert cells_of(html)[1:] == [
        ["inside a node", "port out, port in", "3.40 µs", "450 GB/s"],
        ["between nodes", "port out, NIC out, NIC in, port in", "14.0 µs", "50.0 GB/s"],
        ["all-reduce of 8 GPUs of a node", "ports", "47.9 µs", "450 GB/s"],
        ["copies to hosts", "host out, host in", "10.0 µs", "64.0 GB/s"],
    ]
    assert "nodes of 2 devices (4 GPUs each; rates are those of one GPU)" in html
    narrow = ps.Network(nodes=ps.Nodes(4, port_bandwidth=1e9, nic_bandwidth=2e9, n_nics=1))
    assert cells_of(narrow._repr_html_())[2][-1] == "1.00 GB/s"
    assert "a port of 1.00 GB/s each, and 1 NIC of 2.00 GB/s" in narrow._repr_html_()
    free = ps.Network(nodes=ps.Nodes(2))
    assert [row[1] for row in cells_of(free._repr_html_())[1:]] == ["none", "none"]


def test_links_beside_nodes() -> None:
    """Routes between devices that links name, of which one pair holds ports."""
    nodes = ps.Nodes(2, port_latency=1e-6, port_bandwidth=1e9, nic_latency=2e-6)
    network = ps.Network(nodes=nodes, links=[ps.Link(5e-6, 3e9, ((0, 1),))])
    links, routes = tables_of(network._repr_html_())
    assert [row[0] for row in links[1:]] == ["0 to 1", "inside a node", "between nodes"]
    assert routes[1:] == [
        ["from 0", "", "5.00 µs, 3.00 GB/s"],
        ["from 1", "1.00 µs, 1.00 GB/s", ""],
    ]


def test_a_large_network_is_counted_by_kind() -> None:
    """A full matrix of 64 devices in groups of 8: two kinds of links."""
    group = np.arange(64) // 8
    is_near = group[:, None] == group
    network = ps.Network.from_matrix(1e-6, np.where(is_near, 300e9, 25e9))
    html = network._repr_html_()
    links, routes = tables_of(html)
    assert links[1:] == [
        ["3,584 named pairs", "3,584", "1.00 µs", "25.0 GB/s"],
        ["448 named pairs", "448", "1.00 µs", "300 GB/s"],
        ["all other pairs", "1 a pair", "0 s", "unlimited"],
    ]
    assert len(routes) == len(routes[0]) == 9
    assert "Not shown: pairs of all 4,032 links, routes of 56 more devices (see resolve)." in html


def test_many_kinds_of_links_are_cut() -> None:
    """56 links, each of its own bandwidth and all with the same number of pairs."""
    network = ps.Network.from_matrix(0.0, 1e9 + np.arange(64.0).reshape(8, 8))
    html = network._repr_html_()
    assert len(tables_of(html)[0]) == 1 + 16 + 1
    assert "Not shown: pairs of all 56 links, 40 more kinds of links." in html


# Models and GPUs


def test_a_transformer_shows_its_parts_and_sizes() -> None:
    model = ps.Transformer.preset("llama3_70b")
    html = model._repr_html_()
    parts, sizes = tables_of(html)
    rows = {row[0]: row[1:] for row in parts[1:]}
    single = f"{model.layer_parameters:,}"
    whole = f"{80 * model.layer_parameters:,}"
    flops = format_decimal(model.layer_flops(), "FLOP")
    assert rows["layer"] == [
        "80",
        single,
        flops,
        whole,
        format_decimal(80 * model.layer_flops(), "FLOP"),
    ]
    assert rows["embedding"][2] == "0"
    numbers = [int(rows[name][3].replace(",", "")) for name in rows]
    assert sum(numbers[:-1]) == numbers[-1] == model.n_parameters
    assert rows["all"][4] == format_decimal(model.step_flops() / 3, "FLOP")
    assert format_decimal(model.step_flops(), "FLOP") in html
    shown = {row[0]: row[1] for row in sizes[1:]}
    assert shown["hidden_size"] == "8,192"
    assert shown["n_kv_heads"] == "8"
    assert shown["head_size"] == "128"
    assert shown["gated_mlp"] == "yes"
    assert shown["tied_embeddings"] == "no"
    assert "has the matrix of the embedding" not in html
    tied = dataclasses.replace(model, tied_embeddings=True)
    assert "has the matrix of the embedding" in tied._repr_html_()


def test_each_attribute_of_models_and_gpus_is_shown() -> None:
    assert set(SIZES) == {field.name for field in dataclasses.fields(ps.Transformer)}
    assert {*RATES, "name"} == {field.name for field in dataclasses.fields(ps.GPU)}


def test_a_gpu_shows_its_rates() -> None:
    gpu = ps.GPU.preset("h100_sxm")
    html = gpu._repr_html_()
    rows = {row[0]: row[1] for row in cells_of(html)[1:]}
    assert rows["flops"] == format_decimal(gpu.flops, "FLOP/s")
    assert rows["bandwidth"] == format_decimal(gpu.bandwidth, "B/s")
    assert rows["memory"] == format_decimal(gpu.memory or 0, "B") == "81.6 GB"
    assert rows["launch"] == format_time(gpu.launch) == "10.0 µs"
    assert rows["multiprocessors"] == "132"
    assert "GPU h100_sxm; products reach 60% of the data sheet" in html
    plain = {row[0]: row[1] for row in cells_of(ps.GPU(flops=1e12, bandwidth=1e9)._repr_html_())}
    assert plain["memory"] == plain["peak_flops"] == "not given"


# Costs, layers and placements


def test_costs_show_every_field_that_is_given() -> None:
    """With its unit; those that have no values of stages by name."""
    costs = ps.Costs(
        1, 2, recompute=(3, 4), launch=1e-3, reorder=0.5, exchange_keys=0.25, reduced_share=0.5,
        parameter_bytes=1024, tied_bytes=8, skip_bytes=16,
    )  # fmt: skip
    html = costs._repr_html_()
    head = ["F", "B", "R", "REORDER vectors", "launch", "parameter bytes", "exchange keys"]
    assert cells_of(html) == [
        ["costs", *head, "reduced share"],
        ["stage 0", "1.00 s", "2.00 s", "3.00 s", "500 ms", "1.00 ms", "1.00 KiB", "250 ms", "0.5"],
        ["stage 1", "1.00 s", "2.00 s", "4.00 s", "500 ms", "1.00 ms", "1.00 KiB", "250 ms", "0.5"],
    ]
    assert "Given as well: skip_bytes, tied_bytes." in html
    assert "Given as well" not in ps.Costs(1, 2)._repr_html_()


def test_layers_show_the_columns_that_are_not_zero() -> None:
    layers = ps.Layers(
        {
            "forward_workspace_bytes": [1 << 20, 0],
            "forward": [1e-3, 2e-3],
            "backward": [2e-3, 4e-3],
            "recompute": [0, 0],
        }
    )
    assert cells_of(layers._repr_html_()) == [
        ["layers", "F", "B", "forward workspace bytes"],
        ["layer 0", "1.00 ms", "2.00 ms", "1.00 MiB"],
        ["layer 1", "2.00 ms", "4.00 ms", "0 B"],
    ]
    assert "joint_activation_bytes" not in layers._repr_html_()
    joint = dataclasses.replace(layers, joint_activation_bytes=[[1, 2], [0, 1]])
    assert "joint_activation_bytes" in joint._repr_html_()


def test_many_layers_are_cut() -> None:
    html = ps.Layers({"forward": [1.0] * 40, "backward": [2.0] * 40})._repr_html_()
    assert len(cells_of(html)) == 1 + 32
    assert "Not shown: layers 32 to 39." in html


def test_a_placement_has_a_row_a_device() -> None:
    assert cells_of(ps.Placement.v_shaped(3)._repr_html_()) == [
        ["placement", "stages"],
        ["device 0", "0, 5"],
        ["device 1", "1, 4"],
        ["device 2", "2, 3"],
    ]


def test_paths_of_a_bidirectional_placement_have_columns() -> None:
    html = ps.Placement.bidirectional(2)._repr_html_()
    assert cells_of(html) == [
        ["placement", "stages of path 0", "stages of path 1"],
        ["device 0", "0", "1"],
        ["device 1", "1", "0"],
    ]
    assert "2 paths; each has a copy of the stages" in html


@pytest.mark.parametrize(("n_devices", "n_chunks"), [(40, 1), (2, 20), (33, 17)])
def test_a_large_placement_is_cut(n_devices: int, n_chunks: int) -> None:
    html = ps.Placement.looped(n_devices, n_chunks)._repr_html_()
    rows = cells_of(html)[1:]
    assert len(rows) == min(n_devices, 32)
    assert (f"devices 32 to {n_devices - 1}" in html) == (n_devices > 32)
    assert rows[1][1].endswith(f"and {n_chunks - 16} more") == (n_chunks > 16)


# Names from users and files


def test_names_are_escaped() -> None:
    """Names of GPUs, and sources of layers such as the path of a file."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e9, name=EVIL)
    layers = ps.Layers({"forward": [1], "backward": [2]}, source=EVIL)
    for shown in (gpu, layers):
        html = shown._repr_html_()
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 B/s"),
        (0.5, "0.5 B/s"),
        (999.4, "999 B/s"),
        (999.6, "1.00 kB/s"),
        (312e12, "312 TB/s"),
        (1e30, "1e+12 EB/s"),
        (math.inf, "inf EB/s"),
    ],
)
def test_decimal_prefixes(value: float, text: str) -> None:
    assert format_decimal(value, "B/s") == text
