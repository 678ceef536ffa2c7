"""Settings of sweeps and TOML files that have a transformer in place of seconds and bytes."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_output import fail, rows, succeed

import pipesim as ps
from pipesim.errors import CostsWarning, UnknownNameError
from pipesim.scheduling.registry import schedule_info

COUNTS = {"n_devices": 4, "n_microbatches": 8}
SMALL = {"n_layers": 8, "sequence_length": 2048}
OPTIONS = {"gpu": "h100_sxm", "microbatch_size": 1, "flash_attention": True}
MODEL = {"model": "llama3_8b", **SMALL, **OPTIONS}
TOML = """\
devices = 4
microbatches = 8
{schedule}
[costs]
network = {{ preset = "dgx_h100" }}
[costs.transformer]
model = "llama3_8b"
n_layers = 8
sequence_length = 2048
flash_attention = true
gpu = "{gpu}"
microbatch_size = 1
tensor_parallel = 2
"""


def swept(grid: dict[str, Any], **base: Any) -> list[dict[str, Any]]:
    table = ps.sweep(grid, base={**COUNTS, **MODEL, **base}, n_jobs=1, progress=False)
    return [dict(row) for _, row in table.iterrows()]


def makespan(name: str = "1f1b", model: ps.Transformer | None = None, **options: Any) -> float:
    """Return the seconds by the functions of Python, with balanced devices."""
    schedule = ps.schedule(name, 4, 8)
    model = model or ps.Transformer.preset("llama3_8b", **SMALL)
    options = {**OPTIONS, "placement": schedule.placement, **options}
    costs = model.costs(schedule.placement.n_stages, **options)
    if "costs" in schedule_info(name).options:  # as sweeps order such schedules
        schedule = ps.schedule(name, 4, 8, costs=costs)
    return ps.simulate(ps.lower(schedule), costs).makespan


def test_a_sweep_over_schedules_and_tensor_parallelism() -> None:
    """A schedule of two stages a device has the same model, and a machine its groups of GPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostsWarning)  # that models differ in size
        table = swept(
            {"schedule": ["1f1b", "zbv"], "tensor_parallel": [1, 4]},
            network={"preset": "dgx_h100"},
        )
    networks = {size: ps.Network.preset("dgx_h100", gpus_per_device=size) for size in (1, 4)}
    assert [row["makespan"] for row in table] == [
        makespan(name, tensor_parallel=size, network=networks[size])
        for name in ("1f1b", "zbv")
        for size in (1, 4)
    ]
    assert len({row["makespan"] for row in table}) == 4


def test_recompute_by_its_value() -> None:
    """Of layers inside backwards, or as tasks; the same seconds on one machine but for launches."""
    (inside,), (tasks,) = (
        swept({"recompute": [value]}, schedule="1f1b") for value in ("full", "always")
    )
    assert inside["makespan"] == makespan(recompute="full")
    assert inside["n_tasks"] < tasks["n_tasks"]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "hanayo"])
def test_a_word_divides_the_layers_of_each_row(name: str) -> None:
    """For the schedule of the row; ``"balanced"`` is the default."""
    grid = {"layers_per_stage": ["balanced", "even", None], "schedule": [name]}
    table = swept(grid, n_layers=16)
    model = ps.Transformer.preset("llama3_8b", **SMALL | {"n_layers": 16})
    balanced, even = makespan(name, model), makespan(name, model, partition="even")
    assert [row["makespan"] for row in table] == [balanced, even, balanced]
    assert balanced < even


@pytest.mark.parametrize("word", ["balanced", "even"])
def test_a_word_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, word: str) -> None:
    text = TOML.format(schedule='schedule = "1f1b"', gpu="h100_sxm")
    config, table = tmp_path / "run.toml", tmp_path / "timeline.csv"
    network = ps.Network.preset("dgx_h100", gpus_per_device=2)
    for n_devices in (1, 4):
        settings = text.replace("devices = 4", f"devices = {n_devices}")
        config.write_text(f'{settings}layers_per_stage = "{word}"\n')
        succeed(capsys, "simulate", "--config", config, "--csv", table)
        schedule = ps.schedule("1f1b", n_devices, 8)
        costs = ps.Transformer.preset("llama3_8b", **SMALL).costs(
            word, placement=schedule.placement, tensor_parallel=2, network=network, **OPTIONS
        )
        expected = ps.simulate(ps.lower(schedule), costs).makespan
        assert pd.read_csv(table, comment="#")["end"].max() == pytest.approx(expected)


def test_own_gpus_models_splits_and_overrides() -> None:
    gpu = replace(ps.GPU.preset("h100_sxm"), flops=4e14)
    model = ps.Transformer.preset("llama3_8b", **{**SMALL, "n_layers": 6})
    (row,) = swept({"layers_per_stage": [[1, 2, 2, 1]]}, schedule="1f1b", n_layers=6, gpu=gpu)
    split = model.costs([1, 2, 2, 1], **{**OPTIONS, "gpu": gpu})
    graph = ps.lower(ps.schedule("1f1b", 4, 8))
    assert row["makespan"] == ps.simulate(graph, split).makespan
    (row,) = swept({"schedule": ["1f1b"]}, partition="even", forward=1.0)
    even = ps.Transformer.preset("llama3_8b", **SMALL).costs(4, **OPTIONS, partition="even")
    assert row["makespan"] == ps.simulate(graph, replace(even, forward=1.0)).makespan
    sizes = {**asdict(model), **OPTIONS, "gpu": gpu}
    (row,) = ps.sweep(
        [{"schedule": "1f1b", **COUNTS, "transformer": sizes}], n_jobs=1, progress=False
    )["makespan"]
    assert row == makespan(model=model, gpu=gpu)


