"""`Workload`, and the field of `Costs` that holds it: checks, equality, files, copies."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.costs import Workload
from pipesim.errors import ArgumentError, CostsError, UnknownNameError

SETTINGS = {"layers_per_stage": [2, 2], "hidden_size": 64, "gpu": {"flops": 1e12}, "wide": True}
WORKLOAD = Workload(
    tokens=2048, flops=3e12, gpus_per_device=8, peak_flops=989e12, memory=80e9, settings=SETTINGS
)


def test_costs_keep_their_workload(tmp_path: Path) -> None:
    """In files, copies, scaled costs, costs of chunks and costs of a timeline."""
    costs = ps.Costs(1, 2, workload=WORKLOAD)
    costs.save(tmp_path / "costs.json")
    placement = ps.Placement.v_shaped(2)
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), costs)
    copies = (
        ps.Costs.load(tmp_path / "costs.json"),
        ps.Costs.from_dict(costs.to_dict()),
        copy.deepcopy(costs),
        replace(costs, launch=1e-6),
        costs.scaled(0.5),
        costs.scaled(0.5, op="B", stage=0, n_stages=2),
        costs.in_chunks(placement),
        ps.Costs.from_timeline(timeline),
    )
    for other in copies:
        assert other.workload == WORKLOAD
        assert isinstance(other.workload, Workload)
        assert other.workload.settings == SETTINGS
    assert copies[0] == costs
    assert hash(copies[0]) == hash(costs)
    assert "workload" not in ps.Costs(1, 2).to_dict()


def test_settings_are_not_compared_and_not_shared() -> None:
    """Equal workloads have the same numbers; a change of one's settings changes no other's."""
    other = Workload.from_dict(WORKLOAD.to_dict() | {"settings": {"hidden_size": 128}})
    assert other == WORKLOAD
    assert hash(other) == hash(WORKLOAD)
    assert other != replace(WORKLOAD, tokens=1024)
    numpy_settings: dict[str, Any] = {"layers_per_stage": np.array([1, 2]), "size": np.int64(3)}
    workload = Workload(1, 1, settings=numpy_settings)
    assert workload.settings == {"layers_per_stage": [1, 2], "size": 3}
    workload.to_dict()["settings"]["size"] = 4
    assert workload.settings["size"] == 3


def test_bytes_alone_may_be_texts() -> None:
    assert Workload(1, 1, memory="80GB").memory == 80e9  # type: ignore[arg-type]  # a text
    with pytest.raises(ArgumentError, match="workload: memory must be bytes such as 80e9"):
        Workload(1, 1, memory="8 cows")  # type: ignore[arg-type]  # no number
    with pytest.raises(CostsError, match="workload: tokens must be finite"):
        Workload("8", 1)  # type: ignore[arg-type]  # a text


@pytest.mark.parametrize("name", ["tokens", "flops", "peak_flops", "memory"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, [8]])
def test_numbers_are_above_0(name: str, value: object) -> None:
    """Every refusal names the field and the value."""
    with pytest.raises(CostsError, match=rf"workload: {name} must be finite .* above 0, got"):
        replace(WORKLOAD, **{name: value})


@pytest.mark.parametrize("value", [0, 1.5, "8", None])
def test_gpus_of_a_device_are_a_count(value: Any) -> None:
    """At least one GPU computes."""
    with pytest.raises(ArgumentError, match="gpus_per_device must be"):
        replace(WORKLOAD, gpus_per_device=value)


@pytest.mark.parametrize("value", [[1], "text", {1: 2}, {"a": {1, 2}}, {"a": float("nan")}])
def test_settings_are_values_of_json(value: Any) -> None:
    """Files hold them."""
    with pytest.raises(CostsError, match="workload: settings must"):
        replace(WORKLOAD, settings=value)


def test_mappings_are_checked() -> None:
    """Tables of files give a workload; mistakes name the key."""
    costs = ps.Costs(1, 2, workload={"tokens": 8, "flops": 100})
    assert costs.workload == Workload(8, 100)
    with pytest.raises(UnknownNameError, match="'token'; did you mean 'tokens'"):
        ps.Costs(1, 2, workload={"token": 8, "flops": 100})
    with pytest.raises(CostsError, match="workload: flops is missing"):
        ps.Costs(1, 2, workload={"tokens": 8})
    with pytest.raises(CostsError, match=r"must be a pipesim\.costs\.Workload or a mapping, got"):
        ps.Costs(1, 2, workload=[8, 100])  # type: ignore[arg-type]


def test_sweeps_take_a_workload() -> None:
    """As an object, as a table, and within costs."""
    base = {"n_devices": 2, "n_microbatches": 2, "forward": 1, "backward": 2}
    rows = [
        {"schedule": "1f1b", "workload": WORKLOAD},
        {"schedule": "1f1b", "workload": WORKLOAD.to_dict()},
        {"schedule": "1f1b", "costs": ps.Costs(1, 2, workload=WORKLOAD)},
    ]
    table = ps.sweep(rows, base=base, n_jobs=1, progress=False)
    assert table["error"].isna().all()
    assert table["makespan"].tolist() == [9.0] * 3
