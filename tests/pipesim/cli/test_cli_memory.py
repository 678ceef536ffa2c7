"""`--memory-limit`, and the tokens a second and MFU that the commands print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_output import BASE, fail, rows, succeed

import pipesim as ps
from pipesim.costs import Workload
from pipesim.errors import CostsError, NetworkError
from pipesim.utils.texts import parse_bytes, parse_rate

GIB = 2**30
#: Device 0 of 1F1B holds 4 micro-batches of 1 GiB, and 2 GiB of parameters and gradients.
SIZES = [*BASE, "--activation-bytes", GIB, "--parameter-bytes", GIB]
WORKLOAD = """
[costs.workload]
tokens = 4096
flops = 6e9
peak_flops = 1e12
memory = 5368709120
"""


def test_a_limit_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A line says so, and nothing else is printed."""
    plain = succeed(capsys, "simulate", "1f1b", *SIZES)
    out = succeed(capsys, "simulate", "1f1b", *SIZES, "--memory-limit", "6GiB")
    assert rows(out)[5] == ["limit", "6.0000", "GiB,", "fits"]
    assert rows(out)[:5] + rows(out)[6:] == rows(plain)


@pytest.mark.slow
def test_a_limit_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Each device that needs too much, and changes that fit, fastest first.

    Recompute leaves no activations but those of one micro-batch; its 8 R take 1 ms each.
    """
    for limit in ("5.5GiB", "5905580032", "5.905580032e9 B", "5632 MiB"):
        out = succeed(capsys, "simulate", "1f1b", *SIZES, "--memory-limit", limit)
        assert rows(out)[5] == ["limit", "5.5000", "GiB,", "does", "not", "fit"]
        assert "device 0 needs 6.00 GiB of 5.50 GiB, 512 MiB too much, from task 0F3 on" in out
        assert "device 1 needs" not in out
        table = [row for row in rows(out) if row[0].startswith("lower(recompute='always')")]
        assert table == [["lower(recompute='always')", "41.000", "1.242", "3.0000"]]
    out = succeed(capsys, "simulate", "1f1b", *SIZES, "--memory-limit", "6GiB,5.5GiB,9GB,4GiB")
    assert rows(out)[5][:3] == ["limit", "6.0000", "GiB,"]
    out = succeed(capsys, "simulate", "1f1b", *SIZES, "--memory-limit", "1GiB")
    assert "parameters, gradients and optimizer alone take 2.00 GiB of 1.00 GiB on device 0" in out
    assert out.endswith("none of the changes that were tried fits, alone or with another\n")


def test_tables_of_comparisons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Limits of a file, tokens and FLOPs of its costs; a schedule may have its own limit."""
    config = tmp_path / "limits.toml"
    config.write_text('memory_limit = "6GiB"\n[[schedule]]\nname = "1f1b"\n[[schedule]]\n'
                      'name = "gpipe"\nmemory_limit = 10737418240\n' + WORKLOAD)  # fmt: skip
    out = rows(succeed(capsys, "compare", *SIZES, "--config", config))
    assert out[0][-6:] == ["limit", "(GiB)", "fits", "tokens/s", "MFU", "gap"]
    tokens, mfu = 8 * 4096 / 33e-3, 8 * 6e9 / (33e-3 * 4 * 1e12)
    expected = [f"{tokens:.0f}", f"{mfu:.1%}"]
    assert out[1][-5:] == ["6.000", "yes", *expected, "0.0%"]
    assert out[2][-5:] == ["10.000", "yes", *expected, "0.0%"]
    out = rows(succeed(capsys, "compare", *SIZES, "--config", config, "--memory-limit", "5e9"))
    assert [row[-5:-3] for row in out[1:]] == [["4.6566", "no"]] * 2
    config.write_text('schedule = ["1f1b"]\n' + WORKLOAD)
    out = rows(succeed(capsys, "simulate", *SIZES, "--config", config))
    assert out[5] == ["limit", "5.0000", "GiB,", "does", "not", "fit"], "the memory of the GPU"
    assert out[6] == ["tokens", expected[0], "tokens/s"]
    assert out[7] == ["MFU", expected[1]]