def test_a_file_with_a_fitted_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file of the GPU is beside the TOML file."""
    gpu = replace(ps.GPU.preset("h100_sxm"), flops=4e14, name="")
    (tmp_path / "gpu.json").write_text(json.dumps({"gpu": asdict(gpu)}))
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(schedule='schedule = ["1f1b", "zbv"]', gpu="gpu.json"))
    out = succeed(capsys, "compare", "--config", config)
    network = ps.Network.preset("dgx_h100", gpus_per_device=2)
    model = ps.Transformer.preset("llama3_8b", **SMALL)
    for line, name in zip(rows(out)[1:3], ("1f1b", "zbv"), strict=True):
        expected = makespan(name, model, gpu=gpu, tensor_parallel=2, network=network)
        assert float(line[1]) == pytest.approx(expected * 1e3, rel=1e-4)
    assert "note" not in out  # that stages have the same costs
    grid = ["--grid", "tensor_parallel=1,2", "--grid", "recompute=none,full"]
    path = tmp_path / "table.csv"
    succeed(capsys, "sweep", "1f1b", "--config", config, *grid, "--jobs", 1, "--csv", path)
    assert pd.read_csv(path)["makespan"].tolist() == [
        makespan(
            model=model, gpu=gpu, tensor_parallel=size, recompute=mode,
            network=ps.Network.preset("dgx_h100", gpus_per_device=size),
        )
        for size in (1, 2) for mode in ("none", "full")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "llama3_8b"', 'modl = "llama3_8b"',
         "costs.transformer: unknown key 'modl'; did you mean 'model'"),
        ('model = "llama3_8b"', "", "hidden_size is missing; give the sizes"),
        ("microbatch_size = 1", "", "microbatch_size is missing"),
        ('gpu = "h100_sxm"', 'gpu = "h101_sxm"', "unknown GPU 'h101_sxm'"),
        ('gpu = "h100_sxm"', 'gpu = "gpu.json"', "gpu.json: No such file"),
        ("devices = 4", 'devices = 4\nper = "device"', "per='device' and a transformer"),
        ("tensor_parallel = 2", "tensor_parallel = 16", "tensor_parallel=16 does not divide"),
    ],
)  # fmt: skip
def test_mistakes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, message: str
) -> None:
    config = tmp_path / "run.toml"
    text = TOML.format(schedule='schedule = "1f1b"', gpu="h100_sxm")
    assert old in text
    config.write_text(text.replace(old, new))
    assert message in fail(capsys, "simulate", "--config", config)


def test_unknown_keys_of_a_sweep() -> None:
    with pytest.raises(UnknownNameError, match="unknown key 'tensor_paralel'; did you mean"):
        swept({"tensor_paralel": [1]}, schedule="1f1b")


def test_a_fitted_gpu_brings_the_factors_of_its_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They apply to a machine; an efficiency of its own takes the place of the file's."""
    fields = asdict(ps.GPU.preset("h100_sxm"))
    path, config = tmp_path / "cal.json", tmp_path / "settings.toml"
    path.write_text(json.dumps({"gpu": fields, "network_efficiency": 0.5, "network_latency": 3}))
    by_file = TOML.format(schedule='schedule = "1f1b"', gpu=path.name)
    own = by_file.replace('"dgx_h100"', '"dgx_h100", efficiency = 0.25')
    plain = ps.Network.preset("dgx_h100", 1.0)
    for text, share in ((by_file, 0.5), (own, 0.25)):
        config.write_text(text)
        succeed(capsys, "simulate", "--config", config, "--csv", tmp_path / "timeline.csv")
        network = plain.scaled(latency=3, bandwidth=share).grouped(2)
        table = pd.read_csv(tmp_path / "timeline.csv", comment="#")
        assert table["end"].max() == pytest.approx(makespan(network=network, tensor_parallel=2))
    (row,) = swept(
        {"gpu": [str(path)]}, schedule="1f1b", tensor_parallel=2, network={"preset": "dgx_h100"}
    )
    network = plain.scaled(latency=3, bandwidth=0.5).grouped(2)
    assert row["makespan"] == pytest.approx(makespan(network=network, tensor_parallel=2))


def test_a_machine_has_devices_of_context_parallel_gpus() -> None:
    """A sweep groups the GPUs of a machine as `Transformer.costs` needs them."""
    options = {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}
    (row,) = swept({"schedule": ["1f1b"]}, network={"preset": "dgx_h100"}, **options)
    network = ps.Network.preset("dgx_h100", gpus_per_device=4)
    assert row["makespan"] == pytest.approx(makespan(network=network, **options))
