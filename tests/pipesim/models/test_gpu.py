"""`GPU`: seconds of kernels by hand, presets, and bad values."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from pipesim.models.gpu import Kernel, as_gpu

#: 1e12 FLOP/s, 1e9 bytes/s; 1 us to launch, 0.5 us a kernel.
SMALL = ps.GPU(flops=1e12, bandwidth=1e9, launch=1e-6, overhead=5e-7, half_depth=100)


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (Kernel("deep", flops=1e9), 1e-3 + 5e-7),
        (Kernel("depth of 100", flops=1e9, depth=100), 2e-3 + 5e-7),
        (Kernel("depth of 300", flops=3e9, depth=300), 4e-3 + 5e-7),
        (Kernel("memory", nbytes=1e6), 1e-3 + 5e-7),
        (Kernel("both", flops=1e9, nbytes=2e6), 2e-3 + 5e-7),
        (Kernel("three", nbytes=1e6, n_kernels=3), 1e-3 + 15e-7),
        (Kernel("nothing"), 5e-7),
        (Kernel("half of the rates", flops=1e9, nbytes=4e6, share=0.5), 8e-3 + 5e-7),
        (Kernel("experts", 1e9, 2e6, depth=100, n_kernels=3, is_grouped=True), 4e-3 + 15e-7),
    ],
    ids=lambda x: x.name if isinstance(x, Kernel) else "",
)
def test_seconds_of_a_kernel(kernel: Kernel, seconds: float) -> None:
    assert SMALL.kernel_seconds(kernel) == pytest.approx(seconds, rel=1e-12)


def test_fused_attention_has_a_rate_and_a_last_tile() -> None:
    """Of 40 tiles on 10 multiprocessors, the last takes twice as long as four do on average."""
    gpu = replace(SMALL, attention_ratio=1.25, attention_half_depth=50.0, multiprocessors=10)
    core = Kernel("attention", flops=1e9, depth=100, is_attention=True)
    assert gpu.kernel_seconds(core) == pytest.approx(1.5 / 1.25 * 1e-3 + 5e-7)
    few = core._replace(tiles=40, share=0.5)
    assert gpu.kernel_seconds(few) == pytest.approx(1.25 * 2 * 1.5 / 1.25 * 1e-3 + 5e-7)
    slow = gpu.scaled(0.5)
    assert slow.attention_ratio == gpu.attention_ratio  # attention is as much slower as products
    assert slow.kernel_seconds(core) == pytest.approx(2 * 1.5 / 1.25 * 1e-3 + 5e-7)


def test_a_group_of_products_has_no_waves() -> None:
    """Tiles of several experts run at the same time; memory takes its seconds in addition."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e12, multiprocessors=100)
    product = Kernel("experts", flops=2 * 128 * 256 * 64, nbytes=1e6, depth=64, is_grouped=True)
    assert gpu.kernel_seconds(product) == pytest.approx(product.flops / 1e12 + 1e-6)


def test_an_operation_takes_its_kernels_or_their_launches() -> None:
    """Launches overlap with kernels: the longer of both sums counts, not the sum of longer ones."""
    short, long = Kernel("short", nbytes=100), Kernel("long", nbytes=3000)  # 0.6 and 3.5 us
    assert SMALL.seconds([short, long]) == pytest.approx(4.1e-6)
    assert SMALL.seconds([short] * 4) == pytest.approx(4e-6)
    assert SMALL.seconds([short, short, long]) == pytest.approx(4.7e-6)
    assert SMALL.seconds([]) == 0


def test_scaled_rates_keep_launches() -> None:
    """Work takes twice as long on half of the rates; launches, overheads and the peak stay."""
    gpu = replace(SMALL, peak_flops=3e12, memory=8e9)
    half = gpu.scaled(0.5)
    assert half == replace(gpu, flops=5e11, bandwidth=5e8)
    for kernel in (Kernel("product", flops=1e9, depth=100), Kernel("memory", nbytes=1e6)):
        work = gpu.kernel_seconds(kernel) - gpu.overhead
        assert half.kernel_seconds(kernel) == pytest.approx(2 * work + gpu.overhead)
    assert half.seconds([Kernel("short", nbytes=10)] * 4) == pytest.approx(4e-6)
    for part in (0, -1, nan, inf, "half"):
        with pytest.raises(ArgumentError, match="part must be finite share of the rates > 0"):
            gpu.scaled(part)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="peak_flops"):
        gpu.scaled(4)