def test_tables_of_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    """One column for all rows; a limit that is swept is shown as given."""
    args = ["sweep", "1f1b", "gpipe", *SIZES, "--jobs", 2]
    out = rows(succeed(capsys, *args, "--memory-limit", "6GiB"))
    assert out[0][-3:] == ["limit", "(GiB)", "fits"]
    assert [row[-2:] for row in out[1:]] == [["6.0000", "yes"], ["6.0000", "no"]]
    out = rows(succeed(capsys, *args, "--grid", "memory_limit=6GiB,11e9"))
    assert out[0][:2] == ["schedule", "memory_limit"]
    assert [row[-1] for row in out[1:]] == ["yes", "yes", "no", "yes"]
    assert [row[1] for row in out[1:3]] == ["6GiB", "11000000000.0"]


def test_a_limit_of_orders_too() -> None:
    """zb_2p orders its actions within the limit of a row, as with its own option."""
    base = {"n_devices": 3, "n_microbatches": 6, "forward": 1, "backward": 2, "input_grad": 1,
            "weight_grad": 1, "activation_bytes": 1, "weight_grad_bytes": 1}  # fmt: skip
    grid = {"schedule": ["1f1b", "zb_2p"], "memory_limit": [3, "6B"]}
    table = ps.sweep(grid, base=base, n_jobs=1, progress=False)
    assert table["error"].isna().all()
    assert table["memory_limit"].tolist() == [3, "6B", 3, "6B"]
    assert table["fits"].all()
    assert table["peak_memory"].tolist() == [3, 3, 3, 6]


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        ("80Gi", "memory_limit must be bytes such as 80e9 or 80GiB, got '80Gi'"),
        ("-1", "memory_limit must be bytes >= 0, got -1"),
        ("nan", "got nan"),
        ("1e9,2e9", "memory_limit has 2 values for 4 devices"),
        ("1e9,x,1e9,1e9", "must be bytes such as 80e9 or 80GiB, got 'x'"),
    ],
)
def test_bad_limits(capsys: pytest.CaptureFixture[str], limit: str, match: str) -> None:
    """One line, which has the value."""
    assert match in fail(capsys, "simulate", "1f1b", *SIZES, f"--memory-limit={limit}")


def test_costs_without_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said to fit."""
    error = fail(capsys, "simulate", "1f1b", *BASE, "--memory-limit", "80GiB")
    assert "the costs have no bytes" in error


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 * GIB), ("80 GB", 80e9), ("1.5kB", 1500), ("1.5KiB", 1536), ("7", 7),
        ("1e3", 1e3), ("2E2b", 200), ("3tib", 3 * 2**40), ("", None), ("GiB", None),
        ("80Gi", None), ("80  GB", None), ("8_0", None), ("1e", None), ("80 GB x", None),
    ],
)  # fmt: skip
def test_bytes_as_text(text: str, nbytes: float | None) -> None:
    """Binary and decimal units; nothing is guessed."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25GB/s", 25e9), ("1.5 TiB/s", 1.5 * 2**40), ("400Gb/s", 50e9), ("2e9", 2e9),
        ("25GB", None), ("25GB/h", None), ("/s", None), ("fast/s", None),
    ],
)  # fmt: skip
def test_rates_as_text(text: str, rate: float | None) -> None:
    """Bytes or bits a second; a text without a unit is a number."""
    assert parse_rate(text) == rate


def test_sizes_and_rates_of_costs_and_networks(capsys: pytest.CaptureFixture[str]) -> None:
    """In Python, in tables and on the command line; seconds are no sizes."""
    assert ps.Costs(1, 2, activation_bytes=["1GiB", 5]).activation_bytes == (GIB, 5)
    assert ps.Costs(1, 2, skip_bytes="2kB").skip_bytes == 2000
    assert ps.Network(bandwidth="25GB/s") == ps.Network(bandwidth=25e9)  # type: ignore[arg-type]
    nodes = ps.Nodes(8, port_bandwidth="450GB/s", nic_bandwidth="400Gb/s")  # type: ignore[arg-type]
    assert nodes == ps.Nodes(8, port_bandwidth=450e9, nic_bandwidth=50e9)
    assert ps.Network.from_dict({"bandwidth": "25GB/s"}) == ps.Network(bandwidth=25e9)
    assert ps.GPU(flops=1, bandwidth="3TB/s", memory="80GB").bandwidth == 3e12  # type: ignore[arg-type]
    layers = ps.Layers({"forward": [1, 2], "backward": [2, 4], "activation_bytes": ["1kB", "2KiB"]})
    assert layers.columns["activation_bytes"] == (1000, 2048)
    pairs: Any = {"keys": [[0, "1kB"], [5, 0]]}
    assert ps.Costs(1, 2, exchange_bytes={0: pairs}) == ps.Costs(
        1, 2, exchange_bytes={0: {"keys": [[0, 1000], [5, 0]]}}
    )
    assert Workload(tokens=1, flops=1, memory="40GB").memory == 40e9  # type: ignore[arg-type]
    assert ps.Cluster("dgx_h100", 8, memory="40GB").memory == 40e9
    matrix = ps.Network.from_matrix(1e-6, [[0, "25GB/s"], ["400Gb/s", 0]])
    assert matrix == ps.Network.from_matrix(1e-6, [[0, 25e9], [50e9, 0]])
    assert matrix.all_reduce("1MB", [0, 1]) == matrix.all_reduce(1e6, [0, 1])
    assert matrix.all_to_all([[0, "1MB"], [5, 0]], [0, 1]) == matrix.all_to_all(
        [[0, 1e6], [5, 0]], [0, 1]
    )
    node = ps.Network.preset("dgx_h100", gpus_per_device=8)
    assert node.group_all_reduce("1GB", 8) == node.group_all_reduce(1e9, 8)
    for wrong in ({"forward": "1GB"}, {"forward": 1, "output_bytes": "1 cow"}):
        with pytest.raises(CostsError, match="must be finite"):
            ps.Costs(**wrong)  # type: ignore[arg-type]
    for name in ("bandwidth", "latency"):
        with pytest.raises(NetworkError, match=f"{name} must be"):
            ps.Network(**{name: "25GB/h"})  # type: ignore[arg-type]
    texts = ["--activation-bytes", "1GiB", "--parameter-bytes", "1GiB", "--bandwidth", "9TB/s"]
    numbers = ["--bandwidth", "9e12"]
    assert succeed(capsys, "simulate", "1f1b", *BASE, *texts) == succeed(
        capsys, "simulate", "1f1b", *SIZES, *numbers
    )


def test_memory_without_bytes_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    out = rows(succeed(capsys, "compare", "gpipe", "1f1b", *BASE))
    column = out[0].index("peak") - 1  # "makespan (ms)" has two words
    assert {row[column] for row in out[1:]} == {"-"}
    assert "peak memory  -: no bytes are given" in succeed(capsys, "simulate", "1f1b", *BASE)


def test_a_split_backward_names_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    error = fail(capsys, "compare", "gpipe", "zb_h1", *BASE)
    assert "zb_h1: input_grad is missing" in error
    assert "(here: --input-grad and --weight-grad)" in error


@pytest.mark.slow
def test_html_of_a_timeline() -> None:
    """The line below the figure has what is known."""
    work = Workload(tokens=8, flops=6, peak_flops=1, memory=30)
    costs = ps.Costs(1, 2, activation_bytes=5, parameter_bytes=5, workload=work)
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    text = ps.simulate(graph, costs)._repr_html_()
    assert ", fits in 30.0 B, 1.7778 tokens/s, MFU 66.7%" in text
    with pytest.warns(UserWarning, match="does not fit"):
        timeline = ps.simulate(graph, costs, memory_limit=19)
    assert ", does not fit in 19.0 B" in timeline._repr_html_()
    plain = ps.simulate(graph, ps.Costs(1, 2))._repr_html_()
    assert "MFU" not in plain
    assert "fit" not in plain