@pytest.mark.parametrize(
    ("rows", "columns", "waves"),
    [
        (128 * 20, 256 * 5, 1.0),  # 100 tiles
        (128 * 20, 256 * 15, 1.0),  # 300
        (128, 256, 50 / 0.93),  # two tiles of half the size: each takes as long as 50 of 100
        (128 * 101, 256, 1.5 / (1.01 * 0.93)),  # 202 half tiles: 3 waves of half the length
        (128 * 149, 256, 1.5 / (1.49 * 0.93)),
        (128 * 170, 256, 2 / 1.7),  # 2 waves; four of half tiles are no better
    ],
)
def test_tiles_run_in_whole_waves(rows: int, columns: int, waves: float) -> None:
    """On 100 multiprocessors; tiles of 128 by 256, or of 128 by 128 at 93 % of the rate."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e12, multiprocessors=100)
    product = Kernel("product", flops=2 * rows * columns * 64, depth=64)
    assert gpu.kernel_seconds(product) == pytest.approx(waves * product.flops / 1e12)
    # Two products of half the size have as many tiles each as one of them.
    two = product._replace(flops=2 * product.flops, n_kernels=2)
    assert gpu.kernel_seconds(two) == pytest.approx(2 * gpu.kernel_seconds(product))


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth", "memory", "multiprocessors"),
    [
        ("a100_80gb", 312e12, 2.039e12, 80e9, 108),
        ("h100_sxm", 989.4e12, 3.35e12, 80e9, 132),
        ("h200", 989.4e12, 4.8e12, 141e9, 132),
        ("b200", 2.25e15, 8e12, 180e9, 148),
        ("mi300x", 1307.4e12, 5.3e12, 192e9, 304),
        ("h100_sxm_500w", 989.4e12, 2.4e12, 96e9, 132),
        ("b300", 2.25e15, 8e12, 270e9, 148),
        ("gb300", 2.5e15, 8e12, 279e9, 148),
        ("mi355x", 2516.6e12, 8e12, 288e9, 256),
    ],
)
def test_nominal_rates_are_those_of_the_vendors(
    name: str, flops: float, bandwidth: float, memory: float, multiprocessors: int
) -> None:
    """Data sheets of NVIDIA and AMD: dense products in 16 bits, memory in units of 10^9 bytes."""
    row = ps.gpus().loc[name]
    nominal = [row[key] for key in ("flops", "bandwidth", "memory", "multiprocessors")]
    assert nominal == [flops, bandwidth, memory, multiprocessors]
    gpu = ps.GPU.preset(name)
    assert (gpu.peak, gpu.multiprocessors) == (flops, multiprocessors)


def test_presets_are_data_sheets_times_efficiencies() -> None:
    table = ps.gpus()
    for name, row in table.iterrows():
        gpu = ps.GPU.preset(str(name))
        assert gpu.flops == row["flops"] * row["flops_efficiency"]
        assert gpu.bandwidth == row["bandwidth"] * row["bandwidth_efficiency"]
        assert gpu.memory == row["memory"] * row["memory_efficiency"]
        assert (gpu.peak, gpu.name) == (row["flops"], name)
        assert gpu.attention_ratio * row["flops_efficiency"] == pytest.approx(
            row["flops_efficiency"]
            if np.isnan(row["attention_efficiency"])
            else row["attention_efficiency"]
        )
        assert row["basis"]
        assert row["source"].startswith("https://")
    assert ps.GPU.preset("h200", launch=3e-5).launch == 3e-5
    assert ps.GPU.preset("h100_sxm").memory == 0.95 * 80 * 2**30
    assert ps.GPU.preset("l4").memory == pytest.approx(0.95 * 22.5 * 2**30)  # after its ECC


def test_shares_of_blackwell_follow_from_those_of_h100() -> None:
    """Best products of ml-engineering's table, times the share that H100 keeps; and power."""
    efficiency = ps.gpus()["flops_efficiency"]
    kept = efficiency["h100_sxm"] / 0.803
    for name, best in (("b300", 0.786), ("gb200", 0.729)):
        assert efficiency[name] == pytest.approx(best * kept, abs=0.005)
    assert efficiency["gb300"] == pytest.approx(0.729 * kept * (1400 / 1200) ** (1 / 3), abs=0.005)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"flops": 0}, "flops must be finite FLOP/s > 0, got 0"),
        ({"flops": 10**400}, "got a number of more than 30 digits"),
        ({"bandwidth": 0.0}, "bandwidth must be finite bytes/s > 0"),
        ({"bandwidth": inf}, "bandwidth must be finite"),
        ({"launch": -1e-6}, "launch must be finite seconds >= 0"),
        ({"overhead": nan}, "overhead must be finite seconds"),
        ({"half_depth": -1}, "half_depth must be finite elements >= 0"),
        ({"synchronization": nan}, "synchronization must be finite seconds"),
        ({"multiprocessors": 1.5}, "multiprocessors must be a whole number"),
        ({"memory": 0}, "memory must be finite bytes > 0"),
        ({"attention_ratio": 0}, "attention_ratio must be finite times flops > 0, got 0"),
        ({"peak_flops": 5e11}, r"peak_flops=5e\+11 must be at least flops=1e\+12"),
    ],
)
def test_bad_values(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ps.GPU(**{"flops": 1e12, "bandwidth": 1e9, **options})


def test_unknown_names_and_other_types() -> None:
    with pytest.raises(
        UnknownNameError, match=r"'h100'; did you mean 'h100_nvl' or 'h100_pcie' or"
    ):
        ps.GPU.preset("h100")
    with pytest.raises(ArgumentTypeError):
        SMALL.seconds([("dropout", 0.0)])  # type: ignore[list-item]


def test_flags_of_numpy_are_flags() -> None:
    """A row of a DataFrame has them."""
    model = ps.Transformer.preset("gpt2_xl")
    options: dict[str, Any] = {"microbatch_size": 1, "gpu": "h100_sxm", "partition": "even"}
    costs = model.costs(2, flash_attention=np.True_, **options)
    assert costs == model.costs(2, flash_attention=True, **options)
    with pytest.raises(ArgumentError, match="flash_attention must be True or False"):
        model.costs(2, flash_attention=1, **options)  # type: ignore[arg-type]  # is refused


def test_one_file_for_every_argument(tmp_path: Path) -> None:
    """A path, its content, and fields alone are the same GPU."""
    path, gpu = tmp_path / "cal.json", replace(ps.GPU.preset("h100_sxm"), flops=4e14)
    saved = {"gpu": asdict(gpu), "network_efficiency": 0.5, "constants": {}, "errors": {}}
    path.write_text(json.dumps(saved))
    model = ps.Transformer.preset("gpt2_xl")
    row = {"model": "gpt2_xl", "microbatch_size": 1, "n_microbatches": 2, "seconds": 0.1}
    forms: list[Any] = [path, str(path), saved, asdict(gpu), gpu]
    for form in forms:
        assert as_gpu(form) == gpu
        costs = model.costs(2, microbatch_size=1, partition="even", gpu=form)
        assert costs == model.costs(2, microbatch_size=1, partition="even", gpu=gpu)
        fitted = ps.GPU.fit([row, row], gpu=form, network="dgx_h100", constants=["flops"])
        assert fitted.network_efficiency == (0.7 if form in forms[3:] else 0.5)
        assert fitted.network() == ps.Network.preset("dgx_h100", fitted.network_efficiency)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": 3}, "gpu has no table of the fields of a GPU"),
        ({"network_efficiency": 0}, "network_efficiency must be a finite number above 0, got 0"),
        ({"network_latency": None}, "network_latency must be a finite number above 0, got None"),
        ({"flops": 1e12}, "unknown key of a fitted GPU 'flops'"),
        ({"gpu": {"flops": 1.0}}, "gpu lacks bandwidth"),
    ],
)
def test_files_that_have_no_gpu(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        as_gpu({"gpu": asdict(SMALL), **changes})
